"""Run the program: find the command, and turn an error into one line and an exit status.

Nothing here imports torch before a command needs it.
"""

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper

import rich_click as click
from click.exceptions import Exit

from fedcsd.__version__ import __version__
from fedcsd.cli.compare import compare
from fedcsd.cli.deploy import deploy
from fedcsd.cli.drift import drift
from fedcsd.cli.list import list_
from fedcsd.cli.new_method import new_method
from fedcsd.cli.partition import partition
from fedcsd.cli.plot import plot
from fedcsd.cli.report import report
from fedcsd.cli.reproduce import FIXED, fixed, reproduce
from fedcsd.cli.resume import resume
from fedcsd.cli.run import run
from fedcsd.cli.show import show
from fedcsd.cli.tsne import tsne
from fedcsd.cli.watch import watch
from fedcsd.errors import RunStopped, UserError, show_notes

click.rich_click.TEXT_MARKUP = "rich"
click.rich_click.TEXT_PARAGRAPH_LINEBREAKS = "\n\n"
click.rich_click.MAX_WIDTH = 110


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="fedcsd")
@click.option("--debug", is_flag=True, help="show the traceback of an error (also after a command)")
def cli(debug: bool) -> None:
    """Compare FedCSD with other methods of federated learning on skewed data.

    [bold]fedcsd run[/bold] trains one federation, [bold]fedcsd compare[/bold] several methods on the same one. Both need nothing but this
    package: the data set [bold]digits[/bold] comes with it.

    \b
      fedcsd compare --methods fedavg,fedcsd --rounds 20 --out runs/try
      fedcsd show runs/try
    """


TRAINING = (run, resume, compare, partition, show)
RESULTS = (report, watch, reproduce, drift, tsne, plot)
for command in (*TRAINING, *RESULTS, deploy, list_, new_method):
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the program and exit with its status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    show_notes()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an encoding without ± ends nothing
    sys.exit(guarded([a for a in arguments if a != "--debug"], debug))


def guarded(arguments: list[str], debug: bool) -> int:
    """Run a command; print an error as one line and return the exit status."""
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
    """Ignore a second Ctrl-C while the last line is printed; after it, Ctrl-C ends the program at once."""
    if not interrupted or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def explain(error: BaseException) -> tuple[int, str]:
    """Return the exit status and the line for an error."""
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
        detail = str(error.__context__ or error)  # click wraps the interrupt that a run has completed
        return 130, f"interrupted: {detail}" if detail else "interrupted"
    return 1, f"internal error: {type(error).__name__}: {error} (run again with --debug for the traceback)"
