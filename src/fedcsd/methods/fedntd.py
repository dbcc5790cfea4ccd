"""FedNTD distils the global model's logits of the classes that are not true.

Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022.
"""

from dataclasses import dataclass

from torch import Tensor

from fedcsd.config import option
from fedcsd.methods.fedavg import FedAvg
from fedcsd.objectives import kl_divergence, not_true
from fedcsd.training import Batch, Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class FedNTD(FedAvg):
    """Add `β · τ² · KL(global ‖ local)` over the logits of the C − 1 classes that are not the label's."""

    mu: float = option(1.0, "weight β of the distillation term", ge=0)
    tau: float = option(1.0, "temperature of the soft labels", gt=0)

    def train(self, client: Client, weights: Weights) -> Values:
        return client.train(weights, self.loss, frozen={"global": weights})

    def loss(self, batch: Batch) -> Tensor:
        teacher, student = (not_true(z, batch.labels) for z in (batch.frozen["global"].logits, batch.logits))
        distance = self.tau**2 * kl_divergence(teacher, student, self.tau)
        return batch.cross_entropy + self.mu * distance
