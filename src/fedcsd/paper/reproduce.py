"""Make the paper's tables and figures: train the missing runs, measure, write."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree

from fedcsd.errors import Busy, RunStopped, UserError, end, note, reason, unknown
from fedcsd.experiments.experiment import prepare
from fedcsd.experiments.resuming import note_other_code
from fedcsd.experiments.running import attempt
from fedcsd.experiments.runs.archive import FILE
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.federation.callbacks import Callbacks
from fedcsd.paper.exhibits import EXHIBITS, Exhibit
from fedcsd.paper.files import write
from fedcsd.paper.plan import Filter, Plan, PlannedRun, chosen, plan
from fedcsd.paper.report import Report
from fedcsd.paper.scales import Choices

WAIT = 2.0  # seconds between looks at runs that other processes train


@dataclass(frozen=True)
class Made:
    """A table or figure that is written."""

    report: Report
    files: list[Path]


class Progress:
    """Callbacks for the making of tables and figures; the base class ignores them."""

    def start(self, run: PlannedRun, rounds: int, coming: Sequence[PlannedRun]) -> Callbacks:
        """Called when a run starts, before the runs in `coming`; return the callbacks of its training."""
        return Callbacks()

    def wait(self, left: Sequence[PlannedRun]) -> None:
        """Called again and again while other processes train the runs that are left."""

    def step(self, what: str, done: int, total: int) -> None:
        """Show a step of the work for a picture; called after each."""

    def made(self, made: Made) -> None:
        """Called when a table or figure is written."""


def names_of(names: Sequence[str]) -> list[str]:
    """Return the names of tables and figures, each once; `all` stands for all of them."""
    for name in names:
        if name != "all" and name not in EXHIBITS:
            raise unknown("table or figure", name, [*EXHIBITS, "all"])
    return list(EXHIBITS) if "all" in names else list(dict.fromkeys(names))


def plans(names: Sequence[str], choices: Choices, out: Path) -> dict[str, Plan]:
    """Return the runs of each table or figure."""
    return {name: plan(EXHIBITS[name], choices, out) for name in names}


def any_ended(names: Sequence[str], choices: Choices, out: Path, data: str, other: str) -> bool:
    """Tell if a run has ended for this data set of the paper, trained on it or on `other` in its place."""
    choices = replace(choices, stand_ins={} if other == data else {data: other})
    runs = (run for some in plans(names, choices, out).values() for run in some.values())
    return any(run.ended for run in runs if run.point.data == data)


def wanted(runs: Plan, only: Filter) -> list[PlannedRun]:
    """Return the runs to train, each once."""
    return list({run.path: run for run in runs.values() if chosen(run.point, only)}.values())


def reproduce(
    names: Sequence[str],
    choices: Choices,
    out: Path,
    *,
    only: Filter | None = None,
    train: bool = True,
    tables: bool = True,
    progress: Progress | None = None,
) -> list[Made]:
    """Make tables and figures by name, each in a folder of its own below `out`.

    Finished runs are kept, unfinished ones are resumed, and a run of another process is waited for.

    Args:
        only: chooses the runs to train; a cell without a run is shown as missing
        train: without it no run is trained, and a table without any run is not written
        tables: without it only runs are written
    """
    progress, only = progress or Progress(), only or {}
    todo = plans(names, choices, out)
    left = {name: wanted(runs, only) for name, runs in todo.items()}
    if only and not any(left.values()):
        raise nothing_left(names, only)
    if not train:
        todo = _with_runs(todo, out)
    note_other_code({run.path for runs in todo.values() for run in runs.values() if run.ended})
    if train:
        _try_federations([run for runs in left.values() for run in runs])
    made = []
    for name, runs in todo.items():
        now = left.pop(name)
        later = [run for some in left.values() for run in some]
        try:
            if train:
                _train(now, later, progress)
            if tables:
                made.append(_write(_with_sections(EXHIBITS[name], runs, only), choices, runs, out, progress))
                progress.made(made[-1])
        except (KeyboardInterrupt, RunStopped) as error:
            if tables:
                _write(_with_sections(EXHIBITS[name], runs, only), choices, runs, out, None)
            count = len({run.path for run in [*now, *later] if not run.ended})
            end(error, left=count, command="the same command again", mend=False)
            raise
    return made


def nothing_left(names: Sequence[str], only: Filter) -> UserError:
    """Return the error for a filter that no run passes, with the values that there are."""
    facts = [point.facts for name in names for point in EXHIBITS[name].points]
    found = {key: dict.fromkeys(fact[key] for fact in facts if key in fact) for key in only}
    has = "; ".join(f"{key} {', '.join(values) or 'nowhere'}" for key, values in found.items())
    return UserError(f"--only leaves nothing of {', '.join(names)}, which has {has}")


def _with_runs(todo: Mapping[str, Plan], out: Path) -> dict[str, Plan]:
    """Return the tables and figures with a finished run, and name the others."""
    found = {name: runs for name, runs in todo.items() if any(run.ended for run in runs.values())}
    if not found:
        raise UserError(
            f"{out} has no finished run of {', '.join(todo)} with these settings: give the settings of its runs, or "
            "leave out --no-train to train what is missing"
        )
    for name in todo.keys() - found.keys():
        note(f"{name} is left out: none of its runs is finished")
    return found


def _try_federations(runs: Sequence[PlannedRun]) -> None:
    """Prepare each federation once, so that errors come before the first run starts."""
    left = {(run.point.data, run.point.beta, run.point.pool): run for run in runs if not run.ended}
    for run in left.values():
        prepare(run.values)


def _train(runs: Sequence[PlannedRun], later: Sequence[PlannedRun], progress: Progress) -> None:
    """Train the runs one after another; while other processes train the last ones, train a later run."""
    while left := [run for run in runs if not run.ended]:
        waiting = list({run.path: run for run in [*left, *later] if not run.ended}.values())
        for run in waiting:
            with suppress(Busy):
                _train_one(run, [other for other in waiting if other is not run], progress)
                break
        else:
            progress.wait(left)
            time.sleep(WAIT)


def _train_one(run: PlannedRun, coming: Sequence[PlannedRun], progress: Progress) -> None:
    if run.path.is_dir():  # whether it is locked is known before anything is loaded
        folder = RunDirectory(run.path)
        folder.lock()
        folder.unlock()
    try:
        job = run.job()
    except UserError:
        if not run.begun or run.ended:
            raise
        raise Busy(f"another process has begun {run.path}") from None
    if job is None:
        return
    ended = attempt(job, progress.start(run, job.rounds, coming))
    if not ended.diverged:
        with suppress(OSError):  # checkpoints of a hundred finished runs would fill a disk
            rmtree(run.path / "checkpoints")


def _with_sections(exhibit: Exhibit, runs: Plan, only: Filter) -> Exhibit:
    """Return the exhibit with the sections that have a run or are asked for."""
    there = {point for (point, _), run in runs.items() if run.ended or chosen(point, only)}
    sections = (some for some in exhibit.sections if any(entry.point in there for entry in some.entries))
    return replace(exhibit, sections=tuple(sections))


def _write(exhibit: Exhibit, choices: Choices, runs: Plan, out: Path, progress: Progress | None) -> Made:
    """Write all files. After an interruption (no progress) the pictures stay as they are: a new one takes time."""
    study = "" if (out / FILE).is_file() else choices.folder(point.data for point in exhibit.points)
    shown = {key: run for key, run in runs.items() if key[0] in exhibit.points}
    report, folder = Report.of(exhibit, choices, shown), out / study / exhibit.name
    pictures = [file for file in sorted(folder.glob(f"{exhibit.name}*")) if file.suffix in (".png", ".json")]
    if progress or pictures:
        from fedcsd.paper.figures import draw, pictured  # matplotlib

        pictures = draw(report, folder / exhibit.name, progress.step) if progress else pictures
        report = replace(report, pictured=pictured(report, pictures))
    try:
        return Made(report, [*write(report, folder, pictures), *pictures])
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {reason(error)}") from None
