"""Compare the FedCSD loss with an independent NumPy version, numbers worked out by hand and its symmetries."""

from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedcsd.objectives import authors_csd_loss, csd_loss, csd_target, similarity_weights, soft_label_mask


def numpy_csd(
    z: Any, zt: Any, protos: Any, y: Any, tau: float, similarity: bool, mask: str, target: str, scale: str
) -> Any:
    """Sample by sample, class by class, in float64, straight from the equations."""
    losses = []
    classes = z.shape[1]
    for i in range(len(z)):
        delta = np.zeros(classes)
        for c in range(classes):
            size = np.sqrt((z[i] ** 2).sum()) * np.sqrt((protos[c] ** 2).sum())
            delta[c] = (z[i] * protos[c]).sum() / size if size > 0 else 0.0
        weight = np.exp(delta) / np.exp(delta).sum()
        weight = weight * classes if scale == "classes" else weight
        refined = weight * zt[i] if similarity else zt[i]
        q = np.exp(refined / tau - np.max(refined / tau))
        q = np.full(classes, 1 / classes) if target == "uniform" else q / q.sum()
        shifted = z[i] / tau - np.max(z[i] / tau)
        log_p = shifted - np.log(np.exp(shifted).sum())
        raw = np.exp(zt[i] - zt[i].max())
        kept = {
            "adaptive": raw[y[i]] / raw.sum() > 1 / classes,
            "forcible": zt[i].argmax() == y[i],
            "none": True,
        }[mask]
        losses.append(float(kept) * tau**2 * -(q * log_p).sum())
    return np.array(losses)


def case(seed: int, batch: int, classes: int, size: float = 3.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    z, zt = (torch.randn(batch, classes, generator=g, dtype=torch.float64) * size for _ in range(2))
    prototypes = torch.randn(classes, classes, generator=g, dtype=torch.float64) * size
    return z, zt, prototypes, torch.randint(0, classes, (batch,), generator=g)


@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 9),
    classes=st.integers(2, 12),
    tau=st.sampled_from([0.5, 1.0, 4.0, 10.0]),
    similarity=st.booleans(),
    mask=st.sampled_from(["adaptive", "forcible", "none"]),
    target=st.sampled_from(["teacher", "uniform"]),
    scale=st.sampled_from(["none", "classes"]),
)
def test_equals_the_numpy_version(
    seed: int, batch: int, classes: int, tau: float, similarity: bool, mask: Any, target: Any, scale: Any
) -> None:
    z, zt, prototypes, y = case(seed, batch, classes)
    ours = csd_loss(
        z, zt, prototypes, y, tau=tau, similarity=similarity, mask=mask, target=target, similarity_scale=scale
    )
    theirs = numpy_csd(
        z.numpy(), zt.numpy(), prototypes.numpy(), y.numpy(), tau, similarity, mask, target, scale
    )
    np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-12)


def test_worked_by_hand() -> None:
    # z = (3, 4), prototypes along the axes: cosines 0.6 and 0.8; teacher (2, 0), label 0, tau 2.
    z, zt = torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    prototypes = torch.tensor([[7.0, 0.0], [0.0, 0.1]], dtype=torch.float64)
    weight = exp(0.6) / (exp(0.6) + exp(0.8))  # 0.450166
    assert weight == pytest.approx(0.450166, abs=1e-6)
    q0 = 1 / (1 + exp(-weight * 2 / 2))  # softmax of (0.900332, 0) / 2: 0.610679
    assert q0 == pytest.approx(0.610679, abs=1e-6)
    log_p0, log_p1 = -log(1 + exp(0.5)), -log(1 + exp(-0.5))  # softmax of (1.5, 2)
    expected = 4 * -(q0 * log_p0 + (1 - q0) * log_p1)
    assert expected == pytest.approx(3.117665, abs=1e-6)
    loss = csd_loss(z, zt, prototypes, torch.tensor([0]), tau=2.0)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    # The teacher is wrong about label 1: p = 0.119 < 1/2, so the sample is filtered.
    assert csd_loss(z, zt, prototypes, torch.tensor([1]), tau=2.0).item() == 0


@given(seed=st.integers(0, 1000), batch=st.integers(2, 8))
def test_permuting_the_batch_permutes_the_losses(seed: int, batch: int) -> None:
    z, zt, prototypes, y = (t.float() if t.is_floating_point() else t for t in case(seed, batch, 5))
    order = torch.randperm(batch, generator=torch.Generator().manual_seed(seed))
    whole = csd_loss(z, zt, prototypes, y, tau=10.0)
    torch.testing.assert_close(
        csd_loss(z[order], zt[order], prototypes, y[order], tau=10.0), whole[order], rtol=0, atol=1e-4
    )


def test_a_batch_of_one_is_the_same_as_inside_a_batch() -> None:
    z, zt, prototypes, y = case(3, 6, 5)
    whole = csd_loss(z, zt, prototypes, y, tau=10.0)
    alone = torch.cat(
        [csd_loss(z[i : i + 1], zt[i : i + 1], prototypes, y[i : i + 1], tau=10.0) for i in range(6)]
    )
    torch.testing.assert_close(alone, whole, rtol=1e-12, atol=1e-12)


