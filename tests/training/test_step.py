"""Test the C code of a training step besides the model: cross-entropy, the optimizer, the images of a batch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fedcsd.config import Settings
from fedcsd.data import Dataset
from fedcsd.federation.backends import frames
from fedcsd.kernels.build import library
from fedcsd.kernels.csd import csd
from fedcsd.kernels.vectors import cross_entropy, look_up, slope_of
from fedcsd.training.optimizer import Sgd
from fedcsd.weights import Layout, Weights

compiled = pytest.mark.skipif(library() is None, reason="needs a C compiler")


@given(rows=st.integers(1, 40), classes=st.integers(1, 30), seed=st.integers(0, 99))
def test_cross_entropy_is_minus_the_logarithm_of_the_softmax(rows: int, classes: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    z, y = 8 * random.standard_normal((rows, classes)).astype(np.float32), random.integers(0, classes, rows)
    p = np.exp(z.astype(float)) / np.exp(z.astype(float)).sum(1, keepdims=True)
    logits = torch.from_numpy(z).requires_grad_()
    loss = cross_entropy(logits, torch.from_numpy(y))
    along = torch.from_numpy(random.standard_normal(rows).astype(np.float32))
    (gradient,) = torch.autograd.grad(loss, logits, along)
    np.testing.assert_allclose(loss.detach(), -np.log(p[np.arange(rows), y]), rtol=2e-6, atol=2e-6)
    expected = along.numpy()[:, None] * (p - np.eye(classes)[y])
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(cross_entropy(logits, torch.from_numpy(y)), loss)


def test_its_gradient_has_a_gradient() -> None:
    torch.manual_seed(0)
    z, y = torch.randn(5, 4, requires_grad=True), torch.randint(0, 4, (5,))
    second = []
    for loss in (cross_entropy(z, y), F.cross_entropy(z, y, reduction="none")):
        (first,) = torch.autograd.grad(loss.square().sum(), z, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), z)[0])
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-5)


def test_a_label_that_is_no_class_is_an_error() -> None:
    for wrong in (-1, 3):
        with pytest.raises(IndexError):
            cross_entropy(torch.zeros(2, 3), torch.tensor([0, wrong]))


@compiled
def test_a_kernels_loss_brings_the_slope_that_autograd_finds() -> None:
    z, t, y = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4), torch.randint(0, 4, (6,))
    for loss in (cross_entropy(z, y), csd(z, t, torch.eye(4), y, mu=0.5, tau=2.0)[0]):
        known = slope_of(loss, z)
        assert known is not None
        assert torch.equal(known * (1 / 6), torch.autograd.grad(loss.mean(), z, retain_graph=True)[0])
        assert slope_of(2 * loss, z) is None
        assert slope_of(loss, z.detach()) is None
    inner = (2 * z).requires_grad_()
    assert slope_of(cross_entropy(inner, y), z) is None


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_sgd_is_pytorchs(momentum: float, decay: float) -> None:
    torch.manual_seed(0)
    w = torch.randn(1003)
    ours, gradient = w.clone(), torch.zeros_like(w)
    theirs = torch.nn.Parameter(w.clone())
    sgd = Sgd(ours, gradient, Settings(lr=0.1, momentum=momentum, weight_decay=decay))
    reference = torch.optim.SGD([theirs], lr=0.1, momentum=momentum, weight_decay=decay)
    sgd.start()
    for _ in range(5):
        theirs.grad = torch.randn_like(w)
        gradient.copy_(theirs.grad)
        sgd.step(None, {})
        reference.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-6, atol=1e-6)


@compiled
@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 28, 28), (9,)])
def test_bytes_become_the_same_numbers_either_way(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, (40, *shape), dtype=np.uint8), np.arange(40) % 2
    data = Dataset.of_arrays(x, y, x, y)
    rows = torch.tensor([39, 0, 7, 7, 12])
    assert data.table is not None
    found = look_up(data.x_train, rows, data.table)
    assert found is not None
    torch.testing.assert_close(found, data.images(data.x_train[rows]), rtol=0, atol=1e-6)
    for wrong in (-1, 40):
        with pytest.raises(IndexError):
            look_up(data.x_train, torch.tensor([0, wrong]), data.table)


@pytest.mark.parametrize("size", [0, 100, 1 << 20])
def test_a_message_arrives_as_it_was_sent(size: int) -> None:
    """Values are passed through shared memory, with too little of it, and without any."""
    layout = Layout(("w",), ((50,),), 50)
    shared = frames.Shared(size) if size else None
    weights = Weights(layout, torch.randn(50), recipe=(3, 4, 0.5))
    values = {
        "weights": weights,
        "same": weights.flat,
        "part": torch.arange(12).view(3, 4)[:, 1:3],
        "none": torch.empty(0, 7),
        "flags": torch.tensor([True, False]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "number": 3,
    }
    message = frames.write({"item": 1}, values, shared)
    header, found, taken = frames.read(message, layout, shared)
    if shared is not None:
        shared.memory[:] = bytes(size)  # what was read stays as it is
    assert header == {"item": 1}
    assert list(found) == list(values)
    assert (found["weights"].token, found["weights"].recipe) == (weights.token, (3, 4, 0.5))
    assert torch.equal(found["weights"].flat, weights.flat)
    assert found["same"] is found["weights"].flat
    assert found["number"] == 3
    for name in ("part", "none", "flags", "half", "scalar"):
        assert found[name].dtype == values[name].dtype
        assert torch.equal(found[name], values[name])
    assert taken == 50 * 4 + 6 * 8 + 2 + 3 * 2 + 4
