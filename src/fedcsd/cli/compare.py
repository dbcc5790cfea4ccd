"""Put several methods on the same federation side by side (`fedcsd compare`)."""

from pathlib import Path
from typing import Any

import rich_click as click

from fedcsd.cli.options import (
    experiment_argument,
    gather,
    overwrite_option,
    parse_seeds,
    set_option,
    setting_options,
)
from fedcsd.cli.show import show_compared, show_report


@click.command()
@experiment_argument
@click.option(
    "--methods",
    required=True,
    metavar="A,B,…",
    help="methods, named as in `fedcsd run --method`, or all for every built-in one; the others are compared with the "
    "first. Presets and options go behind colons: fedcsd:m1:mu=0.01",
)
@click.option("--seeds", metavar="0,1,2", help="training seeds; 0-4 is 0,1,2,3,4  [dim](default: 0)[/dim]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/compare"),
    help="folder of the comparison  [dim](default: runs/compare)[/dim]",
)
@overwrite_option
@set_option
@setting_options("seed", "method")
def compare(
    experiment: Path | None,
    methods: str,
    seeds: str | None,
    out: Path,
    overwrite: bool,
    assignments: tuple[str, ...],
    **options: Any,
) -> None:
    """Train several methods on the same federation and put them side by side.

    Each method runs with each seed; the table has mean ± standard deviation and the difference to the
    first method, paired by seed. The same command again goes on where it was cut off. A run that
    diverges is shown as such, and the others go on.

    \b
      fedcsd compare --methods fedavg,fedcsd --seeds 0,1,2 --beta 0.1 --rounds 30 --out runs/compare
      fedcsd compare --methods fedcsd,fedcsd:m2,fedcsd:similarity=false --track-drift
      fedcsd compare --methods all,my_method.py:MyMethod
    """
    values = gather(experiment, options, assignments)
    numbers = parse_seeds(seeds, assignments)
    if numbers:
        values.pop("seed", None)  # the command's seeds replace that of a file

    from fedcsd.results import comparison
    from fedcsd.results.terminal import ProgressDisplay

    out = out.expanduser()
    with ProgressDisplay() as progress:
        result = comparison.compare(
            methods,
            numbers,
            out=out,
            overwrite=overwrite,
            on_start=lambda label, seed, rounds, more: progress.follow(f"{label} seed {seed}", rounds, more),
            **values,
        )
    show_compared(out, result.rows, result.seeds, result.settings)
    show_report(out)
