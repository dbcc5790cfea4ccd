"""Convolution, 2×2 max-pooling and ReLU in one: the compiled kernel where it is faster, else PyTorch.

`_Forward` and `_Backward` are the two halves of the kernel as autograd functions. The second is one of its
own so that `torch.vmap(torch.func.grad(...))` finds it, and so that a gradient has a gradient.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad
from torch.nn import functional as F

from fedcsd.kernels.build import library


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, padding: int = 0, pool: int = 1, relu: bool = False
) -> Tensor:
    """relu(max_pool(conv(x))) of images x [B, C, H, W] with weight [O, C, K, K] and bias [O], at stride 1,
    with `padding` zeros around the image; `pool` is 1 (none) or 2 (2×2), `relu` may be left out.

    On a CPU and in float32 a compiled kernel does it where that is faster; elsewhere PyTorch's operators.
    """
    if pool not in (1, 2):
        raise ValueError(f"pool is {pool}: it can be 1 or 2")
    if not (_fits(x, weight, bias, padding, pool) and library()):
        return plain(x, weight, bias, padding, pool, relu)
    how = (padding, pool, relu)
    if _transformed() or torch.is_grad_enabled() and _wanted(x, weight, bias):
        out: Tensor = _Forward.apply(x, weight, bias, how)[0]  # type: ignore[no-untyped-call]
        return out
    return _forward(x, weight, bias, how, winners=False)[0]


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, pool: int, relu: bool) -> Tensor:
    """The same with PyTorch's operators. Pooling before the ReLU leaves it a quarter of the work."""
    x = F.conv2d(x, weight, bias, padding=padding)
    x = F.max_pool2d(x, 2) if pool == 2 else x
    return F.relu(x) if relu else x


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, pool: int) -> bool:
    """Whether the kernel does this, and does it faster than PyTorch: a matter of shapes alone, so that
    the same computation gives the same bits."""
    if not (
        x.dim() == weight.dim() == 4
        and all(t.device.type == "cpu" and t.dtype == torch.float32 for t in (x, weight))
        and (bias is None or (bias.dtype == torch.float32 and bias.device.type == "cpu"))
    ):
        return False
    batch, channels, height, width = x.shape
    planes, of, tall, side = weight.shape
    if tall != side or of != channels or (bias is not None and bias.shape != (planes,)):
        return False  # some of which PyTorch refuses, in words of its own
    if batch == 0 or padding < 0 or min(height, width) + 2 * padding - side + 1 < pool:
        return False
    return _faster(channels, planes, side) and not (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or forward_ad._current_level >= 0  # the kernel knows no forward-mode derivatives
    )


def _faster(channels: int, planes: int, side: int) -> bool:
    return True


def _transformed() -> bool:
    """Whether vmap, grad or another transform of torch.func is at work."""
    return torch._C._are_functorch_transforms_active()


def _wanted(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


How = tuple[int, int, bool]
"""padding, pool, relu"""
Need = tuple[bool, bool, bool]
"""whose gradient is needed: that of x, weight, bias"""


class Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("B", "C", "H", "W", "O", "K", "P", "S", "relu")]  # noqa: RUF012


class Plan(NamedTuple):
    """All that follows from shapes: the C functions for them, and the sizes of what these fill."""

    forward: Callable[..., None]
    backward: Callable[..., None]
    out: tuple[int, int, int, int]
    winners: int
    scratch: int


@lru_cache(maxsize=1)
def _functions() -> tuple[Any, Any, Any, int]:
    """From C: forward, backward, the bytes they need, and how many images lie side by side."""
    c = library()
    assert c is not None
    shape, pointer = ctypes.POINTER(Shape), ctypes.c_void_p
    c.forward.argtypes, c.forward.restype = [shape, *[pointer] * 6], None
    c.backward.argtypes, c.backward.restype = [shape, *[pointer] * 8], None
    c.scratch_size.argtypes, c.scratch_size.restype = [shape], ctypes.c_int64
    return c.forward, c.backward, c.scratch_size, ctypes.c_int.in_dll(c, "lanes").value


