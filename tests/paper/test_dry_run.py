"""What `fedcsd reproduce --dry-run` refuses without looking at any data."""

from pathlib import Path

import pytest
from conftest import Fedcsd


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--model", "nosuch"), "unknown model 'nosuch'"),
        (("--stand-in", "femnist=nosuch"), "unknown data set 'nosuch'"),
        (("--stand-in", "femnist=/no/such.npz"), "unknown data set '/no/such.npz'"),
    ],
)
def test_a_dry_run_knows_names(fedcsd: Fedcsd, given: tuple[str, ...], told: str) -> None:
    said = fedcsd("reproduce", "table1", "--only", "data=femnist", *given, "--dry-run")
    assert said.returncode == 2
    assert told in said.stderr


def test_a_dry_run_says_what_stands_in(fedcsd: Fedcsd, tmp_path: Path) -> None:
    said = fedcsd("reproduce", "table1", "--only", "data=femnist", "--data-dir", str(tmp_path), "--dry-run")
    assert said.returncode == 0, said.stderr
    assert "note: mnist in place of FEMNIST: not to be compared" in said.stdout


def test_a_dry_run_reads_no_data(fedcsd: Fedcsd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cifar100", "femnist"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for split in ("train", "test"):
            (tmp_path / f"data/{name}/{split}-0.parquet").write_bytes(b"not to be read")
    monkeypatch.setenv("FEDCSD_CACHE", str(tmp_path / "cache"))
    said = fedcsd("reproduce", "table1", "--data-dir", "data", "--dry-run")
    assert said.returncode == 0, said.stderr
    assert "in place of" not in said.stdout
    assert not (tmp_path / "cache").exists()
    monkeypatch.delenv("FEDCSD_DATA", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # it would be an error to ask there
    said = fedcsd("reproduce", "table1", "--dry-run")
    assert said.returncode == 0, said.stderr
    assert "144 runs, 144 to train" in said.stdout


def test_other_data_may_be_listed_with_commas(fedcsd: Fedcsd) -> None:
    given = ("--stand-in", "cifar100=digits, femnist=digits", "--scale", "smoke")
    said = fedcsd("reproduce", "table1", *given, "--dry-run")
    assert said.returncode == 0, said.stderr
    assert "digits in place of CIFAR-100" in said.stdout
    assert "digits in place of FEMNIST" in said.stdout
