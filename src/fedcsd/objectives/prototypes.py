"""Class prototypes: the mean of what a network says of a class."""

from collections.abc import Iterable

import torch
from torch import Tensor


def class_prototypes(logits: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mean vector of each class and how many samples it has: [N, D], [N] -> [classes, D], [classes].

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
    """Global prototypes: for each class the mean over the clients that hold it, folded in one by one.

    `last` [C, D] is what a class keeps that nobody holds.
    """

    def __init__(self, last: Tensor):
        self.last = last
        self.sums = torch.zeros_like(last, dtype=torch.float64)
        self.holders = torch.zeros(last.shape[0], dtype=torch.int64, device=last.device)

    def add(self, prototypes: Tensor, held: Tensor) -> None:
        """A client's prototypes [C, D] and which classes it holds [C]."""
        self.sums += prototypes * held.bool()[:, None]
        self.holders += held.bool()

    @property
    def held(self) -> Tensor:
        """Which classes somebody holds [C]."""
        return self.holders > 0

    @property
    def value(self) -> Tensor:
        mean = (self.sums / self.holders.clamp_min(1)[:, None]).to(self.last.dtype)
        return torch.where(self.held[:, None], mean, self.last)


def average_over_holders(local: Iterable[tuple[Tensor, Tensor]], last: Tensor) -> Tensor:
    """The `HolderMean` of (prototypes [C, D], held [C]) client by client -> [C, D]."""
    mean = HolderMean(last)
    for prototypes, held in local:
        mean.add(prototypes, held)
    return mean.value