@lru_cache(maxsize=1024)
def _plan(x: torch.Size, weight: torch.Size, how: How) -> Plan:
    forward, backward, scratch_size, lanes = _functions()
    (batch, channels, height, width), (planes, _, _, side), (padding, pool, relu) = x, weight, how
    shape = ctypes.pointer(Shape(batch, channels, height, width, planes, side, padding, pool, relu))
    p, r = ((size + 2 * padding - side + 1) // pool for size in (height, width))
    winners = -(-batch // lanes) * lanes * planes * p * r if pool == 2 or relu else 0
    sizes = (batch, planes, p, r), winners, scratch_size(shape)
    return Plan(partial(forward, shape), partial(backward, shape), *sizes)


class _Memory(threading.local):
    """Working memory of a thread: the largest that was needed so far."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")

    def at(self, size: int) -> int:
        if self.tensor.numel() < size:
            self.tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self.tensor.data_ptr()


_memory = _Memory()


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, how: How, *, winners: bool = True
) -> tuple[Tensor, Tensor]:
    """The result, and what the gradient needs to know of it."""
    x, weight = x.contiguous(), weight.contiguous()
    bias = bias.contiguous() if bias is not None else None
    plan = _plan(x.shape, weight.shape, how)
    out = x.new_empty(plan.out)
    winner = torch.empty(plan.winners if winners else 0, dtype=torch.uint8, device="cpu")
    plan.forward(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        winner.data_ptr(),  # 0 if it is empty
        _memory.at(plan.scratch),
    )
    return out, winner


def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, winner: Tensor, g: Tensor, how: How, need: Need
) -> tuple[Tensor, ...]:
    """The gradients of x, weight and bias; empty where it is not needed."""
    x, weight, winner, g = x.contiguous(), weight.contiguous(), winner.contiguous(), g.contiguous()
    plan = _plan(x.shape, weight.shape, how)
    shapes = (x.shape, weight.shape, weight.shape[:1])
    gradients = tuple(x.new_empty(s if needed else 0) for s, needed in zip(shapes, need, strict=True))
    plan.backward(
        x.data_ptr(),
        weight.data_ptr(),
        g.data_ptr(),
        winner.data_ptr(),
        *(gradient.data_ptr() for gradient in gradients),
        _memory.at(plan.scratch),
    )
    return gradients


def _each(function: type[Function], info: Any, in_dims: Any, tensors: Any, *rest: Any) -> tuple[Any, Any]:
    """A function under vmap: for each of the stacked tensors, one after another."""
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
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if g is None:
            return None, None, None, None
        need = ctx.needs_input_grad[:3]
        again = torch.is_grad_enabled() or _transformed()
        gradients = (_Backward.apply if again else _backward)(*ctx.saved_tensors, g, ctx.how, need)
        return *(t if needed else None for t, needed in zip(gradients, need, strict=True)), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any, weight: Any, bias: Any, how: How) -> tuple[Any, Any]:
        return _each(_Forward, info, in_dims, (x, weight, bias), how)


class _Backward(Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, bias, _, g, ctx.how, _ = inputs
        ctx.save_for_backward(x, weight, bias, g)

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradient of the gradients, by PyTorch's operators."""
        x, weight, bias, g = ctx.saved_tensors
        here = (x, weight) if bias is None else (x, weight, bias)

        def gradients(g: Tensor, *here: Tensor) -> Any:
            return torch.func.vjp(lambda *here: plain(*(*here, None)[:3], *ctx.how), *here)[1](g)

        wanted = tuple(
            a if a.numel() else torch.zeros_like(t) for a, t in zip(along, here, strict=False)
        )
        dg, *rest = torch.func.vjp(gradients, g, *here)[1](wanted)
        dx, dweight, dbias = (*rest, None)[:3]
        return dx, dweight, dbias, None, dg, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        return _each(_Backward, info, in_dims, arguments[:5], *arguments[5:])
