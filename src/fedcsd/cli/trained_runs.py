"""Share arguments, options and the output folder among commands on trained runs."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import rich_click as click

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
WARM_UP = (
    "rounds that a method trains before, so that it has what it keeps between rounds (SCAFFOLD, MOON, …); "
    "it then starts from the run's model all the same  [dim](default: 0)[/dim]"
)
IN_ANALYSIS = "[dim](default: analysis in RUN, of several in the folder that holds them)[/dim]"

run_argument = click.argument("path", type=PATH, metavar="RUN")
runs_argument = click.argument("paths", nargs=-1, required=True, type=PATH, metavar="RUN…")


def training_options(command: Command) -> Command:
    """Add the options of commands that train on from a run and write files."""
    as_run = "[dim](default: as the run)[/dim]"
    for option in (
        click.option(
            "-o",
            "--out",
            type=PATH,
            metavar="FOLDER",
            help=f"folder for the files; old ones are replaced  {IN_ANALYSIS}",
        ),
        click.option("--workers", type=int, help=f"clients that train at once  {as_run}"),
        click.option("--device", type=click.Choice(["cpu", "cuda"]), help=f"where to train  {as_run}"),
        click.option("--warm-up", type=click.IntRange(0), default=0, metavar="ROUNDS", help=WARM_UP),
    ):
        command = option(command)
    return command


def folder_for(paths: Sequence[Path]) -> Path:
    """Return the folder for output: of one run or comparison its own, of several the one that holds all."""
    places = [path.expanduser() for path in paths]
    if len({place.resolve() for place in places}) == 1:
        return places[0]
    common = os.path.commonpath([Path(os.path.normpath(place.absolute())).parent for place in places])
    return Path(common if any(place.is_absolute() for place in places) else os.path.relpath(common))
