"""Run the same tests for every method."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcsd
from fedcsd.config.options import describe
from fedcsd.data.matching import MatchingTests
from fedcsd.experiments.experiment import Experiment
from fedcsd.federation.cohort import cohort
from fedcsd.federation.rounds import Federation
from fedcsd.federation.states import DiskStates
from fedcsd.messages import pack, unpack
from fedcsd.methods import Method, methods
from fedcsd.training import Client
from fedcsd.weights import Weights
from helpers.federations import Here, blobs, one_class_net, small

STRONG: dict[str, dict[str, Any]] = {
    "feature_distillation": {"mu": 0.1},
    "fedadagrad": {"server_lr": 0.02},
    "fedcsd": {"mu": 0.1},
    "feddc": {"alpha": 0.1},
    "feddyn": {"alpha": 0.5},
    "fedgkd": {"mu": 0.5},
    "fedprox": {"mu": 0.1},
    "logit_distillation": {"mu": 0.1},
}
"""Options under which the method's own part is plain to see in a few rounds."""

AT_NOTHING: dict[str, dict[str, Any]] = {
    "confidence_penalty": {"mu": 0.0},
    "ditto": {"mu": 0.0},  # with any λ: the personal models do not touch the global one
    "feature_distillation": {"mu": 0.0},
    "fedavg": {},
    "fedavgm": {"server_momentum": 0.0},
    "fedcsd": {"mu": 0.0},
    "fedgkd": {"mu": 0.0},
    "fedntd": {"mu": 0.0},
    "fedproto": {"mu": 0.0},
    "fedprox": {"mu": 0.0},
    "label_smoothing": {"epsilon": 0.0},
    "logit_distillation": {"mu": 0.0},
    "moon": {"mu": 0.0},
}
"""Options with which a method is FedAvg."""

NEVER_FEDAVG = {
    "fedadagrad": "the server's step is always divided by the root of v",
    "fedadam": "the server's step is always divided by the root of v",
    "fedbn": "has no coefficient; with a model without BatchNorm it is FedAvg",
    "feddc": "the server adds the drift whatever alpha is",
    "feddyn": "the server subtracts h/alpha, which does not vanish with alpha",
    "fednova": "has no coefficient; with equal numbers of steps it is FedAvg but for rounding",
    "fedper": "has no coefficient: its global model has no trained classifier",
    "fedyogi": "the server's step is always divided by the root of v",
    "scaffold": "has no coefficient; its first round is FedAvg's",
}

NAMES = methods.names
every_method = pytest.mark.parametrize("name", NAMES)


def make(name: str, **options: Any) -> Method:
    made: Method = methods.load(name)(**{**STRONG.get(name, {}), **options})
    return made


def trained(method: Method, rounds: int = 3, **values: Any) -> Federation:
    experiment = values.pop("experiment", None) or small(method, **values)
    federation = Federation(experiment, Here(experiment))
    for _ in range(rounds):
        federation.step()
    return federation


def memory(federation: Federation) -> dict[str, Any]:
    """Return the federation's whole memory, as plain numbers."""
    _, values = federation.save()
    return {name: getattr(value, "flat", value) for name, value in values.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one
    )


def test_every_method_is_either_fedavg_at_nothing_or_says_why_not() -> None:
    assert sorted([*AT_NOTHING, *NEVER_FEDAVG]) == NAMES


@pytest.mark.parametrize("factory", [None, one_class_net], ids=["plain", "batchnorm"])
@pytest.mark.parametrize("name", AT_NOTHING)
def test_without_its_term_it_is_fedavg_bit_for_bit(name: str, factory: Any) -> None:
    settings = {"factory": factory, "participation": 0.75}
    plain = trained(make("fedavg"), **settings)
    assert torch.equal(
        trained(make(name, **AT_NOTHING[name]), **settings).server.weights.flat, plain.server.weights.flat
    )


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"fedavg", "ditto"}))
def test_with_its_term_it_is_not(name: str) -> None:
    plain, ours = (trained(make(n), factory=one_class_net) for n in ("fedavg", name))
    assert not torch.allclose(ours.server.weights.flat, plain.server.weights.flat, atol=1e-5)


