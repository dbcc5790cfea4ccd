"""A new method is one small class: here one with server state, client state and a gradient of its own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import blobs, small
from test_training import Here

import fedcsd
from fedcsd.config import option
from fedcsd.errors import UserError
from fedcsd.federation import Federation
from fedcsd.methods import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.weights import Values, Weights, weighted_mean


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
