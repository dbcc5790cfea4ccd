"""The networks. Each file defines one factory of the file's name: `(shape, classes) -> nn.Module`.

`shape` is (channels, height, width) of one image. A model returns logits from a final `nn.Linear`;
that layer's input are the features. Users may also give any factory or class of their own.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fedcsd.errors import UserError
from fedcsd.registry import Registry

models = Registry("model", __name__, exclude=("network",))

Factory = Callable[[], nn.Module]


def choose(shape: tuple[int, ...]) -> str:
    """The model that `auto` stands for."""
    return "simple_cnn" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp"


def factory(model: str | Callable[..., nn.Module], shape: tuple[int, ...], classes: int) -> Factory:
    """A function without arguments that makes the model, from a name or a user's own factory.

    A user's factory is called with as many of (shape, classes) as it has required parameters.
    """
    make: Callable[..., nn.Module] = models.load(model) if isinstance(model, str) else model
    if isinstance(make, nn.Module):
        raise UserError(
            "model: give a function or class that makes the model, not a model (lambda: my_model)"
        )
    wanted = [
        p
        for p in inspect.signature(make).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    arguments: tuple[Any, ...] = (shape, classes)[: len(wanted)]
    return partial(make, *arguments)
