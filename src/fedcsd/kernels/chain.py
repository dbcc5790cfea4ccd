"""Compute a model of layers one after another by one call of C each way, without autograd.

PyTorch needs longer to start and record its operators than a small layer takes on a small batch.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcsd.kernels.build import library
from fedcsd.kernels.calls import addresses, memory
from fedcsd.kernels.convolution import Shape, suits
from fedcsd.kernels.cuda import How

CHUNK = 64  # images that pass all layers at a time if no gradient is needed
DENSE = 1 << 19  # weights of the largest matrix for the kernel


class Link(NamedTuple):
    """A layer that the kernel can compute.

    It is a convolution with pooling and ReLU (weight [O, C, K, K]), or a matrix with ReLU (weight [O, C]) for
    flattened input; `how` is padding, pool, relu.
    """

    weight: Tensor
    bias: Tensor | None
    how: How


class Pass(NamedTuple):
    """The results of a forward pass that the backward pass needs."""

    logits: Tensor
    """result of the last layer [B, C]"""
    features: Tensor
    """input of the last layer [B, D]"""
    x: Tensor
    kept: Tensor
    """results of the layers before, one after another, flat"""
    winners: Tensor
    plan: "ChainPlan"


class LinkedLayers:
    """Compute two or more layers, the last a matrix, and write their gradients."""

    def __init__(self, links: Sequence[Link], gradients: Sequence[Tensor | None]):
        """Take the addresses of all tensors, which must not move.

        Args:
            links: the layers
            gradients: for each layer's weight and bias in turn, a part of the flat gradient, or None if it is
                not trained
        """
        self.shapes = tuple((w.shape, None if b is None else b.shape, how) for w, b, how in links)
        self.held = [t for weight, bias, _ in links for t in (weight, bias)], gradients
        self.parameters, self.gradients = ((ctypes.c_void_p * len(t))(*addresses(*t)) for t in self.held)
        wanted = [n // 2 for n, gradient in enumerate(gradients) if gradient is not None]
        self.lowest = min(wanted, default=len(links))
        self.plans: dict[torch.Size, ChainPlan | None] = {}

    def plan(self, x: Tensor) -> "ChainPlan | None":
        """Return the plan for x [B, …], or None if the kernels cannot compute it or are slower than PyTorch."""
        if x.dtype is not torch.float32 or not x.is_cpu or type(x) is not Tensor or x.requires_grad:
            return None
        if x.shape not in self.plans:
            self.plans[x.shape] = _plan(x.shape, self.shapes)
        return self.plans[x.shape]

    def apply(self, plan: "ChainPlan", x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits [B, C] and features [B, D] without gradients."""
        x = x.contiguous()
        logits, features = x.new_empty(plan.logits), x.new_empty(plan.features)
        places = x.data_ptr(), self.parameters, features.data_ptr(), logits.data_ptr()
        plan.apply(*places, memory.at(plan.apply_scratch))
        return logits, features

    def forward(self, plan: "ChainPlan", x: Tensor) -> Pass:
        """Compute logits and features, and keep what `backward` needs."""
        x = x.contiguous()
        logits, features, kept = x.new_empty(plan.logits), x.new_empty(plan.features), x.new_empty(plan.kept)
        winners = torch.empty(plan.winners, dtype=torch.uint8, device="cpu")
        made = addresses(kept, winners, features, logits)
        plan.forward(x.data_ptr(), self.parameters, *made, memory.at(plan.scratch))
        return Pass(logits, features, x, kept, winners, plan)

    def backward(self, made: Pass, slope: Tensor, also: Tensor | None) -> None:
        """Write the gradients of the parameters from those of logits and features."""
        slope, also = slope.contiguous(), None if also is None else also.contiguous()
        given = addresses(made.kept, made.winners, made.features, made.logits, slope, also)
        scratch = memory.at(made.plan.scratch)
        made.plan.backward(self.lowest, made.x.data_ptr(), self.parameters, *given, self.gradients, scratch)


class ChainPlan(NamedTuple):
    """The C functions for given shapes, and the sizes of the tensors that they fill."""

    forward: Callable[..., None]
    backward: Callable[..., None]
    apply: Callable[..., None]
    features: tuple[int, int]
    logits: tuple[int, int]
    scratch: int
    kept: int
    winners: int
    apply_scratch: int


@lru_cache(maxsize=1024)
def _plan(x: torch.Size, layers: tuple[tuple[torch.Size, torch.Size | None, How], ...]) -> ChainPlan | None:
    """Plan by shapes alone, so that the same computation gives the same bits."""
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
    count = len(shapes)
    return ChainPlan(
        partial(c.chain_forward, whole, count),
        partial(c.chain_backward, whole, count),
        partial(c.chain_apply, few, count, x[0]),
        (x[0], shapes[-1].C),
        (x[0], shapes[-1].O),
        scratch,
        kept,
        winners,
        apply_scratch,
    )


def _shape(x: torch.Size, weight: torch.Size, bias: torch.Size | None, how: How) -> Shape | None:
    """Return the shape of a layer for this input, or None if the kernels cannot compute it or are slower."""
    padding, pool, relu = how
    if len(weight) == 4:
        fits = suits(x, weight, bias, padding, pool)
        return Shape(*x, weight[0], weight[2], padding, pool, relu) if fits else None
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
        c.chain_forward.argtypes, c.chain_forward.restype = [shape, number, *[pointer] * 7], None
        c.chain_apply.argtypes, c.chain_apply.restype = [shape, number, number, *[pointer] * 5], None
        c.chain_backward.argtypes, c.chain_backward.restype = [shape, number, number, *[pointer] * 10], None
    return c
