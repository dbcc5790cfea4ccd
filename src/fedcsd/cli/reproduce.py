"""Make the paper's tables and figures, beside what the paper prints (`fedcsd reproduce`)."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import rich_click as click
from click import Option, get_current_context
from click.core import ParameterSource

from fedcsd.cli.options import gather, parse_seeds, set_option_like, setting_options
from fedcsd.config.settings import settings_where
from fedcsd.config.toml import merge
from fedcsd.errors import UserError
from fedcsd.paper.exhibits import EXHIBITS, TITLES
from fedcsd.paper.scales import SCALES, Choices, stand_ins

FIXED = settings_where(in_paper=True)
OF_SCALE = {
    name: "as the scale has it"
    for scale in SCALES.values()
    for part in (scale.common, *scale.data.values())
    for name in part
}


@click.command(
    epilog="The scales:\n\n"
    + "\n\n".join(f"[bold]{name}[/bold]: {scale.meaning}" for name, scale in SCALES.items())
)
@click.argument("names", nargs=-1, metavar="[NAME]…")
@click.option(
    "--scale",
    type=click.Choice(list(SCALES)),
    default="paper",
    show_default=True,
    help="how large: see below; other scales are other runs and other tables",
)
@click.option(
    "--seeds", metavar="0,1,2", help="training seeds  [dim](default: 0,1,2; small 0,1; smoke 0)[/dim]"
)
@click.option(
    "--only",
    multiple=True,
    metavar="KEY=VALUE,…",
    help="train only these: method, data, beta, pool, mu, tau, alpha; a key named twice takes both values; "
    "may be repeated",
)
@click.option(
    "--stand-in",
    "given",
    multiple=True,
    metavar="DATA=OTHER",
    help="other data in place of the paper's, such as femnist=mnist; may be repeated  "
    "[dim](default: MNIST if FEMNIST is not found; at smoke scale digits for what is not in --data-dir)[/dim]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("runs/paper"),
    help="folder of runs, tables and figures  [dim](default: runs/paper)[/dim]",
)
@click.option(
    "--jobs",
    type=click.IntRange(0),
    default=1,
    help="runs trained at once, each in a process of its own, on the next GPU where there are several "
    "(0: one for each GPU)  [dim](default: 1)[/dim]",
)
@click.option("--dry-run", is_flag=True, help="list the runs and how far each is; train and write nothing")
@click.option("--no-train", is_flag=True, help="write tables and figures of the runs there are")
@set_option_like("data.size=128")
@setting_options(*FIXED, usual=OF_SCALE)
def reproduce(
    names: tuple[str, ...],
    scale: str,
    seeds: str | None,
    only: tuple[str, ...],
    given: tuple[str, ...],
    out: Path,
    jobs: int,
    dry_run: bool,
    no_train: bool,
    assignments: tuple[str, ...],
    **options: Any,
) -> None:
    """Make the paper's tables and figures: measured, printed, and the difference.

    NAME is a table or figure, several of them, or [bold]all[/bold]; without one they are listed. Runs are kept and
    shared between tables, so the same command again goes on where it was cut off, and a second table
    trains only what the first did not. The same command on several machines with a common --out shares
    the work, and so does [bold]--jobs[/bold] on one.

    \b
      fedcsd reproduce table1 --scale smoke
      fedcsd reproduce table2 --device cuda --precision bf16 --data-dir /data
      fedcsd reproduce table1 --only method=fedavg,method=fedcsd,data=femnist --seeds 0
      fedcsd reproduce all --scale small --lr 0.05 --dry-run
    """
    if not names:
        refuse_options()
        list_names()
        return
    overrides = overrides_of(options, assignments)

    from fedcsd.experiments.machine import require_cuda
    from fedcsd.paper import reproduce as paper
    from fedcsd.paper.plan import chosen as is_wanted
    from fedcsd.paper.plan import parse_only

    if "" in map(str.strip, only):
        raise UserError("--only takes KEY=VALUE such as method=fedcsd,beta=0.5, and is given nothing")
    chosen, wanted = paper.names_of(names), parse_only(",".join(only))
    points = [point for name in chosen for point in EXHIBITS[name].points]
    needed = [point.data for point in points if is_wanted(point, wanted)]
    if not needed:
        raise paper.nothing_left(chosen, wanted)
    train = not (no_train or dry_run)
    if train and overrides.get("device") == "cuda":
        require_cuda()
    choices = Choices(scale, parse_seeds(seeds) or SCALES[scale].seeds, overrides)
    out = out.expanduser()

    ended = partial(paper.any_ended, chosen, choices, out) if no_train else None
    instead, notes = stand_ins(needed, scale, parse_stand_ins(given), overrides, train, ended)
    choices = replace(choices, stand_ins=instead, notes=notes)
    if dry_run:
        check_names(choices)
        show_notes(choices)
        show_plan(paper.plans(chosen, choices, out), wanted, choices.machine)
        return
    train_and_show(chosen, choices, out, wanted, jobs, not no_train)


def refuse_options() -> None:
    """Refuse options that are given without a name."""
    context = get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and isinstance(parameter, Option):
            raise UserError(f"{parameter.opts[0]} needs a name, such as: fedcsd reproduce table1")


def check_names(choices: Choices) -> None:
    """Refuse an unknown model or data set before anything is loaded."""
    from fedcsd.data.sources import source
    from fedcsd.models import find

    model = merge({}, choices.overrides).get("model", {}).get("name", "auto")
    if model != "auto":
        find(model)
    for other in choices.stand_ins.values():
        if not other.startswith("hub:") and not Path(other).exists():
            source(other)


def train_and_show(
    names: Sequence[str], choices: Choices, out: Path, only: Any, jobs: int, train: bool
) -> None:
    """Print the plan, train what is missing, and print each table as soon as it is made."""
    from fedcsd.paper.helpers import ShownProgress, helping, shared_out
    from fedcsd.paper.reproduce import plans, reproduce, wanted
    from fedcsd.results.terminal import ProgressDisplay, counted, say

    choices, jobs = shared_out(choices, jobs) if train else (choices, 1)
    runs = {run.path: run for some in plans(names, choices, out).values() for run in wanted(some, only)}
    left = [run for run in runs.values() if not run.ended]
    say(choices.text)
    show_notes(choices)
    if left and train:
        expected = f"about {duration_text(sum(run.seconds for run in left))} on {choices.machine}"
        say(f"{counted(len(runs), 'run')}, {len(left)} of them to train: {expected}")
    jobs = max(1, min(jobs, len(left)))
    if left and train and choices.scale == "paper" and choices.overrides.get("device") != "cuda":
        say("this is work for a GPU (--device cuda): on a CPU it takes weeks; --scale small is for one")
    with ProgressDisplay() as display, helping(jobs, names, choices, out, only):
        reproduce(
            names, choices, out, only=only, train=train, progress=ShownProgress(display, jobs, show_made)
        )


def show_notes(choices: Choices) -> None:
    """Print the notes on data in place of the paper's."""
    from fedcsd.results.terminal import say

    for note in choices.notes.values():
        say(f"note: {note}")


def show_made(made: Any) -> None:
    """Print a table or figure that was made, its remarks, and the paths of its files."""
    from fedcsd.paper import report as text
    from fedcsd.results.terminal import say, show_table

    report = made.report
    say()
    say(f": {report.exhibit.title}", bold=report.exhibit.name)
    for section in report.sections:
        say(report.title(section))
        table = text.table(report, section)
        show_table(table.head, table.texts, wide=True)
    for shown in report.pictured:
        say(shown.title)
        show_table(shown.table.head, shown.table.texts)
    for line in (
        *text.findings(report, pairs=False),
        *text.legend(report),
        *text.settings_lines(report),
        *(f"{mark}: {note}" for mark, note in text.footnotes(report, report.results)),
        text.missing_line(report),
    ):
        if line:
            say(line)
    folder = made.files[0].parent
    say(f"files:  {folder}: {', '.join(path.name for path in made.files)}")


def show_plan(plans: dict[str, Any], only: Any, machine: str) -> None:
    """Print the runs of each table with their state, and the work that is left."""
    from fedcsd.paper.reproduce import wanted
    from fedcsd.results.terminal import counted, say, show_table

    seen: dict[Path, Any] = {}
    for name, runs in plans.items():
        some = {run.path: run for run in wanted(runs, only) if run.path not in seen}
        seen |= some
        more = " that no table above has" if name != next(iter(plans)) else ""
        say(f"{name}: {counted(len(some), 'run')}{more}")
        if some:
            rows = [[run.label, run.state, run.path.name] for run in some.values()]
            show_table(["run", "state", "folder"], rows, left=3, wide=True)
    left = [run for run in seen.values() if not run.ended]
    took = duration_text(sum(run.seconds for run in left))
    on = f": about {took} on {machine}" if left else ""
    say(f"{counted(len(seen), 'run')}, {len(left)} to train{on}")


