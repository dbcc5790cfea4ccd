"""Make the reference pages of the site from the code: settings, options of methods, commands, Python API.

Each function returns the text of one page as Markdown. The repository keeps none of them.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

import fedcsd
from fedcsd.cli.list import list_entries
from fedcsd.cli.main import cli
from fedcsd.config import Settings
from fedcsd.config.options import describe
from fedcsd.config.settings import DEFAULTS, Components, settings_where
from fedcsd.methods import methods

LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; bars within cells are escaped."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def settings_page() -> str:
    parts = [
        "# Settings",
        "Everything that defines a run. Each can be given on the command line (`--lr 0.1`), in a file "
        "(`lr = 0.1`), as `--set lr=0.1`, and from Python (`fedcsd.run(lr=0.1)`). Later layers go over "
        "earlier ones: defaults, file, options, `--set`. A run's `config.toml` has all of them as they were.",
        "## Chosen by name",
        "A name, or a table with a name and options: `--set data.size=64`, or `[data]` in a file.",
        table(
            ["setting", "default", "meaning"],
            [
                (f"`{name}`{{ #{name} }}<br>`--{name}`", f"`{default}`", prose(text))
                for name, default, text in describe(Components)
            ],
        ),
    ]
    for panel in dict.fromkeys(f.metadata["panel"] for f in fields(Settings)):
        mine = [f for f in fields(Settings) if f.metadata["panel"] == panel]
        parts += [f"## {panel}", table(["setting", "value", "default", "meaning"], map(setting_row, mine))]
    for what in ("datasets", "models", "partitions"):
        rows = [(f"`{name}`", *split_options(text)) for name, text in list_entries(what)]
        parts += [f"## {what.capitalize()} and their options", table(["name", "what it is", "options"], rows)]
    parts.append(f"These do not change a result: {listed(settings_where(result=False))}.")
    return "\n\n".join(parts) + "\n"


def setting_row(field: Any) -> tuple[str, str, str, str]:
    kind = get_type_hints(Settings)[field.name]
    flag = "--" + field.name.replace("_", "-")
    flags = f"`{flag}`" + (f", `--no-{flag[2:]}`" if kind is bool else "")
    default = str(field.default).lower() if kind is bool else str(field.default)
    return (
        f"`{field.name}`{{ #{field.name} }}<br>{flags}",
        values_of(kind, field.metadata),
        f"`{default}`" if default else "",
        prose(field.metadata["meaning"]),
    )


def values_of(kind: Any, limits: Any) -> str:
    """Return the values of a setting: its type and range, or its choices."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    bounds = [f"{sign} {limits[key]}" for key, sign in LIMITS.items() if limits.get(key) is not None]
    return " ".join([KINDS[kind], ", ".join(bounds)]).strip()


def split_options(text: str) -> tuple[str, str]:
    """Split `"what it is  (data.size=64, …)"` into its two parts."""
    about, _, options = text.partition("  (")
    return prose(about), ", ".join(f"`{o}`" for o in options.removesuffix(")").split(", ") if o)


def methods_page() -> str:
    parts = [
        "# Options of the methods",
        "Given behind the method's name (`--method fedcsd:mu=0.01`), as `--set method.mu=0.01`, in a file's "
        "`[method]` table, or from Python (`fedcsd.FedCSD(mu=0.01)`). A preset is a name for several "
        "options: `--method fedcsd:m1`. Each method has a page that says what it does.",
    ]
    for name in methods.names:
        cls = methods.load(name)
        parts += [f"## `{name}` {{ #{name} }}", f"{first_line(cls)} [Its page](../methods/{name}.md)."]
        rows = [(f"`{key}`", f"`{default}`", prose(text)) for key, default, text in describe(cls)]
        parts.append(table(["option", "default", "meaning"], rows) if rows else "It has no options.")
        presets = [
            (f"`{name}:{preset}`", ", ".join(f"`{key}={str(v).lower()}`" for key, v in chosen.items()))
            for preset, chosen in cls.presets.items()
        ]
        if presets:
            parts.append(table(["preset", "sets"], presets))
    return "\n\n".join(parts) + "\n"


