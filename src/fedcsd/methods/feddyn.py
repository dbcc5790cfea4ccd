"""FedDyn adds a dynamic regulariser under which local optima and the global one agree.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcsd.config import option
from fedcsd.methods._drift import average_with_drift
from fedcsd.methods.base import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class FedDyn(FedAvg):
    """Add `−⟨λ_k, w⟩ + (α/2)‖w − w_G‖²`; the server takes the plain mean of the clients and subtracts `h/α`."""

    alpha: float = option(0.01, "strength of the regulariser", gt=0)

    def start(self, server: Server) -> None:
        server.drift = torch.zeros_like(server.weights.parameters)  # −h/α

    def round(self, server: Server, ask: Ask) -> None:
        average_with_drift(server, ask(self.train, weights=server.weights))

    def train(self, client: Client, weights: Weights) -> Values:
        start = weights.parameters
        own: Tensor = client.state.get("multiplier", torch.zeros_like(start))  # λ_k
        trained = client.train(
            weights, self.loss, gradient=self.pull, given={"start": start, "multiplier": own}
        )
        client.state["multiplier"] = own - self.alpha * (trained["weights"].parameters - start)
        return trained

    def pull(self, parameters: Tensor, gradient: Tensor, given: Mapping[str, Tensor]) -> None:
        gradient.sub_(given["multiplier"]).add_(parameters - given["start"], alpha=self.alpha)
