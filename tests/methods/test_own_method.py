"""A new method is one small class: here one with server state, client state and a gradient of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcsd
from fedcsd.aggregation import weighted_mean
from fedcsd.config import option
from fedcsd.errors import Diverged, MethodFailed, UserError
from fedcsd.federation.rounds import Federation
from fedcsd.methods import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.weights import Values, Weights
from helpers.federations import Here, blobs, small
from helpers.runs import run_once


@dataclass(frozen=True)
class Sticky(FedAvg):
    """Each client is pulled towards its own last weights; the server counts how often it was asked."""

    pull: float = option(0.1, "strength of the pull", ge=0)

    def start(self, server: Server) -> None:
        server.answers = 0

    def round(self, server: Server, ask: Ask) -> None:
        replies = list(ask(self.train, weights=server.weights))
        server.answers = server.answers + len(replies)
        server.weights = weighted_mean(replies)

    def train(self, client: Client, weights: Weights) -> Values:
        own = client.state.get("own", weights.parameters)
        result = client.train(weights, self.loss, gradient=lambda w, g: g.add_(w - own, alpha=self.pull))
        client.state["own"] = result["weights"].parameters.clone()
        client.state["rounds"] = client.state.get("rounds", 0) + 1
        return result


def test_state_lives_from_round_to_round() -> None:
    experiment = small(Sticky(pull=1.0), participation=0.5)
    federation = Federation(experiment, Here(experiment))
    for _ in range(4):
        federation.step()
    assert federation.server.answers == 8
    assert sum(state["rounds"] for state in federation.states.values()) == 8
    assert federation.states[0]["own"].shape == experiment.weights.parameters.shape


def test_without_its_pull_it_is_fedavg() -> None:
    ours = fedcsd.run(method=Sticky(pull=0.0), data=blobs(), clients=4, min_samples=2, rounds=3, workers=2)
    plain = fedcsd.run(method="fedavg", data=blobs(), clients=4, min_samples=2, rounds=3, workers=2)
    assert all(torch.equal(ours.weights[name], plain.weights[name]) for name in plain.weights)


def test_it_runs_on_lanes_and_resumes_with_its_state(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 4, "min_samples": 2, "participation": 0.5}
    whole = fedcsd.run(method=Sticky(pull=1.0), data=blobs(), rounds=5, out=tmp_path / "whole", **settings)
    fedcsd.run(method=Sticky(pull=1.0), data=blobs(), rounds=2, out=tmp_path / "half", **settings)
    with pytest.raises(UserError, match="given from Python"):
        fedcsd.resume(tmp_path / "half", rounds=5)
    half = fedcsd.resume(tmp_path / "half", method=Sticky(pull=1.0), data=blobs(), rounds=5)
    assert (tmp_path / "half" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    assert half.history[-1]["test_accuracy"] == whole.history[-1]["test_accuracy"]


def test_its_options_are_checked_like_the_built_in_ones() -> None:
    with pytest.raises(UserError, match=r"method\.pull must be at least 0, not -1"):
        fedcsd.run(method=Sticky(pull=-1.0), data=blobs(), clients=4)


def test_what_cannot_be_saved_cannot_be_kept() -> None:
    server = Server(small().weights, 3)
    with pytest.raises(TypeError, match=r"server\.names must be"):
        server.names = ["a"]
    with pytest.raises(AttributeError, match=r"no 'teacher'.*start"):
        _ = server.teacher


def test_a_bug_in_a_method_says_where(tmp_path: Path) -> None:
    class Broken(FedAvg):
        def train(self, client: Client, weights: Weights) -> Values:
            return {"weights": weights.named()["nothing"]}

    with pytest.raises(
        fedcsd.RunStopped, match=r"client \d failed: KeyError: 'nothing' \(test_own_method.py, line \d+\)"
    ):
        fedcsd.run(method=Broken(), data=blobs(), clients=4, min_samples=2, rounds=1)


@dataclass(frozen=True)
class Contrast(FedAvg):
    """Two frozen networks at once, one of them the client's own last model, as MOON has."""

    def train(self, client: Client, weights: Weights) -> Values:
        previous = client.state.get("previous", weights)
        result = client.train(weights, self.loss, frozen={"global": weights, "previous": previous})
        client.state["previous"] = result["weights"]
        return result

    def loss(self, batch):
        apart = batch.features - batch.frozen["previous"].features
        near = batch.features - batch.frozen["global"].features
        return super().loss(batch) + 0.1 * near.pow(2).mean() - 0.01 * apart.pow(2).mean()


@pytest.mark.slow
def test_weights_made_at_clients_are_told_apart_on_any_number_of_workers(tmp_path: Path) -> None:
    settings = {"data": blobs(), "clients": 6, "min_samples": 2, "epochs": 1, "method": Contrast()}
    runs = [fedcsd.run(rounds=4, workers=w, **settings) for w in (1, 2, 6)]
    for other in runs[1:]:
        assert all(torch.equal(runs[0].weights[n], other.weights[n]) for n in other.weights)
    fedcsd.run(rounds=2, workers=2, out=tmp_path / "half", **settings)
    resumed = fedcsd.resume(tmp_path / "half", method=Contrast(), data=blobs(), rounds=4)
    assert all(torch.equal(runs[0].weights[n], resumed.weights[n]) for n in resumed.weights)


