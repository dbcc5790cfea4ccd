"""FedPer keeps the classifier at the client and averages the layers below.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019.
"""

from dataclasses import dataclass

from torch import Tensor

from fedcsd.methods._partly_local import PartlyLocal
from fedcsd.weights import Layout


@dataclass(frozen=True)
class FedPer(PartlyLocal):
    """Keep the last linear layer at the client; each has a model of its own."""

    def local(self, layout: Layout) -> Tensor:
        return layout.mask(layout.classifier)
