"""FedDyn: a dynamic regulariser under which local optima and the global one agree.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcsd.config import option
from fedcsd.methods.base import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.weights import Mean, Values, Weights


@dataclass(frozen=True)
class FedDyn(FedAvg):
    """Adds `−⟨λ_k, w⟩ + (α/2)‖w − w_G‖²`; the server takes the plain mean of the clients and subtracts `h/α`."""

    alpha: float = option(0.01, "strength of the regulariser", gt=0)

    def start(self, server: Server) -> None:
        server.drift = torch.zeros_like(server.weights.parameters)  # h/α

    def round(self, server: Server, ask: Ask) -> None:
        start = server.weights
        plain, mean = Mean(), Mean()
        for reply in ask(self.train, weights=start):
            plain.add(reply.weights.flat, reply.samples)
            mean.add(reply.weights.parameters)
        # h ← h − (α/N) Σ (w_k − w_G), over the cohort
        server.drift = server.drift - (mean.weight / server.clients) * (mean.value - start.parameters)
        average = start.like(plain.value)  # for BatchNorm's statistics
        server.weights = average.with_parameters(mean.value - server.drift)

    def train(self, client: Client, weights: Weights) -> Values:
        start = weights.parameters
        own: Tensor = client.state.get("multiplier", torch.zeros_like(start))  # λ_k
        trained = client.train(
            weights, self.loss, gradient=lambda w, g: g.sub_(own).add_(w - start, alpha=self.alpha)
        )
        client.state["multiplier"] = own - self.alpha * (trained["weights"].parameters - start)
        return trained
