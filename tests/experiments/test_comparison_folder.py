"""Test that a comparison writes over an earlier comparison only."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedcsd as package
from fedcsd.errors import UserError
from fedcsd.experiments.comparison_folder import FILES, Unfinished
from fedcsd.federation.callbacks import Callbacks
from helpers.federations import blobs
from helpers.program import Fedcsd

SMALL: dict[str, Any] = {"clients": 4, "min_samples": 2, "epochs": 1, "workers": 1, "rounds": 1}
COMPARE = ("compare", "--methods", "fedavg", "--rounds", "1", "--epochs", "1", "--workers", "1")


def compare(out: Path, methods: Any = "fedavg", **changes: Any) -> Any:
    return package.compare(methods, data=blobs(), out=out, **{**SMALL, **changes})


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_s_folder_is_refused(tmp_path: Path, overwrite: bool) -> None:
    package.run(method="fedavg", data=blobs(), out=tmp_path / "r", **SMALL)
    (tmp_path / "r/report.html").write_text("the run's")
    before = content(tmp_path / "r")
    with pytest.raises(UserError, match="holds a run, not a comparison: choose another --out"):
        compare(tmp_path / "r", overwrite=overwrite)
    assert content(tmp_path / "r") == before


@pytest.mark.parametrize("name", FILES)
def test_somebody_s_own_files_are_not_replaced(fedcsd: Fedcsd, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[1, 2]")
    for overwrite in ((), ("--overwrite",)) if name == FILES[0] else ((),):
        result = fedcsd(*COMPARE, "--out", ".", *overwrite)
        assert result.returncode == 2
        assert result.stderr == f"error: . holds other files ({name}): choose another --out\n"
    assert content(tmp_path) == {name: b"[1, 2]"}


def test_only_into_a_folder_that_is_empty_or_a_comparison_s(tmp_path: Path) -> None:
    (tmp_path / "photos/cats").mkdir(parents=True)
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"photos holds other files \(cats\): choose another --out"):
            compare(tmp_path / "photos", overwrite=overwrite)
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cats"]
    compare(tmp_path / "c")
    (tmp_path / "c/notes.txt").write_text("mine")
    compare(tmp_path / "c", "fedavg,fedprox")
    assert (tmp_path / "c/notes.txt").read_text() == "mine"
    with pytest.raises(UserError, match="is a file: choose another --out"):
        compare(tmp_path / "c/notes.txt")


def test_more_rounds_take_all_runs_further(tmp_path: Path) -> None:
    compare(tmp_path / "long", "fedavg,moon", rounds=3)
    compare(tmp_path / "c", "fedavg,moon", rounds=1)
    package.resume(tmp_path / "c/moon-seed0", data=blobs(), rounds=3)
    with pytest.raises(UserError, match="moon-seed0 has 3 rounds: --rounds 3 takes all runs that far"):
        compare(tmp_path / "c", "fedavg,moon", rounds=2)
    again = compare(tmp_path / "c", "fedavg,moon", rounds=3)
    assert [len(run.history) for runs in again.runs.values() for run in runs] == [3, 3]
    for name in ("fedavg-seed0", "moon-seed0"):
        weights = [(tmp_path / c / name / "model.safetensors").read_bytes() for c in ("long", "c")]
        assert weights[0] == weights[1]


def test_a_comparison_goes_on_with_whatever_of_its_files_is_there(tmp_path: Path) -> None:
    compare(tmp_path / "c")
    (tmp_path / "c/report.html").write_text("of the comparison")
    compare(tmp_path / "c", "fedavg,fedprox")
    for name in FILES[:4]:  # as if it had been cut off after its picture
        (tmp_path / "c" / name).unlink()
    assert len(compare(tmp_path / "c", overwrite=True).rows) == 1
    assert (tmp_path / "c/comparison.json").exists()


def test_a_comparison_that_is_cut_off_says_what_is_left(fedcsd: Fedcsd, tmp_path: Path) -> None:
    def stop(label: str, seed: int, rounds: int, left: int) -> Callbacks:
        if label == "fedprox":
            raise KeyboardInterrupt
        return Callbacks()

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            compare(tmp_path / "c", "fedavg,fedprox:mu=1,fedprox", seeds=[0, 3], on_start=stop)
    said = fedcsd("show", "c").stdout
    assert "fedprox-seed3" in said
    assert "to do" in said
    of = "a comparison of fedavg, fedprox:mu=1, fedprox (seeds 0, 3), not finished"
    assert f"{of}: 2 of 6 runs are left; the same command again goes on with it\n" in said
    compare(tmp_path / "c", "fedavg,fedprox:mu=1,fedprox", seeds=[0, 3])
    assert not (tmp_path / "c/planned.json").exists()


def test_a_run_that_cannot_be_written_is_refused_before_the_first_is_trained(tmp_path: Path) -> None:
    compare(tmp_path / "c", "moon")
    (tmp_path / "c/fedprox-seed0").mkdir(parents=True)
    (tmp_path / "c/fedprox-seed0/notes.txt").write_text("mine")
    before = content(tmp_path / "c")
    with pytest.raises(UserError, match=r"fedprox-seed0 holds other files \(notes\.txt\)"):
        compare(tmp_path / "c", "fedavg,fedprox")
    assert content(tmp_path / "c") == before


def test_one_process_at_a_time_trains_a_comparison(fedcsd: Fedcsd, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    code = "import fcntl; f = open('c/lock', 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdin=pipe, stdout=pipe) as other:
        assert other.stdout
        other.stdout.readline()
        result = fedcsd(*COMPARE, "--out", "c", "--overwrite")
        other.communicate(b"\n")
    assert result.returncode == 2
    assert result.stderr == "error: another process is training c right now\n"
    assert set(content(tmp_path)) == {"c/lock"}
    assert fedcsd(*COMPARE, "--out", "c").returncode == 0


@pytest.mark.parametrize("labels", [("a:b", "a-b"), ("a/b", "a_b")])
def test_two_labels_never_share_a_folder(labels: tuple[str, str], tmp_path: Path) -> None:
    methods = dict(zip(labels, ("fedavg", "fedprox"), strict=True))
    with pytest.raises(UserError, match=r"would both be in a.b-seed0: choose other labels"):
        compare(tmp_path / "c", methods)
    assert not (tmp_path / "c").exists()
    assert len(package.compare(methods, data=blobs(), **SMALL).rows) == 2  # nothing is written
    compare(tmp_path / "c", {labels[0]: "fedavg", "other": "fedprox"})


@pytest.mark.filterwarnings("ignore:constrained_layout")
def test_a_label_too_long_for_a_folder_is_refused_before_any_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'a{20}…' is too long .* choose a shorter label"):
        compare(tmp_path / "c", {"fine": "fedavg", "a" * 250: "fedprox"})
    assert not (tmp_path / "c").exists()
    compare(tmp_path / "c", {"a" * 249: "fedavg"})


@pytest.mark.parametrize("how", ["gone", "torn"])
def test_what_cannot_be_taken_further_is_refused_before_anything_is_touched(tmp_path: Path, how: str) -> None:
    compare(tmp_path / "c", "fedavg,fedprox")
    for path in (tmp_path / "c/fedprox-seed0/checkpoints").iterdir():
        path.unlink() if how == "gone" else path.write_bytes(b"torn")
    before = content(tmp_path / "c")
    with pytest.raises(UserError, match=r"fedprox-seed0 is finished and has no checkpoint: remove it and"):
        compare(tmp_path / "c", "fedavg,fedprox", rounds=2)
    assert content(tmp_path / "c") == before
    shutil.rmtree(tmp_path / "c/fedprox-seed0")
    again = compare(tmp_path / "c", "fedavg,fedprox", rounds=2)
    assert [len(run.history) for runs in again.runs.values() for run in runs] == [2, 2]


def test_what_is_left_of_a_comparison_that_was_to_be_taken_further(fedcsd: Fedcsd, tmp_path: Path) -> None:
    def stop(label: str, seed: int, rounds: int, left: int) -> Callbacks:
        raise KeyboardInterrupt

    compare(tmp_path / "c", "fedavg,fedprox")
    with pytest.raises(KeyboardInterrupt):
        compare(tmp_path / "c", "fedavg,fedprox", rounds=2, on_start=stop)
    said = fedcsd("show", "c").stdout
    assert said.count("1 of 2") == 2
    assert "not finished: 2 of 2 runs are left; the same command" in said


def test_a_comparison_without_a_run_names_none(tmp_path: Path) -> None:
    Unfinished(["fedavg"], [0], ["fedavg-seed0"], 1).write(tmp_path)
    with pytest.raises(UserError, match=r"goes on with it, with more --rounds if you like$"):
        package.resume(tmp_path)


def test_a_default_that_was_changed_is_named_alone(fedcsd: Fedcsd, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    head = "from dataclasses import dataclass\n\nimport fedcsd\n\n\n@dataclass(frozen=True)\n"
    code = head + "class Mine(fedcsd.FedAvg):\n    tau: float = {}\n"
    compare = ("compare", "--methods", "mine.py", "--rounds", "1", "--epochs", "1", "--out", "c")
    file.write_text(code.format(1.0))
    assert fedcsd(*compare).returncode == 0
    file.write_text(code.format(0.3))
    said = fedcsd(*compare)
    assert said.returncode == 2
    assert "(method.tau is 1.0 there and 0.3 here)" in said.stderr
