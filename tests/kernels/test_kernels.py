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
    """Return a list of the kernel's halves that ran."""
    seen: list[str] = []

    def counted(name: str, half: Any) -> Any:
        return lambda *arguments, **options: (seen.append(name), half(*arguments, **options))[1]

    for name in ("_forward", "_backward"):
        monkeypatch.setattr(kernels, name, counted(name, getattr(kernels, name)))
    return seen


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensors, tuple[int, int, bool], Tensor]:
    """Draw tensors, padding, pool and relu, and the gradient of the result. They are small whole numbers, of which every
    sum is exact: equals in pooling and zeros at the ReLU are common, and results can be compared as bits."""
    batch, channels, planes = draw(st.integers(1, 40)), draw(st.integers(1, 7)), draw(st.integers(1, 9))
    side, padding, pool = (
        draw(st.sampled_from([1, 2, 3, 5, 6, 7])),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([1, 2])),
    )
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
    ours, theirs = ask(*tensors), ask(*tensors, dtype=torch.float64)
    assert kernels._fits(*ours, padding, pool)
    out = convolution(*ours, padding=padding, pool=pool, relu=relu)
    out.backward(g)
    with torch.no_grad():
        assert torch.equal(convolution(*ours, padding=padding, pool=pool, relu=relu), out)
    expected = plain(*theirs, padding, pool, relu)
    expected.backward(g.double())
    assert torch.equal(out.double(), expected)
    for a, b in zip(ours, theirs, strict=True):
        assert a is None or torch.equal(a.grad.double(), b.grad)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def example(batch: int = 19, *, bias: bool = True, seed: int = 0) -> Tensors:
    weights = numbers(6, 3, 5, 5, seed=seed + 1), numbers(6, seed=seed + 2) if bias else None
    return numbers(batch, 3, 13, 14, seed=seed), *weights


@compiled
@pytest.mark.parametrize("how", [(0, 2, True), (2, 2, False), (1, 1, True), (0, 1, False)])
@pytest.mark.parametrize("bias", [True, False])
def test_real_numbers_are_pytorchs_in_double_precision(
    calls: list[str], how: tuple[int, int, bool], bias: bool
) -> None:
    padding, pool, relu = how
    ours, theirs = ask(*example(37, bias=bias)), ask(*example(37, bias=bias), dtype=torch.float64)
    out, expected = convolution(*ours, padding=padding, pool=pool, relu=relu), plain(*theirs, *how)
    g = numbers(*out.shape, seed=3)
    out.backward(g)
    expected.backward(g.double())
    assert calls == ["_forward", "_backward"]
    for a, b in zip([out, *ours], [expected, *theirs], strict=True):
        for one, other in ((a, b),) if a is out else ((a.grad, b.grad),) if a is not None else ():
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * other.abs().max().item())


@compiled
def test_the_gradient_is_the_slope(calls: list[str]) -> None:
    """Without pooling and ReLU the layer is linear in each of its tensors: differences are slopes."""
    tensors = ask(*example(5))
    direction = [numbers(*t.shape, seed=9) for t in tensors]
    out = convolution(*tensors, padding=1)
    g = numbers(*out.shape, seed=4)
    gradients = torch.autograd.grad(out, tensors, g)
    for place, gradient in enumerate(gradients):
        moved = [t + d if i == place else t for i, (t, d) in enumerate(zip(tensors, direction, strict=True))]
        rise = ((convolution(*moved, padding=1) - out) * g).sum()
        torch.testing.assert_close(rise, (gradient * direction[place]).sum(), rtol=1e-3, atol=1e-2)


@compiled
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["x", "weight", "bias"])
@pytest.mark.parametrize("pool", [1, 2])
def test_what_is_not_finite_stays_so(calls: list[str], wrong: float, where: str, pool: int) -> None:
    """A number that is not finite stays so in every place of a pooling window."""
    for place in range(4):
        tensors = [t.clone() for t in example(3)]
        if where == "x":
            tensors[0][1, 1, 6 + place // 2, 6 + place % 2] = wrong
        elif where == "weight":
            tensors[1][2, 0, 1, 1] = wrong
        else:
            tensors[2][2] = wrong
        out, expected = convolution(*tensors, pool=pool, relu=True), plain(*tensors, 0, pool, True)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.isinf(), expected.isinf())
        assert out.isnan().any() or wrong == wrong