def test_a_class_nobody_holds_has_similarity_zero() -> None:
    prototypes = torch.eye(3, dtype=torch.float64)
    prototypes[2] = 0
    weights = similarity_weights(torch.tensor([[1.0, 0.0, 5.0]], dtype=torch.float64), prototypes)
    cosines = np.array([1 / np.sqrt(26), 0.0, 0.0])
    np.testing.assert_allclose(weights[0].numpy(), np.exp(cosines) / np.exp(cosines).sum(), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_logits_stay_finite(dtype: torch.dtype) -> None:
    big = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [0.0, 0.0, 0.0]], dtype=dtype)
    y = torch.tensor([0, 1, 2])
    for z in (big, -big):
        z = z.clone().requires_grad_()
        for switches in (
            {},
            {"similarity": False},
            {"similarity_scale": "classes"},
            {"target": "uniform"},
            {"mask": "none"},
        ):
            loss = csd_loss(z, big, big, y, tau=1.0, **switches)
            (gradient,) = torch.autograd.grad(loss.sum(), z)
            assert loss.isfinite().all()
            assert gradient.isfinite().all()


def test_gradient_matches_finite_differences_of_the_log_probabilities() -> None:
    z, zt, prototypes, y = case(5, 4, 3)
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(csd_loss(z, zt, prototypes, y, tau=4.0).sum(), z)
    q = csd_target(z, zt, prototypes, tau=4.0)
    kept = soft_label_mask(zt, y)
    # d/dz of -tau^2 sum q log softmax(z/tau) with q constant is tau (softmax(z/tau) - q).
    torch.testing.assert_close(gradient, kept[:, None] * 4.0 * (torch.softmax(z / 4.0, 1) - q))
    assert not q.requires_grad


def test_gradcheck_with_a_constant_target() -> None:
    _, zt, prototypes, y = case(6, 3, 4)
    z = case(7, 3, 4)[0].requires_grad_()
    assert torch.autograd.gradcheck(lambda s: csd_loss(s, zt, prototypes, y, tau=3.0, similarity=False), (z,))


def test_no_gradient_into_teacher_or_prototypes() -> None:
    z, zt, prototypes, y = case(8, 4, 3)
    for tensor in (z, zt, prototypes):
        tensor.requires_grad_()
    csd_loss(z, zt, prototypes, y, tau=4.0, mask="none").sum().backward()
    assert z.grad is not None
    assert zt.grad is None
    assert prototypes.grad is None


@given(classes=st.integers(2, 1000), level=st.floats(-50, 50), label=st.integers(0, 10**6))
def test_a_teacher_at_exactly_one_over_c_is_filtered(classes: int, level: float, label: int) -> None:
    logits = torch.full((1, classes), level)
    assert soft_label_mask(logits, torch.tensor([label % classes])).item() == 0


def test_just_above_one_over_c_is_kept() -> None:
    logits = torch.zeros(1, 10, dtype=torch.float64)
    logits[0, 3] = 1e-9
    assert soft_label_mask(logits, torch.tensor([3])).item() == 1
    assert soft_label_mask(logits, torch.tensor([4])).item() == 0


def test_the_adaptive_mask_keeps_more_than_the_forcible_one() -> None:
    zt = torch.tensor([[2.0, 1.9, -5.0], [2.0, 1.9, -5.0], [2.0, 1.9, -5.0]])
    y = torch.tensor([0, 1, 2])
    assert soft_label_mask(zt, y, "forcible").tolist() == [1, 0, 0]
    assert soft_label_mask(zt, y, "adaptive").tolist() == [1, 1, 0]
    assert soft_label_mask(zt, y, "none").tolist() == [1, 1, 1]


def test_similarity_scale_makes_the_mean_weight_one() -> None:
    z, _, prototypes, _ = case(9, 4, 10)
    torch.testing.assert_close(
        similarity_weights(z, prototypes, "classes").mean(1), torch.ones(4, dtype=torch.float64)
    )


def test_weights_where_one_class_is_alike_and_all_others_opposite() -> None:
    """The largest weight is that for cosines 1 and -1, which makes targets flat."""
    z = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
    prototypes = torch.cat([0.1 * z, *[-7 * z] * 9])
    expected = [exp(2) / (exp(2) + 9), *[1 / (exp(2) + 9)] * 9]
    assert similarity_weights(z, prototypes)[0].tolist() == pytest.approx(expected, rel=1e-12)


def numpy_authors(z: Any, zt: Any, protos: Any, y: Any, tau: float) -> Any:
    def softmax(v: Any) -> Any:
        e = np.exp(v - v.max())
        return e / e.sum()

    losses = []
    for i in range(len(z)):
        delta = np.array([(z[i] @ p) / (np.linalg.norm(z[i]) * np.linalg.norm(p)) for p in protos])
        refined = softmax(delta) * zt[i]
        p, q = softmax(refined / tau), softmax(z[i] / tau)
        losses.append(
            float(softmax(refined)[y[i]] > 1 / z.shape[1]) * tau**2 * (p * (np.log(p) - np.log(q))).sum()
        )
    return np.array(losses)


@given(seed=st.integers(0, 1000))
def test_the_authors_variant_equals_its_numpy_version(seed: int) -> None:
    z, zt, prototypes, y = case(seed, 5, 4)
    theirs = numpy_authors(z.numpy(), zt.numpy(), prototypes.numpy(), y.numpy(), 4.0)
    np.testing.assert_allclose(
        authors_csd_loss(z, zt, prototypes, y, tau=4.0).numpy(), theirs, rtol=1e-9, atol=1e-12
    )


def test_the_authors_variant_differs_where_it_should() -> None:
    z, zt, prototypes, y = case(11, 3, 4)
    z.requires_grad_()
    # Its gradient also flows through the similarity: finite differences of the whole expression agree.
    assert torch.autograd.gradcheck(lambda s: authors_csd_loss(s, zt, prototypes, y, tau=4.0), (z,))
