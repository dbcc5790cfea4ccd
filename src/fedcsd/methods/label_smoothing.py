"""Label smoothing mixes labels with the uniform distribution; it is a control for distillation.

Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", CVPR 2016.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from fedcsd.config import option
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Batch


@dataclass(frozen=True)
class LabelSmoothing(FedAvg):
    """Mix the labels with the uniform distribution."""

    epsilon: float = option(0.1, "share ε of the uniform distribution in the label", ge=0, le=1)

    def loss(self, batch: Batch) -> Tensor:
        if not self.epsilon:
            return batch.cross_entropy
        return F.cross_entropy(batch.logits, batch.labels, label_smoothing=self.epsilon, reduction="none")
