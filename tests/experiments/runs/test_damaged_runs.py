"""Runs whose files are damaged, lost or cannot be written: told in one line, and nothing is lost that was there."""

import json
import shutil
from pathlib import Path

import pytest

import fedcsd as package
from fedcsd.cli import main as cli
from fedcsd.cli.show import show_finished
from fedcsd.errors import Note, UserError
from fedcsd.experiments.runs import run_folder as runs
from helpers.federations import blobs
from helpers.program import Fedcsd
from helpers.reports import made
from helpers.runs import SMALL

NAN = float("nan")


def test_a_finished_run_without_checkpoints_is_never_trained_again(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=3, out=tmp_path / "run", **SMALL)
    before = (tmp_path / "run/model.safetensors").read_bytes(), (tmp_path / "run/metrics.jsonl").read_text()
    for path in (tmp_path / "run/checkpoints").iterdir():
        path.write_bytes(b"")
    for _ in range(2):  # damaged, then gone
        with pytest.raises(UserError, match="is finished and has no checkpoint: remove it and start again"):
            package.resume(tmp_path / "run", data=blobs(), rounds=4)
        shutil.rmtree(tmp_path / "run/checkpoints", ignore_errors=True)
    now = (tmp_path / "run/model.safetensors").read_bytes(), (tmp_path / "run/metrics.jsonl").read_text()
    assert now == before
    assert package.load_run(tmp_path / "run").accuracy > 0


def test_a_run_that_was_cut_off_and_lost_its_checkpoints_says_that_it_starts_again(tmp_path: Path) -> None:
    whole = package.run(data=blobs(), rounds=3, out=tmp_path / "run", **SMALL)
    (tmp_path / "run/summary.json").unlink()
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.warns(Note, match="no checkpoint is complete; starting again from round 1"):
        again = package.resume(tmp_path / "run", data=blobs())
    assert again.accuracy == whole.accuracy


def test_damaged_runs_are_told_in_one_line(tmp_path: Path, fedcsd: Fedcsd) -> None:
    package.run(data=blobs(), rounds=4, out=tmp_path / "run", **SMALL)
    metrics = tmp_path / "run/metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([lines[0], "garbage\n", *lines[2:]]))
    with pytest.raises(UserError, match="is damaged: not all of rounds 1 to 4"):
        package.resume(tmp_path / "run", data=blobs(), rounds=5)
    (tmp_path / "run/model.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot read the model"):
        package.load_run(tmp_path / "run")
    whole = (tmp_path / "run/partition.npz").read_bytes()
    torn = bytearray(whole)
    torn[60:120] = bytes(60)
    for content in (b"", b"no", whole[:-20], bytes(torn)):
        (tmp_path / "run/partition.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read .*partition\.npz: it is damaged$"):
            package.resume(tmp_path / "run", data=blobs(), rounds=6)
        assert fedcsd("report", "run").returncode == 0
    for content in ("{", "[1]", "3"):
        (tmp_path / "run/summary.json").write_text(content)
        with pytest.raises(UserError, match=r"summary\.json is damaged"):
            package.load_run(tmp_path / "run")
    (tmp_path / "run/config.toml").write_text("= broken")
    with pytest.raises(UserError, match=r"cannot read .*config\.toml"):
        package.resume(tmp_path / "run", data=blobs())


def test_a_run_whose_weights_are_left_out_says_how_to_have_them(tmp_path: Path, fedcsd: Fedcsd) -> None:
    package.run(data=blobs(), rounds=1, out=tmp_path / "run", **SMALL)
    (tmp_path / "run/model.safetensors").unlink()
    again = (
        "the weights of run are not there (results that are shared come without them): train the run again, "
    )
    again = f"error: {again}fedcsd run run/config.toml"
    assert fedcsd("drift", "run").stderr == f"{again}, or further, fedcsd resume run --rounds …\n"
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert fedcsd("drift", "run").stderr == f"{again}\n"


def test_lost_measurements_of_a_finished_run_are_told(tmp_path: Path, fedcsd: Fedcsd) -> None:
    package.run(data=blobs(), rounds=4, out=tmp_path / "run", **SMALL)
    metrics = tmp_path / "run/metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[: metrics.stat().st_size // 2])
    with pytest.warns(Note, match="damaged: of the 4 rounds that were trained 2 are in it|1 are in it"):
        package.load_run(tmp_path / "run")
    assert "of the 4 rounds that were trained" in fedcsd("show", "run").stderr


