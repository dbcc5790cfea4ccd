"""Class prototypes: the mean of what a network says of a class."""

from collections.abc import Iterable

import torch
from torch import Tensor


def class_prototypes(logits: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Mean vector of each class and how many samples it has: [N, D], [N] -> [classes, D], [classes].

    A class without samples has a row of zeros and count 0.
    """
    sums = torch.zeros(classes, logits.shape[1], dtype=torch.float64, device=logits.device)
    sums.index_add_(0, labels, logits.double())
    counts = torch.bincount(labels, minlength=classes)
    return (sums / counts.clamp_min(1)[:, None]).to(logits.dtype), counts


def average_over_holders(local: Iterable[tuple[Tensor, Tensor]], last: Tensor) -> Tensor:
    """Global prototypes: for each class the mean over the clients that hold it.

    `local` gives (prototypes [C, D], held [C]) client by client, `last` [C, D] is what a class keeps
    that nobody holds -> [C, D].
    """
    sums = torch.zeros_like(last, dtype=torch.float64)
    holders = torch.zeros(last.shape[0], dtype=torch.int64, device=last.device)
    for prototypes, held in local:
        sums += prototypes * held.bool()[:, None]
        holders += held.bool()
    mean = (sums / holders.clamp_min(1)[:, None]).to(last.dtype)
    return torch.where(holders[:, None] > 0, mean, last)
