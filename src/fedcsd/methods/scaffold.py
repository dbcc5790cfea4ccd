"""SCAFFOLD: every local step is corrected by how the client's gradient differs from the federation's.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020
(option II of its Algorithm 1).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcsd.methods.base import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.sgd import Gradient, effective_steps
from fedcsd.training import Client
from fedcsd.weights import Mean, Values, Weights


@dataclass(frozen=True)
class Scaffold(FedAvg):
    """Adds `c − c_k` to the gradient; `c_k ← c_k − c + (w_G − w_k)/(τ_k η)`, `c` the mean over all clients.

    With local momentum, τ_k is the number of steps without momentum that go as far: only so are the
    variates gradients, whatever the momentum.
    """

    def start(self, server: Server) -> None:
        server.variate = torch.zeros_like(server.weights.parameters)

    def round(self, server: Server, ask: Ask) -> None:
        weights, change = Mean(), Mean()
        for reply in ask(self.train, weights=server.weights, variate=server.variate):
            weights.add(reply.weights.flat, reply.samples)
            change.add(reply["change"])
        server.weights = server.weights.like(weights.value)
        server.variate = server.variate + change.value * (change.weight / server.clients)

    def train(self, client: Client, weights: Weights, variate: Tensor) -> Values:
        own = client.state.get("variate", torch.zeros_like(variate))
        trained = client.train(weights, self.loss, gradient=self.gradient(client, weights, variate - own))
        way = client.settings.lr * effective_steps(trained["steps"], client.settings.momentum)
        change = (weights.parameters - trained["weights"].parameters) / way - variate
        client.state["variate"] = own + change
        return {"weights": trained["weights"], "change": change}

    def gradient(self, client: Client, weights: Weights, correction: Tensor) -> Gradient:
        return lambda w, g: g.add_(correction)
