"""The commands. Nothing here imports torch before a command needs it."""

import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import rich_click as click
from click.exceptions import Exit

from fedcsd import __version__
from fedcsd.cli_options import (
    NOT_DEALING,
    TRAINING,
    free_name,
    gather,
    overwrite_option,
    set_option,
    setting_options,
)
from fedcsd.config import TABLES, describe, layered
from fedcsd.errors import RunStopped, UserError, unknown

click.rich_click.TEXT_MARKUP = "rich"
click.rich_click.TEXT_PARAGRAPH_LINEBREAKS = "\n\n"
click.rich_click.MAX_WIDTH = 110


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="fedcsd")
@click.option("--debug", is_flag=True, help="show the traceback of an error (also after a command)")
def cli(debug: bool) -> None:
    """Federated learning on skewed data: FedCSD and the methods it is compared with.

    [bold]fedcsd run[/bold] trains one federation, [bold]fedcsd compare[/bold] several methods on the same one. Both need nothing but this
    package: the data set [bold]digits[/bold] comes with it.

    \b
      fedcsd compare --methods fedavg,fedcsd --rounds 20 --out runs/try
      fedcsd show runs/try
    """


@cli.command()
@click.argument("experiment", required=False, type=click.Path(path_type=Path), metavar="[EXPERIMENT.toml]")
@click.option(
    "--method",
    metavar="NAME",
    help="method to train with  [dim](default: fedcsd; see `fedcsd list methods`)[/dim]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="run directory  [dim](default: runs/METHOD-DATA, numbered)[/dim]",
)
@overwrite_option
@set_option
@setting_options()
def run(
    experiment: Path | None,
    method: str | None,
    out: Path | None,
    overwrite: bool,
    assignments: tuple[str, ...],
    **options: Any,
) -> None:
    """Train one federation.

    Settings come from the defaults, then EXPERIMENT.toml, then the options here, then --set. A run's
    own config.toml is a valid EXPERIMENT.toml. Ctrl-C stops cleanly and says how to go on.

    \b
      fedcsd run --method fedcsd --data digits --clients 10 --beta 0.1 --rounds 30 --out runs/first
      fedcsd run experiment.toml --set method.mu=0.01 --set rounds=50
      fedcsd run --data mine.npz --method fedavg
    """
    values = gather(experiment, {} if method is None else {"method": method}, options, assignments)
    values = layered(TABLES, values)
    target = out.expanduser() if out else free_name(values)

    from fedcsd import jobs
    from fedcsd.console import Training

    job = jobs.begin(values, out=target, overwrite=overwrite)
    with Training() as training:
        follow = training.follow(values["method"]["name"], job.rounds)
        finished = jobs.train(job, follow)
    show_finished(finished)


@cli.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--rounds", type=int, help="train for this many rounds in all instead of what was asked for")
@click.option("--lr", type=float, help="another learning rate from here on, after a divergence")
@click.option(
    "--on-divergence",
    type=click.Choice(["stop", "skip"]),
    help="what to do from here on when a loss is not finite",
)
@click.option("--workers", type=int, help="worker processes; does not change the result")
@click.option("--client-state", type=click.Choice(["memory", "disk"]), help="as for run; may change here")
def resume(path: Path, **changes: Any) -> None:
    """Go on with a run that was cut off, to the same weights bit for bit.

    \b
      fedcsd resume runs/first
      fedcsd resume runs/first --rounds 100
    """
    from fedcsd import jobs
    from fedcsd.console import Training, say

    job = jobs.take_up(path, changes=changes)
    if job is None:
        finished = jobs.load_run(path)
        done = finished.summary["rounds"]
        say(f"{path} is finished: {done} rounds. `fedcsd resume {path} --rounds N` trains it for longer.")
    else:
        with Training() as training:
            follow = training.follow(job.config["method"]["name"], job.rounds)
            finished = jobs.train(job, follow)
    show_finished(finished)


