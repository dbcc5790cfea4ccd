"""Compare outputs of every built-in model with recorded ones, which fix padding, activations and BatchNorm's constants.

Parameters are a fixed function of their place, so no random number generator takes part. Computed in float64, the
outputs differ between machines by less than 10⁻⁹ of themselves, and by more than 10⁻⁶ with any of these faults.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fedcsd.models.alexnet import alexnet
from fedcsd.models.mlp import mlp
from fedcsd.models.resnet import resnet18, resnet34, resnet50
from fedcsd.models.simple_cnn import simple_cnn


def scattered(count: int, seed: int) -> Tensor:
    """Return numbers between -1/2 and 1/2 that look random."""
    place = torch.arange(65537)  # a prime, after which they repeat
    once = ((place * place + 31 * seed * place + 7 * seed) % 65537).double() / 65537 - 0.5
    return once.repeat(-(-count // 65537))[:count]


def filled(make: Callable[..., nn.Module], shape: tuple[int, ...]) -> nn.Module:
    """Return the model in float64 with scattered parameters: weights scaled by fan-in, norms about 0.1, biases about 0."""
    with torch.device("meta"):
        model = make(shape, 5).double()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for seed, p in enumerate(model.parameters(), 1):
            values = scattered(p.numel(), seed).view(p.shape)
            p.copy_(values * (12 / p[0].numel()) ** 0.5 if p.dim() > 1 else values * 0.1)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm):
                module.weight.add_(0.1)
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.reset_running_stats()
    return model


def outputs(make: Callable[..., nn.Module], shape: tuple[int, ...]) -> list[float]:
    """Return three logits of a training step, and the same three with the running statistics after it."""
    model = filled(make, shape)
    count = 4
    images = scattered(count * torch.Size(shape).numel(), 99).view(count, *shape)
    with torch.no_grad():
        training, after = model.train()(images), model.eval()(images)
    return [*training[1, :3].tolist(), *after[1, :3].tolist()]


GOLDEN = {
    "mlp": [-1.12755961, -0.4238541562, 0.6053931691, -1.12755961, -0.4238541562, 0.6053931691],
    "simple_cnn": [
        -0.6319026063,
        0.04260523016,
        0.004300219873,
        -0.6319026063,
        0.04260523016,
        0.004300219873,
    ],
    "resnet18": [0.1199667125, -0.1059466808, -0.03187324033, 0.02490281231, -0.06044853166, -0.03362359037],
    "resnet18 group": [
        0.0006207453029,
        -0.1296980108,
        0.07536824897,
        0.0006207453029,
        -0.1296980108,
        0.07536824897,
    ],
    "resnet18 imagenet": [
        0.04628366815,
        -0.1046088334,
        -0.03093157361,
        0.02423666283,
        -0.06018097526,
        -0.03350466048,
    ],
    "resnet34": [
        -0.008372866199,
        0.005800636492,
        -0.0806410005,
        0.09032021948,
        -0.04607569042,
        -0.006267983626,
    ],
    "resnet50": [
        0.03376450956,
        -0.0230249227,
        -0.00811116249,
        -0.07452451293,
        -0.03202869964,
        -0.02414684901,
    ],
    "alexnet": [-0.1028758199, -0.09432585726, -0.02951303079, -0.08770794873, -0.07430379784, -0.0361256561],
}

MODELS = {
    "mlp": (mlp, (1, 8, 8)),
    "simple_cnn": (simple_cnn, (3, 20, 22)),
    "resnet18": (resnet18, (3, 16, 16)),
    "resnet18 group": (partial(resnet18, norm="group"), (3, 16, 16)),
    "resnet18 imagenet": (partial(resnet18, stem="imagenet"), (3, 40, 40)),
    "resnet34": (resnet34, (3, 16, 16)),
    "resnet50": (resnet50, (3, 16, 16)),
    "alexnet": (alexnet, (3, 96, 90)),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_recorded(name: str) -> None:
    assert outputs(*MODELS[name]) == pytest.approx(GOLDEN[name], rel=1e-6, abs=1e-12)
