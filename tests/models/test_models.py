"""Test the networks: their published sizes, and their behaviour in training."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcsd.errors import UserError
from fedcsd.models.alexnet import SixBySix, alexnet
from fedcsd.models.network import Network, find_classifier
from fedcsd.models.resnet import BasicBlock, Bottleneck, resnet18, resnet34, resnet50
from fedcsd.models.simple_cnn import simple_cnn
from fedcsd.weights import Layout

torch.set_num_threads(1)

Make = Callable[..., nn.Module]

imagenet18 = partial(resnet18, stem="imagenet")
group18 = partial(resnet18, norm="group")
group50 = partial(resnet50, norm="group")

EVERY = [
    pytest.param(simple_cnn, (1, 28, 28), 84, id="simple_cnn"),
    pytest.param(resnet18, (3, 16, 16), 512, id="resnet18"),
    pytest.param(resnet18, (1, 8, 11), 512, id="resnet18-smallest"),
    pytest.param(imagenet18, (4, 32, 40), 512, id="resnet18-imagenet-smallest"),
    pytest.param(group18, (3, 8, 8), 512, id="resnet18-group-smallest"),
    pytest.param(resnet34, (3, 16, 16), 512, id="resnet34"),
    pytest.param(resnet50, (3, 16, 16), 2048, id="resnet50"),
    pytest.param(group50, (3, 16, 16), 2048, id="resnet50-group"),
    pytest.param(alexnet, (3, 63, 70), 4096, id="alexnet"),
]


def empty(make: Make, shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """Return the model without numbers in it, which is quick and enough for shapes and counts."""
    with torch.device("meta"):
        return make(shape, classes, **options)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def images(count: int, *shape: int) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))


def seeded(make: Make, shape: tuple[int, ...], classes: int) -> nn.Module:
    torch.manual_seed(0)
    return make(shape, classes)


@pytest.mark.parametrize(
    ("make", "stem", "classes", "parameters"),
    [
        (resnet18, "cifar", 10, 11_173_962),
        (resnet34, "cifar", 10, 21_282_122),
        (resnet50, "cifar", 100, 23_705_252),
        (resnet18, "imagenet", 1000, 11_689_512),
        (resnet34, "imagenet", 1000, 21_797_672),
        (resnet50, "imagenet", 1000, 25_557_032),
    ],
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_residual_networks_have_the_published_sizes(
    make: Make, stem: str, classes: int, parameters: int, norm: str
) -> None:
    assert size(empty(make, (3, 224, 224), classes, stem=stem, norm=norm)) == parameters


def test_the_simple_cnn_has_the_published_size() -> None:
    assert size(empty(simple_cnn, (1, 28, 28), 10)) == 44_426


def test_alexnet_has_the_size_worked_out_by_hand() -> None:
    """Weights and biases of each layer, then weights and biases of the BatchNorm after it."""
    by_hand = [
        3 * 64 * 11 * 11 + 64,  # 23,296
        64 + 64,
        64 * 192 * 5 * 5 + 192,  # 307,392
        192 + 192,
        192 * 384 * 3 * 3 + 384,  # 663,936
        384 + 384,
        384 * 256 * 3 * 3 + 256,  # 884,992
        256 + 256,
        256 * 256 * 3 * 3 + 256,  # 590,080
        256 + 256,
        (256 * 6 * 6) * 4096 + 4096,  # 37,752,832
        4096 + 4096,
        4096 * 4096 + 4096,  # 16,781,312
        4096 + 4096,
        4096 * 10 + 10,  # 40,970
    ]
    model = empty(alexnet, (3, 256, 256), 10)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear | _BatchNorm)]
    assert [size(layer) for layer in layers] == by_hand
    assert size(model) == sum(by_hand) == 57_063_498


@given(height=st.integers(1, 20), width=st.integers(1, 20))
@example(height=7, width=7)
def test_pooling_to_six_by_six_is_pytorchs(height: int, width: int) -> None:
    x = torch.randn(2, 3, height, width, dtype=torch.float64, requires_grad=True)
    found, expected = SixBySix()(x), nn.AdaptiveAvgPool2d(6)(x)
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, slope) for y in (found, expected)))


@pytest.mark.parametrize(("make", "shape", "features"), EVERY)
def test_logits_and_features(make: Make, shape: tuple[int, ...], features: int) -> None:
    """Shapes are those expected in train and eval mode."""
    model = empty(make, shape, 7)
    zeros = torch.zeros(2, *shape, device="meta")
    classifier = find_classifier(model, zeros)
    assert classifier is model.classifier
    assert classifier.in_features == features
    for mode in (True, False):
        assert model.train(mode)(zeros).shape == (2, 7)


def without_gradient(network: Network) -> list[str]:
    """Return the names of the parameters whose gradient is zero all over."""
    whole = torch.cat([network.gradient, torch.zeros(network.layout.size - network.layout.trainable)])
    trained = {name for name, p in network.module.named_parameters() if p.requires_grad}
    return [n for n, g in network.layout.split(whole).items() if n in trained and not g.any()]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "shape", "features"), EVERY)
def test_one_sample_trains_and_gradients_reach_every_parameter(
    make: Make, shape: tuple[int, ...], features: int
) -> None:
    """BatchNorm uses its running statistics here: those of a batch would cancel a bias before it."""
    network = Network(seeded(make, shape, 7), torch.zeros(2, *shape))
    assert network.classifier is network.module.classifier
    before = network.weights().flat
    network.train(single=True)
    outputs = network(images(1, *shape))
    assert outputs.logits.shape == (1, 7)
    assert outputs.features.shape == (1, features)
    assert torch.equal(network.classifier(outputs.features), outputs.logits)
    network.differentiate(nn.functional.cross_entropy(outputs.logits, torch.tensor([3])))
    assert torch.isfinite(network.gradient).all()
    assert without_gradient(network) == []
    assert torch.equal(network.flat, before)


@pytest.mark.parametrize("make", [resnet18, resnet50, group18])
def test_gradients_of_a_batch_reach_every_parameter(make: Make) -> None:
    network = Network(seeded(make, (3, 16, 16), 5), torch.zeros(2, 3, 16, 16))
    network.train()
    network.differentiate(nn.functional.cross_entropy(network(images(4, 3, 16, 16)).logits, torch.arange(4)))
    assert torch.isfinite(network.gradient).all()
    assert without_gradient(network) == []


def test_a_step_down_the_gradient_lowers_the_loss() -> None:
    """A gradient is right with in-place operations: the loss falls as its slope predicts."""
    x, labels = images(4, 3, 16, 16).double(), torch.arange(4)
    network = Network(seeded(resnet18, (3, 16, 16), 5).double(), x)
    network.train()
    loss = nn.functional.cross_entropy(network(x).logits, labels)
    network.differentiate(loss)
    step = 1e-7
    with torch.no_grad():
        network.parameters.sub_(network.gradient, alpha=step)
        fallen = loss - nn.functional.cross_entropy(network(x).logits, labels)
    torch.testing.assert_close(fallen / step, network.gradient.square().sum(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("make", [group18, group50, partial(resnet34, norm="group", stem="imagenet")])
def test_group_norm_leaves_no_batch_norm(make: Make) -> None:
    model, other = empty(make, (3, 32, 32), 10), empty(resnet18, (3, 32, 32), 10)
    groups = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
    assert groups
    assert all(m.num_groups == 32 for m in groups)
    assert not any(isinstance(m, _BatchNorm) for m in model.modules())
    assert not list(model.buffers())
    assert not any(isinstance(m, nn.GroupNorm) for m in other.modules())


@pytest.mark.parametrize(("make", "alone"), [(group18, True), (resnet18, False)])
def test_only_with_group_norm_a_sample_is_seen_alone(make: Make, alone: bool) -> None:
    network = Network(seeded(make, (3, 8, 8), 10), torch.zeros(2, 3, 8, 8))
    network.train()
    one, others = images(1, 3, 8, 8), 5 * images(6, 3, 8, 8)
    with torch.no_grad():
        first, second = (network(torch.cat([one, rest])).logits[0] for rest in others.split(3))
    assert torch.allclose(first, second, rtol=1e-4, atol=1e-4) is alone


def test_the_stride_of_a_bottleneck_is_on_its_3x3() -> None:
    model = empty(resnet50, (3, 32, 32), 10)
    for stage, blocks in enumerate(model.stages):
        for place, block in enumerate(blocks):
            stride = (2, 2) if stage > 0 and place == 0 else (1, 1)
            assert block.conv2.kernel_size == (3, 3)
            assert block.conv2.stride == stride
            for conv in (block.conv1, block.conv3):
                assert (conv.kernel_size, conv.stride) == ((1, 1), (1, 1))
            if place > 0:
                assert isinstance(block.shortcut, nn.Identity)
            else:
                assert (block.shortcut[0].kernel_size, block.shortcut[0].stride) == ((1, 1), stride)


@pytest.mark.parametrize(
    ("make", "stem", "side", "sides"),
    [
        (resnet18, "cifar", 32, [32, 16, 8, 4]),
        (resnet34, "imagenet", 224, [56, 28, 14, 7]),
        (resnet50, "cifar", 8, [8, 4, 2, 1]),
        (resnet50, "imagenet", 32, [8, 4, 2, 1]),
    ],
)
def test_the_four_stages(make: Make, stem: str, side: int, sides: list[int]) -> None:
    model = empty(make, (3, side, side), 10, stem=stem)
    seen: list[tuple[int, ...]] = []
    for blocks in model.stages:
        blocks.register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape)))
    model(torch.zeros(2, 3, side, side, device="meta"))
    channels = [256, 512, 1024, 2048] if make is resnet50 else [64, 128, 256, 512]
    assert seen == [(2, c, s, s) for c, s in zip(channels, sides, strict=True)]


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_a_block_adds_to_its_shortcut(block: Any) -> None:
    """With its last norm at zero nothing is added; with a bias of one in it, one is."""
    same, halving = block(64 * block.expansion, 64, 1, nn.BatchNorm2d), block(32, 64, 2, nn.BatchNorm2d)
    for each, x in ((same, images(2, 64 * block.expansion, 6, 6).relu()), (halving, images(2, 32, 6, 6))):
        last = each.norm2 if block is BasicBlock else each.norm3
        nn.init.zeros_(last.weight)
        with torch.no_grad():
            assert torch.equal(each(x), each.shortcut(x).relu())
            nn.init.ones_(last.bias)
            assert torch.equal(each(x), (1 + each.shortcut(x)).relu())


def test_initial_weights() -> None:
    """Kaiming-normal over what a convolution feeds (variance 2 / fan-out), norms at 1 and 0."""
    for module in seeded(resnet18, (3, 32, 32), 10).modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert module.bias is None
            # The deviation of a sample deviation is 1/√(2n) of it: 1.7 % for the stem's 1,728 weights.
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.06)
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


def statistics(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm):
            yield from (f"{name}.running_mean", f"{name}.running_var")


@pytest.mark.parametrize(
    ("make", "norms"),
    # One after the stem, two or three a block, one a projection; AlexNet: five and two.
    [(resnet18, 1 + 2 * 8 + 3), (resnet34, 1 + 2 * 16 + 3), (resnet50, 1 + 3 * 16 + 4), (alexnet, 5 + 2)],
)
def test_running_statistics_are_weights(make: Make, norms: int) -> None:
    model = empty(make, (3, 64, 64), 10)
    layout, names = Layout.of(model), list(statistics(model))
    assert len(names) == 2 * norms
    assert set(names) <= set(layout.names)
    assert layout.trainable == size(model)
    assert set(layout.names) - set(names) == {n for n, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("make", "shape", "advice"),
    [
        (resnet18, (3, 7, 32), "at least 8×8, these are 3×7×32: use --model mlp"),
        (resnet34, (3, 8, 7), "at least 8×8"),
        (resnet50, (64,), "at least 8×8, these are 64: use --model mlp"),
        (resnet50, (0, 32, 32), "these are 0×32×32"),
        (imagenet18, (3, 31, 64), 'at least 32×32, these are 3×31×64: use stem="cifar"'),
        (imagenet18, (3, 4, 64), "at least 32×32, these are 3×4×64: use --model mlp"),
        (partial(resnet18, norm="layer"), (3, 32, 32), "unknown norm 'layer': choose from batch, group"),
        (partial(resnet18, stem="imagnet"), (3, 32, 32), "did you mean imagenet"),
        (alexnet, (3, 62, 256), "at least 63×63, these are 3×62×256: use --model simple_cnn"),
        (alexnet, (3, 256, 8), "use --model mlp"),
        (alexnet, (6,), "at least 63×63, these are 6: use --model mlp"),
        (simple_cnn, (1, 15, 28), "at least 16×16"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(make: Make, shape: tuple[int, ...], advice: str) -> None:
    with pytest.raises(UserError) as error:
        make(shape, 10)
    assert advice in str(error.value)
    assert "\n" not in str(error.value)
