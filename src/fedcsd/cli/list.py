"""List methods, datasets, models and partitions with their options (`fedcsd list`)."""

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import rich_click as click

from fedcsd.config.options import describe, toml_text
from fedcsd.errors import UserError, unknown
from fedcsd.plugins import spec_of

if TYPE_CHECKING:
    from fedcsd.methods import Method

KEYS = {"methods": "method", "datasets": "data", "models": "model", "partitions": "partition"}
MORE = {
    "datasets": "or a path (.npz, parquet, a folder of images), or hub:owner/name: see docs/data.md",
    "models": "or your own: my_model.py:factory, package.module:factory; see docs/models.md",
}


@click.command(name="list")
@click.argument("what", metavar="methods|datasets|models|partitions")
@click.argument("name", required=False)
def list_(what: str, name: str | None) -> None:
    """List what there is to choose from: methods, datasets, models or partitions.

    \b
      fedcsd list methods
      fedcsd list methods fedcsd      # one method, with what its options mean
    """
    from fedcsd.results.terminal import say, show_table

    if what not in KEYS:
        raise unknown("list", what, KEYS)
    if what != "methods":
        if name:
            raise UserError(f"`fedcsd list {what}` takes no name: leave {name} out")
        show_table([what, ""], list_entries(what), left=2)
        if what in MORE:
            say(MORE[what])
    elif name:
        for one in _methods_of(name):
            show_method(one)
    else:
        show_methods()


def _methods_of(name: str) -> list[str]:
    """Return the methods of a name: one, or all of a file or module that has several."""
    from fedcsd.methods._own import choosable
    from fedcsd.plugins import imported, module_of

    spec = spec_of(name)
    if not spec.home or spec.name:
        return [name]
    module = module_of(spec.file) if spec.file else imported(spec.home)
    own = choosable(module)
    return [f"{name}:{one}" for one in own] if len(own) > 1 else [name]


def show_methods() -> None:
    """Print all methods that have a name, with their options; a broken one with its error."""
    from fedcsd.methods import methods
    from fedcsd.methods._own import from_entry, installed
    from fedcsd.results.terminal import say, show_table

    def options(cls: type["Method"]) -> str:
        texts = [f"{key}={default}" for key, default, _ in describe(cls)]
        return ", ".join(texts) + (f"; presets {', '.join(cls.presets)}" if cls.presets else "")

    rows = []
    for name in methods.names:
        cls = methods.load(name)
        about = _first_line(sys.modules[cls.__module__]).rstrip(".")
        rows.append((name, about, options(cls)))
    for name, entries in installed().items():
        home = ", ".join(entry.value for entry in entries)
        if name in methods.names:
            rows.append((name, f"{home} is hidden by the built-in method of that name", ""))
            continue
        try:
            cls = from_entry(name, entries)
            rows.append((name, f"{_first_line(cls)} ({home})", options(cls)))
        except UserError as error:
            rows.append((name, f"({home}) cannot be used: {error}", ""))
    show_table(["method", "", "options"], rows, left=3)
    say("what the options mean: `fedcsd list methods NAME`; options are given as NAME:OPTION=VALUE")
    say("or your own: my_method.py:Class, package.module:Class; `fedcsd new-method` writes one to start from")


def show_method(name: str) -> None:
    """Print one method: its description, the meaning of its options, its presets."""
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
    if cls.presets:
        rows = [
            (f"{name}:{preset}", ", ".join(f"{key}={toml_text(value)}" for key, value in values.items()))
            for preset, values in cls.presets.items()
        ]
        show_table(["preset", "sets"], rows, left=2)


def list_entries(what: str) -> list[tuple[str, str]]:
    """Return name and description of all datasets, models or partitions, with their options."""
    from fedcsd.data import SOURCES, partitions, source
    from fedcsd.models import MODELS, find

    things: Mapping[str, Callable[..., Any]] = partitions
    if what != "partitions":
        names, load = (SOURCES, source) if what == "datasets" else (MODELS, find)
        things = {name: load(name) for name in names}
    return [(name, _first_line(thing) + _options(thing, KEYS[what])) for name, thing in things.items()]


def _options(function: Callable[..., Any], key: str) -> str:
    """Return the options of a function as the user sets them: its keyword-only parameters."""
    hints, texts = get_type_hints(function), []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            choices = get_args(hints[p.name]) if get_origin(hints[p.name]) is Literal else ()
            texts.append(f"{key}.{p.name}={'|'.join(map(str, choices)) or p.default}")
    return f"  ({', '.join(texts)})" if texts else ""


def _first_line(thing: Any) -> str:
    return next(iter((thing.__doc__ or "").strip().splitlines()), "")
