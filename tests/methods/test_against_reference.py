"""Compare every method with its plain simulation: weights, clients' states, and personal models.

Most cases compute in float64, so that only a difference in meaning shows, not one in the order of sums.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcsd.experiments.experiment import Experiment
from fedcsd.federation.cohort import cohort
from fedcsd.federation.rounds import Federation
from fedcsd.methods import methods
from fedcsd.training import Client
from fedcsd.weights import Weights
from helpers import reference
from helpers.federations import Here, blobs, small
from helpers.plain import Result, State, World
from helpers.reference import OPTIONS, Cast

ROUNDS, SEED, CLASSES = 5, 1, 5
SIZES = [12, 30, 22, 6, 20, 15]  # in batches of 12, none leaves one over: BatchNorm needs two
CASES: dict[str, dict[str, Any]] = {
    "mlp": {"dtype": torch.float64, "norm": False, "momentum": 0.9},
    "batch norm": {"dtype": torch.float64, "norm": True, "momentum": 0.9},
    "no momentum, float32": {"dtype": torch.float32, "norm": True, "momentum": 0.0},
}
TOLERANCE = {torch.float64: {"rtol": 1e-11, "atol": 1e-13}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}


class Net(nn.Module):
    """A model that has body and head, in a given precision."""

    def __init__(self, *, norm: bool, dtype: torch.dtype):
        super().__init__()
        middle = [nn.BatchNorm1d(12)] if norm else []
        layers = [nn.Linear(6, 12), *middle, nn.Tanh(), nn.Linear(12, 8), nn.ReLU()]
        self.body, self.head = nn.Sequential(Cast(dtype), *layers), nn.Linear(8, CLASSES)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def parts(labels: np.ndarray) -> list[np.ndarray]:
    """Return unequal clients, skewed by sorting; client 5 holds class 3 only, client 4 some of class 4."""
    common = np.flatnonzero(labels < 3)
    order = np.random.default_rng(0).normal(size=len(common)) + labels[common]
    *rows, rest = np.split(common[np.argsort(order)], np.cumsum(SIZES[:4]))
    rare, only = np.flatnonzero(labels == 4)[:8], np.flatnonzero(labels == 3)[: SIZES[5]]
    return [*rows, np.concatenate([rest[: SIZES[4] - 8], rare]), only]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def make(name: str, case: str) -> Experiment:
    settings = dict(CASES[case])
    data, model = blobs(samples=200, classes=CLASSES), {key: settings.pop(key) for key in ("dtype", "norm")}
    experiment = small(
        methods.load(name)(**OPTIONS[name]),
        dataset=data,
        factory=lambda: Net(**model),
        clients=len(SIZES),
        participation=0.5,
        batch_size=12,
        lr=0.05,
        weight_decay=1e-3,
        seed=SEED,
        **settings,
    )
    return Experiment(**{**vars(experiment), "parts": parts(data.y_train.numpy())})


@cache
def expected(name: str, case: str) -> Result:
    return getattr(reference, name)(World(make(name, case), ROUNDS), **OPTIONS[name])


def close(got: Weights | Tensor, want: State, names: Sequence[str], case: str) -> None:
    """Weights, or a flat vector of a part of them in the order of the names, equal to a state."""
    assert set(want) <= set(names)
    flat = got.flat if isinstance(got, Weights) else got
    vector = torch.cat([flat[:0], *(want[name].flatten() for name in names if name in want)])
    torch.testing.assert_close(flat, vector, **TOLERANCE[CASES[case]["dtype"]])


def gap(a: State, b: State) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_every_method_has_a_reference() -> None:
    assert set(OPTIONS) == set(methods.names)


def test_the_clients_come_and_go() -> None:
    """The cases have these properties: client 0 is never there, most others come back after missing a round, and
    a class is met for the first time in the second round, another in the third, beside known ones."""
    experiment = make("fedavg", "mlp")
    there = [cohort(experiment.settings, t) for t in range(ROUNDS)]
    assert there == [[1, 2, 3], [1, 2, 5], [1, 3, 4], [1, 2, 4], [3, 4, 5]]
    assert [len(rows) for rows in experiment.parts] == SIZES
    held = [set(experiment.data.y_train[rows].tolist()) for rows in experiment.parts]
    assert held[5] == {3}
    assert 4 in held[4]
    assert all(len(classes) > 1 and 3 not in classes for classes in held[:5])
    assert all(4 not in classes for classes in held[:4])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.filterwarnings("ignore:this model has no BatchNorm")
def test_it_is_what_the_rules_say(name: str, case: str) -> None:
    experiment, want = make(name, case), expected(name, case)
    federation = Federation(experiment, Here(experiment))
    for _ in range(ROUNDS):
        federation.step()
    weights, states = federation.server.weights, federation.states
    names = weights.layout.names
    assert set(want.weights) == set(names)
    close(weights, want.weights, names, case)
    assert {k: set(state) for k, state in states.items()} == {
        k: set(want.clients) for kept in want.clients.values() for k in kept
    }
    for entry, kept in want.clients.items():
        for k, state in kept.items():
            close(states[k][entry], state, names, case)
    for k, state in want.personal.items():
        client = Client(federation.backend.worker.workspace, k, ROUNDS, dict(states.get(k, {})))
        close(experiment.method.personal(client, weights), state, names, case)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "fedavg"])
def test_the_reference_is_far_from_fedavg(name: str, case: str) -> None:
    """So that a method which forgot its term would be found."""
    plain, other = expected("fedavg", case), expected(name, case)
    if name == "fedbn" and not CASES[case]["norm"]:  # nothing stays local: it is FedAvg
        assert gap(plain.weights, other.weights) == 0
        return
    assert (gap(plain.weights, other.weights) > 1e-3) == (name != "ditto")
    assert all(gap(plain.weights, state) > 1e-3 for k, state in other.personal.items() if k != 0)
