"""Compute convolution, 2×2 max-pooling and ReLU in one kernel where it is faster, else with PyTorch.

`_Forward` and `_Backward` are the two halves of the kernel as autograd functions. The second is a function of its
own for `torch.vmap(torch.func.grad(...))`, and for the gradient of a gradient.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter
from torch.nn import functional as F

from fedcsd.kernels import cuda
from fedcsd.kernels.build import library
from fedcsd.kernels.calls import addresses, memory, needs_pytorch, transformed
from fedcsd.kernels.cuda import How


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    padding: int = 0,
    pool: int = 1,
    relu: bool = False,
) -> Tensor:
    """Compute relu(max_pool(conv(x))) at stride 1.

    Args:
        x: images [B, C, H, W]
        weight: [O, C, K, K]
        bias: [O]
        padding: zeros around the image
        pool: 1 (none) or 2 (2×2)
        relu: apply the ReLU
    """
    if pool not in (1, 2):
        raise ValueError(f"pool is {pool}: it can be 1 or 2")
    if x.is_cuda and cuda.fits(x, weight, bias, padding):
        bias = weight.new_zeros(len(weight)) if bias is None else bias
        result = cuda.CudaForward.apply(x, weight, bias, (padding, pool, relu))  # type: ignore[no-untyped-call]
        return cast(Tensor, result[0])
    if not (_fits(x, weight, bias, padding, pool) and library()):
        return plain(x, weight, bias, padding, pool, relu)
    how: How = (padding, pool, relu)
    out: Tensor
    if transformed():
        out = _Forward.apply(x, weight, bias, how)[0]  # type: ignore[no-untyped-call]
    elif torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        out = _apply(x, weight, bias, how)[0]
    else:
        out = _forward(x, weight, bias, how, winners=False)[0]
    return out


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, pool: int, relu: bool) -> Tensor:
    """Compute the same with PyTorch's operators. After the pooling the ReLU has a quarter of the work."""
    x = F.conv2d(x, weight, bias, padding=padding)
    x = F.max_pool2d(x, 2) if pool == 2 else x
    return F.relu(x) if relu else x


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, pool: int) -> bool:
    """Tell if the kernel can compute this, and is faster than PyTorch."""
    for t in (x, weight) if bias is None else (x, weight, bias):
        if t.dtype is not torch.float32 or not t.is_cpu or type(t) not in (Tensor, Parameter):
            return False
    shapes = x.shape, weight.shape, None if bias is None else bias.shape
    return suits(*shapes, padding, pool) and not needs_pytorch()


@lru_cache(maxsize=1024)
def suits(x: torch.Size, weight: torch.Size, bias: torch.Size | None, padding: int, pool: int) -> bool:
    """Tell by shapes alone if the kernel is to be used, so that the same computation gives the same bits."""
    if not len(x) == len(weight) == 4:
        return False
    (_, channels, height, width), (planes, of, tall, side) = x, weight
    if tall != side or of != channels or (bias is not None and bias != (planes,)):
        return False  # PyTorch reports some of these as errors
    if min(x) < 1 or min(weight) < 1 or padding < 0 or min(height, width) + 2 * padding - side + 1 < pool:
        return False
    return _faster(channels, planes, pool)


def _faster(channels: int, planes: int, pool: int) -> bool:
    """Tell if the kernel beats PyTorch 2.13, forward and backward, on one thread with AVX-512 or AVX2.

    benchmarks/convolution.py measures it. With pooling and ReLU the kernel is 2 to 6.6 times as fast for 1 → 6 to
    6 → 16 channels, 1.1 to 2 times up to 32 → 32, and 0.7 to 1.5 times for 64 → 64.
    """
    return channels * planes <= 512 if pool == 2 else max(channels, planes) <= 16


Need = tuple[bool, bool, bool]
"""The gradients that are needed: of x, weight, bias."""


class Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("B", "C", "H", "W", "O", "K", "P", "S", "relu")]


class ConvolutionPlan(NamedTuple):
    """The C functions for given shapes, and the sizes of the tensors that they fill."""

    forward: Callable[..., None]
    backward: Callable[..., None]
    out: tuple[int, int, int, int]
    winners: int
    scratch: int


