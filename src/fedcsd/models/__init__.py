"""Make networks: a factory for each, `(shape, classes, *, options) -> nn.Module`. Training does not belong here.

`shape` is (channels, height, width) of one image. A model returns logits from a final `nn.Linear`;
the input of that layer are the features. Users may also give a factory or class of their own.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from fedcsd.config.options import call_with
from fedcsd.errors import UserError, unknown
from fedcsd.plugins import check_unchanged, digest_of_source, file_of, imported, module_of, source_of

MODELS = {
    "simple_cnn": "simple_cnn:simple_cnn",
    "mlp": "mlp:mlp",
    "resnet18": "resnet:resnet18",
    "resnet34": "resnet:resnet34",
    "resnet50": "resnet:resnet50",
    "alexnet": "alexnet:alexnet",
}


def choose(shape: tuple[int, ...]) -> str:
    """Return the name of the model for data that names none."""
    return "simple_cnn" if len(shape) == 3 and min(shape[1:]) >= 16 else "mlp"


def find(name: str) -> Callable[..., nn.Module]:
    """Return the factory of a name, or of a user's `file.py:factory` or `package.module:factory`."""
    home, _, own = name.rpartition(":")
    if home or own.endswith(".py"):
        return find_own(home, own)
    if name not in MODELS:
        error = unknown("model", name, MODELS)
        raise UserError(f"{error}; or give your own as file.py:factory or package.module:factory")
    module, _, function = MODELS[name].partition(":")
    found: Callable[..., nn.Module] = getattr(import_module(f"{__name__}.{module}"), function)
    return found


def find_own(home: str, name: str) -> Callable[..., nn.Module]:
    """Return the function or class `name` of a file or module."""
    if not home or not name:
        file = home or name
        raise UserError(
            f"{file} does not say which function or class makes the model: {Path(file).name}:NAME"
        )
    path = file_of(home)
    module = module_of(path) if path else imported(home)
    if not hasattr(module, name):
        where, known = Path(home).name, functions_of(module)
        if not known:
            raise UserError(f"{where} has no function or class that could make the model")
        raise unknown(f"function or class of {where}", name, known)
    found: Callable[..., nn.Module] = getattr(module, name)
    return found


def functions_of(module: ModuleType) -> list[str]:
    """Return the names of the functions and classes that a module defines."""
    return [
        name
        for name, thing in vars(module).items()
        if callable(thing)
        and getattr(thing, "__module__", "") == module.__name__
        and not name.startswith("_")
    ]


def factory(
    model: str | Callable[..., nn.Module], options: Mapping[str, Any], shape: tuple[int, ...], classes: int
) -> "Factory":
    """Return a function without arguments that makes the model, from a name or a user's own factory.

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
    own = model if isinstance(model, str) and ":" in model else ""
    return Factory(make, dict(options), arguments, own, digest_of_source(make, own) if own else "")


@dataclass(frozen=True)
class Factory:
    """Makes a run's model with the code of its start, also when the file changes later."""

    make: Callable[..., nn.Module]
    options: dict[str, Any]
    arguments: tuple[Any, ...]
    name: str = ""
    """of a user's model; "" for one that is built in or given from Python"""
    digest: str = ""
    """of the file of a user's model"""

    def __call__(self) -> nn.Module:
        """Make the model."""
        try:
            module = call_with(self.make, self.options, "model", *self.arguments)
        except UserError:
            raise
        except Exception as error:
            name = getattr(self.make, "__name__", "it")
            raise UserError(
                f"the model could not be made: {name} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(module, nn.Module):
            raise UserError(
                f"the model factory must return an nn.Module; it returned a {type(module).__name__}"
            )
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a user's model by its name, for a process that does not share this one's memory."""
        if not self.digest:
            return Factory, (self.make, self.options, self.arguments)
        check_unchanged(source_of(self.make, self.name), self.digest)
        return _again, (self.options, self.arguments, self.name, self.digest)


def _again(options: dict[str, Any], arguments: tuple[Any, ...], name: str, digest: str) -> Factory:
    return Factory(find(name), options, arguments, name, digest)
