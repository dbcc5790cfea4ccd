"""FedAvgM adds momentum to the server's updates.

Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019.
"""

from dataclasses import dataclass

import torch

from fedcsd.aggregation import weighted_mean
from fedcsd.config import option
from fedcsd.methods.base import Ask, Server
from fedcsd.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedAvgM(FedAvg):
    """Compute `v ← βv + (w_G − Σ p_k w_k)`, `w_G ← w_G − v`."""

    server_momentum: float = option(0.9, "momentum β of the server's updates", ge=0, lt=1)

    def start(self, server: Server) -> None:
        server.velocity = torch.zeros_like(server.weights.parameters)

    def round(self, server: Server, ask: Ask) -> None:
        average = weighted_mean(ask(self.train, weights=server.weights))
        carried = self.server_momentum * server.velocity
        server.velocity = carried + (server.weights.parameters - average.parameters)
        # w_G − v, computed from the average: with β = 0 it is FedAvg to the bit.
        server.weights = average.with_parameters(average.parameters - carried)
