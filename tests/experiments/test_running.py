"""Test a run on disk: it is complete, can be resumed, and is never overwritten by accident."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import kill_and_resume
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedcsd as package
from fedcsd.errors import Note, UserError
from fedcsd.experiments.runs.recorded import Change
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.experiments.summary import summarise
from fedcsd.files import write_whole
from helpers.federations import blobs
from helpers.runs import SMALL, same, stop_after


def test_a_run_directory_is_complete(tmp_path: Path) -> None:
    run = package.run(
        method=package.FedCSD(mu=0.01), rounds=3, track_drift=True, out=tmp_path / "run", clients=10, epochs=1
    )
    names = {p.name for p in (tmp_path / "run").iterdir()}
    assert names == {
        "config.toml",
        "partition.npz",
        "metrics.jsonl",
        "summary.json",
        "model.safetensors",
        "checkpoints",
        "lock",
    }
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["method"] == {"name": "fedcsd", **vars(package.FedCSD(mu=0.01))}
    assert config["seed"] == 0
    assert config["versions"]["torch"] == torch.__version__
    assert config["host"]["cores"] >= 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    wanted = {
        "test_accuracy",
        "test_loss",
        "train_loss",
        "seconds",
        "bytes_up",
        "bytes_down",
        "mask_rate",
        "wrong_filtered",
    }
    assert wanted | {"teacher_accuracy", "target_entropy", "logit_drift", "feature_drift"} <= set(lines[-1])
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2
    parts, _ = RunDirectory.open(tmp_path / "run").partition()
    assert sorted(np.concatenate(parts).tolist()) == list(range(1437))
    model = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(model[name], run.weights[name]) for name in run.weights)
    assert run.summary == json.loads((tmp_path / "run" / "summary.json").read_text())


def test_the_final_round_is_the_result_and_the_best_is_named_as_such() -> None:
    history = [
        {
            "round": r,
            "test_accuracy": a,
            "test_loss": 1.0,
            "bytes_up": 1,
            "bytes_down": 2,
            "seconds": 1.0,
            "diverged": 0,
        }
        for r, a in enumerate([0.5] * 8 + [0.9, 0.6, 0.7, 0.4], 1)
    ]
    summary = summarise(history)
    assert summary["final_accuracy"] == 0.4
    assert (summary["best_accuracy"], summary["best_round"]) == (0.9, 9)
    assert summary["mean_of_last_ten_accuracy"] == pytest.approx((0.5 * 6 + 0.9 + 0.6 + 0.7 + 0.4) / 10)


def test_the_model_loads_into_the_network_strictly(tmp_path: Path) -> None:
    from helpers.federations import one_class_net

    run = package.run(
        method="fedavg", data=blobs(), model=one_class_net, rounds=1, out=tmp_path / "run", **SMALL
    )
    one_class_net().load_state_dict(load_file(tmp_path / "run" / "model.safetensors"), strict=True)
    assert run.weights["1.num_batches_tracked"].dtype == torch.int64


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=1, out=tmp_path / "run", **SMALL)
    before = (tmp_path / "run" / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match=r"holds a run already.*fedcsd resume.*--overwrite"):
        package.run(data=blobs(), rounds=1, seed=1, out=tmp_path / "run", **SMALL)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == before
    package.run(data=blobs(), rounds=1, seed=1, out=tmp_path / "run", overwrite=True, **SMALL)
    assert (tmp_path / "run" / "model.safetensors").read_bytes() != before


def test_other_people_s_files_are_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"other files \(thesis.tex\)"):
            package.run(data=blobs(), rounds=1, out=tmp_path, overwrite=overwrite, **SMALL)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize("every", [1, 3])
def test_interrupted_and_resumed_is_the_same_run(tmp_path: Path, every: int) -> None:
    settings: dict[str, Any] = {
        **SMALL,
        "rounds": 6,
        "checkpoint_every": every,
        "participation": 0.75,
        "track_drift": True,
    }
    package.run(data=blobs(), out=tmp_path / "whole", **settings)
    with pytest.raises(KeyboardInterrupt, match="rounds 1 to 4 are saved; go on with: fedcsd resume"):
        package.run(data=blobs(), out=tmp_path / "cut", on_round=stop_after(4), **settings)
    package.resume(tmp_path / "cut", data=blobs())
    same(tmp_path / "whole", tmp_path / "cut")


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=5, out=tmp_path / "whole", **SMALL)
    with pytest.raises(KeyboardInterrupt):
        package.run(data=blobs(), rounds=5, out=tmp_path / "cut", on_round=stop_after(4), **SMALL)
    newest = max((tmp_path / "cut" / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-100])
    metrics = tmp_path / "cut" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-30])  # and the last line of measurements is torn as well
    with pytest.warns(Note, match="the checkpoint of round 4 is damaged; going back to round 3"):
        package.resume(tmp_path / "cut", data=blobs())
    same(tmp_path / "whole", tmp_path / "cut")


def test_all_checkpoints_lost_starts_from_the_beginning(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=3, out=tmp_path / "whole", **SMALL)
    with pytest.raises(KeyboardInterrupt):
        package.run(data=blobs(), rounds=3, out=tmp_path / "cut", on_round=stop_after(2), **SMALL)
    for path in (tmp_path / "cut" / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.warns(Note, match="no checkpoint is complete; starting again from round 1"):
        package.resume(tmp_path / "cut", data=blobs())
    same(tmp_path / "whole", tmp_path / "cut")


def test_a_record_lost_between_checkpoint_and_metrics_is_restored(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=4, out=tmp_path / "whole", **SMALL)
    with pytest.raises(KeyboardInterrupt):
        package.run(data=blobs(), rounds=4, out=tmp_path / "cut", on_round=stop_after(2), **SMALL)
    metrics = tmp_path / "cut" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    package.resume(tmp_path / "cut", data=blobs())
    same(tmp_path / "whole", tmp_path / "cut")


def test_a_finished_run_can_be_trained_for_longer(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=5, out=tmp_path / "whole", **SMALL)
    package.run(data=blobs(), rounds=2, out=tmp_path / "more", **SMALL)
    finished = package.resume(tmp_path / "more")  # nothing to do, so the data is not needed
    assert finished.summary["rounds"] == 2
    package.resume(tmp_path / "more", data=blobs(), rounds=5)
    same(tmp_path / "whole", tmp_path / "more")
    assert RunDirectory.open(tmp_path / "more").changes == [Change(2, "setting", "rounds", 2, 5)]


def test_other_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        package.run(data=blobs(), rounds=3, out=tmp_path / "cut", on_round=stop_after(1), **SMALL)
    with pytest.raises(UserError, match="not the data"):
        package.resume(tmp_path / "cut", data=blobs(seed=1))
    with pytest.raises(UserError, match="the data of this run was given from Python"):
        package.resume(tmp_path / "cut")
    with pytest.raises(UserError, match="beta cannot change"):
        package.resume(tmp_path / "cut", data=blobs(), beta=0.5)


def test_another_method_or_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        package.run(data=blobs(), rounds=3, out=tmp_path / "cut", on_round=stop_after(1), **SMALL)
    for method in (package.FedCSD(mu=5.0), package.FedAvg()):
        with pytest.raises(UserError, match="was started with"):
            package.resume(tmp_path / "cut", data=blobs(), method=method)
    with pytest.raises(UserError, match="the model is not the model"):
        package.resume(
            tmp_path / "cut", data=blobs(), model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 3))
        )
    package.resume(tmp_path / "cut", data=blobs(), method=package.FedCSD())


def test_folders_that_only_look_like_runs_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs/checkpoints").mkdir(parents=True)
    (tmp_path / "theirs/checkpoints/epoch10.pt").write_text("weeks of training")
    (tmp_path / "theirs/model.safetensors").write_text("a model")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="holds other files"):
            package.run(data=blobs(), rounds=1, out=tmp_path / "theirs", overwrite=overwrite, **SMALL)
    assert (tmp_path / "theirs/checkpoints/epoch10.pt").read_text() == "weeks of training"
    (tmp_path / "begun/checkpoints").mkdir(parents=True)  # what a run killed at its very start leaves
    (tmp_path / "begun/partition.npz").write_bytes(b"")
    package.run(data=blobs(), rounds=1, out=tmp_path / "begun", **SMALL)


@pytest.mark.slow
def test_the_lock_is_free_after_an_interruption(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as kept:  # a notebook keeps the exception alive
        package.run(data=blobs(), rounds=3, out=tmp_path / "run", on_round=stop_after(1), **SMALL)
    code = "import pathlib, sys; from fedcsd.experiments.runs.run_folder import RunDirectory\n"
    code += "RunDirectory.open(pathlib.Path(sys.argv[1])).lock()"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")]).returncode == 0
    assert kept.value is not None


def test_an_interruption_anywhere_in_a_round_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedcsd.federation import requests

    settings = {**SMALL, "rounds": 4, "checkpoint_every": 10}
    package.run(data=blobs(), out=tmp_path / "whole", **settings)
    calls, means = [], requests.means_of_notes

    def interrupted(notes: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return means(notes)

    monkeypatch.setattr(requests, "means_of_notes", interrupted)
    with pytest.raises(KeyboardInterrupt, match="rounds 1 to 2 are saved"):
        package.run(data=blobs(), out=tmp_path / "cut", **settings)
    monkeypatch.undo()
    package.resume(tmp_path / "cut", data=blobs())
    same(tmp_path / "whole", tmp_path / "cut")


def test_lost_checkpoint_folder_starts_from_the_beginning(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=3, out=tmp_path / "whole", **SMALL)
    with pytest.raises(KeyboardInterrupt):
        package.run(data=blobs(), rounds=3, out=tmp_path / "cut", on_round=stop_after(2), **SMALL)
    shutil.rmtree(tmp_path / "cut/checkpoints")
    package.resume(tmp_path / "cut", data=blobs())
    same(tmp_path / "whole", tmp_path / "cut")


def test_bytes_are_the_same_after_a_resume(tmp_path: Path) -> None:
    method = package.FedCSD(teacher="global")
    whole = package.run(data=blobs(), method=method, rounds=4, **SMALL)
    package.run(data=blobs(), method=method, rounds=2, out=tmp_path / "half", **SMALL)
    half = package.resume(tmp_path / "half", data=blobs(), method=method, rounds=4)
    assert [r["bytes_down"] for r in half.history] == [r["bytes_down"] for r in whole.history]


@pytest.mark.slow
def test_only_one_process_trains_a_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        package.run(data=blobs(), rounds=3, out=tmp_path / "run", on_round=stop_after(1), **SMALL)
    code = (
        "import sys, pathlib; from fedcsd.experiments.runs.run_folder import RunDirectory\n"
        "run = RunDirectory.open(pathlib.Path(sys.argv[1])); run.lock(); print('locked', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(UserError, match="another process is training"):
        package.resume(tmp_path / "run", data=blobs())
    other.communicate("\n")
    package.resume(tmp_path / "run", data=blobs())


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole(tmp_path / "file", b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_too_little_space_is_refused_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(UserError, match=r"0 MB free and the run needs about \d MB"):
        package.run(data=blobs(), rounds=4, out=tmp_path / "run", **SMALL)


def test_a_full_disk_in_mid_run_says_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RunDirectory.record

    def full(self: RunDirectory, line: dict[str, Any]) -> None:
        if line["round"] == 3:
            raise OSError(28, "No space left on device")
        record(self, line)

    monkeypatch.setattr(RunDirectory, "record", full)
    with pytest.raises(package.RunStopped, match="No space left on device; rounds 1 to 3 are saved"):
        package.run(data=blobs(), rounds=4, out=tmp_path / "run", **SMALL)
    monkeypatch.undo()
    package.run(data=blobs(), rounds=4, out=tmp_path / "whole", **SMALL)
    package.resume(tmp_path / "run", data=blobs())
    same(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "state"), [("fedcsd:mu=0.01", "memory"), ("moon", "disk")])
def test_killed_and_resumed_is_byte_identical(tmp_path: Path, method: str, state: str) -> None:
    run = (*kill_and_resume.RUN, "--method", method, "--client-state", state)
    kills = kill_and_resume.kill_until_done(tmp_path, run, kills=4, seed=0)
    assert kills == 4
    same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_cleanly_and_says_how_to_go_on(tmp_path: Path, how: signal.Signals) -> None:
    command = [sys.executable, "-m", "fedcsd", "run", "--rounds", "500", "--out", "run"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(how)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "are saved; go on with: fedcsd resume run" in errors
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_finished_run_takes_no_change_that_would_do_nothing(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=1, out=tmp_path / "run", **SMALL)
    with pytest.raises(UserError, match="is finished, --lr would have no effect: give --rounds as well"):
        package.resume(tmp_path / "run", data=blobs(), lr=0.5)


def test_a_folder_of_runs_is_no_run_but_names_one(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.toml").write_text("")
    with pytest.raises(UserError, match=r"holds no run, but some are below it: name one, such as .*b$"):
        RunDirectory.open(tmp_path)
    (tmp_path / "c/runs/a").mkdir(parents=True)
    (tmp_path / "c/runs/a/config.toml").write_text("")
    with pytest.raises(
        UserError, match=r"c holds no run, but some are below it: name one, such as .*c/runs/a$"
    ):
        RunDirectory.open(tmp_path / "c")