@cli.command()
@click.argument("experiment", required=False, type=click.Path(path_type=Path), metavar="[EXPERIMENT.toml]")
@click.option(
    "--methods",
    required=True,
    metavar="A,B,…",
    help="methods; the others are compared with the first. Options go behind colons: fedcsd:mu=0.01:tau=4",
)
@click.option("--seeds", metavar="0,1,2", help="training seeds  [dim](default: 0)[/dim]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/compare"),
    help="folder of the comparison  [dim](default: runs/compare)[/dim]",
)
@overwrite_option
@set_option
@setting_options("seed")
def compare(
    experiment: Path | None,
    methods: str,
    seeds: str,
    out: Path,
    overwrite: bool,
    assignments: tuple[str, ...],
    **options: Any,
) -> None:
    """Train several methods on the same federation and put them side by side.

    Each method runs with each seed; the table has mean ± standard deviation and the difference to the
    first method, paired by seed. The same command again goes on where it was cut off.

    \b
      fedcsd compare --methods fedavg,fedcsd --seeds 0,1,2 --beta 0.1 --rounds 30 --out runs/compare
      fedcsd compare --methods fedcsd,fedcsd:mask=none,fedcsd:similarity=false --track-drift
    """
    values = gather(experiment, {}, options, assignments)
    try:
        numbers = [int(s) for s in (seeds or str(values.get("seed", 0))).split(",")]
    except ValueError:
        raise UserError(f"--seeds takes whole numbers such as 0,1,2, not {seeds!r}") from None
    values.pop("seed", None)

    from fedcsd import comparison
    from fedcsd.console import Training

    out = out.expanduser()
    with Training() as training:
        result = comparison.compare(
            methods,
            numbers,
            out=out,
            overwrite=overwrite,
            on_start=lambda label, seed, rounds, more: training.follow(f"{label} seed {seed}", rounds, more),
            **values,
        )
    show_comparison(out, result.rows, numbers)


@cli.command()
@click.argument("experiment", required=False, type=click.Path(path_type=Path), metavar="[EXPERIMENT.toml]")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    help="write the picture here: clients against classes (.png, .svg or .pdf)",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path),
    help="write the partition here, for --partition saved --set partition.file=…",
)
@set_option
@setting_options(*TRAINING, *NOT_DEALING)
def partition(
    experiment: Path | None,
    plot: Path | None,
    save: Path | None,
    assignments: tuple[str, ...],
    **options: Any,
) -> None:
    """Show who would hold what, without training.

    \b
      fedcsd partition --data digits --beta 0.1 --clients 10 --plot p.png
      fedcsd partition --data digits --partition classes --set partition.per_client=2
    """
    values = gather(experiment, {}, options, assignments)

    from fedcsd.analysis.partitions import plot_partition, table_of
    from fedcsd.console import say, show_table
    from fedcsd.experiments import deal
    from fedcsd.runs import write_partition

    if plot and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot writes .png, .svg or .pdf, not {plot.name}")
    data, parts, held = deal(values)
    show_table(*table_of(data, parts))
    for path, write in (
        (plot, lambda p: plot_partition(data, parts, p)),
        (save, lambda p: write_partition(p, parts, held, len(data.y_train))),
    ):
        if path:
            try:
                write(path)
            except (OSError, ValueError) as error:
                raise UserError(f"cannot write {path}: {error}") from None
            say(f"written: {path}")


@cli.command(name="list")
@click.argument("what", metavar="methods|datasets|models|partitions")
def list_(what: str) -> None:
    """What there is to choose from: methods, datasets, models or partitions."""
    from fedcsd.console import say, show_table

    kinds = ("methods", "datasets", "models", "partitions")
    if what not in kinds:
        raise unknown("list", what, kinds)
    if what == "methods":
        from fedcsd.methods import methods

        for name in methods.names:
            cls = methods.load(name)
            say(f"  {cls.__doc__}", bold=name)
            if options := describe(cls):
                show_table(["option", "default", "meaning"], options, left=3)
        return
    show_table([what, ""], list_entries(what), left=2)
    if what == "datasets":
        say("or a path (.npz, parquet, a folder of images), or hub:owner/name: see docs/data.md")


def list_entries(what: str) -> list[tuple[str, str]]:
    """Name, and the first line of the docstring with the options there are."""
    from fedcsd.data import SOURCES, partitions, source
    from fedcsd.models import MODELS, find

    if what == "partitions":
        things: dict[str, Callable[..., Any]] = dict(partitions)
    else:
        things = (
            {name: source(name) for name in SOURCES}
            if what == "datasets"
            else {name: find(name) for name in MODELS}
        )
    key = {"datasets": "data", "models": "model", "partitions": "partition"}[what]
    return [(name, _first_line(thing) + _options(thing, key)) for name, thing in things.items()]


