"""Compare models of small layers in one call of C each way with PyTorch's operators."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedcsd.kernels.build import library
from fedcsd.models.layers import Chain, ConvPool, Dense
from fedcsd.models.network import Network, Outputs
from fedcsd.models.simple_cnn import simple_cnn

compiled = pytest.mark.skipif(library() is None, reason="needs a C compiler")


def whole(shape: tuple[int, ...], random: torch.Generator) -> Tensor:
    """Small whole numbers, of which every sum is exact: results can be compared as bits."""
    return torch.randint(-1, 2, shape, generator=random).float()


@st.composite
def problems(draw: st.DrawFn) -> tuple[Chain, Tensor, torch.Generator]:
    """Draw a model with or without convolutions, and images for it."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batch, channels, side = draw(st.integers(1, 70)), draw(st.integers(1, 3)), draw(st.integers(4, 9))
    layers: dict[str, Any] = {}
    x, size = torch.zeros(2, channels, side, side), channels
    if draw(st.booleans()):
        size = draw(st.integers(1, 7))
        relu, bias = draw(st.booleans()), draw(st.booleans())
        layers["conv"] = ConvPool(
            channels,
            size,
            3,
            padding=draw(st.integers(0, 1)),
            pool=draw(st.sampled_from([1, 2])),
            relu=relu,
            bias=bias,
        )
        x = layers["conv"](x)
    size = x[0].numel()
    for name in ("first", "second")[: draw(st.integers(0 if layers else 1, 2))]:
        out = draw(st.integers(1, 40))
        layers[name], size = Dense(size, out, relu=draw(st.booleans()), bias=draw(st.booleans())), out
    layers["last"] = Dense(size, draw(st.integers(2, 20)), relu=False, bias=draw(st.booleans()))
    model = Chain(**layers)
    for parameter in model.parameters():
        parameter.data = whole(tuple(parameter.shape), random)
    return model, whole((batch, channels, side, side), random), random


def by_autograd(network: Network, images: Tensor, along: Outputs) -> tuple[Outputs, Tensor]:
    """Return the outputs and the flat gradient of Σ along · outputs by PyTorch, layer after layer."""
    outputs = network(images)
    total = sum((a * o).sum() for a, o in zip(along, outputs, strict=True))
    found = torch.autograd.grad(total, network.trained, allow_unused=True)  # type: ignore[arg-type]
    pieces = [torch.zeros_like(p) if g is None else g for g, p in zip(found, network.trained, strict=True)]
    return outputs, torch.cat([piece.reshape(-1) for piece in pieces])


@compiled
@settings(max_examples=100)
@given(problem=problems())
def test_whole_numbers_give_pytorchs_outputs_and_gradient_exactly(problem: Any) -> None:
    model, images, random = problem
    network = Network(model, images[:2])
    assert network.chain is not None
    assert network.chain.plan(images) is not None
    outputs = network.record(images)
    along = Outputs(*(whole(tuple(o.shape), random) for o in outputs))
    network.differentiate(sum((a * o).sum() for a, o in zip(along, outputs, strict=True)))  # type: ignore[arg-type]
    expected, gradient = by_autograd(network, images, along)
    with torch.no_grad():
        alone = network(images)
    for ours, theirs, frozen in zip(outputs, expected, alone, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, frozen)
    assert torch.equal(network.gradient, gradient)


def cnn() -> Network:
    torch.manual_seed(0)
    return Network(simple_cnn((1, 28, 28), 10), torch.randn(2, 1, 28, 28))


@pytest.mark.parametrize("batch", [1, 10, 64, 100])
def test_a_step_of_the_simple_cnn_is_what_autograd_gives(batch: int) -> None:
    network = cnn()
    images, labels = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    for loss in (
        lambda o: F.cross_entropy(o.logits, labels),
        lambda o: F.cross_entropy(o.logits, labels, reduction="none") + o.features.square().sum(1),
        lambda o: o.features.square().mean(),
    ):
        network.differentiate(loss(network.record(images)))
        ours = network.gradient.clone()
        network.differentiate(loss(network(images)))
        torch.testing.assert_close(ours, network.gradient, rtol=1e-4, atol=1e-6)


@compiled
def test_an_image_does_not_depend_on_the_others() -> None:
    network, images = cnn(), torch.randn(150, 1, 28, 28)
    assert network.steady(images)
    with torch.no_grad():
        together = network(images)
        for part in (slice(0, 7), slice(60, 130), slice(149, 150)):
            for whole_batch, alone in zip(together, network(images[part]), strict=True):
                assert torch.equal(whole_batch[part], alone)


@compiled
def test_what_is_not_trained_has_no_gradient() -> None:
    model = simple_cnn((1, 28, 28), 10)
    for name in ("conv1", "fc1"):
        model.get_submodule(name).requires_grad_(False)
    network, images = Network(model, torch.randn(2, 1, 28, 28)), torch.randn(5, 1, 28, 28)
    assert network.chain is not None
    network.differentiate(network.record(images).logits.square().sum())
    ours = network.gradient.clone()
    network.differentiate(network(images).logits.square().sum())
    torch.testing.assert_close(ours, network.gradient, rtol=1e-4, atol=1e-5)


def test_not_a_number_is_not_hidden() -> None:
    network, images = cnn(), torch.randn(3, 1, 28, 28)
    images[1, 0, 5, 5] = torch.nan
    network.differentiate(network.record(images).logits.sum())
    assert network.gradient.isnan().any()
    with torch.no_grad():
        assert network(images).logits.isnan().any(1).tolist() == [False, True, False]


def test_a_model_that_does_something_else_is_left_to_autograd() -> None:
    class Twice(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def layers() -> dict[str, Any]:
        return {"a": Dense(4, 3), "b": Dense(3, 2, relu=False)}

    hooked = Chain(**layers())
    hooked.get_submodule("a").register_forward_hook(lambda *_: None)
    strided = Chain(a=ConvPool(1, 2, 3, stride=2), b=Dense(2, 2, relu=False))
    assert [model.links() for model in (Twice(**layers()), hooked, strided)] == [None] * 3
    assert Chain(**layers()).links() is not None


def test_its_layers_are_pytorchs_own_in_all_but_speed() -> None:
    model, plain = (
        Chain(a=Dense(12, 3), b=Dense(3, 2, relu=False)),
        nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.ReLU(), nn.Linear(3, 2)),
    )
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    x = torch.randn(5, 3, 4)
    assert torch.equal(model(x), plain(x))
    assert [name for name, _ in model.named_parameters()] == ["a.weight", "a.bias", "b.weight", "b.bias"]
