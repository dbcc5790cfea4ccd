"""Make a multi-layer perceptron, for small images and tables."""

from collections.abc import Sequence
from math import prod

from torch import nn

from fedcsd.models.layers import Chain, Dense


def mlp(shape: Sequence[int], classes: int) -> nn.Module:
    """Make hidden layers of 128 and 64 with ReLU, for data of any shape."""
    return Chain(
        hidden1=Dense(prod(shape), 128),
        hidden2=Dense(128, 64),
        classifier=Dense(64, classes, relu=False),
    )
