"""The commands that look into trained runs: `fedcsd drift`, `tsne` and `plot`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rich_click as click

from fedcsd.errors import UserError
from fedcsd.files import check_writable

run_argument = click.argument("path", type=click.Path(path_type=Path), metavar="RUN")
runs_argument = click.argument(
    "paths", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN…"
)
folder_option = click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="where to write; what is there is replaced  [dim](default: analysis in RUN, of several in the folder that holds them)[/dim]",
)
device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="where to train  [dim](default: as the run)[/dim]"
)
workers_option = click.option(
    "--workers", type=int, help="clients that train at once  [dim](default: as the run)[/dim]"
)

warm_up_option = click.option(
    "--warm-up",
    type=click.IntRange(min=0),
    default=0,
    metavar="ROUNDS",
    help="rounds that a method trains before, so that what it keeps of rounds is there (SCAFFOLD, MOON, …); "
    "it then starts from the run's model all the same  [dim](default: 0)[/dim]",
)


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
@warm_up_option
@device_option
@workers_option
@folder_option
def drift(
    path: Path, epochs: int, methods: str | None, images: int, out: Path | None, **changes: Any
) -> None:
    """How local models leave the global one, and what they forget.

    From the run's last global model each method does one round of many local epochs. After every epoch
    the local models' logits and features are compared with the global model's on test images, and the
    local models and their average are tested: the paper's Fig. 1. Panel d shows the run's own rounds, with
    four lines if it was run with --track-drift. A table and a heat map say which classes were forgotten.

    \b
      fedcsd drift runs/first
      fedcsd drift runs/first --epochs 50 --methods fedavg,fedprox,fedcsd:mu=0.01
    """
    from fedcsd.results.analysis import drift as drifts
    from fedcsd.results.analysis import forgetting
    from fedcsd.results.analysis.one_round import latest
    from fedcsd.results.terminal import Work, say, show_table

    run = latest(path)
    folder = out.expanduser() if out else folder_for([path]) / "analysis"
    check_writable(folder)
    chosen = methods or drifts.methods_for(run)
    with Work("local trainings") as work:
        found = drifts.study(run, epochs=epochs, methods=chosen, images=images, report=work, **changes)
    written = [
        *drifts.draw(found, folder / "drift"),
        *forgetting.draw(found.forgetting, folder / "forgetting"),
    ]
    written.append(write_json(folder / "drift.json", found.to_json()))
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


@click.command()
@runs_argument
@click.option(
    "--client", type=int, help="whose local model  [dim](default: who holds the fewest classes)[/dim]"
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
@warm_up_option
@device_option
@workers_option
@folder_option
def tsne(
    paths: tuple[Path, ...],
    client: int | None,
    epochs: int | None,
    samples: int,
    out: Path | None,
    **changes: Any,
) -> None:
    """Features of test images in the plane (t-SNE), coloured by class.

    Of one run its global model and one local model, trained from it in one more round. Of several runs all
    global models, and of the last run two local models: trained with cross-entropy alone, and with the full
    local loss. With a FedAvg and a FedCSD run these are the paper's four panels. Printed, and below each panel,
    is how well the features themselves tell the classes apart.

    \b
      fedcsd tsne runs/first --client 3
      fedcsd tsne runs/fedavg runs/fedcsd
    """
    from fedcsd.plugins import free
    from fedcsd.results.analysis import tsne as planes
    from fedcsd.results.analysis.one_round import latest
    from fedcsd.results.plots import labels_of
    from fedcsd.results.terminal import Work, show_table

    runs: dict[str, Any] = {}
    found = [latest(path) for path in paths]
    for label, run in zip(labels_of([run.settings for run in found]), found, strict=True):
        runs[free(label, runs)] = run
    folder = out.expanduser() if out else folder_for(paths) / "analysis"
    check_writable(folder)
    with Work("steps") as work:
        written = planes.picture(
            runs, folder / "tsne", samples=samples, client=client, epochs=epochs or 0, report=work, **changes
        )
    show_table(*planes.table(json.loads(written[-1].read_text(encoding="utf-8"))))
    show_written(written)


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
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="picture to write: .png, .svg or .pdf  "
    "[dim](default: all three, to analysis in RUN, of several in the folder that holds them)[/dim]",
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
    from fedcsd.results import plots
    from fedcsd.results import style as figures

    if mask and target:
        raise UserError("--mask and --target are two pictures: give one of them")
    if (mask or target) and (metrics is not None or x is not None):
        flags = "--mask" if mask else "--target", "--y" if metrics is not None else "--x"
        raise UserError(f"{flags[0]} is a picture of its own: leave out {flags[1]}")
    metrics, x = metrics or "", x or "round"
    histories = plots.grouped(plots.found(paths))
    wanted = [name.strip() for name in metrics.split(",") if name.strip()] or ["test_accuracy"]
    name = "mask" if mask else "target" if target else "-".join(wanted) + ("" if x == "round" else f"-by-{x}")
    if out and out.suffix not in figures.SUFFIXES:
        raise UserError(f"-o writes .png, .svg or .pdf, not {out.name}")
    stem = out.expanduser() if out else folder_for(paths) / "analysis" / name
    if mask:
        written = plots.plot_mask(histories, stem)
    elif target:
        written = plots.plot_target(histories, stem)
    else:
        written = plots.plot(histories, stem, y=wanted, x=x)
    show_written(written)


def folder_for(paths: Sequence[Path]) -> Path:
    """Where what is made of runs goes: of one run or comparison to its folder, of several to the one that holds all."""
    places = [path.expanduser() for path in paths]
    if len({place.resolve() for place in places}) == 1:
        return places[0]
    common = os.path.commonpath([Path(os.path.normpath(place.absolute())).parent for place in places])
    return Path(common if any(place.is_absolute() for place in places) else os.path.relpath(common))


def write_json(path: Path, content: Any) -> Path:
    from fedcsd.messages import finite

    path.write_text(json.dumps(finite(content)) + "\n", encoding="utf-8")
    return path


def show_written(paths: list[Path]) -> None:
    from fedcsd.results.terminal import say

    endings: dict[Path, list[str]] = {}
    for path in paths:
        endings.setdefault(path.with_suffix(""), []).append(path.suffix)
    for stem, (first, *others) in endings.items():
        say(f"written: {stem}{first}" + (f" ({', '.join(others)})" if others else ""))