@pytest.mark.parametrize("name", ["scaffold", "moon", "fedproto"])
def test_the_first_round_knows_nothing_and_is_fedavg_s(name: str) -> None:
    plain, ours = (trained(make(n), rounds=1, factory=one_class_net) for n in ("fedavg", name))
    assert torch.equal(ours.server.weights.flat, plain.server.weights.flat)


def test_without_batchnorm_fedbn_is_fedavg() -> None:
    with pytest.warns(UserWarning, match="no BatchNorm"):
        ours = trained(make("fedbn"))
    plain = trained(make("fedavg"))
    assert torch.equal(ours.server.weights.flat, plain.server.weights.flat)
    assert ours.record["client_accuracy_personal_mean"] == pytest.approx(plain.record["client_accuracy_mean"])


def test_with_equal_steps_fednova_is_fedavg_but_for_rounding() -> None:
    data = blobs(samples=120)
    rows = list(np.arange(120).reshape(4, 30))
    plain, ours = (
        trained(
            make(n),
            experiment=Experiment(**{**vars(small(make(n), dataset=data, lr=0.1)), "parts": rows}),
        ).server.weights.flat
        for n in ("fedavg", "fednova")
    )
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:this model has no BatchNorm")
@every_method
@pytest.mark.parametrize("factory", [None, one_class_net], ids=["plain", "batchnorm"])
def test_clients_come_back_after_missing_rounds(name: str, factory: Any) -> None:
    """Four rounds in which each client misses some; all memories stay finite and of their shape."""
    experiment = small(make(name), factory=factory, participation=0.5, clients=5)
    rounds = [set(cohort(experiment.settings, t)) for t in range(6)]
    back = {k for t in range(2, 6) for k in rounds[t] - rounds[t - 1] if k in set().union(*rounds[: t - 1])}
    assert back  # somebody does come back
    federation = trained(make(name), rounds=6, experiment=experiment)
    assert all(bool(torch.as_tensor(value).isfinite().all()) for value in memory(federation).values())
    assert np.isfinite(federation.record["train_loss"])


@every_method
def test_a_client_of_one_class_and_one_of_one_sample(name: str) -> None:
    data = blobs(samples=90, classes=4)
    labels = data.y_train.numpy()
    rows = [np.flatnonzero(labels != 3), np.flatnonzero(labels == 3)[1:], np.flatnonzero(labels == 3)[:1]]
    experiment = small(make(name), dataset=data, clients=3, factory=four_class_net)
    federation = trained(make(name), experiment=Experiment(**{**vars(experiment), "parts": rows}))
    assert all(bool(torch.as_tensor(value).isfinite().all()) for value in memory(federation).values())


@every_method
def test_resume_in_the_middle_is_bit_for_bit(name: str) -> None:
    settings: dict[str, Any] = {"factory": one_class_net, "participation": 0.5, "clients": 5}
    whole = trained(make(name), rounds=5, **settings)
    half = trained(make(name), rounds=3, **settings)
    experiment = small(make(name), **settings)
    again = Federation(experiment, Here(experiment))
    again.load(*unpack(pack(*half.save()), experiment.network.layout))
    for _ in range(2):
        again.step()
    assert same(memory(again), memory(whole))
    timing = ("seconds", "seconds_evaluating")
    assert {k: v for k, v in again.record.items() if k not in timing} == {
        k: v for k, v in whole.record.items() if k not in timing
    }


@pytest.mark.slow
@every_method
def test_one_worker_or_two_or_none_gives_the_same(name: str) -> None:
    settings: dict[str, Any] = {"clients": 5, "min_samples": 2, "batch_size": 16, "epochs": 1, "rounds": 3}
    settings["beta"] = 0.5
    runs = [
        fedcsd.run(
            method=make(name),
            data=blobs(),
            model=one_class_net,
            participation=0.6,
            workers=workers,
            **settings,
        )
        for workers in (1, 2)
    ]
    here = trained(
        make(name), experiment=small(make(name), factory=one_class_net, participation=0.6, **settings)
    )
    for run in runs:
        for key, tensor in here.server.weights.named().items():
            assert torch.equal(run.weights[key], tensor), key


KEEPING = {
    "ditto": {"personal"},
    "fedbn": {"local"},
    "feddc": {"drift", "variate"},
    "feddyn": {"multiplier"},
    "fedper": {"local"},
    "moon": {"previous"},
    "scaffold": {"variate"},
}
"""What clients remember, by name."""


