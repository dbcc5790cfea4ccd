"""Compare FedCSD's loss as one operation with the objectives in double precision."""

import sys
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcsd.kernels import csd

kernels: Any = sys.modules["fedcsd.kernels.csd"]
Given = tuple[Tensor, Tensor, Tensor | None, Tensor]
VARIANTS: list[dict[str, Any]] = [
    {"similarity": similarity, "mask": mask, "target": target, "similarity_scale": scale}
    for similarity, mask, target, scale in product(
        (True, False), ("adaptive", "forcible", "none"), ("teacher", "uniform"), ("none", "classes")
    )
    if scale == "none" or (similarity and target == "teacher")
]


def example(batch: int = 9, classes: int = 10, *, seed: int = 0, size: float = 3.0) -> Given:
    random = torch.Generator().manual_seed(seed)
    z, t, p = (torch.randn(n, classes, generator=random) * size for n in (batch, batch, classes))
    return z, t, p, torch.randint(0, classes, (batch,), generator=random)


def result(tensors: Any, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, entropy, and the gradient of a weighted sum of losses."""
    logits, *others = tensors
    logits = logits.detach().requires_grad_()
    loss, spread = csd(logits, *others, **how)
    weights = torch.linspace(-1, 2, len(loss), dtype=loss.dtype, device=loss.device)
    (gradient,) = torch.autograd.grad((loss * weights).sum(), logits)
    return loss.detach(), spread, gradient


def double(tensors: Any) -> list[Any]:
    return [t.cpu().double() if t is not None and t.is_floating_point() else t for t in tensors]


def close(found: Any, tensors: Any, how: dict[str, Any]) -> None:
    """Compare with the objectives in double precision, up to float32's rounding: an error of the refined logits is one of
    the target, which weighs μ τ² times the logits' spread."""
    z, t, p, y = tensors
    tau, mu = how["tau"], how["mu"]
    expected = result(double((z, t, p, y if y is None else y.cpu())), **how)
    spread, teacher = 1 + z.abs().max().item() / tau, 1 + t.abs().max().item() / tau
    if how["similarity_scale"] == "classes":
        teacher *= 8  # the greatest weight is at most e² / C
    allowed = 1 + mu * tau**2 * spread * teacher, teacher, 2 + 2 * mu * tau * teacher
    for a, b, times in zip(found, expected, allowed, strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=1e-5, atol=1e-6 * times)


def decided(teacher: Tensor, labels: Tensor) -> bool:
    """Tell if the adaptive mask is the same in any precision: no p_y is near 1/C, unless exactly 1/C."""
    p = F.softmax(teacher.double(), 1).gather(1, labels[:, None])[:, 0] * teacher.shape[1]
    flat = teacher.amax(1) == teacher.amin(1)
    return bool((((p - 1).abs() > 1e-4) | flat).all())


def finite_where_pytorch_has_it(device: str) -> None:
    """One sample is spoilt: it is so in the result as with PyTorch's operators, and the others are not."""
    for wrong, where, place in product(
        (float("nan"), float("inf"), -float("inf")), ("logits", "teacher"), (0, 5)
    ):
        for variant in VARIANTS:
            z, t, p, y = example(5, 6)
            y[2] = 5
            (z if where == "logits" else t)[2, place] = wrong
            how = {"mu": 0.3, "tau": 4.0, **variant}
            found = result([f if f is None else f.to(device) for f in (z, t, p, y)], **how)
            expected = result(double((z, t, p, y)), **how)
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a.isfinite().cpu(), b.isfinite()), (wrong, where, place, how)
            if where == "logits":
                assert not found[0][2].isfinite()


def stacked_is_a_loop(device: str, shared: bool, variant: dict[str, Any]) -> None:
    many = [torch.stack(f).to(device) for f in zip(*(example(9, 7, seed=s) for s in range(3)), strict=True)]  # type: ignore[arg-type]
    many[2] = many[2][0] if shared else many[2]

    def total(z: Tensor, t: Tensor, p: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        loss, spread = csd(z, t, p, y, mu=0.3, tau=4.0, **variant)
        return loss.square().sum(), (loss, spread)

    dims = (0, 0, None if shared else 0, 0)
    found, (loss, spread) = torch.vmap(torch.func.grad(total, has_aux=True), in_dims=dims)(*many)
    outer = torch.func.grad(lambda z: torch.vmap(total, in_dims=dims)(z, *many[1:])[0].sum())(many[0])
    assert torch.equal(outer, found)
    for k in range(3):
        z, t, p, y = (f if d is None else f[k] for f, d in zip(many, dims, strict=True))
        z = z.requires_grad_()
        value, alone = total(z, t, p, y)
        assert torch.equal(torch.autograd.grad(value, z)[0], found[k])
        assert torch.equal(loss[k], alone[0].detach())
        assert torch.equal(spread[k], alone[1])
