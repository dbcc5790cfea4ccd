"""Continue a run that was cut off, or train a finished one for longer (`fedcsd resume`)."""

from pathlib import Path
from typing import Any

import rich_click as click

from fedcsd.cli.options import resume_options
from fedcsd.cli.run import train_and_show
from fedcsd.cli.show import show_finished
from fedcsd.cli.trained_runs import run_argument
from fedcsd.errors import UserError


@click.command()
@run_argument
@resume_options
def resume(path: Path, **changes: Any) -> None:
    """Go on with a run that was cut off, to the same weights bit for bit.

    \b
      fedcsd resume runs/first
      fedcsd resume runs/first --rounds 100
    """
    from fedcsd.experiments.resuming import continued
    from fedcsd.experiments.running import load_run
    from fedcsd.results.terminal import say

    if job := continued(path, changes=changes):
        train_and_show(job, path)
        return
    finished = load_run(path)
    done = finished.summary["rounds"]
    if done > (changes["rounds"] or done):
        raise UserError(f"{path} has {done} rounds already: --rounds must be at least that")
    say(f"{path} is finished: {done} rounds. `fedcsd resume {path} --rounds N` trains it for longer.")
    show_finished(finished)
