"""FedGKD distils from the mean of the last few global models.

Yao et al., "FedGKD: Towards Heterogeneous Federated Learning via Global Knowledge Distillation",
IEEE Transactions on Computers 2023.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcsd.aggregation import weighted_mean
from fedcsd.config import option
from fedcsd.methods.base import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.objectives import kl_divergence
from fedcsd.training import Batch, Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class FedGKD(FedAvg):
    """Add `μ · T² · KL(teacher ‖ student)`, the teacher being the mean of the last M global models."""

    mu: float = option(0.01, "weight of the distillation term", ge=0)
    tau: float = option(1.0, "temperature T of the soft labels", gt=0)
    window: int = option(5, "how many global models M the teacher is the mean of", ge=1)

    def start(self, server: Server) -> None:
        server.recent = server.weights.flat[None]

    def round(self, server: Server, ask: Ask) -> None:
        # With a window of one the teacher is the global model, the same weights, which are sent once.
        teacher = server.weights
        if len(server.recent) > 1:
            teacher = teacher.like(server.recent.mean(0, dtype=torch.float64).to(server.recent.dtype))
        server.weights = weighted_mean(ask(self.train, weights=server.weights, teacher=teacher))
        server.recent = torch.cat([server.recent, server.weights.flat[None]])[-self.window :]

    def train(self, client: Client, weights: Weights, teacher: Weights) -> Values:
        return client.train(weights, self.loss, frozen={"teacher": teacher})

    def loss(self, batch: Batch) -> Tensor:
        distance = self.tau**2 * kl_divergence(batch.frozen["teacher"].logits, batch.logits, self.tau)
        return batch.cross_entropy + self.mu * distance
