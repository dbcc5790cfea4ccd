"""Test drift and forgetting within a round: their numbers, and that observation changes nothing."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedcsd
from fedcsd.errors import RunStopped, UserError
from fedcsd.experiments.choices import choices_of, make_method
from fedcsd.experiments.experiment import Experiment
from fedcsd.experiments.machine import backend_for
from fedcsd.experiments.running import Run
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Request
from fedcsd.methods.fedavg import FedAvg
from fedcsd.results.analysis import drift, forgetting
from fedcsd.results.analysis.observation import Observed
from fedcsd.results.analysis.one_round import NextRound, latest, ready
from helpers.federations import blobs, small

SETTINGS: dict[str, Any] = {
    "clients": 2,
    "min_samples": 2,
    "rounds": 2,
    "epochs": 2,
    "batch_size": 16,
    "beta": 0.5,
    "workers": 2,
    "lr": 0.05,
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def trained(model: Any = network, **settings: Any) -> Run:
    return fedcsd.run(method="fedavg", data=blobs(), model=model, **{**SETTINGS, **settings})


def plain_round(experiment: Experiment, rounds: int) -> torch.Tensor:
    """The global weights after an ordinary round that nobody looks into."""
    with backend_for(experiment) as backend:
        federation = Federation(experiment, backend)
        federation.round = rounds
        federation.step()
        return federation.server.weights.flat


def log_softmax(z: Any) -> Any:
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def by_numpy(weights: Any, x: Any) -> tuple[Any, Any]:
    """Return features and logits of `network()`."""
    w1, b1, w2, b2 = (
        weights.named()[name].double().numpy() for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    )
    features = np.maximum(0, x @ w1.T + b1)
    return features, features @ w2.T + b2


def test_numbers_of_one_epoch_by_numpy() -> None:
    run, data = trained(), blobs()
    found = drift.study(run, epochs=1, methods=["fedavg"], data=data, model=network)
    experiment = ready(run, data=data, model=network)
    experiment = replace(experiment, settings=replace(experiment.settings, epochs=1))
    x, y = data.x_test.double().numpy(), data.y_test.numpy()
    start_features, start_logits = by_numpy(experiment.weights, x)
    kl, l2, right, flats = [], [], [], []
    for client in (0, 1):
        worker = experiment.worker()
        local = worker.answer(Request(2, "train", {"weights": experiment.weights}), client, {}).weights
        features, logits = by_numpy(local, x)
        p, q = log_softmax(start_logits), log_softmax(logits)
        kl.append((np.exp(p) * (p - q)).sum(1).mean())
        l2.append(np.sqrt(((features - start_features) ** 2).sum(1)).mean())
        right.append((logits.argmax(1) == y).mean())
        flats.append(local.flat.double() * len(experiment.parts[client]))
    curve = found.curves["fedavg"]
    assert curve.logit_drift == pytest.approx([np.mean(kl)], rel=1e-5)
    assert curve.feature_drift == pytest.approx([np.mean(l2)], rel=1e-5)
    assert curve.local_accuracy == pytest.approx([np.mean(right)])
    average = experiment.weights.like(sum(flats) / sum(map(len, experiment.parts)))
    assert curve.average_accuracy == pytest.approx([(by_numpy(average, x)[1].argmax(1) == y).mean()])
    assert found.accuracy == pytest.approx((start_logits.argmax(1) == y).mean())
    assert found.accuracy == pytest.approx(run.accuracy)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*drift.PAPER, "moon", "scaffold", "fedcsd:authors"])
@pytest.mark.parametrize("model", [network, with_dropout, with_norm])
def test_looking_on_changes_no_bit(method: str, model: Any) -> None:
    run = trained(model)
    (table,) = choices_of(method, {}).values()
    following, chosen = NextRound.of(ready(run, data=blobs(), model=model), 2), make_method(table)
    gathered = drift.Gathered(lambda: None)
    with following.trained(chosen, gathered, epochs=3, observer=drift.Meter(50)) as federation:
        (*_, last) = gathered.averages()
        assert torch.equal(last, federation.server.weights.flat)
    assert torch.equal(last, plain_round(following.experiment(chosen, 3), 2))


def test_an_observed_method_goes_to_worker_processes_that_share_nothing() -> None:
    method = Observed(make_method({"name": "fedcsd", "mu": 0.5}), lambda *_: None, drift.Meter(3))
    again = copy.deepcopy(method)
    assert again.method == method.method
    assert (again.trains, again.observer.images, again.seen) == (("train",), 3, None)


def test_each_epoch_is_the_end_of_a_shorter_round() -> None:
    experiment = ready(trained(), data=blobs(), model=network)
    method = make_method({"name": "fedcsd"})
    gathered = drift.Gathered(lambda: None)
    following = NextRound.of(experiment, 2)
    with following.trained(method, gathered, epochs=3, observer=drift.Meter(50)):
        pass
    for epochs, average in enumerate(gathered.averages(), 1):
        assert torch.equal(average, plain_round(following.experiment(method, epochs), 2))


def test_partial_participation_takes_the_next_rounds_cohort() -> None:
    run = trained(clients=4, participation=0.5)
    told: list[tuple[str, int, int]] = []
    found = drift.study(
        run,
        epochs=1,
        methods="fedavg,fedcsd",
        data=blobs(),
        model=network,
        images=7,
        report=lambda *some: told.append(some),
    )
    cohort = NextRound.of(ready(run, data=blobs(), model=network), 2).clients
    assert len(cohort) == 2
    assert found.forgetting.clients == cohort
    assert found.images == sum(found.forgetting.images) == 7
    assert told == [("fedavg", 0, 4), ("fedavg", 1, 4), ("fedavg", 2, 4)] + [
        ("fedcsd", done, 4) for done in (2, 3, 4)
    ]


def test_who_trains_as_fedavg_in_a_first_round_is_told() -> None:
    some = ["fedavg", "scaffold", "fedprox:mu=1", "moon"]
    found = drift.study(trained(), epochs=1, methods=some, data=blobs(), model=network)
    assert found.alike == ["scaffold", "moon"]


@pytest.mark.slow
def test_a_warm_up_gives_methods_what_they_keep_and_puts_the_model_back() -> None:
    run, some = trained(), ["fedavg", "scaffold", "moon", "fedavgm"]
    steps: list[tuple[str, int, int]] = []

    def study(warm_up: int) -> drift.Drift:
        return drift.study(
            run,
            epochs=2,
            methods=some,
            warm_up=warm_up,
            report=lambda *step: steps.append(step),
            data=blobs(),
            model=network,
        )

    anew = study(0)
    assert anew.alike == ["scaffold", "moon", "fedavgm"]
    steps.clear()
    found = study(1)
    assert found.curves["fedavg"] == anew.curves["fedavg"]  # the same model and the same batches
    assert found.alike == ["fedavgm"]  # whose clients are FedAvg's
    assert found.curves["scaffold"] != found.curves["moon"]
    assert found.forgetting.before == anew.forgetting.before
    first = [done for label, done, _ in steps if label == "fedavg"]
    assert first == list(range(len(anew.forgetting.clients) + 2))
    assert steps[-1][1] == steps[-1][2] == len(some) * (len(anew.forgetting.clients) + 1)
    assert drift.Drift.from_json(found.to_json()).warm_up == 1
    assert study(2).curves["scaffold"] != found.curves["scaffold"]
    with pytest.raises(UserError, match="this run has 2 rounds: --warm-up may be as many at most"):
        study(3)


@pytest.mark.slow
def test_json_there_and_back_and_figures(tmp_path: Path) -> None:
    run = trained(track_drift=True)
    found = drift.study(run, epochs=2, methods=drift.PAPER, data=blobs(), model=network)
    assert drift.Drift.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert set(found.history[0]) == {"round", *drift.HISTORY}
    for paths in (
        drift.draw(found, tmp_path / "a" / "drift"),
        forgetting.draw(found.forgetting, tmp_path / "a" / "forgetting"),
    ):
        assert [path.suffix for path in paths] == [".png", ".svg", ".pdf"]
        starts = [path.read_bytes()[:8] for path in paths]
        assert starts[0] == b"\x89PNG\r\n\x1a\n"
        assert starts[1].startswith(b"<?xml")
        assert starts[2].startswith(b"%PDF")
    again = drift.draw(found, tmp_path / "b" / "drift")
    assert again[1].read_bytes() == (tmp_path / "a" / "drift.svg").read_bytes()


def test_a_method_that_diverges_is_named() -> None:
    run = trained()
    run.settings["lr"] = 1e30
    with pytest.raises(RunStopped, match=r"fedavg: client \d: .*try fewer --epochs"):
        drift.study(run, epochs=1, methods=["fedavg"], data=blobs(), model=network)


def test_data_from_python_must_be_given_again() -> None:
    with pytest.raises(
        UserError, match="the data of this run was given from Python: analyse it there, with data="
    ):
        drift.study(trained(), epochs=1, methods=["fedavg"])


def test_the_runs_own_method_is_taken_with_its_options() -> None:
    def chosen(name: str, **options: Any) -> list[str]:
        settings = {"method": {"name": name, **options}}
        return list(drift.methods_for(Run(settings, [], {}, {}, None)))

    assert chosen("fedavg") == list(drift.PAPER)
    assert chosen("fedcsd", mu=0.01, tau=10.0) == [*drift.PAPER[:3], "fedcsd:mu=0.01"]
    assert chosen("fedprox", mu=0.5) == [*drift.PAPER, "fedprox:mu=0.5"]
    assert chosen("Mine, given from Python") == list(drift.PAPER)


def test_a_checkpointed_run_is_taken_as_far_as_it_is(tmp_path: Path) -> None:
    def stop(record: dict[str, Any], rounds: int) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    settings = {"data": "digits", "method": "fedavg", "clients": 3, "epochs": 1}
    with pytest.raises(KeyboardInterrupt):
        fedcsd.run(out=tmp_path / "cut", rounds=5, on_round=stop, **settings)
    cut, whole = latest(tmp_path / "cut"), fedcsd.run(rounds=2, **settings)
    assert len(cut.history) == 2
    assert cut.accuracy == whole.accuracy
    assert all(torch.equal(cut.weights[name], tensor) for name, tensor in whole.weights.items())
    fedcsd.resume(tmp_path / "cut")
    assert len(latest(tmp_path / "cut").history) == 5


def test_forgetting_of_a_hand_made_confusion() -> None:
    # Rows are true classes, columns what the model says; client 0 holds class 0 only, client 1 all.
    before = [[9, 1, 0], [5, 10, 5], [1, 1, 8]]
    first = [[10, 0, 0], [20, 0, 0], [6, 0, 4]]
    second = [[8, 1, 1], [4, 12, 4], [2, 2, 6]]
    labels = np.repeat([0, 1, 2], [10, 20, 10])

    def right(confusion: list[list[int]]) -> list[int]:
        said = np.concatenate([np.repeat([0, 1, 2], row) for row in confusion])
        return forgetting.counts(said == labels, labels, 3)

    found = forgetting.Forgetting(
        [0, 1],
        [[True, False, False], [True, True, True]],
        [10, 20, 10],
        right(before),
        {"m": [right(first), right(second)]},
    )
    (row,) = found.rows()
    # Held: client 0 class 0, 9/10 -> 10/10; client 1 all, 27/40 -> 26/40. Not held: client 0, 18/30 -> 4/30.
    assert row == pytest.approx([(0.9 + 27 / 40) / 2, (1 + 26 / 40) / 2, 18 / 30, 4 / 30])
    head, ((*cells,),) = found.table()
    assert cells == ["m", "78.75", "82.50", "60.00", "13.33", "46.67"]
    assert len(head) == len(cells)


def test_nothing_to_forget_where_every_client_holds_all() -> None:
    found = forgetting.Forgetting([0], [[True, True]], [2, 2], [2, 1], {"m": [[2, 2]]})
    assert found.rows() == [[0.75, 1.0, None, None]]
    assert found.table()[1] == [["m", "75.00", "100.00", "–", "–", "–"]]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["eager", "stacked"])
def test_tracked_drift_is_the_same_with_every_engine(engine: str) -> None:
    names = ["logit_drift", "feature_drift", "local_accuracy", "train_accuracy", "local_train_accuracy"]
    experiment = small(track_drift=True, factory=network)
    with backend_for(experiment) as backend:
        expected = Federation(experiment, backend).step()
    found = Federation(experiment, DeviceBackend(experiment.worker(), engine)).step()
    assert [found[name] for name in names] == pytest.approx([expected[name] for name in names], rel=1e-4)


def test_accuracy_on_training_data_by_numpy() -> None:
    experiment = small(FedAvg(), track_drift=True, factory=network, dataset=blobs(1200), clients=2)
    with backend_for(experiment) as backend:
        record = Federation(experiment, backend).step()
    x, y = experiment.data.x_train.double().numpy(), experiment.data.y_train.numpy()
    before, after = [], []
    for client, rows in enumerate(experiment.parts):
        every = rows[:: -(-len(rows) // 250)]  # at most 250 of a client's samples
        assert len(rows) > 250 >= len(every)
        request = Request(0, "train", {"weights": experiment.weights})
        local = experiment.worker().answer(request, client, {}).weights
        before += (by_numpy(experiment.weights, x[every])[1].argmax(1) == y[every]).tolist()
        after += (by_numpy(local, x[every])[1].argmax(1) == y[every]).tolist()
    assert record["train_accuracy"] == pytest.approx(np.mean(before))
    assert record["local_train_accuracy"] == pytest.approx(np.mean(after))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["eager", "graphs", "stacked", "auto"])
def test_a_gpu_sees_what_the_cpu_sees(engine: str) -> None:
    run = trained(clients=4, workers=1)  # a process that holds a GPU takes seconds to fork
    given: dict[str, Any] = {"epochs": 3, "methods": drift.PAPER, "data": blobs(), "model": network}
    expected = drift.study(run, **given)
    found = drift.study(run, **given, device="cuda", engine=engine, workers=0)
    for label, curve in expected.curves.items():
        assert found.curves[label].logit_drift == pytest.approx(curve.logit_drift, rel=1e-2)
        assert found.curves[label].feature_drift == pytest.approx(curve.feature_drift, rel=1e-2)
        assert found.curves[label].average_accuracy == pytest.approx(curve.average_accuracy, abs=0.02)
