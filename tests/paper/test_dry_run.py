"""Test the output of `fedcsd reproduce` before anything is trained: refusals, expected time, and the plan."""

from dataclasses import replace
from pathlib import Path

import pytest

from fedcsd.paper.exhibits import BETA_OPEN, EXHIBITS
from fedcsd.paper.report import Report, legend
from fedcsd.paper.scales import SCALES, Choices
from helpers.program import Fedcsd


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
    assert "note: mnist in place of FEMNIST: only the order of methods" in said.stdout


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


def test_the_list_and_a_dry_run_expect_the_same_time(fedcsd: Fedcsd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    listed = fedcsd("reproduce").stdout
    row = next(line for line in listed.splitlines() if "│ fig1 " in line)
    planned = fedcsd("reproduce", "fig1", "--stand-in", "cifar100=cifar100", "--dry-run").stdout
    time = planned[planned.index("about ") + 6 :].partition(" on ")[0]
    assert f" {time} │" in row
    assert "fig1 and fig-tsne for the first" in listed


def test_only_without_anything_is_refused(fedcsd: Fedcsd) -> None:
    said = fedcsd("reproduce", "table1", "--only", "", "--dry-run")
    assert said.returncode == 2
    assert "--only takes KEY=VALUE" in said.stderr


def test_what_is_set_in_place_of_the_scales_settings_is_told_with_it() -> None:
    assert Choices("smoke").text == f"scale smoke: {SCALES['smoke'].meaning}"
    told = Choices("smoke", overrides={"rounds": 8, "workers": 1}).text
    assert told == f"scale smoke with rounds=8 (the scale: {SCALES['smoke'].meaning})"


def test_of_several_seeds_a_picture_of_one_model_has_the_first() -> None:
    one = Report.of(EXHIBITS["fig1"], Choices("smoke", (0,)), {})
    two = Report.of(EXHIBITS["fig1"], Choices("smoke", (0, 1)), {})
    said = "only the first seed is shown"
    assert said in legend(two)
    assert said not in legend(one)
    office = EXHIBITS["fig-comm"].sections[-1:]
    both = (EXHIBITS["fig-comm"], replace(EXHIBITS["fig-comm"], sections=office))
    remarks = [legend(Report.of(exhibit, Choices("smoke"), {})) for exhibit in both]
    assert [BETA_OPEN in some for some in remarks] == [True, False]
