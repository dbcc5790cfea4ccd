"""A multi-layer perceptron, for small images and tables."""

from collections.abc import Sequence
from math import prod

from torch import nn

from fedcsd.models.layers import Chain, Dense


def mlp(shape: Sequence[int], classes: int) -> nn.Module:
    """Two hidden layers of 128 and 64 with ReLU, on data of any shape."""
    layers = {"1": Dense(prod(shape), 128), "3": Dense(128, 64), "5": Dense(64, classes, relu=False)}
    return Chain(**layers)  # named as in an nn.Sequential with Flatten and ReLU between them
