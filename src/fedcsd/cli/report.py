"""Write a page with everything that runs recorded (`fedcsd report`)."""

from pathlib import Path

import rich_click as click

from fedcsd.cli.trained_runs import folder_for, runs_argument
from fedcsd.errors import UserError


@click.command()
@runs_argument
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="page to write; an old one is replaced  [dim](default: report.html in RUN, of several in the folder that holds them)[/dim]",
)
def report(paths: tuple[Path, ...], out: Path | None) -> None:
    """Write a page with everything that runs recorded, to open in a browser.

    RUN may be a comparison's folder, which stands for all runs in it. Seeds of the same settings are one
    line with a band. The page is one file that needs no network: it can be mailed, kept and printed.

    \b
      fedcsd report runs/compare
      fedcsd report runs/fedavg runs/fedcsd -o report.html
    """
    from fedcsd.results.report.page import FILE, write_report
    from fedcsd.results.terminal import say

    target = out.expanduser() if out else folder_for(paths) / FILE
    if target.is_dir():
        raise UserError(f"{target} is a folder: name a file, such as {target / FILE}")
    say(f"report: {write_report([path.expanduser() for path in paths], target)}")
