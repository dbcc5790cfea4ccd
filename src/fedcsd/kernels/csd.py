"""Compute FedCSD's loss in one operation, in C on a CPU and in CUDA on a GPU, or else with the objectives.

Its dozens of small operations on [B, C] take longer to start than to compute. The kernel returns the loss, the
entropy of the target and the gradient of the loss at once; the backward pass is one multiplication.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from fedcsd.kernels.build import library, switched_off
from fedcsd.kernels.calls import addresses, memory, needs_pytorch, stacked, transformed
from fedcsd.kernels.vectors import cross_entropy
from fedcsd.objectives.csd import Mask, Scale, Target, csd_target, masked_distillation
from fedcsd.objectives.distillation import entropy

CLASSES = 1024  # of a row on a GPU, at most
WARPS = 4  # of a block on a GPU
MASKS = ("adaptive", "forcible", "none")


class CsdOptions(NamedTuple):
    """The options of the loss, as `csd` takes them."""

    mu: float
    tau: float
    similarity: bool
    mask: Mask
    target: Target
    similarity_scale: Scale


def csd(
    logits: Tensor,
    teacher_logits: Tensor,
    prototypes: Tensor | None,
    labels: Tensor,
    *,
    mu: float,
    tau: float,
    similarity: bool = True,
    mask: Mask = "adaptive",
    target: Target = "teacher",
    similarity_scale: Scale = "none",
) -> tuple[Tensor, Tensor]:
    """Compute `CE + μ · L_CSD` (`objectives.csd_loss`), and the entropy of the target as a share of log C.

    logits [B, C], teacher_logits [B, C], prototypes [C, C], labels [B] -> [B], [B]. The gradient goes into
    `logits` only. Prototypes are needed for the similarity only.
    """
    how = CsdOptions(float(mu), float(tau), similarity, mask, target, similarity_scale)
    if similarity and target == "teacher":
        assert prototypes is not None, "similarity needs prototypes"
    else:
        prototypes = None
    if not _fits(logits, teacher_logits, prototypes, labels, how):
        return plain(logits, teacher_logits, prototypes, labels, how)
    if transformed():
        result = _Csd.apply(logits, teacher_logits, prototypes, labels, how)  # type: ignore[no-untyped-call]
    elif torch.is_grad_enabled() and logits.requires_grad:
        result = _apply(logits, teacher_logits, prototypes, labels, how)
    else:
        result = _forward(logits, teacher_logits, prototypes, labels, how, slope=False)
    return result[0], result[1]


def plain(
    logits: Tensor, teacher: Tensor, prototypes: Tensor | None, labels: Tensor, how: CsdOptions
) -> tuple[Tensor, Tensor]:
    """Compute the same with PyTorch's operators. Rows may be stacked, [K, B, C], with their own prototypes or not."""
    if logits.dim() > 2:
        own = None if prototypes is None or prototypes.dim() == 2 else 0
        stacked = torch.vmap(partial(plain, how=how), in_dims=(0, 0, own, 0))
        together: tuple[Tensor, Tensor] = stacked(logits, teacher, prototypes, labels)
        return together
    mu, tau, similarity, mask, target, scale = how
    q = csd_target(
        logits, teacher, prototypes, tau=tau, similarity=similarity, target=target, similarity_scale=scale
    )
    distillation = masked_distillation(q, logits, teacher, labels, tau=tau, mask=mask)
    loss = cross_entropy(logits, labels) + mu * distillation
    return loss, entropy(q) / log(q.shape[1])


def _fits(
    logits: Tensor, teacher: Tensor, prototypes: Tensor | None, labels: Tensor, how: CsdOptions
) -> bool:
    """Tell if the kernel can compute this. Without its term the loss is PyTorch's cross-entropy, bit for bit."""
    shape, device = logits.shape, logits.get_device()  # −1 is the CPU
    if how.mu == 0 or len(shape) != 2 or shape[0] < 1 or shape[1] < 2:
        return False
    for t in (logits, teacher) if prototypes is None else (logits, teacher, prototypes):
        if t.dtype is not torch.float32 or t.get_device() != device or type(t) not in (Tensor, Parameter):
            return False
    if labels.dtype is not torch.int64 or labels.get_device() != device or labels.shape != shape[:1]:
        return False
    if teacher.shape != shape or (prototypes is not None and prototypes.shape != (shape[1], shape[1])):
        return False
    if needs_pytorch(logits.device.type):
        return False
    if logits.is_cpu:
        return library() is not None
    return (
        logits.is_cuda
        and shape[1] <= CLASSES
        and hasattr(torch.cuda, "_compile_kernel")
        and device == torch.cuda.current_device()
        and not switched_off()
    )


class Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("N", "each", "C", "similarity", "mask", "uniform")),
        *((name, ctypes.c_float) for name in ("scale", "mu", "tau")),
    ]