@compiled
def test_a_nan_reaches_the_gradient(calls: list[str]) -> None:
    x, weight, bias = example(3)
    x[0, 0, 5, 5] = float("nan")
    tensors = ask(x, weight, bias)
    convolution(*tensors, pool=2, relu=True).sum().backward()
    assert tensors[1].grad.isnan().any()


@compiled
def test_tensors_that_are_not_contiguous(calls: list[str]) -> None:
    x, weight, bias = example()
    turned = (
        x.transpose(2, 3).contiguous().transpose(2, 3),
        weight.to(memory_format=torch.channels_last),
        torch.stack([bias, bias], 1)[:, 0],
    )
    assert not any(t.is_contiguous() for t in turned)
    ours, theirs = ask(x, weight, bias), [t.detach().requires_grad_() for t in turned]
    results = [convolution(*tensors, padding=1, pool=2, relu=True) for tensors in (ours, theirs)]
    for out in results:
        out.sum().backward()  # whose gradient is one number, expanded
    assert torch.equal(*results)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))
    assert calls == ["_forward"] * 2 + ["_backward"] * 2


@compiled
def test_only_what_is_needed_is_computed(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = example()
    stored: list[int] = []
    half = kernels._forward
    monkeypatch.setattr(
        kernels, "_forward", lambda *a, **o: (r := half(*a, **o), stored.append(r[1].numel()))[0]
    )
    convolution(x, weight, bias, pool=2, relu=True)
    with torch.no_grad():
        convolution(*ask(x, weight, bias), pool=2, relu=True)
    assert stored == [0, 0]
    frozen = weight.detach(), bias.clone().requires_grad_()
    out = convolution(x, *frozen, pool=2, relu=True)
    assert stored[2] > 0
    out.sum().backward()
    assert frozen[0].grad is None
    expected = plain(x, *(own := (weight, bias.clone().requires_grad_())), 0, 2, True)
    expected.sum().backward()
    torch.testing.assert_close(frozen[1].grad, own[1].grad)


@compiled
def test_an_image_does_not_depend_on_its_neighbours(calls: list[str]) -> None:
    x, weight, bias = example(40)
    out = convolution(x, weight, bias, pool=2, relu=True)
    for rows in ([3], [17, 3], list(range(39, -1, -1)), [3] * 21):
        assert torch.equal(convolution(x[rows], weight, bias, pool=2, relu=True), out[rows])


def gradients_of(tensors: Tensors) -> list[Tensor]:
    asked = ask(*tensors)
    out = convolution(*asked, padding=1, pool=2, relu=True)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), asked)]


@compiled
def test_the_same_bits_every_time_and_in_threads(calls: list[str]) -> None:
    tasks = [example(batch, seed=batch) for batch in (1, 5, 16, 33, 40, 64)] * 4
    alone = [gradients_of(task) for task in tasks]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(gradients_of, tasks))
    for one, other in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@compiled
@pytest.mark.parametrize(
    "stacked", [(True, True, True), (False, True, True), (True, False, False), (True, True, False)]
)
def test_stacked_gradients_are_those_of_a_loop(calls: list[str], stacked: tuple[bool, ...]) -> None:
    many = [torch.stack(some) for some in zip(*(example(9, seed=s) for s in range(4)), strict=True)]
    given = [t if s else t[0] for t, s in zip(many, stacked, strict=True)]

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return convolution(x, weight, bias, padding=1, pool=2, relu=True).square().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    found = torch.vmap(gradient, in_dims=tuple(0 if s else None for s in stacked))(*given)
    assert calls == ["_forward"] * 4 + ["_backward"] * 4
    for k in range(4):
        tensors = ask(*(t[k] if s else t for t, s in zip(given, stacked, strict=True)))
        expected = torch.autograd.grad(loss(*tensors), tensors)
        assert all(torch.equal(a[k], b) for a, b in zip(found, expected, strict=True))


@compiled
def test_a_whole_model_stacked(calls: list[str]) -> None:
    models = [simple_cnn((1, 28, 28), 10) for _ in range(3)]
    parameters, _ = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    x, y = numbers(3, 7, 1, 28, 28), torch.arange(21).view(3, 7) % 10

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(models[0], parameters, (x,)), y)

    found = torch.vmap(torch.func.grad(loss))(parameters, x, y)
    for k, model in enumerate(models):
        F.cross_entropy(model(x[k]), y[k]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name][k], parameter.grad, rtol=1e-4, atol=1e-6)


