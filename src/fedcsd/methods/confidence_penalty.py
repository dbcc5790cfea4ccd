"""The confidence penalty adds a cost to sure predictions; it is a control for distillation.

Pereyra et al., "Regularizing Neural Networks by Penalizing Confident Output Distributions", 2017.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from fedcsd.config import option
from fedcsd.methods.fedavg import FedAvg
from fedcsd.objectives import entropy
from fedcsd.training import Batch


@dataclass(frozen=True)
class ConfidencePenalty(FedAvg):
    """Subtract the entropy of the predictions from the local loss: `CE − μ · H(p)`."""

    mu: float = option(0.1, "weight of the entropy of the predictions", ge=0)

    def loss(self, batch: Batch) -> Tensor:
        uncertainty = entropy(F.softmax(batch.logits, dim=1))
        return batch.cross_entropy - self.mu * uncertainty
