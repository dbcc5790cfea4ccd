"""FedCSD's loss as one operation against the objectives it is made of."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedcsd.kernels import csd
from fedcsd.kernels.build import library
from fedcsd.kernels.vectors import cross_entropy
from helpers.csd import (
    VARIANTS,
    Given,
    close,
    decided,
    example,
    finite_where_pytorch_has_it,
    kernels,
    result,
    stacked_is_a_loop,
)

compiled = pytest.mark.skipif(library() is None, reason="needs a C compiler")


@st.composite
def problems(draw: st.DrawFn) -> tuple[Given, dict[str, Any]]:
    """Tensors of all sizes, whole numbers among them, of which many are equal; some prototypes are missing."""
    batch, classes = draw(st.integers(1, 70)), draw(st.integers(2, 130))
    z, t, p, y = example(batch, classes, seed=draw(st.integers(0, 2**32)), size=1.0)
    assert p is not None
    whole = draw(st.booleans())
    z, t = ((f.round() if whole else f) * draw(st.sampled_from([0.0, 0.1, 3.0, 50.0, 1e4])) for f in (z, t))
    p[draw(st.sampled_from([classes, 1, 2])) :: 2] = 0
    how = {**draw(st.sampled_from(VARIANTS)), "mu": draw(st.floats(1e-3, 2)), "tau": draw(st.floats(0.5, 20))}
    return (z, t, p * draw(st.sampled_from([1e-14, 1.0, 1e4])), y), how


@compiled
@settings(max_examples=300)
@given(problem=problems())
def test_it_is_what_the_objectives_say(problem: Any) -> None:
    tensors, how = problem
    assume(how["mask"] != "adaptive" or decided(tensors[1], tensors[3]))
    assert kernels._fits(*tensors, kernels.CsdOptions(**how))
    found = result(tensors, **how)
    close(found, tensors, how)
    with torch.no_grad():
        again = csd(*tensors, **how)
    assert all(torch.equal(a, b) for a, b in zip(again, found, strict=False))


@compiled
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))
def test_every_variant(calls: list[bool], variant: dict[str, Any]) -> None:
    how = {"mu": 0.3, "tau": 4.0, **variant}
    close(result(example(37), **how), example(37), how)
    assert calls == [True]


def test_worked_by_hand() -> None:
    """With two classes, no similarity and τ = 1, the target is the teacher's softmax, q = (3/4, 1/4)."""
    third, zero = torch.tensor([[3.0, 1.0]]).log(), torch.zeros(1, 2)
    y = torch.tensor([0])
    loss, spread = csd(zero, third, None, y, mu=2.0, tau=1.0, similarity=False)
    two = torch.tensor(2.0).log()
    torch.testing.assert_close(loss, (3 * two)[None])
    q = torch.tensor([0.75, 0.25])
    torch.testing.assert_close(spread, (-(q * q.log()).sum() / two)[None])
    gradient = result((zero, third, None, y), mu=2.0, tau=1.0, similarity=False)[2]
    torch.testing.assert_close(gradient, -torch.tensor([[0.5 - 1 + 2 * (0.5 - 0.75), 0.5 + 2 * 0.25]]))


def test_without_its_term_it_is_cross_entropy_to_the_last_bit() -> None:
    z, *others = example(33)
    loss, _, gradient = result((z, *others), mu=0.0, tau=10.0)
    z = z.requires_grad_()
    expected = cross_entropy(z, others[2])  # type: ignore[arg-type]
    assert torch.equal(loss, expected)
    weights = torch.linspace(-1, 2, 33)
    assert torch.equal(gradient, torch.autograd.grad((expected * weights).sum(), z)[0])


@compiled
def test_a_teacher_that_knows_nothing_is_filtered() -> None:
    for classes in (2, 3, 10, 100, 130):
        z, _, p, y = example(20, classes)
        flat = torch.full((20, classes), 7.3)
        loss = csd(z, flat, p, y, mu=1.0, tau=10.0)[0]
        torch.testing.assert_close(loss, F.cross_entropy(z, y, reduction="none"))


@compiled
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_first_of_equals_is_the_teachers_choice(calls: list[bool], device: str) -> None:
    z, _, _, _ = example(3, 4)
    t = torch.tensor([[1.0, 5.0, 5.0, 5.0]] * 3)
    y = torch.tensor([1, 2, 3])
    ours = [f.to(device) for f in (z, t)]
    loss = csd(*ours, None, y.to(device), mu=1.0, tau=10.0, similarity=False, mask="forcible")[0].cpu()
    assert ((loss - F.cross_entropy(z, y, reduction="none")).abs() > 1e-3).tolist() == [True, False, False]
    assert calls == [False]


@compiled
def test_what_is_not_finite_stays_so(calls: list[bool]) -> None:
    finite_where_pytorch_has_it("cpu")
    assert calls


@compiled
def test_the_same_bits_every_time_and_whatever_the_neighbours(calls: list[bool]) -> None:
    z, t, p, y = example(70, 13)
    how: dict[str, Any] = {"mu": 0.3, "tau": 4.0}
    z.requires_grad_()
    loss, spread = csd(z, t, p, y, **how)
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    for rows in (list(range(70)), [3], [69, 3], list(range(69, -1, -1)), [3] * 21):
        part = z.detach()[rows].requires_grad_()
        found = csd(part, t[rows], p, y[rows], **how)
        assert torch.equal(found[0], loss[rows])
        assert torch.equal(found[1], spread[rows])
        assert torch.equal(torch.autograd.grad(found[0].sum(), part)[0], gradient[rows])


