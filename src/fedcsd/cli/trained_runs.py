"""Share arguments, options and the output folder among commands on trained runs."""

import os
from collections.abc import Sequence
from pathlib import Path

import rich_click as click

run_argument = click.argument("path", type=click.Path(path_type=Path), metavar="RUN")
runs_argument = click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN…"
)
folder_option = click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="folder for the files; old ones are replaced  "
    "[dim](default: analysis in RUN, of several in the folder that holds them)[/dim]",
)
device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="where to train  [dim](default: as the run)[/dim]"
)
workers_option = click.option(
    "--workers", type=int, help="clients that train at once  [dim](default: as the run)[/dim]"
)
warm_up_option = click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=0,
    metavar="ROUNDS",
    help="rounds that a method trains before, so that it has what it keeps between rounds (SCAFFOLD, MOON, …); "
    "it then starts from the run's model all the same  [dim](default: 0)[/dim]",
)


def folder_for(paths: Sequence[Path]) -> Path:
    """Return the folder for output: of one run or comparison its own, of several the one that holds all."""
    places = [path.expanduser() for path in paths]
    if len({place.resolve() for place in places}) == 1:
        return places[0]
    common = os.path.commonpath([Path(os.path.normpath(place.absolute())).parent for place in places])
    return Path(common if any(place.is_absolute() for place in places) else os.path.relpath(common))