@compiled
def test_gradients_of_gradients_and_other_transforms(calls: list[str]) -> None:
    tensors = ask(*example(4))

    def norm(function: Any, tensors: Any) -> Tensor:
        out = function(*tensors)
        return sum(
            g.square().sum() for g in torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        )  # type: ignore[return-value]

    def ours(*tensors: Any) -> Tensor:
        return convolution(*tensors, padding=1, pool=2, relu=True)

    def theirs(*tensors: Any) -> Tensor:
        return plain(*tensors, 1, 2, True)

    found, expected = (torch.autograd.grad(norm(f, tensors), tensors) for f in (ours, theirs))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())
    pairs = [
        torch.func.jvp(f, tuple(tensors), tuple(torch.ones_like(t) for t in tensors)) for f in (ours, theirs)
    ]
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b)
    frozen = ask(*example(4, bias=False)[:2])
    assert norm(lambda x, w: convolution(x, w, pool=2), frozen).isfinite()


@pytest.mark.parametrize(
    ("dtype", "shape", "side"),
    [(torch.float64, (4, 3, 13, 14), 5), (torch.float32, (3, 13, 14), 5), (torch.float32, (0, 3, 13, 14), 5)],
)
def test_pytorch_does_the_rest(
    calls: list[str], dtype: torch.dtype, shape: tuple[int, ...], side: int
) -> None:
    _, weight, bias = example()
    x = numbers(*shape).to(dtype)
    arguments = x, weight.to(dtype), bias.to(dtype)
    assert torch.equal(convolution(*arguments, pool=2, relu=True), plain(*arguments, 0, 2, True))
    assert calls == []


def test_wrong_shapes_are_refused_in_pytorchs_words() -> None:
    x, weight, bias = example()
    with pytest.raises(RuntimeError, match="channels"):
        convolution(x[:, :2], weight, bias)
    with pytest.raises(RuntimeError, match="size"):
        convolution(x[:, :, :3], weight, bias)
    with pytest.raises(ValueError, match="pool is 3"):
        convolution(x, weight, bias, pool=3)


@compiled
def test_autocast_and_compilers_see_pytorchs_operators(calls: list[str]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert convolution(*example(), pool=2).dtype == torch.bfloat16
    assert calls == []


@pytest.mark.parametrize(
    "options",
    [{}, {"padding": 2}, {"bias": False}, {"stride": 2}, {"dilation": 2}, {"groups": 3}, {"padding": "same"},
     {"padding": (1, 2)}, {"padding_mode": "reflect", "padding": 1}, {"pool": 1}, {"relu": False}],
)  # fmt: skip
def test_the_layer_is_a_convolution_with_pooling_and_relu(options: dict[str, Any]) -> None:
    own = {key: options[key] for key in ("pool", "relu") if key in options}
    others = {key: value for key, value in options.items() if key not in own}
    torch.manual_seed(0)
    layer = ConvPool(3, 6, 5, **options)
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 6, 5, **others)
    assert list(layer.state_dict()) == list(conv.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), conv.parameters(), strict=True))
    x = numbers(5, 3, 14, 15)
    y = conv(x)
    y = F.max_pool2d(y, 2) if own.get("pool", 2) == 2 else y
    torch.testing.assert_close(layer(x), F.relu(y) if own.get("relu", True) else y)


def test_the_layer_says_what_it_is() -> None:
    assert repr(ConvPool(1, 6, 5)).endswith("kernel_size=(5, 5), stride=(1, 1), pool=2, relu=True)")
    with pytest.raises(ValueError, match="pool is 4"):
        ConvPool(1, 6, 5, pool=4)


@pytest.mark.parametrize(
    ("channels", "planes", "pool", "faster"),
    [
        (1, 6, 2, True),
        (6, 16, 2, True),
        (16, 32, 2, True),
        (32, 32, 2, False),
        (3, 16, 1, True),
        (3, 32, 1, False),
    ],
)
def test_the_kernel_is_chosen_by_shape(channels: int, planes: int, pool: int, faster: bool) -> None:
    x, weight = torch.zeros(2, channels, 8, 8), torch.zeros(planes, channels, 3, 3)
    assert kernels._fits(x, weight, None, 0, pool) is faster


def test_fake_tensors_have_no_numbers_to_work_on() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert convolution(torch.randn(4, 1, 9, 9), torch.randn(2, 1, 3, 3), pool=2).shape == (4, 2, 3, 3)
