"""Command-line options made from the settings, so that each is described once."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import rich_click as click
from click import get_current_context

from fedcsd.config import TABLES, Settings, layered, parse_assignments, read_toml
from fedcsd.errors import UserError
from fedcsd.naming import short

Command = TypeVar("Command", bound=Callable[..., Any])

NAMED = {
    "data": "data set: a name (see `fedcsd list datasets`), an .npz file, a folder of images, parquet files, or hub:owner/name",
    "model": "network: a name (see `fedcsd list models`), your own as file.py:factory or package.module:factory, or auto to fit the data",
    "partition": "how the data is dealt to clients (see `fedcsd list partitions`), or auto for what the data is for",
}
FEDERATION = (
    "data_dir",
    "train_size",
    "clients",
    "beta",
    "min_samples",
    "participation",
    "dropout",
    "holdout",
)
TRAINING = (
    "classifier",
    "augment",
    "rounds",
    "epochs",
    "batch_size",
    "lr",
    "momentum",
    "weight_decay",
    "on_divergence",
)
MACHINE = ("device", "workers", "precision", "engine", "compile")
NOT_DEALING = (  # what beside training does not matter to who holds what
    *MACHINE,
    "seed",
    "track_drift",
    "checkpoint_every",
    "client_state",
    "tensorboard",
    "mlflow",
    "participation",
    "dropout",
)
PANELS = (
    dict.fromkeys(FEDERATION, "The federation")
    | dict.fromkeys(TRAINING, "Training")
    | dict.fromkeys(MACHINE, "Where it runs")
)


def setting_options(
    *leave_out: str, usual: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Command], Command]:
    """A command-line option for every setting, with its meaning and default; `usual` says in words what
    it is where the command has defaults of its own."""

    def decorate(command: Command) -> Command:
        hints = get_type_hints(Settings)
        for f in reversed([f for f in fields(Settings) if f.name not in leave_out]):
            flag, kind = "--" + f.name.replace("_", "-"), hints[f.name]
            if kind is bool:
                flag += f"/--no-{flag[2:]}"
            shown = usual.get(f.name, f.default)
            default = f"  [dim](default: {shown})[/dim]" if kind is not bool and shown != "" else ""
            choice = click.Choice(get_args(kind)) if get_origin(kind) is Literal else kind
            text, panel = f.metadata["meaning"] + default, PANELS.get(f.name, "Reproducing and measuring")
            command = click.option(flag, f.name, default=None, type=choice, help=text, panel=panel)(command)
        for name, text in reversed([named for named in NAMED.items() if named[0] not in leave_out]):
            text += f"  [dim](default: {usual.get(name, TABLES[name])})[/dim]"
            command = click.option(
                f"--{name}", default=None, metavar="NAME", help=text, panel="The federation"
            )(command)
        return command

    return decorate


def moved_options(command: Command) -> Command:
    """Where things are now that a run found elsewhere."""
    for flag, metavar, what in (
        ("--data-dir", "DIR", "where published data sets are now, if they have moved"),
        ("--data", "PATH", "where your own data is now, if it has moved"),
        ("--model", "FILE.py:NAME", "where the file of a model of your own is now, if it has moved"),
        ("--method", "FILE.py:CLASS", "where the file of a method of your own is now, if it has moved"),
    ):
        command = click.option(flag, metavar=metavar, help=what)(command)
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
    """All layers of settings on top of each other."""
    from_file = read_toml(experiment) if experiment else {}
    given = {key: value for key, value in options.items() if value is not None}
    assigned = parse_assignments(assignments)
    _refuse_options({**from_file, **assigned})
    return layered(from_file, given, assigned)


def _refuse_options(values: Mapping[str, Any]) -> None:
    """Options of the command that are no settings cannot be given as such."""
    for option in get_current_context().command.params:
        if option.name in values and option.name not in {*Settings.__dataclass_fields__, *TABLES}:
            raise UserError(f"{option.name} is no setting: give it as {option.opts[0]}")


def parse_seeds(text: str | None, assignments: tuple[str, ...] = ()) -> tuple[int, ...] | None:
    """The seeds of --seeds; what --set says against --seeds and --methods is refused."""
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
    """`3`, or `0-4` for all from 0 to 4."""
    first, dash, last = text.partition("-")
    found = range(int(first), int(last) + 1) if first and dash else [int(text)]
    if not found:
        raise ValueError
    return found


def free_name(values: dict[str, Any]) -> Path:
    """A run directory that does not exist yet."""
    base = f"{short(values['method']['name'])}-{Path(values['data']['name'].removeprefix('hub:')).stem}"
    names = (Path("runs") / (base if n == 1 else f"{base}-{n}") for n in range(1, 10_000))
    return next(path for path in names if not path.exists())
