"""Logit distillation has the round's global model teach the clients' logits.

Hinton et al., "Distilling the Knowledge in a Neural Network", 2015; the logit side of the comparison
in Fig. 1 of the FedCSD paper, and FedCSD with all its parts off (its Base).
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from fedcsd.config import option
from fedcsd.methods.fedavg import FedAvg
from fedcsd.objectives import soft_cross_entropy
from fedcsd.training import Batch, Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class LogitDistillation(FedAvg):
    """Add `μ · τ² · −Σ q_G log q`, the cross-entropy with the global model's soft labels."""

    mu: float = option(0.001, "weight of the distillation term", ge=0)
    tau: float = option(10.0, "temperature of the soft labels", gt=0)

    def train(self, client: Client, weights: Weights) -> Values:
        return client.train(weights, self.loss, frozen={"global": weights})

    def loss(self, batch: Batch) -> Tensor:
        target = F.softmax(batch.frozen["global"].logits / self.tau, dim=1)
        distance = self.tau**2 * soft_cross_entropy(target, batch.logits, self.tau)
        return batch.cross_entropy + self.mu * distance
