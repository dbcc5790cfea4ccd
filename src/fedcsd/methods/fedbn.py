"""FedBN keeps BatchNorm at the client and averages everything else.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
"""

from dataclasses import dataclass

from torch import Tensor

from fedcsd.errors import note
from fedcsd.methods._partly_local import PartlyLocal
from fedcsd.methods.base import Server
from fedcsd.weights import Layout


@dataclass(frozen=True)
class FedBN(PartlyLocal):
    """Keep scales, shifts and running statistics of BatchNorm at the client; each has a model of its own."""

    def start(self, server: Server) -> None:
        if not server.weights.layout.norms:
            note("this model has no BatchNorm: fedbn is the same as fedavg here")

    def local(self, layout: Layout) -> Tensor:
        return layout.mask(layout.norms)
