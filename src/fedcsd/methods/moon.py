"""MOON draws features to the global model's and away from those of the client's own last model.

Li et al., "Model-Contrastive Federated Learning", CVPR 2021.
"""

from dataclasses import dataclass

from torch import Tensor

from fedcsd.config import option
from fedcsd.methods.fedavg import FedAvg
from fedcsd.objectives import model_contrastive
from fedcsd.training import Batch, Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class Moon(FedAvg):
    """Add a contrast of features with those of the global and the previous local model; no projection head."""

    mu: float = option(1.0, "weight of the contrastive term", ge=0)
    tau: float = option(0.5, "temperature of the contrast", gt=0)

    def train(self, client: Client, weights: Weights) -> Values:
        previous = client.state.get("previous")  # None in a client's first round
        frozen = {} if previous is None else {"global": weights, "previous": previous}
        trained = client.train(weights, self.loss, frozen=frozen)
        client.state["previous"] = trained["weights"]
        return trained

    def loss(self, batch: Batch) -> Tensor:
        loss = batch.cross_entropy
        if not batch.frozen:
            return loss
        near, far = (batch.frozen[name].features for name in ("global", "previous"))
        return loss + self.mu * model_contrastive(batch.features, near, far, self.tau)
