"""Make small federations: data, experiments and a backend in this process."""

from typing import Any

import numpy as np
import torch
from torch import nn

from fedcsd.data import Dataset
from fedcsd.experiments.experiment import Experiment, prepare
from fedcsd.federation.backends.local import LocalBackend
from fedcsd.federation.backends.protocol import Backend
from fedcsd.federation.evaluation import Evaluation
from fedcsd.messages import Request
from fedcsd.weights import Weights


def blobs(samples: int = 120, classes: int = 3, seed: int = 0) -> Dataset:
    """Return points around one centre for each class, which a model learns in a moment."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(classes, 6)) * 2
    labels = random.integers(0, classes, 2 * samples)
    points = (centres[labels] + random.normal(size=(2 * samples, 6))).astype(np.float32)
    return Dataset.of_arrays(
        points[:samples], labels[:samples], points[samples:], labels[samples:], name="blobs", classes=classes
    )


def small(method: Any = None, **values: Any) -> Experiment:
    """Return an experiment on blobs."""
    defaults = {"clients": 4, "min_samples": 2, "rounds": 2, "epochs": 2, "batch_size": 16, "beta": 0.5}
    values = {**defaults, "data": "given from Python", **values}
    given = {"data": values.pop("dataset", None) or blobs(), "model": values.pop("factory", None)}
    return prepare(values, method=method, **given)


def assert_found_by_workers(experiment: Experiment) -> None:
    """Check that forked workers train the same as spawned ones, which share nothing with us."""
    request = Request(0, "train", {"weights": experiment.weights})
    results = []
    for start in ("fork", "spawn"):
        backend = LocalBackend(experiment.worker(), experiment.network.layout, 1, start)
        try:
            results.append([reply.weights.flat for reply in backend.ask(request, range(2), {})])
        finally:
            backend.close()
    assert all(map(torch.equal, *results))


class Here(Backend):
    """A backend that trains clients in this process, one after another."""

    def __init__(self, experiment: Experiment):
        self.worker = experiment.worker()

    def ask(self, request, clients, states):
        return (self.worker.answer(request, k, states.get(k, {})) for k in clients)

    def evaluate(self, round: int, weights: Weights) -> Evaluation:
        request = Request(round, "evaluate", {"weights": weights}, "evaluate")
        return Evaluation.of_blocks(*self.worker.evaluate_all(request))


def one_class_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
