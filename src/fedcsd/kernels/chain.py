"""A model of layers one after another as one call of C each way, past autograd.

A small layer on a small batch takes less time than PyTorch needs to start its operators, to record them and to
find its way back through them.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fedcsd.kernels.build import library
from fedcsd.kernels.convolution import How, Shape, _suits, memory, transformed

CHUNK = 64  # images that go through all layers at a time where no gradient is needed
DENSE = 1 << 19  # weights of the largest matrix that is multiplied here


class Link(NamedTuple):
    """One layer: a convolution with pooling and ReLU (weight [O, C, K, K]), or a matrix with ReLU (weight [O, C])
    for what comes flattened; `how` is padding, pool, relu."""

    weight: Tensor
    bias: Tensor | None
    how: How


class Pass(NamedTuple):
    """What going back needs of a batch that went forward."""

    x: Tensor
    kept: Tensor
    """the results of all layers, one after another, flat"""
    winners: Tensor
    plan: "Plan"

    @property
    def features(self) -> Tensor:
        """what the last layer was given [B, D]"""
        return self.kept[self.plan.features : self.plan.logits].view(len(self.x), -1)

    @property
    def logits(self) -> Tensor:
        """its result [B, C]"""
        return self.kept[self.plan.logits :].view(len(self.x), -1)


class Chain:
    """Two or more layers, the last a matrix, and where their gradients go."""

    def __init__(self, links: Sequence[Link], gradients: Sequence[Tensor | None]):
        """`gradients`: for each layer's weight and bias in turn, a part of the flat gradient, or None for what is
        not trained. All these tensors stay where they are."""
        self.shapes = tuple((w.shape, None if b is None else b.shape, how) for w, b, how in links)
        self.held = [t for weight, bias, _ in links for t in (weight, bias)], gradients
        self.parameters, self.gradients = (_addresses(tensors) for tensors in self.held)
        wanted = [n // 2 for n, gradient in enumerate(gradients) if gradient is not None]
        self.lowest = min(wanted, default=len(links))

    def plan(self, x: Tensor) -> "Plan | None":
        """How x [B, …] goes through; None if the kernels do not do this, or do it more slowly than PyTorch."""
        if x.dtype is not torch.float32 or not x.is_cpu or type(x) is not Tensor or x.requires_grad:
            return None
        if (
            transformed()
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled("cpu")
            or forward_ad._current_level >= 0
        ):
            return None
        return _plan(x.shape, self.shapes)

    def apply(self, plan: "Plan", x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, C] and features [B, D], without a way back."""
        x = x.contiguous()
        out, features = x.new_empty(len(x), plan.classes), x.new_empty(len(x), plan.width)
        plan.apply(
            x.data_ptr(), self.parameters, features.data_ptr(), out.data_ptr(), memory.at(plan.apply_scratch)
        )
        return out, features

    def forward(self, plan: "Plan", x: Tensor) -> Pass:
        x = x.contiguous()
        kept = x.new_empty(plan.kept)
        winners = torch.empty(plan.winners, dtype=torch.uint8, device="cpu")
        plan.forward(
            x.data_ptr(), self.parameters, kept.data_ptr(), winners.data_ptr(), memory.at(plan.scratch)
        )
        return Pass(x, kept, winners, plan)

    def backward(self, made: Pass, logits: Tensor, features: Tensor | None) -> None:
        """Write the parameters' gradients, given those of logits and features."""
        x, kept, winners, plan = made
        logits, features = logits.contiguous(), None if features is None else features.contiguous()
        plan.backward(
            self.lowest,
            x.data_ptr(),
            self.parameters,
            kept.data_ptr(),
            winners.data_ptr(),
            logits.data_ptr(),
            None if features is None else features.data_ptr(),
            self.gradients,
            memory.at(plan.scratch),
        )


class Plan(NamedTuple):
    """All that follows from shapes: the C functions for them, and the sizes of what these fill."""

    forward: Callable[..., None]
    backward: Callable[..., None]
    apply: Callable[..., None]
    features: int
    """where features begin among the results"""
    logits: int
    """where logits begin"""
    width: int
    classes: int
    scratch: int
    kept: int
    winners: int
    apply_scratch: int


@lru_cache(maxsize=1024)
def _plan(x: torch.Size, layers: tuple[tuple[torch.Size, torch.Size | None, How], ...]) -> Plan | None:
    """A matter of shapes alone, so that the same computation gives the same bits."""
    shapes: list[Shape] = []
    out, c = x, _functions()
    for weight, bias, how in layers:
        shape = _shape(out, weight, bias, how)
        if shape is None or c is None:
            return None
        p, r = ((size + 2 * shape.P - shape.K + 1) // shape.S for size in (shape.H, shape.W))
        out = torch.Size((x[0], shape.O, p, r))
        shapes.append(shape)
    whole, few = _sized(shapes, x[0]), _sized(shapes, min(x[0], CHUNK))
    (scratch, kept, winners), (apply_scratch, *_) = _sizes(whole), _sizes(few)
    count, width, classes = len(shapes), shapes[-1].C, shapes[-1].O
    return Plan(
        partial(c.chain_forward, whole, count),
        partial(c.chain_backward, whole, count),
        partial(c.chain_apply, few, count, x[0]),
        kept - x[0] * (classes + width),
        kept - x[0] * classes,
        width,
        classes,
        scratch,
        kept,
        winners,
        apply_scratch,
    )


def _shape(x: torch.Size, weight: torch.Size, bias: torch.Size | None, how: How) -> Shape | None:
    """A layer for an input of this shape; None if the kernels do not do it, or not faster."""
    padding, pool, relu = how
    if len(weight) == 4:
        suits = _suits(x, weight, bias, padding, pool)
        return Shape(*x, weight[0], weight[2], padding, pool, relu) if suits else None
    planes, inputs = weight
    if len(x) < 2 or min(x) < 1 or x[1:].numel() != inputs or inputs * planes > DENSE:
        return None
    return Shape(x[0], inputs, 1, 1, planes, 1, 0, 1, relu)


def _sized(shapes: Sequence[Shape], batch: int) -> Any:
    array = (Shape * len(shapes))(*shapes)
    for shape in array:
        shape.B = batch
    return array


def _sizes(shapes: Any) -> tuple[int, ...]:
    c, sizes = _functions(), (ctypes.c_int64 * 3)()
    c.chain_sizes(shapes, len(shapes), sizes)
    return tuple(sizes)


@lru_cache(maxsize=1)
def _functions() -> Any:
    c = library()
    if c is not None:
        shape, pointer, number = ctypes.POINTER(Shape), ctypes.c_void_p, ctypes.c_int64
        c.chain_sizes.argtypes, c.chain_sizes.restype = [shape, number, pointer], None
        c.chain_forward.argtypes, c.chain_forward.restype = [shape, number, *[pointer] * 5], None
        c.chain_apply.argtypes, c.chain_apply.restype = [shape, number, number, *[pointer] * 5], None
        c.chain_backward.argtypes, c.chain_backward.restype = [shape, number, number, *[pointer] * 8], None
    return c


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(None if t is None else t.data_ptr() for t in tensors))
