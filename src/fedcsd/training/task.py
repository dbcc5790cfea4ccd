"""Describe a task of local training, and share parts between engines.

An engine takes a `Task` and returns the trained weights and the sums of what the loss measured. All
engines take the same steps on the same batches. They differ in the number of operations they start,
the thread that starts them, and the number of clients in one operation.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Protocol

import torch
from torch import Tensor

from fedcsd.config import Settings
from fedcsd.models.network import Network, Outputs
from fedcsd.training.batch import Batch, Loss, checked_loss
from fedcsd.training.images import Images
from fedcsd.training.optimizer import Gradient
from fedcsd.weights import Weights


@dataclass
class Live:
    """Frozen networks that must see every batch, since augmented images differ each time."""

    networks: Mapping[str, Network] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    """identities of their weights; clients with the same tokens share the networks"""
    training: bool = False
    """use batch statistics"""
    stream: AbstractContextManager[None] = field(default_factory=nullcontext)
    """random numbers of their own"""

    def outputs(self, images: Tensor) -> dict[str, Outputs]:
        """Return each network's outputs on a batch of images, without gradients."""
        if not self.networks:
            return {}
        with self.stream:
            return {name: frozen_outputs(n, images, train=self.training) for name, n in self.networks.items()}


def frozen_outputs(network: Network, images: Tensor, *, train: bool) -> Outputs:
    """Return a network's outputs without gradients; `train` uses batch statistics."""
    if train:
        network.train(single=len(images) == 1)
    with torch.no_grad():
        return network(images)


@dataclass
class Task:
    """All that an engine needs to train one client."""

    client: int
    settings: Settings
    network: Network
    """to train in"""
    weights: Weights
    """to start from"""
    loss: Loss
    change: Gradient | None
    """of the gradient, before each step"""
    method: object
    """owner of the loss; its functions are the same for all clients"""
    images: Images
    rows: Tensor
    """of the client's samples in the training data [samples]"""
    order: Tensor
    """positions among the client's samples, epoch after epoch, on the CPU [epochs, samples]"""
    numbers: Callable[[int], Tensor | None]
    """random numbers of an epoch's augmentation, a row for each sample"""
    start_generators: Callable[[], object]
    """starts the process's generators for random layers of the model"""
    given: Mapping[str, Tensor] = field(default_factory=dict)
    known: Mapping[str, Outputs] = field(default_factory=dict)
    """frozen networks' outputs on all of the client's samples"""
    live: Live = field(default_factory=Live)
    after_epoch: Callable[[Weights], object] | None = None

    @property
    def samples(self) -> int:
        return len(self.rows)

    @property
    def device(self) -> torch.device:
        return self.network.flat.device

    def end_epoch(self) -> None:
        """Call `after_epoch`; every engine does so after each epoch of a task that has it."""
        if self.after_epoch is not None:
            self.after_epoch(self.network.weights())

    def key(self) -> Hashable | None:
        """Return a key that tasks share if their steps differ in numbers only; None if the loss is unique."""
        functions = [identity(self.loss, self.method)]
        functions.append(identity(self.change, self.method) if self.change else "")
        if None in functions:
            return None
        given = tuple((name, tensor.shape, tensor.dtype) for name, tensor in sorted(self.given.items()))
        return (
            *functions,
            given,
            tuple(sorted(self.known)),
            tuple(sorted(self.live.networks)),
            self.live.training,
        )


def identity(function: object, method: object) -> Hashable | None:
    """Return a key of a function's code and the constants it encloses; None if it encloses anything else.

    A function that encloses a tensor may do something else than another one with the same code.
    """
    if isinstance(function, MethodType):
        return (function.__func__, id(function.__self__)) if function.__self__ is method else None
    if not isinstance(function, FunctionType) or function.__defaults__ or function.__kwdefaults__:
        return None
    parts: list[Hashable] = [function.__code__]
    for cell in function.__closure__ or ():
        enclosed = cell.cell_contents
        if enclosed is method:
            continue
        if not isinstance(enclosed, (int, float, str, bool, type(None))):
            enclosed = identity(enclosed, method)
            if enclosed is None:
                return None
        parts.append(enclosed)
    return tuple(parts)


@dataclass
class Trained:
    """Weights and sums that local training returns."""

    weights: Weights
    steps: int
    sums: dict[str, float] = field(default_factory=dict)
    """over all samples and epochs, of the loss and of its measurements"""
    diverged: str = ""
    """the reason, if training diverged"""


class Engine(Protocol):
    """An engine carries out local training."""

    def train(self, task: Task) -> Trained: ...


def cut(samples: int, batch: int, network: Network) -> tuple[int, int]:
    """Return an epoch's number of whole batches and the size of the last, smaller one.

    A single sample has no batch statistics: with BatchNorm it joins the batch before it.
    """
    whole, rest = divmod(samples, batch)
    return (whole - 1, batch + 1) if rest == 1 and whole and network.norms else (whole, rest)


def batches(order: Tensor, size: int, network: Network) -> Iterator[Tensor]:
    """Split an epoch into its batches."""
    whole, rest = cut(len(order), size, network)
    return iter(torch.split(order, [size] * whole + [rest] * bool(rest)))


def tally(sums: dict[str, Tensor], batch: Batch, result: Tensor | tuple[Tensor, dict[str, Tensor]]) -> Tensor:
    """Add a batch's loss and measurements to the sums; return the mean loss."""
    value, measured = checked_loss(batch, result)
    mean = value.mean() if value.dim() else value
    _add(sums, "train_loss", mean.detach(), len(batch.labels))
    for name, values in measured.items():
        _add(sums, name, values.detach().sum())
    return mean


def _add(sums: dict[str, Tensor], name: str, value: Tensor, times: int = 1) -> None:
    if name not in sums:
        sums[name] = torch.zeros((), dtype=torch.float64, device=value.device)
    sums[name].add_(value, alpha=times)


NOT_FINITE = "the weights are no longer finite after local training"


def totals_of(flat: Tensor, sums: dict[str, Tensor]) -> tuple[dict[str, float], str]:
    """Return the sums as numbers and the reason if the weights diverged; wait for the device once."""
    finite = flat.abs().max().isfinite().double()  # NaN is the greatest of all
    *totals, whole = torch.stack([*sums.values(), finite]).tolist()
    return dict(zip(sums, totals, strict=True)), "" if whole else NOT_FINITE
