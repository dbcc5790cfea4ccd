"""A multi-layer perceptron, for small images and tables."""

from collections.abc import Sequence
from math import prod

from torch import nn


def mlp(shape: Sequence[int], classes: int) -> nn.Module:
    """Two hidden layers of 128 and 64 with ReLU, on data of any shape."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(prod(shape), 128),
        nn.ReLU(),
        nn.Linear(128, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )
