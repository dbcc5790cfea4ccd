"""Test TensorBoard and MLflow: the values sent to them, and that training does not depend on them."""

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedcsd as package
from fedcsd.errors import Note, UserError
from fedcsd.experiments import tracking
from fedcsd.experiments.resuming import continued
from fedcsd.experiments.running import begin, train
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.experiments.tracking import EachRound, scalars
from helpers.federations import blobs
from helpers.program import Fedcsd

SMALL: dict[str, Any] = {
    "clients": 4,
    "min_samples": 2,
    "epochs": 1,
    "batch_size": 16,
    "beta": 0.5,
    "workers": 1,
}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let MLflow store in files, without its advice to use a database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "ml").as_uri()


def runs_at(uri: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))


def history_of(uri: str, run: Any, key: str) -> dict[int, float]:
    from mlflow import MlflowClient

    return {m.step: m.value for m in MlflowClient(uri).get_metric_history(run.info.run_id, key)}


def interrupted(path: Path, after: int, **settings: Any) -> None:
    """A run that is stopped by Ctrl-C after so many rounds."""

    def stop(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == after:
            raise KeyboardInterrupt

    values = {**SMALL, "method": "fedavg", "data": "given from Python", "model": "mlp", **settings}
    job = begin(values, given={"data": blobs()}, out=path)
    with pytest.raises(KeyboardInterrupt):
        train(job, EachRound(stop))


def test_what_is_a_number_is_sent() -> None:
    record = {
        "round": 3,
        "test_accuracy": 0.5,
        "domain_accuracy": {"amazon": 0.25},
        "bad": float("nan"),
        "clients": 4,
    }
    expected = {"test_accuracy": 0.5, "domain_accuracy/amazon": 0.25, "clients": 4.0}
    assert scalars({**record, "class_accuracies": [0.1], "none": None}) == expected


@pytest.mark.slow
def test_both_have_every_round_once_after_a_resume_and_change_nothing(tmp_path: Path, store: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data, path = blobs(), tmp_path / "r"
    plain = package.run(data=data, method="fedavg", model="mlp", rounds=4, **SMALL)
    interrupted(path, 3, rounds=4, tensorboard=True, mlflow=store, checkpoint_every=2)
    (run,) = runs_at(store)
    assert run.info.status == "KILLED"
    finished = package.resume(path, data=data)
    for name, weights in plain.weights.items():
        assert np.array_equal(weights, finished.weights[name])
    expected = {r["round"]: r["test_accuracy"] for r in finished.history}
    (run,) = runs_at(store)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "r"
    assert run.data.params["method.name"] == "fedavg"
    assert history_of(store, run, "test_accuracy") == expected
    events = EventAccumulator(str(path / "tensorboard"))
    events.Reload()
    assert {e.step: e.value for e in events.Scalars("test_accuracy")} == pytest.approx(expected)
    assert RunDirectory.open(path).settings["tensorboard"]
    assert package.run(data=data, method="fedavg", out=path, overwrite=True, rounds=1, **SMALL).path == path
    assert not (path / "tensorboard").exists()


@pytest.mark.slow
def test_a_server_that_is_lost_does_not_end_the_training(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "PATIENCE", 0.0)
    kept, away = tmp_path / "ml", tmp_path / "away"

    def move(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == 2:
            kept.rename(away)
        if record["round"] == 4:
            away.rename(kept)

    with pytest.warns(Note, match="does not answer; training goes on") as notes:
        run = package.run(data=blobs(), method="fedavg", rounds=5, mlflow=store, on_round=move, **SMALL)
    assert len(run.history) == 5
    assert sum("MLflow" in str(note.message) for note in notes) == 1
    (there,) = runs_at(store)
    assert history_of(store, there, "test_accuracy") == {r["round"]: r["test_accuracy"] for r in run.history}


def test_what_cannot_be_had_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r"
    with pytest.raises(UserError, match="MLFLOW_TRACKING_PASSWORD"):
        package.run(data=blobs(), out=out, mlflow="http://me:secret@localhost", **SMALL)
    with pytest.raises(UserError, match=r"MLflow at http://127\.0\.0\.1:9 cannot be used"):
        package.run(data=blobs(), out=out, mlflow="http://127.0.0.1:9", **SMALL)
    with pytest.raises(UserError, match="give one"):
        package.run(data=blobs(), tensorboard=True, **SMALL)
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.split(".")[0] == "mlflow" or name == "torch.utils.tensorboard":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"pip install 'fedcsd\[tensorboard\]'"):
        package.run(data=blobs(), out=out, tensorboard=True, **SMALL)
    with pytest.raises(UserError, match=r"pip install 'fedcsd\[mlflow\]'"):
        package.run(data=blobs(), out=out, mlflow="http://127.0.0.1:9", **SMALL)
    assert not out.exists()


def test_they_are_no_part_of_what_a_run_is(tmp_path: Path) -> None:
    package.compare("fedavg", data=blobs(), out=tmp_path / "c", rounds=1, **SMALL)
    compared = package.compare(
        "fedavg", data=blobs(), out=tmp_path / "c", rounds=1, tensorboard=True, **SMALL
    )
    assert "tensorboard" not in compared.settings
    assert continued(tmp_path / "c" / "fedavg-seed0", changes={"tensorboard": True}) is None


def test_from_the_command_line(fedcsd: Fedcsd, tmp_path: Path) -> None:
    result = fedcsd("run", "--rounds", "1", "--epochs", "1", "--tensorboard", "--out", "r")
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "r" / "tensorboard").glob("events.*"))
    longer = fedcsd("resume", "r", "--rounds", "2", "--no-tensorboard")
    assert longer.returncode == 0, longer.stderr
    assert len(list((tmp_path / "r" / "tensorboard").glob("events.*"))) == 1
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["rounds"] == 2
