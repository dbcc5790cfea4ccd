"""The server averages tensors and models here: weighted means, and moving averages of models."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedcsd.errors import Diverged
from fedcsd.messages import Reply
from fedcsd.weights import Weights

PIECE = 1 << 16  # numbers at a time on a CPU: in float64 they fit into its cache


class Mean:
    """A weighted mean of tensors that are added one by one.

    The sum is kept in float64, so that equal values average to exactly those.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.weight = 0.0

    def add(self, value: Tensor, weight: float = 1) -> None:
        if self.total is None:
            self.total, self.dtype = value.new_zeros(value.shape, dtype=torch.float64), value.dtype
        size = PIECE if value.is_cpu else max(1, value.numel())
        totals, values = torch.split(self.total.view(-1), size), torch.split(value.reshape(-1), size)
        for total, piece in zip(totals, values, strict=True):
            total.add_(piece, alpha=weight)
        self.weight += weight

    @property
    def value(self) -> Tensor:
        if self.total is None:
            raise Diverged("no client of this round returned usable weights: lower the learning rate (--lr)")
        return (self.total / self.weight).to(self.dtype)


def weighted_mean(replies: Iterable[Reply]) -> Weights:
    """Compute `Σ p_k w_k` with `p_k = n_k / Σ n_j` over these replies, each added as it arrives."""
    mean, last = Mean(), None
    for reply in replies:
        last = reply.weights
        mean.add(last.flat, reply.samples)
    flat = mean.value
    assert last is not None
    return last.like(flat)


def lerp(first: Weights, second: Weights, t: float) -> Weights:
    """Compute `(1 − t)·first + t·second`, the moving average of models."""
    flat = torch.lerp(first.flat, second.flat, t)
    return Weights(first.layout, flat, recipe=(first.token, second.token, t))