def commands_page() -> str:
    parts = [
        "# Commands",
        "`fedcsd COMMAND --help` says the same in the terminal; `--debug` shows the traceback of an error.",
    ]
    for name in cli.list_commands(click.Context(cli)):
        parts += command_part(name, cli.commands[name])
    return "\n\n".join(parts) + "\n"


def command_part(name: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=f"fedcsd {name}")
    parts = [f"## fedcsd {name}", "```text\n" + " ".join(command.get_usage(context).split()[1:]) + "\n```"]
    text, *examples = inspect.cleandoc(command.help or "").split("\b\n")
    parts.append(prose(text.strip()))
    parts += [f"```text\n{inspect.cleandoc(lines).strip()}\n```" for lines in examples]
    given = set(DEFAULTS)
    options = [p for p in command.params if isinstance(p, click.Option)]
    # `resume` and the analyses have options of the same names with a meaning of their own.
    settings = [o for o in options if o.name in given] if len(options) > len(given) // 3 else []
    rows = [(flags_of(o), prose(o.help or "")) for o in options if o not in settings]
    if rows:
        parts.append(table(["option", "meaning"], rows))
    if settings:
        links = ", ".join(f"[`{max(o.opts, key=len)}`](settings.md#{o.name})" for o in settings)
        parts.append(f"Settings, each an option: {links}.")
    if epilog := getattr(command, "epilog", None):
        parts.append(prose(inspect.cleandoc(epilog)))
    return parts


def flags_of(option: click.Option) -> str:
    flags = ", ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
    if option.is_flag:
        return flags
    choices = "|".join(option.type.choices) if isinstance(option.type, click.Choice) else ""
    return f"{flags} `{option.metavar or choices or option.type.name.upper()}`"


API: dict[str, tuple[str, ...]] = {
    "Training and comparing": (
        "run",
        "resume",
        "load_run",
        "Run",
        "compare",
        "results.comparison.Comparison",
    ),
    "Data": ("Dataset",),
    "A method of your own": (
        "Method",
        "FedAvg",
        "config.option",
        "methods.base.Server",
        "methods.base.Ask",
        "messages.Reply",
        "training.client.Client",
        "training.task.Batch",
        "weights.Weights",
        "aggregation.weighted_mean",
        "aggregation.Mean",
        "aggregation.lerp",
        "training.optimizer.effective_steps",
    ),
    "Layers that are fast on a CPU": ("models.layers.ConvPool", "models.layers.Dense", "models.layers.Chain"),
    "What can go wrong": ("UserError", "RunStopped"),
}


def python_page() -> str:
    """Return the page of the names that `fedcsd` exports and of the classes to subclass."""
    parts = ["# Python API", "`import fedcsd` is quick: torch is loaded when a name is first used."]
    for title, names in API.items():
        parts.append(f"## {title}")
        parts += [f"::: fedcsd.{name}" for name in names]
    rest = [n for n in fedcsd.__all__ if n not in {name for names in API.values() for name in names}]
    parts += [
        "## Methods",
        "Each is a frozen dataclass of its options, to be given as `fedcsd.run(method=…)`; "
        "[what the options mean](methods.md).",
    ]
    parts += [f"::: fedcsd.{name}\n    options:\n      members: false" for name in rest]
    return "\n\n".join(parts) + "\n"


def prose(text: str) -> str:
    """Return the help's rich markup as Markdown, with HTML escaped."""
    text = re.sub(r"\[bold\](.*?)\[/bold\]", r"**\1**", text, flags=re.S)
    text = re.sub(r"\s*\[dim\]\((.*?)\)\[/dim\]", r" (\1)", text, flags=re.S)
    return text.replace("<", "&lt;")


def first_line(thing: Any) -> str:
    return prose(next(iter((thing.__doc__ or "").strip().splitlines()), ""))


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


PAGES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings_page,
    "reference/methods.md": methods_page,
    "reference/commands.md": commands_page,
    "reference/python.md": python_page,
}
