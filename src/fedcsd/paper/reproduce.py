"""Make the paper's tables and figures: train what is missing, measure, write."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree

from fedcsd.errors import Busy, RunStopped, UserError, end, note, unknown
from fedcsd.experiments.archive import FILE
from fedcsd.experiments.experiment import prepare
from fedcsd.experiments.resuming import note_other_code
from fedcsd.experiments.run_folder import RunDirectory
from fedcsd.experiments.running import attempt
from fedcsd.federation.callbacks import Callbacks
from fedcsd.files import writing
from fedcsd.paper.exhibits import EXHIBITS, Exhibit, Point
from fedcsd.paper.files import write
from fedcsd.paper.plan import Filter, Planned, chosen, plan
from fedcsd.paper.report import Report
from fedcsd.paper.scales import Choices

WAIT = 2.0  # seconds between looks at runs that other processes train
OnStart = Callable[[Planned, int, Sequence[Planned]], Callbacks]
"""Called with a run, its rounds and the runs that come after it; gives what watches it."""
OnWait = Callable[[Sequence[Planned]], None]
"""Called every now and then while other processes train the runs that are left."""
OnStep = Callable[[str, int, int], None]
"""What a picture is being made of, steps done, of how many."""


@dataclass(frozen=True)
class Made:
    """A table or figure, and where its files are."""

    report: Report
    files: list[Path]


def names_of(names: Sequence[str]) -> list[str]:
    for name in names:
        if name != "all" and name not in EXHIBITS:
            raise unknown("table or figure", name, [*EXHIBITS, "all"])
    return list(EXHIBITS) if "all" in names else list(dict.fromkeys(names))


def plans(names: Sequence[str], choices: Choices, out: Path) -> dict[str, dict[tuple[Point, int], Planned]]:
    """The runs of each name. All lie in one folder, so that tables share them."""
    return {name: plan(EXHIBITS[name], choices, out) for name in names}


def any_ended(names: Sequence[str], choices: Choices, out: Path, data: str, other: str) -> bool:
    """Whether there is a run to show of this data set of the paper, trained on this or other data."""
    choices = replace(choices, stand_ins={} if other == data else {data: other})
    runs = (run for some in plans(names, choices, out).values() for run in some.values())
    return any(run.ended for run in runs if run.point.data == data)


def wanted(runs: Mapping[tuple[Point, int], Planned], only: Filter) -> list[Planned]:
    """The runs that are to be trained, each once; --only leaves the others as they are."""
    return list({run.path: run for run in runs.values() if chosen(run.point, only)}.values())


def reproduce(
    names: Sequence[str],
    choices: Choices,
    out: Path,
    *,
    only: Filter | None = None,
    train: bool = True,
    tables: bool = True,
    on_start: OnStart | None = None,
    on_wait: OnWait | None = None,
    on_step: OnStep | None = None,
    on_made: Callable[[Made], None] | None = None,
) -> list[Made]:
    """Tables and figures by name, each in a folder of its own below `out`.

    Runs that are there already are taken as they are, unfinished ones go on from where they were left,
    and a run that another process is training is waited for. `only` chooses what is trained; cells
    whose runs are not there are shown as missing, and without `train` nothing is written of a table of which
    there is none. Without `tables` nothing is written but the runs.
    `on_made` is called as soon as a table or figure is written.
    """
    all_runs = plans(names, choices, out)
    todo = {name: wanted(runs, only or {}) for name, runs in all_runs.items()}
    if only and not any(todo.values()):
        raise nothing_left(names, only)
    if not train:
        with_runs = {name: runs for name, runs in all_runs.items() if any(run.ended for run in runs.values())}
        if not with_runs:
            raise nothing_there(names, out)
        for name in all_runs.keys() - with_runs.keys():
            note(f"{name}: no run is there")
        all_runs = with_runs
    note_other_code({run.path for runs in all_runs.values() for run in runs.values() if run.ended})
    if train:
        _check([run for runs in todo.values() for run in runs])
    made = []
    for name, runs in all_runs.items():
        later = [run for other in list(todo)[list(todo).index(name) + 1 :] for run in todo[other]]
        try:
            if train:
                _train(todo[name], later, on_start, on_wait)
            if tables:
                shown = _parts(EXHIBITS[name], runs, only or {})
                made.append(_write(shown, choices, runs, out, on_step or (lambda *_: None)))
                if on_made:
                    on_made(made[-1])
        except (KeyboardInterrupt, RunStopped) as error:
            if tables:
                _write(_parts(EXHIBITS[name], runs, only or {}), choices, runs, out, None)
            left = len({run.path for run in [*todo[name], *later] if not run.ended})
            end(error, left=left, command="the same command again", mend=False)
            raise
    return made


def nothing_left(names: Sequence[str], only: Filter) -> UserError:
    """No point of these has all that --only asks for: what they have of it."""
    facts = [point.facts for name in names for point in EXHIBITS[name].points]
    found = {key: dict.fromkeys(fact[key] for fact in facts if key in fact) for key in only}
    has = "; ".join(f"{key} {', '.join(values) or 'nowhere'}" for key, values in found.items())
    return UserError(f"--only leaves nothing of {', '.join(names)}, which has {has}")


def nothing_there(names: Sequence[str], out: Path) -> UserError:
    have = "has" if len(names) == 1 else "have"
    trained = f"{', '.join(names)} {have} no finished run with these settings in {out}"
    return UserError(
        f"{trained}: give the settings that they were trained with, or leave out --no-train to train what is missing"
    )


def _check(runs: Sequence[Planned]) -> None:
    """Refuse what cannot work before the first run starts: each federation is tried once."""
    tried = set()
    for run in runs:
        federation = (run.point.data, run.point.beta, run.point.pool)
        if federation not in tried and not run.ended:
            tried.add(federation)
            prepare(run.values)


def _train(
    runs: Sequence[Planned], later: Sequence[Planned], on_start: OnStart | None, on_wait: OnWait | None
) -> None:
    """Train what has not ended, one after another. Where only runs are left that other processes train,
    one of those that come later is trained meanwhile; without any, they are waited for."""
    while left := [run for run in runs if not run.ended]:
        waiting = list({run.path: run for run in [*left, *later] if not run.ended}.values())
        for run in waiting:
            try:
                _one(run, [other for other in waiting if other is not run], on_start)
            except Busy:
                continue
            break
        else:
            if on_wait:
                on_wait(left)
            time.sleep(WAIT)


def _one(run: Planned, coming: Sequence[Planned], on_start: OnStart | None) -> None:
    if run.path.is_dir():  # before anything is loaded
        there = RunDirectory(run.path)
        there.lock()
        there.unlock()
    try:
        job = run.job()
    except UserError:
        if run.state == "to do" or run.ended:
            raise
        raise Busy(f"another process has begun {run.path}") from None
    if job is None:
        return
    ended = attempt(job, on_start(run, job.rounds, coming) if on_start else None)
    if not ended.diverged:
        # A finished run needs no checkpoint, and those of a hundred runs of a ResNet-50 would fill a disk.
        with suppress(OSError):
            rmtree(run.path / "checkpoints")


def _parts(exhibit: Exhibit, runs: Mapping[tuple[Point, int], Planned], only: Filter) -> Exhibit:
    """Without the parts that --only leaves out and of which nothing is there from another time."""
    there = {point for (point, _), run in runs.items() if run.ended or chosen(point, only)}
    parts = tuple(part for part in exhibit.parts if any(cell.point in there for cell in part.cells))
    return replace(exhibit, parts=parts)


def _write(
    exhibit: Exhibit,
    choices: Choices,
    runs: Mapping[tuple[Point, int], Planned],
    out: Path,
    on_step: OnStep | None,
) -> Made:
    """All files; after an interruption (no on_step) with the picture there is, for one takes its time."""
    beside = "" if (out / FILE).is_file() else choices.folder(point.data for point in exhibit.points)
    shown = {key: run for key, run in runs.items() if key[0] in exhibit.points}
    report, folder = Report.of(exhibit, choices, shown), out / beside / exhibit.name
    pictures = [file for file in sorted(folder.glob(f"{exhibit.name}*")) if file.suffix in (".png", ".json")]
    if on_step or pictures:
        from fedcsd.paper.figures import draw, numbers  # matplotlib

        pictures = draw(report, folder / exhibit.name, on_step) if on_step else pictures
        report = replace(report, numbers=numbers(report, pictures))
    with writing(folder):
        return Made(report, [*write(report, folder, pictures), *pictures])
