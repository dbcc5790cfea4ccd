"""`fedcsd list`: what there is to choose from."""

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import rich_click as click

from fedcsd.config.options import describe, toml_text
from fedcsd.errors import UserError, unknown
from fedcsd.plugins import spec_of

if TYPE_CHECKING:
    from fedcsd.methods import Method


@click.command(name="list")
@click.argument("what", metavar="methods|datasets|models|partitions")
@click.argument("name", required=False)
def list_(what: str, name: str | None) -> None:
    """What there is to choose from: methods, datasets, models or partitions.

    \b
      fedcsd list methods
      fedcsd list methods fedcsd      # one method, with what its options mean
    """
    from fedcsd.results.terminal import say, show_table

    kinds = ("methods", "datasets", "models", "partitions")
    if what not in kinds:
        raise unknown("list", what, kinds)
    if name and what != "methods":
        raise UserError(f"`fedcsd list {what}` takes no name: leave {name} out")
    if what == "methods":
        for one in _named(name) if name else ():
            show_method(one)
        if not name:
            list_methods()
        return
    show_table([what, ""], list_entries(what), left=2)
    if what == "datasets":
        say("or a path (.npz, parquet, a folder of images), or hub:owner/name: see docs/data.md")
    elif what == "models":
        say("or your own: my_model.py:factory, package.module:factory; see docs/models.md")


def _named(name: str) -> list[str]:
    """The methods of a name: one, or all of a file or module that has several."""
    from fedcsd.methods._own import choosable
    from fedcsd.plugins import imported, module_of

    spec = spec_of(name)
    if not spec.home or spec.name:
        return [name]
    module = module_of(spec.file) if spec.file else imported(spec.home)
    own = choosable(module)
    return [f"{name}:{one}" for one in own] if len(own) > 1 else [name]


def list_methods() -> None:
    """Every method that has a name, with its options; a broken one with what is wrong."""
    from fedcsd.methods import methods
    from fedcsd.methods._own import from_entry, installed
    from fedcsd.results.terminal import say, show_table

    rows = [(name, _about(methods.load(name)), _defaults(methods.load(name))) for name in methods.names]
    for name, entries in installed().items():
        home = ", ".join(entry.value for entry in entries)
        if name in methods.names:
            rows.append((name, f"{home} is hidden by the built-in method of that name", ""))
            continue
        try:
            cls = from_entry(name, entries)
            rows.append((name, f"{_first_line(cls)} ({home})", _defaults(cls)))
        except UserError as error:
            rows.append((name, f"({home}) cannot be used: {error}", ""))
    show_table(["method", "", "options"], rows, left=3)
    say("what the options mean: `fedcsd list methods NAME`; options are given as NAME:OPTION=VALUE")
    say("or your own: my_method.py:Class, package.module:Class; `fedcsd new-method` writes one to start from")


def _about(cls: type["Method"]) -> str:
    """Return what a built-in method does, without formulas: the first line of its file."""
    return _first_line(sys.modules[cls.__module__]).rstrip(".")


def _defaults(cls: type["Method"]) -> str:
    """The options of a method with their defaults, and its presets."""
    options = ", ".join(f"{key}={default}" for key, default, _ in describe(cls))
    presets = ", ".join(cls.presets)
    return f"{options}; presets {presets}" if presets else options


def show_method(name: str) -> None:
    """One method: where it is from, what its options mean, its presets."""
    from fedcsd.methods import methods
    from fedcsd.results.terminal import say, show_table

    cls = methods.load(name)
    say(f"  {_first_line(cls)}", bold=name)
    for text in inspect.cleandoc(sys.modules[cls.__module__].__doc__ or "").split("\n\n")[1:]:
        say(text if text.startswith(" ") else " ".join(text.split()))
    spec = spec_of(name)
    name = f"{name}:{cls.__name__}" if spec.home and not spec.name else name
    if options := describe(cls):
        show_table(["option", "default", "meaning"], options, left=3)
    presets = [
        (f"{name}:{preset}", ", ".join(f"{k}={toml_text(v)}" for k, v in settings.items()))
        for preset, settings in cls.presets.items()
    ]
    if presets:
        show_table(["preset", "sets"], presets, left=2)


def list_entries(what: str) -> list[tuple[str, str]]:
    """Name, and the first line of the docstring with the options there are."""
    from fedcsd.data import SOURCES, partitions, source
    from fedcsd.models import MODELS, find

    if what == "partitions":
        things: dict[str, Callable[..., Any]] = dict(partitions)
    else:
        things = (
            {name: source(name) for name in SOURCES}
            if what == "datasets"
            else {name: find(name) for name in MODELS}
        )
    key = {"datasets": "data", "models": "model", "partitions": "partition"}[what]
    return [(name, _first_line(thing) + _options(thing, key)) for name, thing in things.items()]


def _options(function: Any, key: str) -> str:
    """The options of a factory, as one sets them."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    hints = get_type_hints(function)
    texts = []
    for p in parameters:
        choices = "|".join(map(str, get_args(hints[p.name]))) if get_origin(hints[p.name]) is Literal else ""
        texts.append(f"{key}.{p.name}={choices or p.default}")
    return f"  ({', '.join(texts)})" if texts else ""


def _first_line(thing: Any) -> str:
    return next(iter((thing.__doc__ or "").strip().splitlines()), "")
