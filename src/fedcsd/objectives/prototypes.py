"""Compute class prototypes: the mean output of a network for each class."""

from collections.abc import Iterable

import torch
from torch import Tensor


def class_prototypes(logits: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean vector and the size of each class: [N, D], [N] -> [classes, D], [classes].

    A class without samples has a row of zeros and count 0.
    """
    if logits.is_cuda:  # index_add_ would add up in no fixed order there, and bincount would wait
        of_class = labels == torch.arange(classes, device=labels.device)[:, None]
        sums, counts = of_class.double() @ logits.double(), of_class.sum(1)
    else:
        sums = torch.zeros(classes, logits.shape[1], dtype=torch.float64)
        sums.index_add_(0, labels, logits.double())
        counts = torch.bincount(labels, minlength=classes)
    return (sums / counts.clamp_min(1)[:, None]).to(logits.dtype), counts


class HolderMean:
    """Average the prototypes of each class over the clients that hold it, one client after another.

    A class that nobody holds keeps its row of `last` [C, D].
    """

    def __init__(self, last: Tensor):
        self.last = last
        self.sums = torch.zeros_like(last, dtype=torch.float64)
        self.holders = torch.zeros(last.shape[0], dtype=torch.int64, device=last.device)

    def add(self, prototypes: Tensor, held: Tensor) -> None:
        """Add a client's prototypes [C, D]; `held` [C] is true for the classes it holds."""
        self.sums += prototypes * held.bool()[:, None]
        self.holders += held.bool()

    @property
    def held(self) -> Tensor:
        """Return [C], true for the classes that somebody holds."""
        return self.holders > 0

    @property
    def value(self) -> Tensor:
        """Return the global prototypes [C, D]."""
        mean = (self.sums / self.holders.clamp_min(1)[:, None]).to(self.last.dtype)
        return torch.where(self.held[:, None], mean, self.last)


def average_over_holders(local: Iterable[tuple[Tensor, Tensor]], last: Tensor) -> Tensor:
    """Return the `HolderMean` of the clients' (prototypes [C, D], held [C])."""
    mean = HolderMean(last)
    for prototypes, held in local:
        mean.add(prototypes, held)
    return mean.value