def _options(function: Any, key: str) -> str:
    """The options of a factory, as one sets them."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    hints = get_type_hints(function)
    texts = []
    for p in parameters:
        choices = "|".join(map(str, get_args(hints[p.name]))) if get_origin(hints[p.name]) is Literal else ""
        texts.append(f"{key}.{p.name}={choices or p.default}")
    return f"  ({', '.join(texts)})" if texts else ""


def _first_line(thing: Any) -> str:
    return (thing.__doc__ or "").strip().splitlines()[0]


@cli.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="RUN")
def show(path: Path) -> None:
    """The results of a run or a comparison, finished or not."""
    if (path / "comparison.json").is_file():
        from fedcsd.comparison import load_rows

        show_comparison(path, *load_rows(path))
        return

    from fedcsd.console import say, show_run, show_table, sparkline
    from fedcsd.runs import RunDirectory, progress_of, summarise

    if not (path / "config.toml").exists() and (parts := progress_of(path)):
        show_table(["run", "rounds", "accuracy (%)"], parts)
        say("a comparison that is not finished: the same command again goes on with it")
        return
    directory = RunDirectory.open(path)
    settings, history, summary = directory.settings, directory.history(), directory.summary
    if not history:
        say(f"{path} has no finished round yet: `fedcsd resume {path}` goes on with it")
        return
    show_run(settings, summary or summarise(history))
    say(f"accuracy by round  {sparkline([r['test_accuracy'] for r in history])}")
    if summary is None:
        say(
            f"not finished: {len(history)} of {settings['rounds']} rounds. `fedcsd resume {path}` goes on with it"
        )
    elif (path / "curves.png").exists():
        say(f"curves: {path / 'curves.png'}")


def show_finished(finished: Any) -> None:
    from fedcsd.analysis.curves import plot_curves
    from fedcsd.console import say, show_run

    show_run(finished.settings, finished.summary)
    label = finished.settings["method"]["name"]
    picture = plot_curves({label: [finished.history]}, finished.path / "curves.png")
    say(f"run:    {finished.path}")
    say(f"curves: {picture}")


def show_comparison(path: Path, rows: Sequence[Any], seeds: Sequence[int]) -> None:
    from fedcsd.comparison import table
    from fedcsd.console import say, show_table

    show_table(*table(rows))
    over = f"seed {seeds[0]}"
    if len(seeds) > 1:
        over = (
            f"mean ± standard deviation over seeds {', '.join(map(str, seeds))}; differences paired by seed"
        )
    say(f"accuracy of the final round, {over}")
    if any(row.drift is not None for row in rows):
        say(
            "logit drift: KL(global ‖ local) after local training, mean over all rounds; sent: both ways, all rounds"
        )
    say(f"table:  {path / 'comparison.md'}")
    say(f"curves: {path / 'curves.png'}")


def main(arguments: list[str] | None = None) -> None:
    """The program: runs a command and turns what a user can cause into one line and a status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    sys.exit(guarded(arguments, debug))


def guarded(arguments: list[str], debug: bool) -> int:
    try:
        return int(cli.main(arguments, prog_name="fedcsd", standalone_mode=False) or 0)
    except Exit as error:
        return error.exit_code
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        status, line = explain(error)
        print(line, file=sys.stderr, flush=True)
        return status


def explain(error: BaseException) -> tuple[int, str]:
    """The exit status and the one line for something that went wrong."""
    if isinstance(error, click.NoSuchOption):
        from fedcsd.experiments import option_of_method

        name = error.option_name.lstrip("-").replace("-", "_")
        if option_of_method(name):
            return 2, f"error: {name} is an option of the method: --set method.{name}=…"
    if isinstance(error, click.ClickException):
        return 2, f"error: {error.format_message()}"
    if isinstance(error, UserError):
        return 2, f"error: {error}"
    if isinstance(error, RunStopped):
        return 1, f"stopped: {error}"
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        detail = str(error.__context__ or error)  # click wraps what the run had to say
        return 130, f"interrupted: {detail}" if detail else "interrupted"
    return 1, f"internal error: {type(error).__name__}: {error} (run again with --debug for the traceback)"
