"""The commands that show runs in a browser: `fedcsd report` and `fedcsd watch`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rich_click as click

from fedcsd.cli.analysis import folder_for, runs_argument
from fedcsd.errors import Diverged, UserError


@click.command()
@runs_argument
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="page to write; what is there is replaced  [dim](default: report.html in RUN, of several in the folder that holds them)[/dim]",
)
def report(paths: tuple[Path, ...], out: Path | None) -> None:
    """One page with everything that runs recorded, to open in a browser.

    RUN may be a comparison's folder, which stands for all runs in it. Seeds of the same settings are one
    line with a band. The page is one file that needs no network: it can be mailed, kept and printed.

    \b
      fedcsd report runs/compare
      fedcsd report runs/fedavg runs/fedcsd -o report.html
    """
    from fedcsd.results.report.page import FILE, write
    from fedcsd.results.terminal import say

    places = [path.expanduser() for path in paths]
    target = out.expanduser() if out else folder_for(paths) / FILE
    if target.is_dir():
        raise UserError(f"{target} is a folder: name a file, such as {target / FILE}")
    say(f"report: {write(places, target)}")


@click.command()
@runs_argument
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="port on 127.0.0.1  [dim](default: a free one)[/dim]",
)
def watch(paths: tuple[Path, ...], port: int) -> None:
    """Follow a run in the browser while it trains.

    The same page as `fedcsd report` makes, served on this machine alone, which adds each round as it is
    done. RUN may be a comparison's folder, and need not exist yet. Ctrl-C ends it; training goes on.

    \b
      fedcsd watch runs/first
      fedcsd watch runs/compare --port 8000
    """
    from fedcsd.results.report.serve import serve

    serve([path.expanduser() for path in paths], port)


def show_report(folder: Path) -> None:
    """The report of a run or comparison that has ended, written and named."""
    from fedcsd.results.report.page import write_beside
    from fedcsd.results.terminal import say

    if page := write_beside(folder):
        say(f"report: {page}")


@contextmanager
def reported_if_diverged(folder: Path) -> Iterator[None]:
    """A run that diverges has a report too: it is the one that somebody will look into."""
    try:
        yield
    except Diverged:
        show_report(folder)
        raise