@pytest.mark.parametrize("line", [b'{"round": 2, "x": "\xff"}', b"{}", b'{"round": null}', b'{"round": "2"}'])
def test_a_line_that_is_none_of_a_round_is_left_out(line: bytes, tmp_path: Path, fedcsd: Fedcsd) -> None:
    package.run(data=blobs(), rounds=3, out=tmp_path / "run", **SMALL)
    metrics = tmp_path / "run/metrics.jsonl"
    first, _, last = metrics.read_bytes().splitlines()
    metrics.write_bytes(b"\n".join([first, line, last]))
    said = "note: run/metrics.jsonl is damaged: of the 3 rounds that were trained 2 are in it\n"
    for command in (("plot", "run"), ("show", "run"), ("report", "run")):
        done = fedcsd(*command)
        assert (done.returncode, done.stderr) == (0, said)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("lost", ["test_accuracy", "final_accuracy", "best_round", "bytes_up", "seconds"])
def test_numbers_that_are_lost_are_shown_as_such(
    lost: str, finished: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "all/run", [0.5, 0.7, 0.6])
    metrics, summary = run / "metrics.jsonl", run / "summary.json"
    whole = json.loads(summary.read_text())
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    without = [{k: v for k, v in content.items() if k != lost} for content in (whole, *records)]
    for result, *rounds in (
        without,
        [{**r, lost: None} for r in without],
        [{**r, lost: NAN} for r in without],
    ):
        metrics.write_text("".join(json.dumps(r) + "\n" for r in [records[0], *rounds[1:]]))
        summary.write_text(json.dumps(result)) if finished else summary.unlink(missing_ok=True)
        for command in (("show", run), ("show", run.parent), ("report", run)):
            status = cli.guarded([command[0], str(command[1])], debug=False)
            said = capsys.readouterr()
            assert status == 0 or "is damaged" in said.err
            assert "nan" not in said.out


def test_a_run_that_cannot_be_written_is_told_in_one_line(tmp_path: Path, fedcsd: Fedcsd) -> None:
    package.run(rounds=1, out=tmp_path / "run", **SMALL)
    (tmp_path / "run/curves.png").mkdir()
    again = fedcsd("resume", "run")
    assert again.returncode == 0
    assert "note: cannot write to run/curves.png: Is a directory" in again.stderr
    (tmp_path / "run/lock").unlink()
    (tmp_path / "run/lock").mkdir()
    assert fedcsd("resume", "run", "--rounds", "2").stderr == "error: cannot write to run: Is a directory\n"


def test_a_run_is_not_put_where_a_comparison_is(tmp_path: Path, fedcsd: Fedcsd) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c/comparison.json").write_text("{}")
    said = fedcsd("run", "--data", "digits", "--out", "c")
    assert said.stderr == "error: c holds a comparison: choose another --out\n"


def test_interrupted_after_the_last_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    run = package.run(data=blobs(), rounds=1, out=tmp_path / "run", **SMALL)
    monkeypatch.setattr("fedcsd.results.curves.plot_curves", interrupt)
    with pytest.raises(KeyboardInterrupt, match="run is finished, its pictures are not"):
        show_finished(run)


def test_show_of_a_folder_of_runs(tmp_path: Path, fedcsd: Fedcsd) -> None:
    package.run(data=blobs(), rounds=1, out=tmp_path / "all/one", **SMALL)
    (tmp_path / "all/c").mkdir()
    (tmp_path / "all/c/comparison.json").write_text("{")
    shown = fedcsd("show", "all").stdout
    assert "the runs in all; if a comparison was cut off there" in shown
    assert "a comparison: fedcsd show all/c" in shown
    damaged = fedcsd("show", "all/c")
    assert (
        damaged.stderr
        == "error: all/c/comparison.json is damaged: the same comparison again writes it anew\n"
    )


def test_a_run_that_cannot_be_written_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.run(rounds=2, out=tmp_path / "run", epochs=1)

    def refuse(path: Path, content: bytes) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("fedcsd.experiments.runs.run_folder.write_whole", refuse)
    for moved in ({}, {"data_dir": str(tmp_path)}):
        with pytest.raises(UserError, match=r"^cannot write to .*run: Permission denied$"):
            package.resume(tmp_path / "run", rounds=3, **moved)
    monkeypatch.undo()
    assert package.resume(tmp_path / "run", rounds=3).summary["rounds"] == 3


def test_a_disk_that_is_full_at_the_very_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = runs.write_whole

    def full(path: Path, content: bytes) -> None:
        if path.name == "model.safetensors":
            raise OSError(28, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr("fedcsd.experiments.runs.run_folder.write_whole", full)
    with pytest.raises(
        package.RunStopped, match=r"No space left on device; rounds 1 to 2 are saved; go on with"
    ):
        package.run(data=blobs(), rounds=2, out=tmp_path / "run", **SMALL)
    monkeypatch.undo()
    assert package.resume(tmp_path / "run", data=blobs()).summary["rounds"] == 2
