"""The commands. Nothing here imports torch before a command needs it."""

import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import rich_click as click
from click.exceptions import Exit

from fedcsd.__version__ import __version__
from fedcsd.cli.analysis import drift, plot, run_argument, tsne
from fedcsd.cli.deploy import deploy
from fedcsd.cli.list import list_
from fedcsd.cli.new import new_method
from fedcsd.cli.options import (
    experiment_argument,
    free_name,
    gather,
    out_option,
    overwrite_option,
    parse_seeds,
    resume_options,
    set_option,
    setting_options,
)
from fedcsd.cli.report import report, reported_if_diverged, show_report, watch
from fedcsd.cli.reproduce import FIXED, fixed, reproduce
from fedcsd.config import Settings
from fedcsd.config.options import names_where
from fedcsd.errors import RunStopped, UserError, note, show_notes
from fedcsd.plugins import short

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
@experiment_argument
@out_option
@overwrite_option
@set_option
@setting_options()
def run(
    experiment: Path | None,
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
      fedcsd run --data mine.npz --method my_method.py:MyMethod:mu=0.1
    """
    values = gather(experiment, options, assignments)

    from fedcsd.experiments import running as jobs
    from fedcsd.experiments.choices import resolved
    from fedcsd.results.terminal import Training

    values = resolved(values)
    target = out.expanduser() if out else free_name(values)

    job = jobs.begin(values, out=target, overwrite=overwrite)
    with Training() as training:
        follow = training.follow(short(values["method"]["name"]), job.rounds)
        with reported_if_diverged(target):
            finished = jobs.train(job, follow)
    show_finished(finished)


@cli.command()
@run_argument
@resume_options
def resume(path: Path, **changes: Any) -> None:
    """Go on with a run that was cut off, to the same weights bit for bit.

    \b
      fedcsd resume runs/first
      fedcsd resume runs/first --rounds 100
    """
    from fedcsd.experiments import running as jobs
    from fedcsd.results.terminal import Training, say

    job = jobs.take_up(path, changes=changes)
    if job is None:
        finished = jobs.load_run(path)
        done = finished.summary["rounds"]
        if done > (changes["rounds"] or done):
            raise UserError(f"{path} has {done} rounds already: --rounds must be at least that")
        say(f"{path} is finished: {done} rounds. `fedcsd resume {path} --rounds N` trains it for longer.")
    else:
        with Training() as training:
            follow = training.follow(short(job.config["method"]["name"]), job.rounds)
            with reported_if_diverged(path):
                finished = jobs.train(job, follow)
    show_finished(finished)


@cli.command()
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
        values.pop("seed", None)  # of a file, which what is said here goes over

    from fedcsd.results import comparison
    from fedcsd.results.terminal import Training

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
    show_compared(out, result.rows, result.seeds, result.settings)
    show_report(out)


@cli.command()
@experiment_argument
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
@setting_options("method", *names_where(Settings, deals=False))
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
    values = gather(experiment, options, assignments)

    from fedcsd.data.partition import packed
    from fedcsd.experiments.experiment import deal
    from fedcsd.files import write_whole, writing
    from fedcsd.results.partitions import plot_partition, table_of
    from fedcsd.results.terminal import say, show_table

    if plot and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot writes .png, .svg or .pdf, not {plot.name}")
    data, parts, held = deal(values)
    show_table(*table_of(data, parts))
    for option, path, write in (
        ("--plot", plot, lambda p: plot_partition(data, parts, p)),
        ("--save", save, lambda p: write_whole(p, packed(parts, held, len(data.y_train)))),
    ):
        if path:
            with writing(path, f"choose another {option}"):
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path)
            say(f"written: {path}")


@cli.command()
@run_argument
def show(path: Path) -> None:
    """The results of a run or a comparison, finished or not."""
    if (path / "comparison.json").is_file():
        from fedcsd.results.tables import load_rows

        show_compared(path, *load_rows(path))
        name_files(path, "report.html")
        return

    from fedcsd.experiments.archive import is_run, open_run
    from fedcsd.experiments.summary import left_in, progress_of, summarise
    from fedcsd.results.terminal import say, show_run, show_table, sparkline

    if not is_run(path) and (parts := progress_of(path)):
        show_table(["run", "rounds", "accuracy (%)"], parts)
        say(left_in(path))
        for other in sorted(path.glob("*/comparison.json")):
            say(f"a comparison: fedcsd show {other.parent}")
        return
    directory = open_run(path)
    settings, history, summary = directory.settings, directory.history(), directory.summary
    end = directory.divergence
    if not history and not end:
        say(f"{path} has no finished round yet: `fedcsd resume {path}` goes on with it")
        return
    if history:
        show_run(settings, summary or summarise(history), finished=summary is not None)
        say(f"accuracy by round  {sparkline([r.get('test_accuracy') for r in history])}")
    for change in directory.config["facts"].get("changes", []):
        say(change)
    if end:
        say(f"{end}. `fedcsd resume {path} --lr …` or `--on-divergence skip` goes on with it")
    elif summary is None:
        say(
            f"not finished: {len(history)} of {settings['rounds']} rounds. `fedcsd resume {path}` goes on with it"
        )
    else:
        name_files(path, "curves.png", "report.html")


def name_files(folder: Path, *names: str) -> None:
    """Those that are there."""
    from fedcsd.results.terminal import say

    for path in filter(Path.exists, (folder / name for name in names)):
        say(f"{path.stem}: {path}")


def show_finished(finished: Any) -> None:
    from fedcsd.results.curves import plot_curves
    from fedcsd.results.terminal import say, show_run

    show_run(finished.settings, finished.summary)
    label = short(finished.settings["method"]["name"])
    say(f"run:    {finished.path}")
    try:
        say(f"curves: {plot_curves({label: [finished.history]}, finished.path / 'curves.png')}")
        show_report(finished.path)
    except OSError as error:
        note(f"cannot write {finished.path / 'curves.png'}: {error.strerror or error}")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{finished.path} is finished, its pictures are not") from None


def show_compared(path: Path, rows: Sequence[Any], seeds: Sequence[int], settings: Mapping[str, Any]) -> None:
    from fedcsd.results.terminal import say, show_comparison

    show_comparison(rows, seeds, settings)
    if any(end for row in rows for end in row.diverged):
        say(
            "a run that diverged: `fedcsd resume` on its folder, with another --lr or --on-divergence skip, goes on"
        )
        say("with it, and the same comparison again takes its result")
    say(f"table:  {path / 'comparison.md'} (.tex, .csv, .json)")
    say(f"curves: {path / 'curves.png'}")


for command in (report, watch, reproduce, drift, tsne, plot, deploy, list_, new_method):
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """The program: runs a command and turns what a user can cause into one line and a status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    show_notes()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a ± that an encoding lacks ends nothing
    sys.exit(guarded(arguments, debug))


def guarded(arguments: list[str], debug: bool) -> int:
    try:
        return int(cli.main(arguments, prog_name="fedcsd", standalone_mode=False) or 0)
    except Exit as error:
        return error.exit_code
    except (Exception, KeyboardInterrupt) as error:
        with ending(isinstance(error, (KeyboardInterrupt, click.Abort))):
            if debug:
                traceback.print_exc()
            status, line = explain(error)
            print(line, file=sys.stderr, flush=True)
        return status


@contextmanager
def ending(interrupted: bool) -> Iterator[None]:
    """After Ctrl-C: another one does not take the last line away, and from then on ends the program at once
    and without a word."""
    if not interrupted or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def explain(error: BaseException) -> tuple[int, str]:
    """The exit status and the one line for something that went wrong."""
    if isinstance(error, click.NoSuchOption):
        from fedcsd.experiments.experiment import option_of_method

        name = error.option_name.lstrip("-").replace("-", "_")
        if name in FIXED and error.ctx and error.ctx.command is reproduce:
            return 2, f"error: {fixed(name)}"
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
