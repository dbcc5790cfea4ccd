"""A batch as a loss function sees it, and the check of what the loss returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from torch import Tensor

from fedcsd.kernels.vectors import cross_entropy
from fedcsd.measurements import check_own_measurement
from fedcsd.models.network import Outputs


@dataclass(frozen=True)
class Batch:
    """One batch of training samples; a loss is a pure function of it."""

    logits: Tensor
    """of the model in training [B, C]"""
    features: Tensor
    """its penultimate features [B, D]"""
    labels: Tensor
    """[B]"""
    frozen: Mapping[str, Outputs]
    """logits and features of each frozen network on the same images"""
    given: Mapping[str, Tensor]
    """tensors that are the same for every batch, such as prototypes"""

    @property
    def cross_entropy(self) -> Tensor:
        """Cross-entropy of the logits with the labels, a number for each sample [B]."""
        return cross_entropy(self.logits, self.labels)


Loss = Callable[[Batch], Tensor | tuple[Tensor, dict[str, Tensor]]]
"""Maps a batch to its loss: a number for each sample [B], or their mean. A loss may return measurements
beside it, by name, each a number for each sample [B]."""


class LookedUp:
    """A frozen network's outputs for a batch, taken from a table of all samples on first use."""

    def __init__(self, table: Outputs, part: Tensor | slice):
        self._table, self._part = table, part

    @cached_property
    def logits(self) -> Tensor:
        return self._table.logits[self._part]

    @cached_property
    def features(self) -> Tensor:
        return self._table.features[self._part]


def look_up(tables: Mapping[str, Outputs], part: Tensor | slice) -> dict[str, Outputs]:
    """Return the frozen networks' outputs for the samples at these positions."""
    return {name: cast(Outputs, LookedUp(table, part)) for name, table in tables.items()}


def checked_loss(
    batch: Batch, result: Tensor | tuple[Tensor, dict[str, Tensor]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss and its measurements, after a check of their types and shapes."""
    value, measured = result if isinstance(result, tuple) else (result, {})
    if not isinstance(value, Tensor):
        raise TypeError(f"the loss must be a tensor; it is a {type(value).__name__}")
    if value.dim() and value.shape != batch.labels.shape:
        raise ValueError(
            f"the loss has shape {list(value.shape)}: it must be a number for each sample, "
            f"here {list(batch.labels.shape)}, or their mean"
        )
    for name, values in measured.items():
        check_own_measurement(name)
        if values.shape != batch.labels.shape:
            raise ValueError(
                f"the loss measures {name!r} with shape {list(values.shape)}: "
                f"return a number for each sample, here {list(batch.labels.shape)}"
            )
    if not value.requires_grad:
        raise ValueError(
            "the loss does not depend on the model's outputs: compute it from batch.logits or batch.features, "
            "without detach() or no_grad()"
        )
    return value, measured
