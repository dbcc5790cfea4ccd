"""A method that keeps states of its clients, and runs of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fedcsd
from fedcsd.aggregation import weighted_mean
from fedcsd.config import option
from fedcsd.federation import states
from fedcsd.federation.states import file_name
from fedcsd.messages import header_of
from fedcsd.methods import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.weights import Values, Weights
from helpers.federations import blobs

SETTINGS: dict[str, Any] = {
    "clients": 8,
    "min_samples": 2,
    "participation": 0.5,
    "epochs": 1,
    "rounds": 6,
    "workers": 2,
}


@dataclass(frozen=True)
class Keeping(FedAvg):
    """A client is pulled to its last weights and kept apart from its last model, as in MOON."""

    fail_in: int = option(0, "the round in which the third client that is asked fails")

    def train(self, client: Client, weights: Weights) -> Values:
        previous = client.state.get("previous", weights)
        client.note("times", torch.tensor([float(client.state.get("times", 0))]))
        result = client.train(
            weights,
            self.loss,
            frozen={"previous": previous},
            gradient=lambda w, g: g.add_(w - previous.parameters, alpha=0.5),
        )
        client.state["previous"] = result["weights"]
        client.state["times"] = client.state.get("times", 0) + 1
        return result

    def round(self, server: Server, ask: Ask) -> None:
        def some() -> Any:
            for number, reply in enumerate(ask(self.train, weights=server.weights)):
                if self.fail_in == server.count and number == 2:
                    raise fedcsd.RunStopped("something went wrong")
                yield reply

        server.count = server.count + 1
        server.weights = weighted_mean(some())

    def start(self, server: Server) -> None:
        server.count = 0

    def loss(self, batch):
        apart = batch.features - batch.frozen["previous"].features
        return super().loss(batch) + 0.1 * apart.pow(2).mean()


def run(out: Path | None = None, *, method: Any = None, **settings: Any) -> fedcsd.Run:
    return fedcsd.run(method=method or Keeping(), data=blobs(), out=out, **{**SETTINGS, **settings})


def files(path: Path) -> set[str]:
    return {p.name for p in (path / "clients").iterdir()}


def named(path: Path) -> list[set[str]]:
    """The files that each checkpoint names, newest first."""
    checkpoints = sorted((path / "checkpoints").iterdir(), reverse=True)
    return [{file_name(*v) for v in states.versions(header_of(c)).items()} for c in checkpoints]