@every_method
def test_what_its_clients_remember_and_that_it_may_lie_on_disk(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"participation": 0.5, "clients": 5, "factory": one_class_net}
    experiment = small(make(name), **settings)
    in_memory = trained(make(name), rounds=4, experiment=experiment)
    on_disk = Federation(experiment, Here(experiment), states=DiskStates(tmp_path, experiment.network.layout))
    for _ in range(4):
        on_disk.step()
    assert torch.equal(in_memory.server.weights.flat, on_disk.server.weights.flat)
    assert in_memory.states.keys() == on_disk.states.keys()
    for client in in_memory.states:
        kept = in_memory.states[client]
        assert set(kept) == KEEPING[name]
        assert same(
            *({n: getattr(v, "flat", v) for n, v in s.items()} for s in (kept, on_disk.states[client]))
        )
    assert bool(in_memory.states) == (name in KEEPING)


@pytest.mark.filterwarnings("ignore:this model has no BatchNorm")
@every_method
def test_augmented_images_and_the_drift_that_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    images = random.integers(0, 255, (80, 8, 8), dtype=np.uint8)
    data = fedcsd.Dataset.of_arrays(images[:60], np.arange(60) % 3, images[60:], np.arange(20) % 3)
    experiment = small(
        make(name), dataset=data, augment="cifar", track_drift=True, factory=image_net, min_samples=1
    )
    trainings, train = [], Client.train

    def watched(self: Client, weights: Weights, *arguments: Any, **named: Any) -> Any:
        result = train(self, weights, *arguments, **named)
        if "name" not in named:  # a personal model that is trained beside the shared one does not count
            trainings.append((self.round, weights, result["weights"]))
        return result

    monkeypatch.setattr(Client, "train", watched)
    record = trained(make(name), rounds=2, experiment=experiment).record
    assert np.isfinite(record["train_loss"])
    drifts = [drift(experiment, before, after) for round_, before, after in trainings if round_ == 1]
    assert record["logit_drift"] == pytest.approx(np.mean(drifts), rel=1e-3, abs=1e-7)


def drift(experiment: Experiment, before: Weights, after: Weights) -> float:
    """Mean KL divergence of predictions on the test images after a training from those before it."""
    network, logs = experiment.network, []
    network.eval()
    for weights in (before, after):
        network.load(weights)
        with torch.no_grad():
            logits = network(experiment.data.images(experiment.data.x_test)).logits
        logs.append(logits.double().log_softmax(1))
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(1).mean())


def normed_net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )


def four_class_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))


def image_net() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )


@every_method
def test_integer_buffers_never_become_weights(name: str) -> None:
    federation = trained(make(name), rounds=1, factory=one_class_net)
    assert not any("num_batches" in n for n in federation.server.weights.layout.names)


@every_method
def test_its_file_begins_with_its_citation_and_its_options_have_meanings(name: str) -> None:
    cls = methods.load(name)
    source = Path(fedcsd.__file__).parent / "methods" / f"{name}.py"
    opening = source.read_text(encoding="utf-8").split('"""')[1]
    assert " et al., " in opening
    assert any(str(year) in opening for year in range(2014, 2025)) or name == "fedcsd"
    assert cls.__doc__
    assert all(default and meaning for _, default, meaning in describe(cls))


PERSONALISED = ["ditto", "fedbn", "fedper"]


@pytest.mark.parametrize("holdout", [0.0, 0.25])
@every_method
def test_personalised_methods_test_each_client_s_model_on_its_own_data(name: str, holdout: float) -> None:
    method = make(name)
    experiment = small(method, factory=one_class_net, holdout=holdout, participation=0.5)
    federation = trained(method, experiment=experiment)
    record, weights = federation.record, federation.server.weights
    shared = [accuracy(experiment, weights, k) for k in range(4)]
    assert record["client_accuracy_mean"] == pytest.approx(np.mean(shared))
    assert record["client_accuracy_worst_decile"] == pytest.approx(min(shared))
    assert ("client_accuracy_personal_mean" in record) == (name in PERSONALISED)
    if name in PERSONALISED:
        site, states = federation.backend.worker.workspace, federation.states
        clients = [Client(site, k, federation.round, dict(states.get(k, {}))) for k in range(4)]
        own = [accuracy(experiment, method.personal(c, weights), c.number) for c in clients]
        assert record["client_accuracy_personal_mean"] == pytest.approx(np.mean(own))
        assert states.keys() <= set(range(4))