def list_names() -> None:
    """Print the names, what each makes, and the work at each scale."""
    from fedcsd.results.terminal import say, show_table

    rows = []
    for name in (*EXHIBITS, "all"):
        exhibits = [EXHIBITS[name]] if name in EXHIBITS else list(EXHIBITS.values())
        times = []
        for scale, of in SCALES.items():
            runs = {
                (point, seed)
                for exhibit in exhibits
                for point in exhibit.points
                for seed in (of.seeds[:1] if exhibit.first_seed_only else of.seeds)
            }
            times.append(duration_text(sum(Choices(scale).seconds(point) for point, _ in runs)))
        title = exhibits[0].title if len(exhibits) == 1 else "all of them; what they share is trained once"
        rows.append([name, title, str(len({point for e in exhibits for point in e.points})), *times])
    show_table(["name", "what it makes", "runs", *SCALES], rows, left=2)
    seeds = ", ".join(f"{name} {len(scale.seeds)}" for name, scale in SCALES.items())
    pictures = " and ".join(name for name, exhibit in EXHIBITS.items() if exhibit.first_seed_only)
    say(f"runs: for each seed, {pictures} for the first; seeds: {seeds}")
    for machine in dict.fromkeys(scale.machine for scale in SCALES.values()):
        named = [name for name, scale in SCALES.items() if scale.machine == machine]
        say(f"time of {' and '.join(named)}: roughly, on {machine}")
    say("start with: fedcsd reproduce table1 --scale smoke")


def duration_text(seconds: float) -> str:
    """Return a rough duration in words."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return "1 min"


def parse_stand_ins(given: Sequence[str]) -> dict[str, str]:
    """Return the other data of each data set that --stand-in names."""
    found = {}
    for text in (part for some in given for part in re.split(r",(?=\s*\w+=)", some)):
        name, equals, other = text.partition("=")
        if not equals or not other:
            raise UserError(f"--stand-in takes DATA=OTHER, such as femnist=mnist, not {text!r}")
        found[name.strip()] = other.strip()
    return found


def overrides_of(options: dict[str, Any], assignments: tuple[str, ...]) -> dict[str, Any]:
    """Return the settings that replace those of the scale; refuse those that the tables vary."""
    values = gather(None, options, assignments)
    for key in values:
        if key in FIXED and not (key == "data" and "name" not in values["data"]):
            raise UserError(fixed(key))
    return values


def fixed(key: str) -> str:
    """Return the message for a setting that the tables vary."""
    only = f"choose among its values with --only {key}=…"
    other = f"leave it out; --stand-in {next(iter(TITLES))}=… trains on other data"
    advice = {"method": only, "beta": only, "data": other, "seed": "give seeds as --seeds"}
    return f"the paper's tables and figures set {key}: {advice.get(key, 'leave it out')}"
