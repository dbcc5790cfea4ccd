"""Test that every engine on a GPU trains what the CPU trains, up to rounding."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedcsd
from fedcsd.aggregation import weighted_mean
from fedcsd.errors import MethodFailed
from fedcsd.federation.backends import memory
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.rounds import Federation
from fedcsd.methods import Method, methods
from fedcsd.methods.fedavg import FedAvg
from fedcsd.models.network import Outputs
from fedcsd.results.analysis.drift import Meter
from fedcsd.training import Batch, Client
from fedcsd.training.workspace import Workspace
from helpers.engines import Enclosed, Wrong, assigning, experiment, pictures, trained

pytestmark = pytest.mark.gpu

ENGINES = ["eager", "graphs", "stacked", "auto"]
NEAR = 1e-3  # of the way that the weights went; docs/speed.md states it


def steps(federation: Federation) -> None:
    for _ in range(3):
        federation.step()


def apart(one: Federation, other: Federation) -> float:
    """Return the distance of two results, as a share of the way from the start."""
    start = one.setup.weights.flat
    mine, yours = (some.server.weights.flat.cpu() for some in (one, other))
    return float((mine - yours).norm() / (mine - start).norm())


@pytest.mark.parametrize("augment", ["none", "cifar"])
@pytest.mark.parametrize("name", methods.names)
def test_every_engine_trains_what_the_cpu_trains(name: str, augment: str) -> None:
    method = methods.load(name)()
    expected = trained(experiment(method, augment=augment), "eager")
    for engine in ENGINES:
        prepared = experiment(method, augment=augment, device="cuda", engine=engine)
        if engine == "stacked" and augment != "none" and name == "moon":
            with pytest.raises(fedcsd.UserError, match="must look at every batch"):
                trained(prepared)
            continue
        found = trained(prepared)
        assert apart(expected, found) < NEAR, engine
        assert found.record["train_loss"] == pytest.approx(expected.record["train_loss"], rel=1e-4)
        assert found.record["bytes_down"] == expected.record["bytes_down"]


@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
def test_ragged_batches_and_clients_smaller_than_one(batch: int) -> None:
    # Two rounds: in the third, with batches of one, rounding decides which of two pixels a pool takes.
    values = {"batch_size": batch, "min_samples": 1, "beta": 0.2, "epochs": 3, "lr": 0.001}
    expected = trained(experiment(FedAvg(), **values), "eager", rounds=2)
    for engine in ("graphs", "stacked"):
        found = trained(experiment(FedAvg(), device="cuda", engine=engine, **values), rounds=2)
        assert apart(expected, found) < NEAR, engine


def test_batch_norm_and_its_statistics() -> None:
    def model(shape: Any, classes: int) -> nn.Module:
        norm = nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        return nn.Sequential(norm, nn.Linear(4 * 14 * 14, classes))

    def run(samples: int, **values: Any) -> Federation:
        prepared = fedcsd.experiments.experiment.prepare(
            {"data": "given from Python", "partition": "iid", "epochs": 5, "batch_size": 16, **values},
            method=FedAvg(),
            data=pictures(samples),
            model=model,
        )
        return trained(prepared, values.get("engine", "eager"))

    for samples in (300, 4 * 33):  # the second leaves one sample over
        expected = run(samples, clients=4)
        for engine in ("eager", "graphs", "auto"):
            found = run(samples, clients=4, device="cuda", engine=engine)
            assert apart(expected, found) < NEAR, engine
            assert found.backend.engine in ("eager", "graphs")


@pytest.mark.parametrize("engine", ["eager", "graphs", "stacked"])
def test_the_same_run_twice_has_the_same_bits(engine: str) -> None:
    one, other = (trained(experiment(FedAvg(), device="cuda", engine=engine)) for _ in range(2))
    assert torch.equal(one.server.weights.flat, other.server.weights.flat)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize(("model", "side"), [("resnet18", 16), ("alexnet", 64), ("alexnet", 256)])
def test_large_networks_have_the_same_bits_with_any_number_of_lanes(
    model: str, side: int, precision: str
) -> None:
    values = {"model": model, "lr": 0.01, "augment": "cifar", "device": "cuda", "precision": precision}
    few = {"clients": 3, "participation": 1.0, "epochs": 1}
    one, other = (
        trained(
            experiment(methods.load("fedcsd")(), pictures(150, side), workers=lanes, **values, **few),
            "graphs",
            rounds=2,
        )
        for lanes in (1, 0)
    )
    assert torch.equal(one.server.weights.flat, other.server.weights.flat)
    assert torch.equal(one.server.prototypes, other.server.prototypes)


def test_a_client_keeps_its_lane_and_no_lane_is_left_over() -> None:
    prepared = experiment(FedAvg(), device="cuda", clients=3, participation=1.0, epochs=10)
    lanes = trained(prepared, "graphs", rounds=5).backend.lanes.lanes
    size = prepared.settings.batch_size
    assert [lane.engine.sizes() for lane in lanes] == [
        {size, len(part) % size} - {0} for part in sorted(prepared.parts, key=len, reverse=True)
    ]


class Looking(FedAvg):
    """A method whose loss uses its own numbers."""

    def loss(self, batch: Batch) -> Tensor:
        loss = F.cross_entropy(batch.logits, batch.labels)
        return loss if math.isfinite(loss.item()) else loss * 0


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (Looking(), "cannot be recorded on the GPU and runs step by step"),
        (Enclosed(), "another function for every client"),
    ],
)
def test_what_is_not_recorded_once_is_told_and_right(method: Method, told: str) -> None:
    expected = trained(experiment(method), "eager")
    prepared = experiment(method, device="cuda", engine="graphs")
    federation = Federation(prepared, DeviceBackend(prepared.worker(), "graphs"))
    with pytest.warns(match=told):
        steps(federation)
    assert apart(expected, federation) < NEAR


def test_what_draws_runs_one_client_at_a_time_and_repeats() -> None:
    def model(shape: Any, classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, classes)
        )

    def run() -> Federation:
        values = {"data": "given from Python", "clients": 4, "device": "cuda", "batch_size": 16}
        prepared = fedcsd.experiments.experiment.prepare(
            values, method=FedAvg(), data=pictures(), model=model
        )
        return trained(prepared, "auto")

    one, other = run(), run()
    assert one.backend.lanes.random == {"train"}
    assert torch.equal(one.server.weights.flat, other.server.weights.flat)


def test_bfloat16_stays_near() -> None:
    for model in ("simple_cnn", "resnet18"):
        full = trained(experiment(FedAvg(), device="cuda", model=model, lr=0.01), "graphs")
        half = trained(
            experiment(FedAvg(), device="cuda", model=model, lr=0.01, precision="bf16", engine="graphs")
        )
        assert 0 < apart(full, half) < 0.2, model


def test_compiled_networks_stay_near() -> None:
    values = {"model": "resnet18", "lr": 0.01, "augment": "cifar", "device": "cuda", "engine": "graphs"}
    plain, compiled = (
        trained(experiment(methods.load("fedcsd")(), compile=compile, **values), rounds=1)
        for compile in (False, True)
    )
    assert apart(plain, compiled) < 0.05


def test_a_teacher_that_does_not_count_changes_no_bit() -> None:
    values = {"model": "resnet18", "lr": 0.01, "augment": "cifar", "device": "cuda", "engine": "graphs"}
    for more in ({}, {"precision": "bf16"}, {"precision": "bf16", "compile": True}):
        without, beside = (
            trained(experiment(method, **values, **more), rounds=2)
            for method in (FedAvg(), methods.load("fedcsd")(mu=0.0))
        )
        assert torch.equal(without.server.weights.flat, beside.server.weights.flat), more


def test_lanes_read_what_they_share_when_it_is_there() -> None:
    prepared = experiment(FedAvg(), device="cuda", track_drift=True)
    workspace, weights = prepared.worker().workspace, prepared.weights.to("cuda")
    other, slow, quick = workspace.another(), torch.cuda.Stream(), torch.cuda.Stream()
    meter = Meter(20)

    def metered(some: Workspace) -> Outputs:
        return some.remembered((-2, weights.token), lambda: meter.outputs(some, weights))

    for asked in (lambda s: s.probe(weights), lambda s: s.local_outputs(weights, 0), metered):
        for one in (workspace, other):
            asked(one)  # the networks are made
        workspace.cache.clear()
        with torch.cuda.stream(slow):
            torch.cuda._sleep(1_000_000_000)  # about half a second
            asked(workspace)
        with torch.cuda.stream(quick):
            found = asked(other).logits.clone()
        torch.cuda.synchronize()
        assert torch.equal(found, asked(workspace).logits)


def test_a_model_that_assigns_its_buffers_is_recorded_right() -> None:
    expected = trained(assigning(), "eager")
    for engine in ("graphs", "auto"):
        found = trained(assigning(device="cuda", engine=engine))
        assert apart(expected, found) < NEAR
        assert found.backend.engine == "graphs"


class Given(FedAvg):
    """A method that gives the loss another number from the CPU in each round and for each client."""

    def train(self, client: Client, weights: Any) -> Any:
        number = torch.tensor(client.round / 10 + client.number)
        return client.train(weights, self.loss, given={"number": number}, gradient=self.change)

    def change(self, parameters: Tensor, gradient: Tensor, given: Any) -> None:
        gradient.mul_(1 + given["number"])


class Noisy(FedAvg):
    """A server that draws on its device."""

    def round(self, server: Any, ask: Any) -> None:
        server.weights = weighted_mean(ask(self.train, weights=server.weights))
        server.drawn = torch.rand(3, device=server.weights.flat.device)


def test_numbers_from_the_cpu_are_not_recorded_for_good() -> None:
    expected = trained(experiment(Given(), lr=0.005), "eager")
    for engine in ("graphs", "stacked"):
        found = trained(experiment(Given(), lr=0.005, device="cuda", engine=engine))
        assert apart(expected, found) < NEAR, engine


def test_the_server_draws_the_same_with_every_engine_and_leaves_no_trace() -> None:
    torch.cuda.manual_seed(7)
    before, drawn = torch.cuda.get_rng_state(), []
    for engine in ENGINES:
        drawn.append(trained(experiment(Noisy(), device="cuda", engine=engine), rounds=2).server.drawn)
        assert torch.equal(before, torch.cuda.get_rng_state())
    assert all(torch.equal(drawn[0], other) for other in drawn)


class Counting(Method):
    """A method in which each client counts its trainings, in place."""

    def round(self, server: Any, ask: Any) -> None:
        server.weights = weighted_mean(ask(self.train, weights=server.weights))

    def train(self, client: Client, weights: Any) -> Any:
        client.state.setdefault("count", torch.zeros(3, device=weights.flat.device)).add_(1)
        return client.train(weights, self.loss)

    def loss(self, batch: Batch) -> Tensor:
        return batch.cross_entropy


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("room", [0.25, 0.0])
def test_states_stay_on_the_device_if_there_is_room(
    engine: str, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SERVER", room)
    federation = trained(experiment(Counting(), device="cuda", engine=engine, participation=1.0))
    assert len(federation.states) == 6
    for state in federation.states.values():
        assert state["count"].is_cuda == bool(room)
        assert state["count"].tolist() == [3, 3, 3]


def test_a_mistake_in_a_lane_is_told() -> None:
    with pytest.raises(MethodFailed, match="client 3 failed: KeyError"):
        trained(experiment(Wrong(), device="cuda", engine="graphs", participation=1.0))


@pytest.mark.parametrize("engine", ["graphs", "stacked"])
def test_a_resumed_run_goes_on_to_the_same_bits(engine: str, tmp_path: Path) -> None:
    values = {"data": "digits", "clients": 6, "epochs": 1, "device": "cuda", "method": "fedcsd"}
    values["engine"] = engine
    whole = fedcsd.run(**values, rounds=4, out=tmp_path / "whole")
    fedcsd.run(**values, rounds=2, out=tmp_path / "half")
    resumed = fedcsd.resume(tmp_path / "half", rounds=4)
    assert resumed.summary["engine"] == engine
    for name, tensor in whole.weights.items():
        assert torch.equal(tensor, resumed.weights[name])


def test_a_method_of_one_s_own() -> None:
    class Own(Method):
        def round(self, server: Any, ask: Any) -> None:
            replies = list(ask(self.train, weights=server.weights))
            server.weights = server.weights.like(torch.stack([r.weights.flat for r in replies]).mean(0))

        def train(self, client: Client, weights: Any) -> Any:
            return client.train(weights, self.loss, frozen={"start": weights})

        def loss(self, batch: Batch) -> Tensor:
            return batch.cross_entropy + (batch.features - batch.frozen["start"].features).square().mean(1)

    expected = trained(experiment(Own()), "eager")
    for engine in ENGINES:
        assert apart(expected, trained(experiment(Own(), device="cuda", engine=engine))) < NEAR