@lru_cache(maxsize=1)
def _functions() -> tuple[Any, Any, Any, int]:
    """Return from C: forward, backward, the bytes they need, and the number of images side by side."""
    c = library()
    assert c is not None
    shape, pointer = ctypes.POINTER(Shape), ctypes.c_void_p
    c.forward.argtypes, c.forward.restype = [shape, *[pointer] * 6], None
    c.backward.argtypes, c.backward.restype = [shape, *[pointer] * 8], None
    c.scratch_size.argtypes, c.scratch_size.restype = [shape], ctypes.c_int64
    return c.forward, c.backward, c.scratch_size, ctypes.c_int.in_dll(c, "lanes").value


@lru_cache(maxsize=1024)
def _plan(x: torch.Size, weight: torch.Size, how: How) -> ConvolutionPlan:
    forward, backward, scratch_size, lanes = _functions()
    (batch, channels, height, width), (planes, _, _, side), (padding, pool, relu) = x, weight, how
    shape = ctypes.pointer(Shape(batch, channels, height, width, planes, side, padding, pool, relu))
    p, r = ((size + 2 * padding - side + 1) // pool for size in (height, width))
    winners = -(-batch // lanes) * lanes * planes * p * r if pool == 2 or relu else 0
    sizes = (batch, planes, p, r), winners, scratch_size(shape)
    return ConvolutionPlan(partial(forward, shape), partial(backward, shape), *sizes)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, how: How, *, winners: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the result, and the pooling winners for the gradient."""
    x, weight = x.contiguous(), weight.contiguous()
    bias = bias.contiguous() if bias is not None else None
    plan = _plan(x.shape, weight.shape, how)
    out = x.new_empty(plan.out)
    winner = torch.empty(plan.winners if winners else 0, dtype=torch.uint8, device="cpu")
    plan.forward(*addresses(x, weight, bias, out, winner), memory.at(plan.scratch))
    return out, winner


def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, winner: Tensor, g: Tensor, how: How, need: Need
) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight and bias; one that is not needed is empty."""
    x, weight, winner, g = x.contiguous(), weight.contiguous(), winner.contiguous(), g.contiguous()
    plan = _plan(x.shape, weight.shape, how)
    dx = torch.empty_like(x) if need[0] else x.new_empty(0)
    dweight = torch.empty_like(weight) if need[1] else x.new_empty(0)
    dbias = x.new_empty(len(weight) if need[2] else 0)
    plan.backward(*addresses(x, weight, g, winner, dx, dweight, dbias), memory.at(plan.scratch))
    return dx, dweight, dbias


def _each(function: type[Function], info: Any, in_dims: Any, tensors: Any, *rest: Any) -> tuple[Any, Any]:
    """Apply a function under vmap to each of the stacked tensors in turn."""
    parts = [
        (tensor,) * info.batch_size if dim is None else tensor.unbind(dim)
        for tensor, dim in zip(tensors, in_dims, strict=False)
    ]
    results = [function.apply(*each, *rest) for each in zip(*parts, strict=True)]  # type: ignore[no-untyped-call]
    stacked = tuple(torch.stack(result) for result in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


class _Forward(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> tuple[Tensor, Tensor]:
        return _forward(x, weight, bias, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.how = inputs
        ctx.save_for_backward(*tensors, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return None, None, None, None
        need = ctx.needs_input_grad[:3]
        again = torch.is_grad_enabled() or transformed()
        half: Any = _Backward.apply if again else _backward
        dx, dw, db = half(*ctx.saved_tensors, g, ctx.how, need)
        return dx if need[0] else None, dw if need[1] else None, db if need[2] else None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any, weight: Any, bias: Any, how: How) -> tuple[Any, Any]:
        return _each(_Forward, info, in_dims, (x, weight, bias), how)


# `Function.apply` without transforms and without its look at the signature, which takes longer than a small
# convolution.
_apply: Any = super(Function, _Forward).apply


class _Backward(Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, _, g, ctx.how, _ = inputs
        ctx.save_for_backward(x, weight, bias, g)

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the gradients, by PyTorch's operators."""
        x, weight, bias, g = ctx.saved_tensors
        here = (x, weight) if bias is None else (x, weight, bias)

        def gradients(g: Tensor, *here: Tensor) -> Any:
            return torch.func.vjp(lambda *here: plain(*(*here, None)[:3], *ctx.how), *here)[1](g)

        wanted = tuple(a if a.numel() else torch.zeros_like(t) for a, t in zip(along, here, strict=False))
        dg, *rest = torch.func.vjp(gradients, g, *here)[1](wanted)
        dx, dweight, dbias = (*rest, None)[:3]
        return dx, dweight, dbias, None, dg, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        return _each(_Backward, info, in_dims, arguments[:5], *arguments[5:])
