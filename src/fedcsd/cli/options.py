"""Make command-line options from the descriptions of the settings."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import rich_click as click
from click import get_current_context

from fedcsd.config import Settings
from fedcsd.config.settings import DEFAULTS, Components, settings_where
from fedcsd.config.toml import merge, parse_assignments, read_toml
from fedcsd.errors import UserError
from fedcsd.plugins import short

Command = TypeVar("Command", bound=Callable[..., Any])


def options_from(
    *classes: type, names: Iterable[str] | None = None, usual: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Command], Command]:
    """Add a command-line option for each option of these dataclasses that has a panel.

    Args:
        names: add only these
        usual: texts to show in place of a default, for a command with defaults of its own
    """

    def decorate(command: Command) -> Command:
        for cls in reversed(classes):
            hints = get_type_hints(cls)
            for f in reversed(fields(cls)):
                if not f.metadata["panel"] or (names is not None and f.name not in names):
                    continue
                flag, kind = "--" + f.name.replace("_", "-"), hints[f.name]
                flag += f"/--no-{flag[2:]}" if kind is bool else ""
                shown = usual.get(f.name, "" if kind is bool else f.default)
                text = f.metadata["meaning"] + (f"  [dim](default: {shown})[/dim]" if shown != "" else "")
                command = click.option(
                    flag,
                    f.name,
                    default=None,
                    type=click.Choice(get_args(kind)) if get_origin(kind) is Literal else kind,
                    metavar="NAME" if cls is Components else None,
                    help=text,
                    panel=f.metadata["panel"],
                )(command)
        return command

    return decorate


def setting_options(
    *leave_out: str, usual: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Command], Command]:
    """Add an option for every component and setting but those to leave out."""
    names = [name for name in DEFAULTS if name not in leave_out]
    return options_from(Components, Settings, names=names, usual=usual)


def resume_options(command: Command) -> Command:
    """Add an option for every setting that may change when a run is resumed."""
    names = settings_where(on_resume=("free", "mends"))
    usual = dict.fromkeys(names, "as the run has it")
    return options_from(Settings, names=names, usual=usual)(moved_options(command))


def moved_options(command: Command) -> Command:
    """Add an option for every setting that states where something is, to give its new place."""
    for name in reversed(settings_where(on_resume="moves")):
        text = f"where the run's {name.replace('_', ' ')} is now, if it has moved"
        command = click.option("--" + name.replace("_", "-"), metavar="PATH", help=text)(command)
    return command


def set_option_like(example: str) -> Callable[[Any], Any]:
    return click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="KEY=VALUE",
        help=f"any setting or option by name, such as {example}; may be repeated",
    )


experiment_argument = click.argument(
    "experiment", required=False, type=click.Path(path_type=Path), metavar="[EXPERIMENT.toml]"
)
out_option = click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="run directory  [dim](default: runs/METHOD-DATA, numbered)[/dim]",
)
set_option = set_option_like("method.mu=0.01")
overwrite_option = click.option("--overwrite", is_flag=True, help="replace what is at --out")


def gather(
    experiment: Path | None, options: Mapping[str, Any], assignments: tuple[str, ...]
) -> dict[str, Any]:
    """Merge the file, the options and the assignments of a command."""
    from_file = read_toml(experiment) if experiment else {}
    given = {key: value for key, value in options.items() if value is not None}
    assigned = parse_assignments(assignments)
    _refuse_options({**from_file, **assigned})
    return merge(from_file, given, assigned)


def _refuse_options(values: Mapping[str, Any]) -> None:
    """Refuse options of the command, such as `out`, that are given as settings."""
    for option in get_current_context().command.params:
        if option.name in values and option.name not in DEFAULTS:
            raise UserError(f"{option.name} is no setting: give it as {option.opts[0]}")


def parse_seeds(text: str | None, assignments: tuple[str, ...] = ()) -> tuple[int, ...] | None:
    """Return the seeds of --seeds; refuse --set with a seed or a method beside --seeds or --methods."""
    also = parse_assignments(assignments)
    if "name" in also.get("method", {}):
        raise UserError("--set names a method beside --methods: name all methods in --methods alone")
    if text is None:
        return None
    if "seed" in also:
        raise UserError(f"--set seed={also['seed']} beside --seeds: name all seeds in --seeds alone")
    try:
        seeds = tuple(seed for part in text.split(",") for seed in _range(part.strip()))
    except ValueError:
        raise UserError(f"--seeds takes whole numbers such as 0,1,2 or 0-2, not {text!r}") from None
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise UserError("--seeds needs different whole numbers from 0 on, such as 0,1,2")
    return seeds


def _range(text: str) -> Iterable[int]:
    """Return the numbers of `3` or `0-4`."""
    first, dash, last = text.partition("-")
    found = range(int(first), int(last) + 1) if first and dash else [int(text)]
    if not found:
        raise ValueError
    return found


def free_name(values: dict[str, Any]) -> Path:
    """Return a run directory that does not exist yet."""
    base = f"{short(values['method']['name'])}-{Path(values['data']['name'].removeprefix('hub:')).stem}"
    names = (Path("runs") / (base if n == 1 else f"{base}-{n}") for n in range(1, 10_000))
    return next(path for path in names if not path.exists())
