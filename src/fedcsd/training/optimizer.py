"""Take steps of SGD on flat vectors, with `--lr`, `--momentum` and `--weight-decay`."""

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from fedcsd.config import Settings
from fedcsd.kernels.vectors import sgd_step

Gradient = Callable[..., object]
"""Changes the flat gradient in place before each step.

It is called with (parameters, gradient), or with (parameters, gradient, given) if it takes three
arguments. A function that finds its tensors in `given`, not in a closure, is the same for every client,
so that a GPU records the step once."""


def with_given(change: Gradient) -> Gradient:
    """Return a change of the gradient as a function of three arguments."""
    if len(inspect.signature(change).parameters) > 2:
        return change
    return lambda parameters, gradient, given: change(parameters, gradient)


class Sgd:
    """SGD with momentum and weight decay, as PyTorch defines it.

    `v ← ρv + (g + λw)`, `w ← w − ηv`; `start` sets the momentum to zero for each client in each round.
    """

    def __init__(self, parameters: Tensor, gradient: Tensor, settings: Settings):
        self.parameters, self.gradient, self.settings = parameters, gradient, settings
        self.momentum = torch.zeros_like(parameters) if settings.momentum else gradient
        velocity = self.momentum if settings.momentum else None
        self._compiled = sgd_step(
            parameters, gradient, velocity, settings.lr, settings.momentum, settings.weight_decay
        )

    def start(self) -> None:
        if self.settings.momentum:
            self.momentum.zero_()

    def step(self, change: Gradient | None, given: Mapping[str, Tensor]) -> None:
        """Change the gradient by `change`, then take one step."""
        settings = self.settings
        if change is not None:
            changed = change(self.parameters, self.gradient, given)
            if isinstance(changed, Tensor) and changed is not self.gradient:
                raise TypeError(
                    "gradient= must change the gradient in place, such as gradient.add_(…): "
                    "it returned another tensor, which would be lost"
                )
        if self._compiled is not None:
            self._compiled()
            return
        if self.parameters.is_cuda and settings.momentum:
            self._fused()
            return
        if settings.weight_decay:
            self.gradient.add_(self.parameters, alpha=settings.weight_decay)
        if settings.momentum:
            self.momentum.mul_(settings.momentum).add_(self.gradient)
        self.parameters.add_(self.momentum, alpha=-settings.lr)

    def _fused(self) -> None:
        """Take the step in one pass over the vectors."""
        sgd(
            [self.parameters],
            [self.gradient],
            [self.momentum],
            fused=True,
            weight_decay=self.settings.weight_decay,
            momentum=self.settings.momentum,
            lr=self.settings.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def effective_steps(steps: int, momentum: float) -> float:
    """Convert τ steps with momentum ρ to steps without it: `(τ − ρ(1 − ρ^τ)/(1 − ρ)) / (1 − ρ)`.

    A gradient taken i steps before the end moves the weights by `η(1 − ρ^i)/(1 − ρ)`; this is the sum.
    """
    rho = momentum
    return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
