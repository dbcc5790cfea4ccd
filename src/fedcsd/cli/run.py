"""Train one federation (`fedcsd run`)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from fedcsd.cli.options import (
    experiment_argument,
    free_name,
    gather,
    out_option,
    overwrite_option,
    set_option,
    setting_options,
)
from fedcsd.cli.show import show_finished, show_report
from fedcsd.errors import Diverged
from fedcsd.plugins import short

if TYPE_CHECKING:
    from fedcsd.experiments.running import Job


@click.command()
@experiment_argument
@out_option
@overwrite_option
@set_option
@setting_options()
def run(
    experiment: Path | None,
    out: Path | None,
    overwrite: bool,
    assignments: tuple[str, ...],
    **options: Any,
) -> None:
    """Train one federation.

    Settings come from the defaults, then EXPERIMENT.toml, then the options here, then --set. A run's
    own config.toml is a valid EXPERIMENT.toml. Ctrl-C stops cleanly and says how to go on.

    \b
      fedcsd run --method fedcsd --data digits --clients 10 --beta 0.1 --rounds 30 --out runs/first
      fedcsd run experiment.toml --set method.mu=0.01 --set rounds=50
      fedcsd run --data mine.npz --method my_method.py:MyMethod:mu=0.1
    """
    values = gather(experiment, options, assignments)

    from fedcsd.experiments.choices import resolved
    from fedcsd.experiments.running import begin

    values = resolved(values)
    folder = out.expanduser() if out else free_name(values)
    train_and_show(begin(values, out=folder, overwrite=overwrite), folder)


def train_and_show(job: "Job", folder: Path) -> None:
    """Train a run to its end and print its result. A run that diverges has a report too."""
    from fedcsd.experiments.running import train
    from fedcsd.results.terminal import ProgressDisplay

    with ProgressDisplay() as progress:
        try:
            finished = train(job, progress.follow(short(job.config["method"]["name"]), job.rounds))
        except Diverged:
            show_report(folder)
            raise
    show_finished(finished)
