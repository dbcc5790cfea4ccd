"""Compute the small parts of a training step in C: cross-entropy, the optimizer, the images of a batch."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from fedcsd.kernels.build import library
from fedcsd.kernels.calls import addresses, memory, needs_pytorch, transformed


@lru_cache(maxsize=1)
def _functions() -> Any:
    c = library()
    if c is not None:
        pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        c.cross_entropy.argtypes, c.cross_entropy.restype = [number, number, *[pointer] * 5], number
        c.look_up.argtypes, c.look_up.restype = [*[number] * 4, *[pointer] * 4], number
        c.sgd.argtypes, c.sgd.restype = [number, *[real] * 3, *[pointer] * 3], None
    return c


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute −log softmax(logits)_label for each sample: logits [B, C], labels [B] -> [B]."""
    if not _fits(logits, labels):
        return F.cross_entropy(logits, labels, reduction="none")
    if torch.is_grad_enabled() and logits.requires_grad:
        return cast(Tensor, _apply(logits, labels))
    return _cross_entropy(logits, labels, slope=False)[0]


def _fits(logits: Tensor, labels: Tensor) -> bool:
    return (
        logits.dtype is torch.float32
        and logits.is_cpu
        and type(logits) is Tensor
        and labels.dtype is torch.int64
        and labels.is_cpu
        and logits.dim() == 2
        and labels.shape == logits.shape[:1]
        and min(logits.shape) >= 1
        and not transformed()
        and not needs_pytorch()
        and _functions() is not None
    )


def _cross_entropy(logits: Tensor, labels: Tensor, *, slope: bool) -> tuple[Tensor, Tensor]:
    logits, labels = logits.contiguous(), labels.contiguous()
    rows, classes = logits.shape
    loss, found = logits.new_empty(rows), torch.empty_like(logits) if slope else logits.new_empty(0)
    places = addresses(logits, labels, loss, found)
    wrong = _functions().cross_entropy(rows, classes, *places, memory.at(2 * 64 * classes))
    if wrong >= 0:
        raise IndexError(f"Target {labels[wrong]} is out of bounds.")
    return loss, found


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        loss, slope = _cross_entropy(logits, labels, slope=True)
        ctx.save_for_backward(slope, logits, labels)
        ctx.first_is_slope = True
        return loss

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        slope, logits, labels = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a gradient of the gradient
            slope = logits.softmax(1) - F.one_hot(labels, logits.shape[1])
        return g.unsqueeze(1) * slope, None


_apply: Any = super(Function, _CrossEntropy).apply  # `Function.apply` without its look at the signature


def slope_of(loss: Tensor, logits: Tensor) -> Tensor | None:
    """Return d loss_n / d logits_n [B, C] of a loss [B] that a kernel has computed, or None for another loss.

    The kernel has computed it along with the loss, so autograd is not needed.
    """
    node: Any = loss.grad_fn
    if node is None or not getattr(node, "first_is_slope", False):
        return None
    (source, _), *_ = node.next_functions
    return node.saved_tensors[0] if getattr(source, "variable", None) is logits else None


def sgd_step(
    parameters: Tensor, gradient: Tensor, velocity: Tensor | None, lr: float, momentum: float, decay: float
) -> Callable[[], None] | None:
    """Return a function that takes a step of SGD on these vectors, or None if C cannot."""
    c = _functions()
    if c is None or parameters.dtype is not torch.float32 or not parameters.is_cpu:
        return None
    vectors = addresses(gradient, velocity, parameters)

    def step() -> None:
        c.sgd(parameters.numel(), lr, momentum, decay, *vectors)

    return step


def look_up(x: Tensor, rows: Tensor, table: Tensor) -> Tensor | None:
    """Return rows of images x [N, C, …] in bytes, each pixel mapped by its channel's table [C, 256].

    Return None if C cannot.
    """
    c = _functions()
    if c is None or not x.is_cpu or not x.is_contiguous():
        return None
    rows, channels = rows.contiguous(), len(table)
    out = torch.empty((len(rows), *x.shape[1:]), dtype=torch.float32, device="cpu")
    sizes = len(rows), channels, x.shape[1:].numel() // channels, len(x)
    wrong = c.look_up(*sizes, *addresses(x, rows, table, out))
    if wrong >= 0:
        raise IndexError(f"row {rows[wrong]} is out of range: there are {len(x)}")
    return out
