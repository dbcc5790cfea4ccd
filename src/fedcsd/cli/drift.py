"""Measure how far local models move away from the global one in a round (`fedcsd drift`)."""

from pathlib import Path
from typing import Any

import rich_click as click

from fedcsd.cli.trained_runs import folder_for, run_argument, training_options


@click.command()
@run_argument
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    default=10,
    help="local epochs of the round; the paper has 50  [dim](default: 10)[/dim]",
)
@click.option(
    "--methods",
    metavar="A,B,…",
    help="methods, named as in `fedcsd run --method`  [dim](default: those of the paper's Fig. 1, FedCSD and the run's own)[/dim]",
)
@click.option(
    "--images",
    type=click.IntRange(min=1),
    default=10_000,
    help="test images to measure on, the first ones  [dim](default: 10000)[/dim]",
)
@training_options
def drift(
    path: Path, epochs: int, methods: str | None, images: int, out: Path | None, **changes: Any
) -> None:
    """Measure how local models leave the global one, and what they forget.

    From the run's last global model each method does one round of many local epochs. After every epoch
    the local models' logits and features are compared with the global model's on test images, and the
    local models and their average are tested: the paper's Fig. 1. Panel d shows the run's own rounds, with
    four lines if it was run with --track-drift. A table and a heat map say which classes were forgotten.

    \b
      fedcsd drift runs/first
      fedcsd drift runs/first --epochs 50 --methods fedavg,fedprox,fedcsd:mu=0.01
    """
    from fedcsd.files import check_writable
    from fedcsd.results.analysis import drift as drifts
    from fedcsd.results.analysis import forgetting
    from fedcsd.results.analysis.one_round import latest
    from fedcsd.results.terminal import ProgressDisplay, say, show_table, show_written

    run = latest(path)
    folder = out.expanduser() if out else folder_for([path]) / "analysis"
    check_writable(folder)
    chosen = methods or drifts.methods_for(run)
    with ProgressDisplay() as progress:
        found = drifts.study(
            run, epochs=epochs, methods=chosen, images=images, report=progress.step, **changes
        )
    written = drifts.write(found, folder)
    say(f"{found.when}:")
    show_table(*found.table())
    if found.alike:
        why = "what sets them apart is at the server or in personal models"
        if not found.warm_up:
            why += ", or comes with rounds: --warm-up 1 trains one before"
        say(f"trained as FedAvg: {', '.join(found.alike)} ({why})")
    say(f"{forgetting.MEANING}:")
    show_table(*found.forgetting.table())
    if not all("train_accuracy" in record for record in found.history):
        say("panel d lacks the local models: train the run with --track-drift to have them")
    show_written(written)
