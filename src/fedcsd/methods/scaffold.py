"""SCAFFOLD corrects every local step by the difference of the client's gradient from the federation's.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020
(option II of its Algorithm 1).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcsd.aggregation import Mean, weighted_mean
from fedcsd.messages import Reply
from fedcsd.methods.base import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.training.optimizer import effective_steps
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """Add `c − c_k` to the gradient; `c_k ← c_k − c + (w_G − w_k)/(a_k η)`, `c` the mean over all clients.

    `a_k` is the number of steps, or with local momentum the number of steps without momentum that go
    as far. This makes the variates gradients, whatever the momentum.
    """

    def start(self, server: Server) -> None:
        server.variate = torch.zeros_like(server.weights.parameters)

    def round(self, server: Server, ask: Ask) -> None:
        changes = Mean()
        replies = ask(self.train, weights=server.weights, variate=server.variate)
        self.average(server, _with_changes(replies, changes))
        server.variate = server.variate + changes.value * (changes.weight / server.clients)

    def average(self, server: Server, replies: Iterable[Reply]) -> None:
        server.weights = weighted_mean(replies)

    def train(self, client: Client, weights: Weights, variate: Tensor) -> Values:
        own = client.state.get("variate", torch.zeros_like(variate))
        given = self.given(client, weights, variate - own)
        trained = client.train(weights, self.loss, gradient=self.correct, given=given)
        way = client.settings.lr * effective_steps(trained["steps"], client.settings.momentum)
        change = (weights.parameters - trained["weights"].parameters) / way - variate
        client.state["variate"] = own + change
        return {"weights": trained["weights"], "change": change}

    def given(self, client: Client, weights: Weights, correction: Tensor) -> dict[str, Tensor]:
        """Return the tensors that `correct` takes."""
        return {"correction": correction}

    def correct(self, parameters: Tensor, gradient: Tensor, given: Mapping[str, Tensor]) -> None:
        gradient.add_(given["correction"])


def _with_changes(replies: Iterable[Reply], changes: Mean) -> Iterator[Reply]:
    """Yield the replies, and fold their changes of variates in."""
    for reply in replies:
        changes.add(reply["change"])
        yield reply
