"""Draw the features of test images in the plane (`fedcsd tsne`)."""

import json
from pathlib import Path
from typing import Any

import rich_click as click

from fedcsd.cli.trained_runs import folder_for, runs_argument, training_options


@click.command()
@runs_argument
@click.option(
    "--client",
    type=int,
    help="client of the local model  [dim](default: the one with the fewest classes)[/dim]",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    help="local epochs of the local model  [dim](default: as the run)[/dim]",
)
@click.option(
    "--samples",
    type=click.IntRange(min=10),
    default=2000,
    help="test images to show  [dim](default: 2000)[/dim]",
)
@training_options
def tsne(
    paths: tuple[Path, ...],
    client: int | None,
    epochs: int | None,
    samples: int,
    out: Path | None,
    **changes: Any,
) -> None:
    """Draw the features of test images in the plane (t-SNE), coloured by class.

    Of one run its global model and one local model, trained from it in one more round. Of several runs all
    global models, and of the last run two local models: trained with cross-entropy alone, and with the full
    local loss. With a FedAvg and a FedCSD run these are the paper's four panels. Printed, and below each panel,
    is how well the features themselves tell the classes apart.

    \b
      fedcsd tsne runs/first --client 3
      fedcsd tsne runs/fedavg runs/fedcsd
    """
    from fedcsd.files import check_writable
    from fedcsd.results.analysis import tsne as planes
    from fedcsd.results.terminal import ProgressDisplay, show_table, show_written

    runs = planes.labelled(paths)
    folder = out.expanduser() if out else folder_for(paths) / "analysis"
    check_writable(folder)
    with ProgressDisplay() as progress:
        written = planes.picture(
            runs,
            folder / "tsne",
            samples=samples,
            client=client,
            epochs=epochs or 0,
            report=progress.step,
            **changes,
        )
    show_table(*planes.table(json.loads(written[-1].read_text(encoding="utf-8"))))
    show_written(written)
