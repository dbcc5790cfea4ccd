"""How the steps of local training are carried out.

An engine takes a `Task`, what one client is to train and on what, and gives back the trained weights
and what was measured on the way. All engines take the same steps on the same batches; they differ in
how many operations are started, from where, and for how many clients at once.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fedcsd.kernels.vectors import cross_entropy
from fedcsd.measurements import check_own_measurement
from fedcsd.models.network import Network, Outputs
from fedcsd.training.optimizer import Gradient
from fedcsd.weights import Weights

if TYPE_CHECKING:
    from fedcsd.training.client import Client


@dataclass(frozen=True)
class Batch:
    """One batch as a loss sees it. The loss is a pure function of this."""

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
        """of the logits with the labels, a number a sample [B]"""
        return cross_entropy(self.logits, self.labels)


Measured = dict[str, Tensor]
Loss = Callable[[Batch], Tensor | tuple[Tensor, Measured]]
"""A batch to its loss, one number a sample [B] or their mean; beside it may stand measurements, one
number a sample [B]."""


class Looked:
    """A frozen network's outputs for a batch, looked up among those for all of a client's samples when
    they are asked for."""

    def __init__(self, table: Outputs, part: Tensor | slice):
        self._table, self._part = table, part

    @cached_property
    def logits(self) -> Tensor:
        return self._table.logits[self._part]

    @cached_property
    def features(self) -> Tensor:
        return self._table.features[self._part]


def looked_up(tables: Mapping[str, Outputs], part: Tensor | slice) -> dict[str, Outputs]:
    return {name: cast(Outputs, Looked(table, part)) for name, table in tables.items()}


@dataclass
class Task:
    """One local training of one client."""

    client: "Client"
    weights: Weights
    """to start from"""
    loss: Loss
    change: Gradient | None
    """of the gradient, before each step"""
    given: Mapping[str, Tensor]
    known: Mapping[str, Outputs]
    """frozen networks' outputs on all local data"""
    live: Mapping[str, Network]
    """frozen networks that must look at every batch, as augmented images differ each time"""
    live_training: bool
    """whether those use the statistics of the batch"""
    live_tokens: tuple[int, ...]
    """the weights of those, by token: where they are the same, clients have them in common"""
    purpose: str
    """what the batches are drawn for: a second training of the same client draws others"""
    seed: int
    """of what draws inside the model"""
    observed: bool = False
    """whether somebody looks at the weights after each epoch"""

    def after_epoch(self, network: Network) -> None:
        """What every engine calls when an epoch is done; only an observed task needs to be looked at then."""
        if self.observed:
            self.client.observe(self.weights, network.weights())

    @property
    def samples(self) -> int:
        return self.client.samples

    def order(self) -> Tensor:
        """Positions among the client's samples, epoch after epoch [epochs, samples], on the CPU."""
        return torch.stack([self.client.order(self.purpose, e) for e in range(self.client.settings.epochs)])

    def numbers(self, epoch: int) -> Tensor | None:
        """What is random in the augmentation of an epoch, a row for each sample."""
        return self.client.numbers(self.purpose, epoch)

    def key(self) -> Hashable | None:
        """The same for all tasks whose steps are the same but for the numbers in them; None if this is
        the only one of its kind."""
        functions = [identity(self.loss, self.client.site.method)]
        functions.append(identity(self.change, self.client.site.method) if self.change else "")
        if None in functions:
            return None
        given = tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(self.given.items()))
        return (*functions, given, tuple(sorted(self.known)), tuple(sorted(self.live)), self.live_training)


def identity(function: Callable[..., Any], method: object) -> Hashable | None:
    """What a function does, told by its code and by constants it encloses; None if it encloses more,
    such as tensors: then another one of the same code may do something else."""
    if isinstance(function, MethodType):
        return (function.__func__, id(function.__self__)) if function.__self__ is method else None
    if not isinstance(function, FunctionType) or function.__defaults__ or function.__kwdefaults__:
        return None
    parts: list[Hashable] = [function.__code__]
    for cell in function.__closure__ or ():
        if cell.cell_contents is method:
            continue
        if not isinstance(cell.cell_contents, (int, float, str, bool, type(None))):
            return None
        parts.append(cell.cell_contents)
    return tuple(parts)


@dataclass
class Trained:
    """What local training gave."""

    weights: Weights
    steps: int
    sums: dict[str, float] = field(default_factory=dict)
    """over all samples and epochs, of the loss and of what the loss measures"""
    diverged: str = ""
    """how training went astray, if it did"""


def cut(samples: int, batch: int, network: Network) -> tuple[int, int]:
    """An epoch's number of whole batches, and how many samples the last one beside them has.

    A single sample has no batch statistics: where a network needs them, it joins the batch before it.
    """
    whole, rest = divmod(samples, batch)
    return (whole - 1, batch + 1) if rest == 1 and whole and network.norms else (whole, rest)


def batches(order: Tensor, size: int, network: Network) -> Iterator[Tensor]:
    """An epoch batch by batch."""
    whole, rest = cut(len(order), size, network)
    return iter(torch.split(order, [size] * whole + [rest] * bool(rest)))


def checked(batch: Batch, result: Tensor | tuple[Tensor, Measured]) -> tuple[Tensor, Measured]:
    """What a loss gave: one number a sample or their mean, and measurements of one number a sample."""
    value, measured = result if isinstance(result, tuple) else (result, {})
    if not isinstance(value, Tensor):
        raise TypeError(f"the loss must be a tensor; it is a {type(value).__name__}")
    if value.dim() and value.shape != batch.labels.shape:
        raise ValueError(
            f"the loss is of shape {list(value.shape)}: it must be one number a sample, here {list(batch.labels.shape)}, or their mean"
        )
    for name, values in measured.items():
        check_own_measurement(name)
        if values.shape != batch.labels.shape:
            raise ValueError(
                f"the loss measures {name!r} as {list(values.shape)}: give one number a sample, here {list(batch.labels.shape)}"
            )
    if not value.requires_grad:
        raise ValueError(
            "the loss does not depend on the model's outputs: compute it from batch.logits or batch.features, "
            "without detach() or no_grad()"
        )
    return value, measured


def tally(sums: dict[str, Tensor], batch: Batch, result: Tensor | tuple[Tensor, Measured]) -> Tensor:
    """Add up what a loss gave for a batch; the loss is returned, one number a sample or their mean."""
    value, measured = checked(batch, result)
    mean = value.mean() if value.dim() else value
    add(sums, "train_loss", mean.detach(), len(batch.labels))
    for name, values in measured.items():
        add(sums, name, values.detach().sum())
    return mean


def add(sums: dict[str, Tensor], name: str, value: Tensor, times: int = 1) -> None:
    if name not in sums:
        sums[name] = torch.zeros((), dtype=torch.float64, device=value.device)
    sums[name].add_(value, alpha=times)


def finish(network_flat: Tensor, sums: dict[str, Tensor]) -> tuple[dict[str, float], str]:
    """The sums as numbers, and what is wrong with them or with the weights; one wait for the device."""
    finite = network_flat.abs().max().isfinite().double()  # NaN is the greatest of all
    *totals, whole = torch.stack([*sums.values(), finite]).tolist()
    found = dict(zip(sums, totals, strict=True))
    if not whole:
        return found, "the weights are no longer finite after local training"
    return found, ""
