"""FedAdagrad runs Adagrad on the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021.
"""

from dataclasses import dataclass

from torch import Tensor

from fedcsd.config import option
from fedcsd.methods._adaptive import Adaptive


@dataclass(frozen=True)
class FedAdagrad(Adaptive):
    """Divide the server's step by the root of `v ← v + Δ²`."""

    server_lr: float = option(0.1, "learning rate η of the server", gt=0)
    beta1: float = option(0.0, "momentum of the server's updates", ge=0, lt=1)

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square
