"""FedAdam runs Adam on the server.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021.
"""

from dataclasses import dataclass

from torch import Tensor

from fedcsd.config import option
from fedcsd.methods._adaptive import Adaptive


@dataclass(frozen=True)
class FedAdam(Adaptive):
    """Divide the server's step by the root of `v ← β₂v + (1 − β₂)Δ²`."""

    beta2: float = option(0.99, "momentum of the squared updates", ge=0, lt=1)

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square