def test_a_client_can_forget() -> None:
    class Forgetful(FedAvg):
        def train(self, client: Client, weights: Weights) -> Values:
            client.note("remembers", torch.tensor([float("x" in client.state)]))
            if client.state.pop("x", None) is None:
                client.state["x"] = 1.0
            return client.train(weights, self.loss)

    history = run_once(Forgetful(), rounds=4).history
    assert [r["remembers"] for r in history] == [0, 1, 0, 1]


def test_random_numbers_of_a_method_are_reproducible() -> None:
    class Noisy(FedAvg):
        def round(self, server: Server, ask: Ask) -> None:
            super().round(server, ask)
            server.weights = server.weights.like(
                server.weights.flat + 0.01 * torch.randn_like(server.weights.flat)
            )

        def train(self, client: Client, weights: Weights) -> Values:
            shaken = weights.like(weights.flat + 0.01 * torch.randn_like(weights.flat))
            return client.train(shaken, self.loss)

    runs = [run_once(Noisy(), workers=w) for w in (1, 2, 2)]
    assert all(torch.equal(runs[0].weights[n], r.weights[n]) for r in runs for n in r.weights)
    assert not torch.equal(runs[0].weights["hidden1.weight"], run_once(FedAvg()).weights["hidden1.weight"])


def test_two_trainings_of_a_client_in_a_round_see_different_batches() -> None:
    experiment = small(FedAvg())
    client = Client(experiment.worker().workspace, 0, 0)
    first, second = (client.train(experiment.weights, FedAvg().loss)["weights"].flat for _ in range(2))
    assert not torch.equal(first, second)
    assert client.notes["train_loss"][1] == 2 * 2 * client.samples


class Lost(FedAvg):
    """A method whose server makes a model that is not finite in its second round."""

    def round(self, server: Server, ask: Ask) -> None:
        flat = weighted_mean(ask(self.train, weights=server.weights)).flat
        server.weights = server.weights.like(flat / server.values.get("rest", 1))
        server.rest = 0


def test_a_model_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    told = r"round 2, the global model is no longer finite: lower .*; round 1 is saved; go on with"
    with pytest.raises(Diverged, match=told):
        run_once(Lost(), rounds=3, out=tmp_path / "r")
    mended = type("Lost", (FedAvg,), {})()
    run = fedcsd.resume(tmp_path / "r", method=mended, data=blobs())
    assert run.summary["rounds"] == 3
    with pytest.raises(Diverged, match="the global model is no longer finite"):
        run_once(Lost(), on_divergence="skip")


def test_views_and_numpy_numbers_may_be_returned() -> None:
    class Views(FedAvg):
        def train(self, client: Client, weights: Weights) -> Values:
            result = client.train(weights, self.loss)
            flat = result["weights"]
            client.state["a"], client.state["b"] = flat.parameters[:3], flat.parameters[3:6]
            return {**result, "part": flat.parameters, "n": np.float64(2.5)}

    run_once(Views())


def test_the_client_s_traceback_is_kept() -> None:
    class Broken(FedAvg):
        def train(self, client: Client, weights: Weights) -> Values:
            return {"weights": client.labels @ torch.ones(3, 3)}

    with pytest.raises(MethodFailed, match=r"test_own_method\.py, line") as caught:
        run_once(Broken())
    assert any("client.labels @ torch.ones" in note for note in caught.value.__notes__)


def test_a_method_can_be_given_as_a_class_and_nothing_else() -> None:
    assert run_once(FedAvg).settings["method"] == {"name": "fedavg"}
    for wrong in (None, 3, dict):
        with pytest.raises(UserError, match="method must be"):
            run_once(wrong)


@pytest.mark.slow
def test_own_methods_models_and_data_can_be_compared() -> None:
    result = fedcsd.compare(
        {"plain": "fedavg", "mine": Sticky(pull=0.5), "csd": {"name": "fedcsd", "mu": 0.1}},
        seeds=[0, 1],
        data=blobs(),
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 3)),
        clients=4,
        min_samples=2,
        rounds=1,
    )
    assert [row.label for row in result.rows] == ["plain", "mine", "csd"]
    assert result.runs["csd"][0].settings["method"]["mu"] == 0.1


def test_a_model_that_assigns_its_buffers_is_averaged_all_the_same() -> None:
    class Running(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.head = torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return self.head(x - self.mean)

    runs = [run_once(FedAvg(), model=Running, workers=w) for w in (1, 2, 4)]
    assert all(torch.equal(runs[0].weights[n], r.weights[n]) for r in runs for n in r.weights)
    assert runs[0].weights["mean"].abs().sum() > 0


class Unsaved(torch.nn.Module):
    """A model that keeps a mean that is not saved, and counts batches in a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.head = torch.nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            self.count = self.count + 1
        return self.head((x - self.mean) * (1 + 1 / (1 + self.count)))


def test_what_a_model_does_not_save_is_as_new_for_every_client() -> None:
    runs = [run_once(FedAvg(), model=Unsaved, workers=w) for w in (1, 2, 4)]
    assert all(torch.equal(runs[0].weights[n], r.weights[n]) for r in runs for n in r.weights)


def test_a_model_may_freeze_its_batch_norm() -> None:
    class Frozen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(x))

        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            self.norm.eval()
            return self

    weights = run_once(FedAvg(), model=Frozen).weights
    assert not weights["norm.running_mean"].any()
    assert (weights["norm.running_var"] == 1).all()


def test_a_factory_must_make_new_models() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 3))
    with pytest.raises(UserError, match="the same model twice"):
        run_once(FedAvg(), model=lambda: model)
