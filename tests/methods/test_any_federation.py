"""Every method, and FedCSD with each of its parts and controls, against its plain simulation in federations of
any kind: clients that fail or hold one sample, batches that leave one over, augmented images, clients stacked
as one. Weights, what clients keep, personal models and what each round measures."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedcsd.data import Dataset
from fedcsd.experiments.experiment import Experiment
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.rounds import Federation
from fedcsd.methods import methods
from fedcsd.training import Client
from fedcsd.weights import Weights
from helpers import reference
from helpers.federations import Here, small
from helpers.plain import Result, State, World
from helpers.reference import OPTIONS, Cast

PARTS: dict[str, dict[str, Any]] = {
    "base": {"similarity": False, "mask": "none", "teacher": "global"},
    "m1": {"teacher": "global"},
    "m2": {"mask": "none"},
    "m3": {"similarity": False},
    "forcible": {"mask": "forcible"},
    "uniform": {"target": "uniform"},
    "scaled": {"similarity_scale": "classes"},
}
"""The paper's ablations and the controls, for the reference: the method has them from its own presets."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, options) for name, options in OPTIONS.items()},
    **{f"fedcsd:{part}": ("fedcsd", {**OPTIONS["fedcsd"], **switches}) for part, switches in PARTS.items()},
    "fedcsd:authors": ("fedcsd_authors", OPTIONS["fedcsd"]),
}
IN_THE_GRADIENT = {"fedprox", "scaffold", "feddyn", "feddc"}  # terms that `train_loss` does not have
ROUNDS, CLASSES, SIDE = 3, 4, 6

pytestmark = pytest.mark.filterwarnings("ignore:this model has no BatchNorm")


class Net(nn.Module):
    """Body and head in float64, so that only a difference in meaning shows."""

    def __init__(self, norm: bool):
        super().__init__()
        middle = [nn.BatchNorm1d(7)] if norm else []
        layers = [nn.Linear(SIDE * SIDE, 7), *middle, nn.Tanh(), nn.Linear(7, 5), nn.ReLU()]
        self.body = nn.Sequential(nn.Flatten(), Cast(torch.float64), *layers)
        self.head = nn.Linear(5, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def pictures() -> Dataset:
    random = np.random.default_rng(0)
    y = np.arange(160) % CLASSES
    patterns = random.integers(0, 120, (CLASSES, SIDE, SIDE))
    x = (patterns[y] + random.integers(0, 136, (len(y), SIDE, SIDE))).astype(np.uint8)
    return Dataset.of_arrays(x[:120], y[:120], x[120:], y[120:], name="patterns")


@dataclass
class Setting:
    """A federation is given by its clients' sizes, the skew of their labels, and their training settings."""

    sizes: list[int]
    noise: float
    norm: bool
    values: dict[str, Any]


of_all_kinds = st.builds(
    Setting,
    sizes=st.lists(st.sampled_from([1, 2, 5, 9, 13, 17]), min_size=3, max_size=5),
    noise=st.sampled_from([0.1, 3.0]),
    norm=st.booleans(),
    values=st.fixed_dictionaries(
        {
            "batch_size": st.sampled_from([8, 4, 1, 64]),
            "epochs": st.integers(1, 2),
            "participation": st.sampled_from([0.6, 1.0]),
            "dropout": st.sampled_from([0.0, 0.3]),
            "momentum": st.sampled_from([0.0, 0.9]),
            "augment": st.sampled_from(["none", "cifar"]),
            "seed": st.integers(0, 5),
        }
    ),
)

VALUES = {"batch_size": 8, "epochs": 1, "participation": 0.6, "dropout": 0.0, "momentum": 0.9}
PLAIN = Setting([17, 9, 1, 13, 5], 0.6, False, {**VALUES, "augment": "none", "seed": 3})
AUGMENTED = Setting([17, 9, 1, 13], 0.6, True, {**VALUES, "dropout": 0.3, "augment": "cifar", "seed": 1})


def prepared(method: Any, setting: Setting) -> Experiment:
    data, clients = pictures(), len(setting.sizes)
    values = {"lr": 0.005, "weight_decay": 1e-3, "rounds": ROUNDS, "min_samples": 1, **setting.values}
    model = {"dataset": data, "factory": lambda: Net(setting.norm)}
    experiment = small(method, partition="iid", clients=clients, **model, **values)
    by_label = np.argsort(data.y_train.numpy() + setting.noise * np.random.default_rng(0).normal(size=120))
    parts = [some[:size] for some, size in zip(np.array_split(by_label, clients), setting.sizes, strict=True)]
    return Experiment(**{**vars(experiment), "parts": parts})


def backends(experiment: Experiment, name: str, setting: Setting) -> list[Any]:
    """BatchNorm and teachers of each client's own are not stacked."""
    own = name == "fedcsd:authors" or (name == "moon" and setting.values["augment"] != "none")
    stacked = [] if setting.norm or own else [DeviceBackend(experiment.worker(), "stacked")]
    return [Here(experiment), *stacked]


def close(got: Weights | Tensor, want: State, names: tuple[str, ...]) -> None:
    flat = got.flat if isinstance(got, Weights) else got
    vector = torch.cat([flat[:0], *(want[name].flatten() for name in names if name in want)])
    torch.testing.assert_close(flat, vector, rtol=1e-8, atol=1e-10)


def equal(federation: Federation, records: list[Any], want: Result, world: World, name: str) -> None:
    weights, states = federation.server.weights, federation.states
    names, experiment = weights.layout.names, federation.setup
    close(weights, want.weights, names)
    for entry, kept in want.clients.items():
        assert set(kept) == {k for k, state in states.items() if entry in state}
        for k, state in kept.items():
            close(states[k][entry], state, names)
    for k, state in want.personal.items():
        client = Client(experiment.worker().workspace, k, ROUNDS, dict(states.get(k, {})))
        close(experiment.method.personal(client, weights), state, names)
    for t, record in enumerate(records):
        for measure, values in world.measured[t].items():
            if values and not (measure == "train_loss" and name in IN_THE_GRADIENT):
                assert record[measure] == pytest.approx(np.mean(values), rel=1e-8, abs=1e-10), measure


def compare(name: str, setting: Setting) -> None:
    function, options = CASES[name]
    own, _, preset = name.partition(":")
    kind = methods.load(own)
    experiment = prepared(kind(**OPTIONS[own], **kind.presets.get(preset, {})), setting)
    world = World(experiment, ROUNDS)
    want = getattr(reference, function)(world, **options)
    for backend in backends(experiment, name, setting):
        federation = Federation(experiment, backend)
        equal(federation, [federation.step() for _ in range(ROUNDS)], want, world, name)


@pytest.mark.parametrize("setting", [PLAIN, AUGMENTED], ids=["plain", "augmented"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_what_the_rules_say(name: str, setting: Setting) -> None:
    compare(name, setting)


@pytest.mark.slow
@settings(max_examples=20)
@given(name=st.sampled_from(sorted(CASES)), setting=of_all_kinds)
def test_so_it_is_in_any_federation(name: str, setting: Setting) -> None:
    compare(name, setting)
