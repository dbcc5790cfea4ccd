"""Every method against its plain simulation: weights, what clients keep, and personal models.

The models compute in float64, so that only a difference in meaning shows, not one in the order of sums.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import reference
import torch
from conftest import blobs, small
from plain import Result, State, World
from test_training import Here
from torch import Tensor, nn

from fedcsd.federation import Experiment, Federation, cohort
from fedcsd.methods import methods
from fedcsd.weights import Weights

OPTIONS: dict[str, dict[str, Any]] = {
    "confidence_penalty": {"mu": 0.3},
    "ditto": {"mu": 0.5},
    "fedadagrad": {"server_lr": 0.1, "beta1": 0.3, "adaptivity": 0.05},
    "fedadam": {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "adaptivity": 0.05},
    "fedavg": {},
    "fedavgm": {"server_momentum": 0.7},
    "fedbn": {},
    "fedcsd": {"mu": 0.1, "tau": 4.0, "alpha": 0.6},
    "feddc": {"alpha": 0.2},
    "feddyn": {"alpha": 0.2},
    "fedgkd": {"mu": 0.5, "tau": 2.0, "window": 3},
    "fednova": {},
    "fedntd": {"mu": 0.5, "tau": 2.0},
    "fedper": {},
    "fedproto": {"mu": 1.0},
    "fedprox": {"mu": 0.5},
    "fedyogi": {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "adaptivity": 0.05},
    "feature_distillation": {"mu": 1.0},
    "label_smoothing": {"epsilon": 0.2},
    "logit_distillation": {"mu": 0.1, "tau": 3.0},
    "moon": {"mu": 1.0, "tau": 0.5},
    "scaffold": {},
}
"""Strong enough that a method's term matters."""

ROUNDS, SEED, CLASSES = 5, 1, 4
SIZES = [12, 30, 22, 6, 20, 13]  # in batches of 8, none leaves one over: BatchNorm needs two
CASES: dict[str, dict[str, Any]] = {
    "mlp": {"momentum": 0.9},
    "batch norm": {"momentum": 0.9},
    "no momentum": {"momentum": 0.0},
    "float32": {"momentum": 0.9},
}
TOLERANCE = {"float32": {"rtol": 1e-4, "atol": 1e-5}}
EXACT = {"rtol": 1e-9, "atol": 1e-11}


class Net(nn.Module):
    """Body and head, in the precision asked for."""

    def __init__(self, *, norm: bool, dtype: torch.dtype):
        super().__init__()
        middle = [nn.BatchNorm1d(12)] if norm else []
        layers = [nn.Linear(6, 12), *middle, nn.Tanh(), nn.Linear(12, 8), nn.ReLU()]
        self.body, self.head = nn.Sequential(Cast(dtype), *layers), nn.Linear(8, CLASSES)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def parts(labels: np.ndarray) -> list[np.ndarray]:
    """Unequal clients, skewed by sorting; the last one alone holds the last class, and nothing else."""
    last = np.flatnonzero(labels == CLASSES - 1)[: SIZES[-1]]
    others = np.flatnonzero(labels != CLASSES - 1)
    order = np.random.default_rng(0).normal(size=len(others)) + labels[others]
    dealt = np.split(others[np.argsort(order)], np.cumsum(SIZES[:-1]))[:-1]
    return [*dealt, last]


def make(name: str, case: str) -> Experiment:
    def factory() -> nn.Module:
        return Net(
            norm=case in ("batch norm", "float32"),
            dtype=torch.float32 if case == "float32" else torch.float64,
        )

    data = blobs(samples=160, classes=CLASSES)
    experiment = small(
        methods.load(name)(**OPTIONS[name]),
        dataset=data,
        factory=factory,
        clients=len(SIZES),
        participation=0.5,
        batch_size=8,
        lr=0.05,
        weight_decay=1e-3,
        seed=SEED,
        **CASES[case],
    )
    return Experiment(**{**vars(experiment), "parts": parts(data.y_train.numpy())})


@cache
def expected(name: str, case: str) -> Result:
    return getattr(reference, name)(World(make(name, case), ROUNDS), **OPTIONS[name])


def gap(a: State, b: State) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def test_every_method_has_a_reference() -> None:
    assert set(OPTIONS) == set(methods.names)


def test_the_clients_come_and_go() -> None:
    """What the cases stand on: who is there when, and who holds what."""
    experiment = make("fedavg", "mlp")
    there = [cohort(experiment.settings, t) for t in range(ROUNDS)]
    assert there == [[1, 2, 3], [1, 2, 5], [1, 3, 4], [1, 2, 4], [3, 4, 5]]
    assert [len(rows) for rows in experiment.parts] == SIZES
    held = [sorted(set(experiment.data.y_train[rows].tolist())) for rows in experiment.parts]
    assert held[5] == [3]
    assert all(3 not in classes and len(classes) > 1 for classes in held[1:5])


def close(got: Any, want: State, case: str) -> None:
    """Weights by name, or a vector in the order of the names, equal to a state."""
    if isinstance(got, Weights):
        named = got.named()
        assert set(named) == set(want)
        got, want = torch.cat([named[n].flatten() for n in want]), want
    torch.testing.assert_close(got, torch.cat([v.flatten() for v in want.values()]), **tolerance(case))


def tolerance(case: str) -> dict[str, float]:
    return {"rtol": 1e-4, "atol": 1e-6} if case == "float32" else {"rtol": 1e-9, "atol": 1e-11}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_what_the_rules_say(name: str, case: str) -> None:
    experiment, want = make(name, case), expected(name, case)
    federation = Federation(experiment, Here(experiment))
    for _ in range(ROUNDS):
        federation.step()
    close(federation.server.weights, want.weights, case)
