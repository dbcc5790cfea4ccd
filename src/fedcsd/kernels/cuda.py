"""Compute the fused convolution on a GPU, for one client or for many with weights of their own.

CUDA's own compiler, which comes with PyTorch, compiles `convolution.cu` for each shape at first use.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedcsd.kernels.build import switched_off
from fedcsd.kernels.calls import needs_pytorch, stacked

How = tuple[int, int, bool]
"""padding, pool, relu"""

SHARED = 48 * 1024  # bytes of a block
THREADS = 256
BLOCKS = 800  # are enough to keep a device busy: with more, a block takes several images


def fits(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> bool:
    """Tell if the kernel can compute this: few channels, small images, float32."""
    if switched_off() or not hasattr(torch.cuda, "_compile_kernel") or needs_pytorch("cuda"):
        return False
    if any(t.dtype is not torch.float32 or not t.is_cuda for t in (x, weight, bias) if t is not None):
        return False
    if x.dim() != 4 or weight.dim() != 4 or 0 in x.shape:
        return False
    (_, channels, height, width), (planes, of, tall, side) = x.shape, weight.shape
    padded = (height + 2 * padding) * (width + 2 * padding) * channels
    places = planes * (height + 2 * padding - side + 1) * (width + 2 * padding - side + 1)
    small = 4 * (padded + weight.numel()) <= SHARED and 8 * padded + 6 * places <= SHARED
    return small and tall == side and of == channels and side <= min(height, width) + 2 * padding


@lru_cache(maxsize=256)
def _kernel(name: str, shape: tuple[int, ...], planes: int, side: int, how: How, dx: bool) -> Any:
    channels, height, width = shape
    padding, pool, relu = how
    together = next(n for n in (4, 3, 2, 1) if planes % n == 0)  # planes that a thread computes at once
    constants = {
        "C": channels, "H": height, "W": width, "O": planes, "K": side, "P": padding, "S": pool,
        "RELU": int(relu), "OC": together, "DX": int(dx), "THREADS": THREADS,
    }  # fmt: skip
    head = "".join(f"#define {constant} {value}\n" for constant, value in constants.items())
    source = Path(__file__).with_name("convolution.cu").read_text(encoding="utf-8")
    return torch.cuda._compile_kernel(head + source, name)


def _forward(x: Tensor, weight: Tensor, bias: Tensor, how: How) -> tuple[Tensor, Tensor]:
    """Return the result and the pooling winners: x [..., B, C, H, W], weight [..., O, C, K, K], bias [..., O]."""
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    (batch, *shape), (planes, _, _, side), (padding, pool, _) = x.shape[-4:], weight.shape[-4:], how
    p, r = ((size + 2 * padding - side + 1) // pool for size in shape[1:])
    out = x.new_empty(*x.shape[:-3], planes, p, r)
    winner = torch.empty_like(out, dtype=torch.uint8)
    run = _kernel("forward", tuple(shape), planes, side, how, False)
    images = x.numel() // (shape[0] * shape[1] * shape[2])
    run(grid=(images, 1, 1), block=(128, 1, 1), args=[x, weight, bias, out, winner, batch])
    return out, winner


def _backward(x: Tensor, weight: Tensor, winner: Tensor, g: Tensor, how: How, dx: bool) -> tuple[Tensor, ...]:
    """Return the gradients of x (x itself if it is not needed), weight and bias; shapes as in `_forward`."""
    x, weight, g = x.contiguous(), weight.contiguous(), g.contiguous()
    (batch, *shape), (planes, _, _, side) = x.shape[-4:], weight.shape[-4:]
    images = x.numel() // (shape[0] * shape[1] * shape[2])
    each = max(n for n in range(1, 9) if batch % n == 0 and (images // n >= BLOCKS or n == 1))
    weights = planes * shape[0] * side * side
    parts = x.new_empty(*x.shape[:-4], batch // each, weights + planes)
    found = torch.empty_like(x) if dx else x
    run = _kernel("backward", tuple(shape), planes, side, how, dx)
    arguments = [x, weight, g, winner, found, parts, batch, each]
    run(grid=(images // each, 1, 1), block=(THREADS, 1, 1), args=arguments)
    sums = parts.sum(-2)
    return found, sums[..., :weights].reshape(weight.shape), sums[..., weights:]


class CudaForward(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, how: How) -> tuple[Tensor, Tensor]:
        return _forward(x, weight, bias, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, ctx.how = inputs
        ctx.save_for_backward(x, weight, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return None, None, None, None
        need = bool(ctx.needs_input_grad[0])
        dx, dweight, dbias = CudaBackward.apply(*ctx.saved_tensors, g, ctx.how, need)  # type: ignore[no-untyped-call]
        return dx if need else None, dweight, dbias, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any, weight: Any, bias: Any, how: How) -> tuple[Any, Any]:
        together = stacked(info, in_dims, (x, weight, bias))
        return CudaForward.apply(*together, how), (0, 0)  # type: ignore[no-untyped-call]


class CudaBackward(Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("the fused convolution has no gradient of its gradient: set FEDCSD_KERNELS=off")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> tuple[Any, Any]:
        together = stacked(info, in_dims, arguments[:4])
        return CudaBackward.apply(*together, *arguments[4:]), (0, 0, 0)  # type: ignore[no-untyped-call]
