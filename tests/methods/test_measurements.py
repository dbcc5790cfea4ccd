"""Test the measurements that a method takes at its clients, and their names."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcsd
from fedcsd.config import option
from fedcsd.errors import MethodFailed
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.rounds import Federation
from fedcsd.measurements import MEASUREMENTS
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.training.task import Batch, tally
from fedcsd.weights import Values, Weights
from helpers.federations import Here, blobs, small


@dataclass(frozen=True)
class Boastful(FedAvg):
    """It measures what the run measures."""

    measured: str = option("test_accuracy", "what it calls its measurement")

    def train(self, client: Client, weights: Weights) -> Values:
        client.note(self.measured, torch.ones(1))
        return super().train(client, weights)


@dataclass(frozen=True)
class BoastfulLoss(Boastful):
    """It measures that beside its loss, in the training of this name."""

    training: str = option("", "name of the training")

    def train(self, client: Client, weights: Weights) -> Values:
        return client.train(weights, self.loss, name=self.training)

    def loss(self, batch: Batch) -> Any:
        return batch.cross_entropy, {self.measured: batch.cross_entropy * 0 + 7}


OF_THE_RUN_S = [
    "test_accuracy",
    "bytes_up",
    "round",
    "train_loss",
    "feature_drift",
    "local_accuracy",
    "refused",
]


@pytest.mark.parametrize("name", OF_THE_RUN_S)
def test_the_runs_own_measurements_are_not_replaced(name: str) -> None:
    for method in (Boastful(name), BoastfulLoss(name)):
        for track_drift in (False, True):
            experiment = small(method, track_drift=track_drift)
            with pytest.raises(MethodFailed, match=f"measures {name}, which is the run's own"):
                Federation(experiment, Here(experiment)).step()


def test_nor_are_they_by_a_training_s_name_or_stacked_or_recorded() -> None:
    experiment = small(BoastfulLoss("accuracy", training="local"))
    with pytest.raises(MethodFailed, match="measures local_accuracy, which is the run's own"):
        Federation(experiment, Here(experiment)).step()
    experiment = small(BoastfulLoss("train_loss"))
    with pytest.raises(MethodFailed, match="measures train_loss, which is the run's own"):
        Federation(experiment, DeviceBackend(experiment.worker(), "stacked")).step()
    batch = Batch(torch.zeros(2, 3), torch.zeros(2, 1), torch.tensor([0, 1]), {}, {})
    with pytest.raises(ValueError, match="measures train_loss, which is the run's own"):
        tally({}, batch, BoastfulLoss("train_loss").loss(batch))


def test_all_that_a_run_records_is_its_own() -> None:
    settings: dict[str, Any] = {"data": blobs(), "clients": 4, "min_samples": 2, "rounds": 1}
    run = fedcsd.run(method="fedper", track_drift=True, holdout=0.2, **settings)
    reserved = {row.name for row in MEASUREMENTS.values() if not row.own}
    assert set(run.history[0]) <= reserved
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text(encoding="utf-8")
    table = page.partition("## metrics.jsonl")[2].partition("`--track-drift` costs")[0]
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    assert {"round", "refused", "client_accuracy_mean"} <= listed <= reserved


@dataclass(frozen=True)
class Noting(FedAvg):
    """It notes something beside training."""

    what: Any = 0

    def train(self, client: Client, weights: Weights) -> Values:
        values = self.what if isinstance(self.what, tuple) else (self.what,)
        client.note("visits", *values)
        return super().train(client, weights)


@pytest.mark.parametrize(
    "number", [3, 3.0, np.int64(3), np.float32(3), torch.tensor(3), torch.full((5,), 3.0), (3, torch.ones(4))]
)
def test_a_note_may_be_a_plain_number(number: Any) -> None:
    experiment = small(Noting(number))
    assert Federation(experiment, Here(experiment)).step()["visits"] == 3


@pytest.mark.parametrize("wrong", ["3", [3], None, (torch.ones(2), [True, False])])
def test_a_note_of_something_else_is_told_in_a_line(wrong: Any) -> None:
    experiment = small(Noting(wrong))
    with pytest.raises(MethodFailed, match=r"client\.note takes tensors or a number: 'visits' has a \w+"):
        Federation(experiment, Here(experiment)).step()