@lru_cache(maxsize=1024)
def _plan(rows: int, each: int, classes: int, how: CsdOptions) -> tuple[Callable[..., int], int]:
    """Return the C function for these shapes, and the bytes that it needs."""
    c = library()
    assert c is not None
    c.csd.argtypes, c.csd.restype = [ctypes.POINTER(Problem), *[ctypes.c_void_p] * 8], ctypes.c_int64
    c.csd_scratch_size.argtypes = [ctypes.POINTER(Problem)]
    c.csd_scratch_size.restype = ctypes.c_int64
    mask, uniform = MASKS.index(how.mask), how.target == "uniform"
    scale = classes if how.similarity_scale == "classes" else 1
    problem = ctypes.pointer(
        Problem(rows, each, classes, how.similarity, mask, uniform, scale, how.mu, how.tau)
    )
    return partial(c.csd, problem), c.csd_scratch_size(problem)


@lru_cache(maxsize=256)
def _kernel(classes: int, how: CsdOptions, slope: bool, _device: int) -> Any:
    """Compile the kernel for the current device."""
    constants = {
        "C": classes, "SIMILARITY": int(how.similarity), "MASK": MASKS.index(how.mask),
        "UNIFORM": int(how.target == "uniform"), "SLOPE": int(slope), "WARPS": WARPS,
        "SCALE": f"{classes if how.similarity_scale == 'classes' else 1}.f",
        "MU": f"{how.mu!r}f", "TAU": f"{how.tau!r}f",
    }  # fmt: skip
    head = "".join(f"#define {constant} {value}\n" for constant, value in constants.items())
    source = Path(__file__).with_name("csd.cu").read_text(encoding="utf-8")
    return torch.cuda._compile_kernel(head + source, "csd")


def _forward(
    logits: Tensor,
    teacher: Tensor,
    prototypes: Tensor | None,
    labels: Tensor,
    how: CsdOptions,
    *,
    slope: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the entropy and the gradient (empty without `slope`).

    logits, teacher [..., B, C], labels [..., B]; prototypes have the first few of these dimensions.
    """
    logits, teacher, labels = logits.contiguous(), teacher.contiguous(), labels.contiguous()
    classes, rows = logits.shape[-1], labels.numel()
    each = rows
    if prototypes is not None:
        prototypes = prototypes.contiguous()
        each = rows * classes * classes // prototypes.numel()
    loss = logits.new_empty(labels.shape)
    spread = logits.new_empty(labels.shape)
    found = torch.empty_like(logits) if slope else logits.new_empty(0)
    if logits.is_cuda:
        run = _kernel(classes, how, slope, logits.device.index)
        tensors = [logits, teacher, logits if prototypes is None else prototypes, labels, loss, spread, found]
        run(grid=(-(-rows // WARPS), 1, 1), block=(32 * WARPS, 1, 1), args=[*tensors, rows, each])
        return loss, spread, found
    function, scratch = _plan(rows, each, classes, how)
    wrong = function(*addresses(logits, teacher, prototypes, labels, loss, spread, found), memory.at(scratch))
    if wrong >= 0:
        raise IndexError(f"Target {labels.flatten()[wrong]} is out of bounds.")
    return loss, spread, found


class _Csd(Function):
    @staticmethod
    def forward(
        logits: Tensor, teacher: Tensor, prototypes: Tensor | None, labels: Tensor, how: CsdOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(logits, teacher, prototypes, labels, how)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.how = inputs
        _, spread, slope = output
        ctx.save_for_backward(slope, *tensors)
        ctx.first_is_slope = True  # see `vectors.slope_of`
        ctx.mark_non_differentiable(spread, slope)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if g is None:
            return None, None, None, None, None
        slope, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled() or transformed():
            return _Slope.apply(g, slope, *tensors, ctx.how), None, None, None, None  # type: ignore[no-untyped-call]
        return g.unsqueeze(-1) * slope, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, logits: Any, teacher: Any, prototypes: Any, labels: Any, how: CsdOptions
    ) -> tuple[Any, Any]:
        """Compute all rows at once; prototypes that all rows share are not repeated."""
        if prototypes is not None and not (in_dims[2] is None and prototypes.dim() == 2):
            (prototypes,) = stacked(info, in_dims[2:3], [prototypes])
        dims = in_dims[0], in_dims[1], in_dims[3]
        logits, teacher, labels = stacked(info, dims, [logits, teacher, labels])
        result = _Csd.apply(logits, teacher, prototypes, labels, how)  # type: ignore[no-untyped-call]
        return result, (0, 0, 0)


_apply: Any = super(Function, _Csd).apply  # `Function.apply` without its look at the signature


class _Slope(Function):
    """Return the gradient, which has a gradient of its own by PyTorch's operators."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: Tensor, slope: Tensor, *_: Any) -> Tensor:
        return g.unsqueeze(-1) * slope

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        g, _, *tensors, ctx.how = inputs
        ctx.save_for_backward(g, *tensors)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor | None, ...]:
        g, logits, teacher, prototypes, labels = ctx.saved_tensors

        def gradient(g: Tensor, logits: Tensor) -> Any:
            return torch.func.vjp(lambda z: plain(z, teacher, prototypes, labels, ctx.how)[0], logits)[1](g)[
                0
            ]

        dg, dlogits = torch.func.vjp(gradient, g, logits)[1](along)
        return dg, None, dlogits, None, None, None, None
