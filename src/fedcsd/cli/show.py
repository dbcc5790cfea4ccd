"""Show the results of a run or a comparison (`fedcsd show`), for other commands too."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from fedcsd.cli.trained_runs import run_argument
from fedcsd.errors import UserError, end, note
from fedcsd.files import writing
from fedcsd.plugins import short

if TYPE_CHECKING:
    from fedcsd.experiments.running import Run


@click.command()
@run_argument
def show(path: Path) -> None:
    """Show the results of a run or a comparison, finished or not."""
    if (path / "comparison.json").is_file():
        from fedcsd.results.comparison import load_rows

        show_compared(path, *load_rows(path))
        show_paths(path / "report.html")
        return

    from fedcsd.experiments.runs.archive import is_run
    from fedcsd.experiments.summary import left_in, progress_of
    from fedcsd.results.terminal import say, show_table

    if not is_run(path) and (runs := progress_of(path)):
        show_table(["run", "rounds", "accuracy (%)"], runs)
        say(left_in(path))
        for other in sorted(path.glob("*/comparison.json")):
            say(f"a comparison: fedcsd show {other.parent}")
        return
    show_one(path)


def show_one(path: Path) -> None:
    """Print how far a run is, what was changed in it, and how to continue it."""
    from fedcsd.experiments.runs.archive import open_run
    from fedcsd.experiments.summary import summarise
    from fedcsd.results.terminal import say, show_run, sparkline

    run = open_run(path)
    settings, history, summary, divergence = run.settings, run.history(), run.summary, run.divergence
    if not history and not divergence:
        say(f"{path} has no finished round yet: `fedcsd resume {path}` goes on with it")
        return
    if history:
        show_run(settings, summary or summarise(history), finished=summary is not None)
        say(f"accuracy by round  {sparkline([r.get('test_accuracy') for r in history])}")
    for change in run.changes:
        say(str(change))
    if divergence:
        say(f"{divergence}. `fedcsd resume {path} --lr …` or `--on-divergence skip` goes on with it")
    elif summary is None:
        of = f"{len(history)} of {settings['rounds']} rounds"
        say(f"not finished: {of}. `fedcsd resume {path}` goes on with it")
    else:
        show_paths(path / "curves.png", path / "report.html")


def show_paths(*paths: Path) -> None:
    """Print the paths of files that exist."""
    from fedcsd.results.terminal import say

    for path in filter(Path.exists, paths):
        say(f"{path.stem}: {path}")


def show_finished(run: "Run") -> None:
    """Print the result of a run that has ended, and draw its curves and its report."""
    from fedcsd.results.curves import plot_curves
    from fedcsd.results.terminal import say, show_run

    assert run.path is not None
    show_run(run.settings, run.summary)
    say(f"run:    {run.path}")
    curves = run.path / "curves.png"
    try:
        with writing(curves):
            plot_curves({short(run.settings["method"]["name"]): [run.history]}, curves)
        say(f"curves: {curves}")
        show_report(run.path)
    except UserError as error:  # training is over and saved
        note(str(error))
    except KeyboardInterrupt as error:
        end(error, cause=f"{run.path} is finished, its pictures are not")
        raise


def show_compared(path: Path, rows: Sequence[Any], seeds: Sequence[int], settings: Mapping[str, Any]) -> None:
    """Print the table of a comparison and the paths of its files."""
    from fedcsd.results.terminal import say, show_comparison

    show_comparison(rows, seeds, settings)
    if any(divergence for row in rows for divergence in row.diverged):
        say("To continue a diverged run: `fedcsd resume RUN --lr …`, then repeat the comparison.")
    say(f"table:  {path / 'comparison.md'} (.tex, .csv, .json)")
    say(f"curves: {path / 'curves.png'}")


def show_report(folder: Path) -> None:
    """Write the report of a run or comparison that has ended, and print its path."""
    from fedcsd.results.report.page import report_beside
    from fedcsd.results.terminal import say

    if page := report_beside(folder):
        say(f"report: {page}")