def accuracy(experiment: Experiment, weights: Weights, client: int) -> float:
    """Accuracy on the images that a client holds out, or on test images like its own."""
    network, data = experiment.network, experiment.data
    network.load(weights)
    network.eval()
    with torch.no_grad():
        train, test = (
            (network(data.images(x)).logits.argmax(1) == y).double().numpy()
            for x, y in ((data.x_train, data.y_train), (data.x_test, data.y_test))
        )
    if experiment.held:
        return float(train[experiment.held[client]].mean())
    rows, shares = MatchingTests(data, len(experiment.parts)).rows(client, experiment.parts[client])
    return float((test[rows] * shares).sum())


def test_fedbn_s_own_models_are_better_where_the_features_differ() -> None:
    """One client's points are stretched and moved: only its own BatchNorm can put that right."""
    data = blobs(samples=240)
    x = data.x_train.clone()
    x[120:] = x[120:] * 5 + 20
    data = replace(data, x_train=x)
    experiment = small(make("fedbn"), dataset=data, clients=2, factory=normed_net, lr=0.05)
    parts = {"parts": [np.arange(90), np.arange(120, 210)], "held": [np.arange(90, 120), np.arange(210, 240)]}
    record = trained(make("fedbn"), rounds=6, experiment=Experiment(**{**vars(experiment), **parts})).record
    assert record["client_accuracy_personal_mean"] > 0.8
    assert record["client_accuracy_personal_mean"] > record["client_accuracy_mean"] + 0.2


@pytest.mark.parametrize("name", ["ditto", "fedper"])
def test_on_skewed_clients_their_own_models_are_better(name: str) -> None:
    """Each client has one class of its own: its own model needs only say that."""
    data = blobs(samples=120)
    labels = data.y_train.numpy()
    rows = [np.flatnonzero(labels == c) for c in range(3)]
    experiment = small(make(name), dataset=data, clients=3, factory=one_class_net, lr=0.1, epochs=4)
    record = trained(make(name), experiment=Experiment(**{**vars(experiment), "parts": rows})).record
    assert record["client_accuracy_personal_mean"] > 0.9
    assert record["client_accuracy_personal_mean"] >= record["client_accuracy_mean"]


@pytest.mark.parametrize(
    ("name", "change"),
    [("fedavgm", {"server_momentum": 1.0}), ("feddyn", {"alpha": 0.0}), ("fedgkd", {"window": 0})],
)
def test_options_out_of_range_are_refused(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(fedcsd.UserError):
        fedcsd.run(method={"name": name, **change}, data=blobs(), clients=4)


@pytest.mark.parametrize(
    ("name", "down", "up"),
    [
        ("fedavg", 1, 1),
        ("fedprox", 1, 1),
        ("fednova", 1, 1),
        ("fedavgm", 1, 1),
        ("moon", 1, 1),
        ("fedgkd", 2, 1),
        ("logit_distillation", 1, 1),
        ("feature_distillation", 1, 1),
        ("fedntd", 1, 1),
        ("scaffold", 2, 2),
        ("feddc", 2, 2),
        ("feddyn", 1, 1),
        ("fedadam", 1, 1),
        ("fedyogi", 1, 1),
        ("fedadagrad", 1, 1),
        ("ditto", 1, 1),
        ("confidence_penalty", 1, 1),
        ("label_smoothing", 1, 1),
    ],
)
def test_what_it_sends_in_models(name: str, down: int, up: int) -> None:
    federation = trained(make(name), rounds=2)
    size = federation.server.weights.nbytes
    assert federation.record["bytes_down"] == 4 * down * size
    assert 4 * up * size <= federation.record["bytes_up"] <= 4 * (up * size + 16)


def test_the_local_part_is_never_sent_up() -> None:
    layout = small(factory=one_class_net).network.layout
    for name, stays in (("fedper", layout.classifier), ("fedbn", layout.norms)):
        federation = trained(make(name), rounds=2, factory=one_class_net)
        assert federation.record["bytes_up"] == 4 * 4 * int((~layout.mask(stays)).sum())
