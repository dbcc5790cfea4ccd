"""Local SGD on flat vectors."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedcsd.config import Settings
from fedcsd.models.network import Network

Gradient = Callable[[Tensor, Tensor], object]
"""Changes the flat gradient in place: called with (parameters, gradient) before each step."""


class Sgd:
    """SGD with momentum and weight decay as PyTorch defines it, on the flat vectors.

    `v ← ρv + (g + λw)`, `w ← w − ηv`; the momentum starts at zero for every client in every round.
    """

    def __init__(self, network: Network, settings: Settings):
        self.network, self.settings, self.taken = network, settings, 0
        self.momentum = torch.zeros_like(network.parameters) if settings.momentum else network.gradient

    def __call__(self, loss: Tensor, gradient: Gradient | None) -> None:
        network, settings = self.network, self.settings
        network.gradient.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        if gradient is not None:
            changed = gradient(network.parameters, network.gradient)
            if isinstance(changed, Tensor) and changed is not network.gradient:
                raise TypeError(
                    "gradient= must change the gradient in place, such as gradient.add_(…): it gave another tensor, which would be lost"
                )
        if settings.weight_decay:
            network.gradient.add_(network.parameters, alpha=settings.weight_decay)
        if settings.momentum:
            self.momentum.mul_(settings.momentum).add_(network.gradient)
        network.parameters.add_(self.momentum, alpha=-settings.lr)
        self.taken += 1


def effective_steps(steps: int, momentum: float) -> float:
    """How far `steps` steps with momentum ρ go, in steps without: `(τ − ρ(1 − ρ^τ)/(1 − ρ)) / (1 − ρ)`.

    A gradient taken i steps before the end moves the weights by `η(1 − ρ^i)/(1 − ρ)`; this is the sum.
    """
    rho = momentum
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