@compiled
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("variant", [{}, {"similarity": False}, {"target": "uniform"}])
def test_stacked_it_is_what_a_loop_gives(calls: list[bool], shared: bool, variant: dict[str, Any]) -> None:
    stacked_is_a_loop("cpu", shared, variant)
    assert len(calls) == 2 + 3  # all clients at once, twice, and one by one


@compiled
def test_stacked_twice() -> None:
    """Stacks of stacks, whose prototypes are those of the inner, the outer, both or neither."""
    tensors = [torch.stack(f) for f in zip(*(example(5, 4, seed=s) for s in range(6)), strict=True)]  # type: ignore[arg-type]
    z, t, p, y = (f.view(2, 3, *f.shape[1:]) for f in tensors)
    how: dict[str, Any] = {"mu": 0.3, "tau": 4.0}

    def one(z: Tensor, t: Tensor, p: Tensor, y: Tensor) -> Tensor:
        return csd(z, t, p, y, **how)[0]

    for outer, inner in product((True, False), repeat=2):
        given = p[:, :] if outer and inner else p[:, 0] if outer else p[0] if inner else p[0, 0]
        within = torch.vmap(one, in_dims=(0, 0, 0 if inner else None, 0))
        found = torch.vmap(within, in_dims=(0, 0, 0 if outer else None, 0))(z, t, given, y)
        for a, b in product(range(2), range(3)):
            own = p[a if outer else 0, b if inner else 0]
            assert torch.equal(found[a, b], one(z[a, b], t[a, b], own, y[a, b]))


@compiled
def test_the_gradient_has_a_gradient(calls: list[bool]) -> None:
    z, t, p, y = example(5, 4)

    def steepness(z: Tensor, t: Tensor, p: Tensor) -> Tensor:
        z = z.detach().requires_grad_()
        loss = csd(z, t, p, y, mu=0.3, tau=4.0)[0]
        (gradient,) = torch.autograd.grad(loss.square().sum(), z, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), z)[0]

    expected = steepness(z.double(), t.double(), p.double())  # type: ignore[union-attr]
    torch.testing.assert_close(steepness(z, t, p).double(), expected, rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]

    def norm(z: Tensor, t: Tensor, p: Tensor) -> Tensor:
        inner = torch.func.grad(lambda z: csd(z, t, p, y, mu=0.3, tau=4.0)[0].square().sum())
        return inner(z).square().sum()

    twice = torch.vmap(torch.func.grad(norm), in_dims=(0, None, None))(torch.stack([z, z]), t, p)
    torch.testing.assert_close(twice.double(), torch.stack([expected] * 2), rtol=1e-4, atol=1e-4)
    assert calls


@compiled
def test_nothing_is_kept_that_nobody_needs(calls: list[bool]) -> None:
    z, t, p, y = example()
    csd(z, t, p, y, mu=1.0, tau=1.0)
    with torch.no_grad():
        csd(z.requires_grad_(), t, p, y, mu=1.0, tau=1.0)
    assert calls == [False, False]
    loss, spread = csd(z, t.clone().requires_grad_(), p, y, mu=1.0, tau=1.0)
    assert calls == [False, False, True]
    assert loss.requires_grad
    assert not spread.requires_grad


@compiled
def test_tensors_that_are_not_contiguous(calls: list[bool]) -> None:
    z, t, p, y = example()
    assert p is not None
    turned = [f.T.contiguous().T for f in (z, t, p)] + [torch.stack([y, y], 1)[:, 0]]
    assert not any(f.is_contiguous() for f in turned)
    how: dict[str, Any] = {"mu": 0.3, "tau": 4.0}
    pairs = zip(result((z, t, p, y), **how), result(turned, **how), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert calls == [True, True]


@compiled
@pytest.mark.parametrize("wrong", [-1, 10, -100, 2**40])
def test_a_label_that_is_no_class_is_refused(wrong: int) -> None:
    z, t, p, y = example()
    y[3] = wrong
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        csd(z, t, p, y, mu=1.0, tau=1.0)


def test_pytorch_does_the_rest(calls: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    z, t, p, y = example()
    assert p is not None
    how: dict[str, Any] = {"mu": 0.3, "tau": 4.0}
    expected = csd(z.double(), t.double(), p.double(), y, **how)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        csd(z, t, p, y, **how)
    assert csd(z.bfloat16(), t.bfloat16(), p.bfloat16(), y, **how)[0].shape == (9,)
    assert csd(z[:0], t[:0], p, y[:0], **how)[0].shape == (0,)
    along = torch.func.jvp(lambda z: csd(z, t, p, y, **how)[0], (z,), (torch.ones_like(z),))[1]
    torch.testing.assert_close(along, torch.zeros(9), atol=1e-4, rtol=0)  # softmax minds no shift
    with FakeTensorMode():
        some = torch.randn(9, 10), torch.randn(9, 10), torch.randn(10, 10), torch.zeros(9, dtype=torch.long)
        assert csd(*some, **how)[0].shape == (9,)
    monkeypatch.setattr(kernels, "library", lambda: None)
    torch.testing.assert_close(csd(z, t, p, y, **how)[0].double(), expected, rtol=1e-5, atol=1e-5)
    assert calls == []


def test_similarity_needs_prototypes() -> None:
    z, t, _, y = example()
    with pytest.raises(AssertionError, match="similarity needs prototypes"):
        csd(z, t, None, y, mu=1.0, tau=1.0)
