"""Follow a run in the browser while it trains (`fedcsd watch`)."""

from pathlib import Path

import rich_click as click

from fedcsd.cli.trained_runs import runs_argument


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
