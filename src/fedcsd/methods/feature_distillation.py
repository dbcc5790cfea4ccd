"""Feature distillation has the round's global model teach the clients' features.

Romero et al., "FitNets: Hints for Thin Deep Nets", ICLR 2015; the feature side of the comparison in
Fig. 1 of the FedCSD paper.
"""

from dataclasses import dataclass

from torch import Tensor

from fedcsd.config import option
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Batch, Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class FeatureDistillation(FedAvg):
    """Add `μ · MSE(h, h_G)`, the distance of features from the global model's, to the local loss."""

    mu: float = option(0.01, "weight of the distillation term", ge=0)

    def train(self, client: Client, weights: Weights) -> Values:
        return client.train(weights, self.loss, frozen={"global": weights})

    def loss(self, batch: Batch) -> Tensor:
        distance = (batch.features - batch.frozen["global"].features).pow(2).mean(1)
        return batch.cross_entropy + self.mu * distance
