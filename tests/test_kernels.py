"""The compiled convolution against PyTorch's operators, and how it is built."""

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedcsd.kernels import convolution
from fedcsd.kernels.build import library
from fedcsd.models.layers import ConvPool
from fedcsd.models.simple_cnn import simple_cnn

kernels: Any = sys.modules["fedcsd.kernels.convolution"]
compiled = pytest.mark.skipif(library() is None, reason="needs a C compiler")
Tensors = tuple[Tensor, Tensor, Tensor | None]


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, pool: int, relu: bool) -> Tensor:
    y = F.conv2d(x, weight, bias, padding=padding)
    y = F.max_pool2d(y, pool)
    return F.relu(y) if relu else y


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which halves of the kernel ran; every shape goes to it."""
    seen: list[str] = []
    for name in ("_forward", "_backward"):

        def counted(*arguments: Any, _half: Any = getattr(kernels, name), _name: str = name, **options: Any) -> Any:
            seen.append(_name)
            return _half(*arguments, **options)

        monkeypatch.setattr(kernels, name, counted)
    monkeypatch.setattr(kernels, "_faster", lambda *_: True)
    return seen


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensors, tuple[int, int, bool], Tensor]:
    """Tensors, padding, pool and relu, and the gradient of the result. Small whole numbers, of which every
    sum is exact: equals in pooling and zeros at the ReLU are common, and results can be compared as bits."""
    batch, channels, planes = draw(st.integers(1, 40)), draw(st.integers(1, 7)), draw(st.integers(1, 9))
    side, padding, pool = draw(st.sampled_from([1, 2, 3, 5, 6, 7])), draw(st.integers(0, 3)), draw(st.sampled_from([1, 2]))
    least = max(1, side - 2 * padding + pool - 1)
    height, width = draw(st.integers(least, least + 9)), draw(st.integers(least, least + 9))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def whole(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=random).float()

    x, weight = whole(batch, channels, height, width), whole(planes, channels, side, side)
    bias = whole(planes) if draw(st.booleans()) else None
    how = (padding, pool, draw(st.booleans()))
    return (x, weight, bias), how, whole(*plain(x, weight, bias, *how).shape)


def ask(*tensors: Tensor | None, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [t if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]


@compiled
@settings(max_examples=150)
@given(problem=problems())
def test_whole_numbers_give_pytorchs_result_and_gradients_exactly(problem: Any) -> None:
    tensors, (padding, pool, relu), g = problem
    kernels._faster, faster = (lambda *_: True), kernels._faster
    try:
        ours, theirs = ask(*tensors), ask(*tensors, dtype=torch.float64)
        out = convolution(*ours, padding=padding, pool=pool, relu=relu)
        out.backward(g)
        with torch.no_grad():
            assert torch.equal(convolution(*ours, padding=padding, pool=pool, relu=relu), out)
    finally:
        kernels._faster = faster
    expected = plain(*theirs, padding, pool, relu)
    expected.backward(g.double())
    assert torch.equal(out.double(), expected)
    for a, b in zip(ours, theirs, strict=True):
        assert a is None or torch.equal(a.grad.double(), b.grad)
