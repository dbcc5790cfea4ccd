"""Show the samples that each client would hold (`fedcsd partition`)."""

from pathlib import Path
from typing import Any

import rich_click as click

from fedcsd.cli.options import (
    experiment_argument,
    gather,
    set_option,
    setting_options,
)
from fedcsd.config import Settings
from fedcsd.config.options import names_where
from fedcsd.errors import UserError


@click.command()
@experiment_argument
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="write the picture here: clients against classes (.png, .svg or .pdf)",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    help="write the partition here, for --partition saved --set partition.file=…",
)
@set_option
@setting_options("method", *names_where(Settings, deals=False))
def partition(
    experiment: Path | None,
    plot: Path | None,
    save: Path | None,
    assignments: tuple[str, ...],
    **options: Any,
) -> None:
    """Show who would hold what, without training.

    \b
      fedcsd partition --data digits --beta 0.1 --clients 10 --plot p.png
      fedcsd partition --data digits --partition classes --set partition.per_client=2
    """
    values = gather(experiment, options, assignments)

    from fedcsd.data.partition import packed
    from fedcsd.experiments.experiment import deal
    from fedcsd.files import write_whole, writing
    from fedcsd.results.partitions import plot_partition, table_of
    from fedcsd.results.style import SUFFIXES
    from fedcsd.results.terminal import say, show_table

    if plot and plot.suffix not in SUFFIXES:
        raise UserError(f"--plot writes .png, .svg or .pdf, not {plot.name}")
    data, parts, held = deal(values)
    show_table(*table_of(data, parts))
    if plot:
        with writing(plot, "choose another --plot"):
            plot.parent.mkdir(parents=True, exist_ok=True)
            plot_partition(data, parts, plot)
    if save:
        with writing(save, "choose another --save"):
            write_whole(save, packed(parts, held, len(data.y_train)))
    for path in filter(None, (plot, save)):
        say(f"written: {path}")
