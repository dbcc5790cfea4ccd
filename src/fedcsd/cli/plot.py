"""Draw what runs recorded (`fedcsd plot`)."""

from pathlib import Path

import rich_click as click

from fedcsd.cli.trained_runs import IN_ANALYSIS, PATH, folder_for, runs_argument
from fedcsd.errors import UserError


@click.command()
@runs_argument
@click.option(
    "--y",
    "metrics",
    metavar="NAME,…",
    help="what to show, a panel each: any measurement of metrics.jsonl  [dim](default: test_accuracy)[/dim]",
)
@click.option("--x", metavar="round|seconds|bytes", help="against what  [dim](default: round)[/dim]")
@click.option("--mask", is_flag=True, help="what FedCSD's mask filters, instead of --y")
@click.option("--target", is_flag=True, help="how far FedCSD's target is from uniform, instead of --y")
@click.option(
    "-o",
    "--out",
    type=PATH,
    metavar="FILE",
    help=f"picture to write: .png, .svg or .pdf  {IN_ANALYSIS.replace('analysis', 'all three, to analysis')}",
)
def plot(
    paths: tuple[Path, ...], metrics: str | None, x: str | None, mask: bool, target: bool, out: Path | None
) -> None:
    """Draw what runs recorded. Seeds of the same settings are one line with a band.

    RUN may be a comparison's folder, which stands for all runs in it.

    \b
      fedcsd plot runs/compare
      fedcsd plot runs/fedavg runs/fedcsd --y test_accuracy,logit_drift --x bytes -o figure.pdf
      fedcsd plot runs/fedcsd --mask
    """
    from fedcsd.results import groups, plots
    from fedcsd.results.style import SUFFIXES
    from fedcsd.results.terminal import show_written

    if mask and target:
        raise UserError("--mask and --target are two pictures: give one of them")
    if (mask or target) and (metrics is not None or x is not None):
        flags = "--mask" if mask else "--target", "--y" if metrics is not None else "--x"
        raise UserError(f"{flags[0]} is a picture of its own: leave out {flags[1]}")
    if out and out.suffix not in SUFFIXES:
        raise UserError(f"-o writes .png, .svg or .pdf, not {out.name}")
    histories = plots.grouped(groups.found(paths))
    wanted = [name.strip() for name in (metrics or "").split(",") if name.strip()] or ["test_accuracy"]
    x = x or "round"
    name = "mask" if mask else "target" if target else "-".join(wanted) + ("" if x == "round" else f"-by-{x}")
    stem = out.expanduser() if out else folder_for(paths) / "analysis" / name
    if mask:
        show_written(plots.plot_mask(histories, stem))
    elif target:
        show_written(plots.plot_target(histories, stem))
    else:
        show_written(plots.plot(histories, stem, y=wanted, x=x))
