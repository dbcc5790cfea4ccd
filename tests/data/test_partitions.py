"""Every way of dealing data, the pictures of it, and clients that come, go and are looked at one by one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedcsd as package
from fedcsd.config import Settings
from fedcsd.data import Groups
from fedcsd.data import split as split_by
from fedcsd.data.partition import hold_out, packed
from fedcsd.errors import Note, UserError
from fedcsd.federation.cohort import cohort, failing
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Request
from fedcsd.methods.fedavg import FedAvg
from fedcsd.methods.fedcsd import FedCSD
from helpers.federations import Here, blobs, small
from helpers.program import Fedcsd, FedcsdRun

LABELS = np.random.default_rng(0).integers(0, 10, 4000)


def deal(
    name: str, labels: np.ndarray = LABELS, groups: Groups | None = None, seed: int = 0, **options
) -> list[np.ndarray]:
    fields = {k: options.pop(k) for k in ("clients", "beta", "min_samples") if k in options}
    return split_by(labels, Settings(partition_seed=seed, **fields), {"name": name, **options}, groups)


@given(clients=st.integers(5, 40), per_client=st.integers(2, 10), seed=st.integers(0, 20))
def test_classes_per_client(clients: int, per_client: int, seed: int) -> None:
    parts = deal("classes", clients=clients, per_client=per_client, seed=seed, min_samples=1)
    assert sorted(np.concatenate(parts).tolist()) == list(range(4000))
    held = [set(LABELS[p].tolist()) for p in parts]
    assert all(len(h) == per_client for h in held)
    holders = [sum(c in h for h in held) for c in range(10)]
    assert max(holders) - min(holders) <= 1


@given(clients=st.integers(1, 40), per_client=st.integers(1, 5), seed=st.integers(0, 20))
def test_shards(clients: int, per_client: int, seed: int) -> None:
    parts = deal("shards", clients=clients, per_client=per_client, seed=seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(4000))
    sizes = [len(p) for p in parts]
    assert max(sizes) - min(sizes) <= per_client
    if clients * per_client >= 40:  # a shard is then smaller than a class and touches two at most
        assert max(len(set(LABELS[p].tolist())) for p in parts) <= 2 * per_client


@pytest.mark.parametrize("beta", [0.3, 1.0, 100.0])
def test_quantity_skew_is_in_the_sizes_only(beta: float) -> None:
    parts = deal("quantity", beta=beta, clients=8)
    assert sorted(np.concatenate(parts).tolist()) == list(range(4000))
    sizes = sorted(len(p) for p in parts)
    if beta == 100.0:
        assert sizes[-1] < 1.5 * sizes[0]
    else:
        assert sizes[-1] > 3 * sizes[0]
    largest = max(parts, key=len)
    assert np.bincount(LABELS[largest], minlength=10).max() / len(largest) < 0.2


def test_by_column_and_saved(tmp_path: Path) -> None:
    groups = Groups(["a", "b", "c"], torch.from_numpy(np.arange(4000) % 3))
    parts = deal("column", groups=groups, clients=10)
    assert [set((p % 3).tolist()) for p in parts] == [{0}, {1}, {2}]
    with pytest.warns(Note, match="--partition column has 3 clients: --clients 7 has no effect"):
        deal("column", groups=groups, clients=7)
    train, held = hold_out(parts, 0.1, 0)
    (tmp_path / "p.npz").write_bytes(packed(train, held, 4000))
    again = deal("saved", file=str(tmp_path / "p.npz"))
    assert [sorted(a.tolist()) for a in again] == [sorted(p.tolist()) for p in parts]
    with pytest.raises(UserError, match="is of 4000 training samples, this data has 100"):
        deal("saved", LABELS[:100], file=str(tmp_path / "p.npz"))
    wrong = {"float": (np.arange(4) + 0.5, [4]), "sum": (np.arange(4), [3]), "twice": (np.zeros(4, int), [4])}
    for name, (rows, sizes) in wrong.items():
        np.savez(tmp_path / f"{name}.npz", rows=rows, sizes=np.array(sizes))
        with pytest.raises(UserError, match=r"whole numbers|must be different numbers"):
            deal("saved", file=str(tmp_path / f"{name}.npz"))
    (tmp_path / "empty.npz").write_bytes(b"")
    with pytest.raises(UserError, match="cannot read a partition"):
        deal("saved", file=str(tmp_path / "empty.npz"))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("classes", {"per_client": 11}, "must be 1 to 10, the number of classes, not 11"),
        ("classes", {"per_client": 1, "clients": 5}, "cannot hold all 10 classes: raise --clients"),
        ("classes", {"per_client": 2, "clients": 300, "min_samples": 13}, "lower --clients or --min-samples"),
        ("shards", {"per_client": 0}, "per_client must be at least 1, not 0"),
        ("shards", {"per_client": 1000}, "cannot be cut into 10000 shards"),
        ("quantity", {"beta": 0.01, "clients": 50}, "raise --beta"),
        ("column", {}, "does not say which client"),
        ("saved", {}, "which file"),
        ("saved", {"file": "nothing.npz"}, "there is no file nothing.npz: correct partition.file"),
        ("shards", {"per_cliant": 2}, "did you mean per_client"),
        ("iid", {"per_client": 2}, "this partition has no options"),
        ("iid", {"clients": 401}, "4000 training samples cannot give 401 clients 10 each"),
    ],
)
def test_impossible_requests_say_what_to_change(name: str, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        deal(name, **options)


def test_the_partition_command_draws_and_saves(fedcsd: Fedcsd, fedcsd_run: FedcsdRun, tmp_path: Path) -> None:
    arguments = ("--data", "digits", "--beta", "0.1", "--clients", "10")
    shown = fedcsd("partition", *arguments, "--plot", "new/p.png", "--save", "new/p.npz")
    assert shown.returncode == 0, shown.stderr
    assert "1,437" in shown.stdout
    assert (tmp_path / "new/p.png").stat().st_size > 5000
    saved = fedcsd_run("--partition", "saved", "--set", "partition.file=new/p.npz", out="r")
    direct = fedcsd_run(*arguments, out="s")
    assert (saved / "model.safetensors").read_bytes() == (direct / "model.safetensors").read_bytes()
    many = fedcsd("partition", "--clients", "100", "--partition", "iid", "--plot", "many.pdf")
    assert many.returncode == 0, many.stderr
    bad = fedcsd("partition", "--plot", "p.bmpp")
    assert bad.returncode == 2
    assert "--plot writes .png, .svg or .pdf, not p.bmpp" in bad.stderr


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    share=st.floats(0.01, 0.9),
    seed=st.integers(0, 9),
)
def test_hold_out(sizes: list[int], share: float, seed: int) -> None:
    parts = [np.arange(n) + 100 * i for i, n in enumerate(sizes)]
    train, held = hold_out(parts, share, seed)
    for rows, t, h in zip(parts, train, held, strict=True):
        assert sorted([*t.tolist(), *h.tolist()]) == rows.tolist()
        assert len(t) >= 1
        assert len(h) == min(int(np.ceil(share * len(rows))), len(rows) - 1)
    assert hold_out(parts, 0.0, seed) == (parts, [])


def test_per_client_accuracy_is_that_of_each_client_s_own_data() -> None:
    experiment = small(FedAvg(), holdout=0.25, clients=6, beta=0.3)
    federation = Federation(experiment, Here(experiment))
    before = experiment.weights
    record = federation.step()
    network, data = experiment.network, experiment.data
    network.load(federation.server.weights)
    network.eval()
    with torch.no_grad():
        right = network(data.images(data.x_train)).logits.argmax(1) == data.y_train
    expected = [float(right[torch.from_numpy(rows)].float().mean()) for rows in experiment.held]
    assert record["client_accuracy_mean"] == pytest.approx(np.mean(expected))
    assert record["client_accuracy_worst_decile"] == pytest.approx(min(expected))
    assert record["client_accuracy_std"] == pytest.approx(np.std(expected))
    local = []
    for k, rows in enumerate(experiment.held):
        network.load(experiment.worker().answer(Request(0, "train", {"weights": before}), k, {}).weights)
        with torch.no_grad():
            out = network(data.images(data.x_train[rows])).logits.argmax(1)
        local.append(float((out == data.y_train[rows]).float().mean()))
    assert record["client_accuracy_local_mean"] == pytest.approx(np.mean(local))
    # What is held out is not trained on.
    assert not set(np.concatenate(experiment.parts)) & set(np.concatenate(experiment.held))


def test_held_out_runs_resume_the_same(tmp_path: Path) -> None:
    settings = {"data": blobs(), "clients": 4, "min_samples": 4, "holdout": 0.2, "dropout": 0.3, "epochs": 1}
    package.run(rounds=4, out=tmp_path / "whole", **settings)
    package.run(rounds=2, out=tmp_path / "half", **settings)
    package.resume(tmp_path / "half", data=blobs(), rounds=4)
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (
        tmp_path / "half/model.safetensors"
    ).read_bytes()


def test_clients_that_fail_are_sent_weights_and_send_nothing() -> None:
    experiment = small(FedCSD(), dropout=0.4, clients=5, rounds=8)
    federation = Federation(experiment, Here(experiment))
    plain = small(FedCSD(), clients=5)
    seen = set()
    for t in range(8):
        fail = failing(experiment.settings, t)
        record = federation.step()
        assert record["failed"] == len(fail)
        assert record["clients"] == 5 - len(fail)
        assert (federation.ledger.last_round == t).sum() == 5 - len(fail)
        size = plain.weights.nbytes
        assert record["bytes_down"] >= 5 * size
        assert record["bytes_up"] == (5 - len(fail)) * (size + 8 + 9 * 4 + 3)
        seen |= fail
    assert seen == set(range(5))
    assert failing(experiment.settings, 3) == failing(experiment.settings, 3)


def test_a_round_in_which_everyone_fails_changes_nothing() -> None:
    experiment = small(FedAvg(), dropout=0.95, clients=3)
    federation = Federation(experiment, Here(experiment))
    quiet = next(t for t in range(50) if len(failing(experiment.settings, t)) == 3)
    federation.round = quiet
    before = federation.server.weights
    record = federation.step()
    assert (record["clients"], record["failed"]) == (0, 3)
    assert federation.server.weights is before


def test_ten_thousand_clients() -> None:
    run = package.run(
        data=blobs(20_000),
        method="fedavg",
        clients=10_000,
        partition="iid",
        min_samples=1,
        participation=0.002,
        rounds=3,
        epochs=1,
    )
    assert [r["clients"] for r in run.history] == [20, 20, 20]
    settings = Settings(clients=10_000, participation=0.002)
    assert cohort(settings, 0) != cohort(settings, 1)


def test_augmentation_is_for_training_only() -> None:
    """Prototypes and evaluation see images as they are; training sees them moved, and only then."""
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (60, 20, 20)).astype(np.uint8)
    y = np.arange(60) % 3
    results = {}
    for augment in ("none", "cifar"):
        experiment = small(FedCSD(), dataset=load_arrays(x, y), augment=augment, clients=2)
        worker = experiment.worker()
        values = {"weights": experiment.weights, "teacher": experiment.weights}
        prototypes = worker.answer(Request(0, "prototypes", values), 0, {})["prototypes"]
        logits = worker.evaluate(Request(0, "evaluate", values), 0)["correct"]
        train = worker.answer(Request(0, "train", {**values, "prototypes": torch.eye(3)}), 0, {}).weights.flat
        again = (
            experiment.worker()
            .answer(Request(0, "train", {**values, "prototypes": torch.eye(3)}), 0, {})
            .weights.flat
        )
        assert torch.equal(train, again)
        results[augment] = prototypes, logits, train
    for i, same in enumerate((True, True, False)):
        assert torch.equal(results["none"][i], results["cifar"][i]) is same


def load_arrays(x: np.ndarray, y: np.ndarray):
    from fedcsd.data import load

    return load((x, y, x, y))


def test_augmentation_names_and_tables(fedcsd: Fedcsd) -> None:
    with pytest.raises(UserError, match="unknown augmentation 'cifr': did you mean cifar"):
        small(FedAvg(), augment="cifr")
    with pytest.raises(UserError, match="is for images"):
        small(FedAvg(), augment="cifar")
