"""The networks: a factory each, `(shape, classes, *, options) -> nn.Module`.

`shape` is (channels, height, width) of one image. A model returns logits from a final `nn.Linear`;
that layer's input are the features. Users may also give any factory or class of their own.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from fedcsd.config import call_with
from fedcsd.errors import UserError, unknown

MODELS = {
    "simple_cnn": "simple_cnn:simple_cnn",
    "mlp": "mlp:mlp",
    "resnet18": "resnet:resnet18",
    "resnet34": "resnet:resnet34",
    "resnet50": "resnet:resnet50",
    "alexnet": "alexnet:alexnet",
}

Factory = Callable[[], nn.Module]


def choose(shape: tuple[int, ...]) -> str:
    """The model for data that names none."""
    return "simple_cnn" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp"


def find(name: str) -> Callable[..., nn.Module]:
    """The factory of a name, or of a user's own `package.module:factory`."""
    if ":" in name:
        return find_own(name)
    if name not in MODELS:
        raise UserError(f"{unknown('model', name, MODELS)}; or give your own as package.module:factory")
    module, _, function = MODELS[name].partition(":")
    found: Callable[..., nn.Module] = getattr(import_module(f"{__name__}.{module}"), function)
    return found


def find_own(name: str) -> Callable[..., nn.Module]:
    """`package.module:factory`, looked for in the current folder as well."""
    module, _, attribute = name.partition(":")
    if not module or not attribute or module.endswith(".py"):
        raise UserError(f"model {name!r}: give package.module:factory, without .py")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a file here hides none of Python's
    try:
        found: Callable[..., nn.Module] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise UserError(f"model {name}: cannot import {module} ({error})") from None
    except AttributeError:
        raise UserError(f"model {name}: {module} has no {attribute!r}") from None
    return found


def factory(
    model: str | Callable[..., nn.Module], options: Mapping[str, Any], shape: tuple[int, ...], classes: int
) -> Factory:
    """A function without arguments that makes the model, from a name or a user's own factory.

    A user's factory is called with as many of (shape, classes) as it has required parameters.
    """
    make = find(model) if isinstance(model, str) else model
    if isinstance(make, nn.Module):
        raise UserError(
            "model: give a function or class that makes the model, not a model (lambda: my_model)"
        )
    if not callable(make):
        raise UserError(f"model must be a name, or a function or class that makes the model, not {make!r}")
    wanted = [
        p
        for p in inspect.signature(make).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    arguments = (shape, classes)[: len(wanted)]
    return partial(_make, make, dict(options), arguments)


def _make(make: Callable[..., nn.Module], options: dict[str, Any], arguments: tuple[Any, ...]) -> nn.Module:
    try:
        module = call_with(make, options, "model", *arguments)
    except UserError:
        raise
    except Exception as error:
        name = getattr(make, "__name__", "it")
        raise UserError(
            f"the model could not be made: {name} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise UserError(f"the model factory must return an nn.Module; it returned a {type(module).__name__}")
    return module
