"""Several methods on the same federation, over several seeds, side by side."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedcsd.config import Settings
from fedcsd.config.options import build, default_of
from fedcsd.config.settings import by_name, settings_where
from fedcsd.config.toml import merge
from fedcsd.errors import RunStopped, UserError, end
from fedcsd.experiments.choices import Choice, choices_of, method_from
from fedcsd.experiments.comparison_folder import FILES, PLANNED, Unfinished, check_folder, ended, run_name
from fedcsd.experiments.experiment import Experiment, config_of, folder_of, prepare, split_objects
from fedcsd.experiments.identity import tell_old
from fedcsd.experiments.run_folder import RunDirectory
from fedcsd.experiments.running import Job, Run, attempt, begin, load_run, take_up
from fedcsd.federation.callbacks import Callbacks
from fedcsd.files import write_whole, writing
from fedcsd.results.rows import About, rows, told
from fedcsd.results.tables import Row, csv_text, latex, markdown

SAME_COMMAND = "the same command again (without --overwrite)"


@dataclass(frozen=True)
class Comparison:
    rows: list[Row]
    runs: dict[str, list[Run]]
    """by label, a run a seed"""
    seeds: list[int]
    path: Path | None
    picture: Path | None
    settings: dict[str, Any]
    """what all have in common: the important settings, and those that are not the default"""

    def __repr__(self) -> str:
        place = f", in {self.path}" if self.path else ""
        return f"<Comparison: {', '.join(self.runs)}, seeds {', '.join(map(str, self.seeds))}{place}>"

    def markdown(self) -> str:
        return markdown(self.rows, self.seeds, self.settings)

    def latex(self) -> str:
        return latex(self.rows, self.seeds, self.settings)

    def csv(self) -> str:
        return csv_text(self.rows)


def compare(
    methods: str | Mapping[str, Choice] | Sequence[Choice],
    seeds: Sequence[int] | None = None,
    *,
    data: Any = "digits",
    model: Any = "auto",
    out: str | Path | None = None,
    overwrite: bool = False,
    on_start: Callable[[str, int, int, int], Callbacks] | None = None,
    **settings: Any,
) -> Comparison:
    """Run every method with every seed on the same settings.

    A run that diverges is a result: it is recorded, not trained again, and the comparison goes on.
    `resume` on its folder with another lr or on_divergence mends it, and the next call takes it then.
    What is not said here is as for `fedcsd.run`.

    Args:
        methods: names as in `--methods`, or methods by label: `{"mine": MyMethod(), "fedavg": "fedavg"}`
        seeds: training seeds; without them there is one, `seed` (0 by default)
        out: with a folder, finished runs found there are taken as they are and unfinished ones are
            resumed, so that calling again goes on where it was cut off, and with more rounds takes all further
        on_start: called with (label, seed, rounds, runs that come after it), gives what watches that run
    """
    seeds = _seeds(seeds, settings)
    shared = settings.pop("method", {})
    if isinstance(shared, str):
        raise UserError(f"method={shared!r} beside methods: name all methods in methods alone")
    without = choices_of(methods, {})
    entries = choices_of(methods, shared)
    folder = folder_of(out) if out is not None else None
    plan = []
    for label, choice in entries.items():
        for seed in seeds:
            values, given = split_objects(method=choice, data=data, model=model)
            path = folder / run_name(label, seed) if folder else None
            plan.append(Cell(label, seed, merge(settings, values, {"seed": seed}), given, path, overwrite))
    if folder:
        check_folder(folder, [(cell.label, cell.seed) for cell in plan])
    about = _about(entries, without, _check(plan))
    names = [cell.path.name for cell in plan if cell.path]
    with _claimed(folder, Unfinished(list(entries), seeds, names, plan[0].rounds)):
        runs = _train_all(plan, on_start)
        with _all_finished(folder):
            picture = folder / "curves.png" if folder else None
            comparison = Comparison(rows(runs, about), runs, seeds, folder, picture, dict(about.settings))
            if folder:
                _write(comparison, folder)
    return comparison


def _seeds(seeds: Sequence[int] | None, settings: dict[str, Any]) -> list[int]:
    """The training seeds, checked; `seed` is taken out of the settings."""
    seed = settings.pop("seed", None)
    if seeds is not None and seed is not None:
        raise UserError(f"seed={seed} beside seeds: name all seeds in seeds alone, such as seeds=[{seed}]")
    seeds = [0 if seed is None else seed] if seeds is None else seeds
    if not isinstance(seeds, Iterable) or isinstance(seeds, str):
        raise UserError(f"seeds must be a list of whole numbers, such as [0, 1, 2], not {seeds!r}")
    found = [build(Settings, {"seed": each}).seed for each in seeds]
    if not found or len(set(found)) != len(found):
        raise UserError("seeds must be different whole numbers, such as [0, 1, 2]")
    return found


def _about(entries: Mapping[str, Any], without: Mapping[str, Any], experiment: Experiment) -> About:
    """What the table's notes need to know of the methods; `without` are they without shared options."""
    untrained, shared, layout = set(), {}, experiment.network.layout
    notes: dict[str, list[str]] = {}
    for label, choice in entries.items():
        method = method_from(choice)
        local = method.local(layout)
        if local is not None:
            if local.any():
                untrained.add(label)
            else:
                notes[label] = ["the same as fedavg: of this model nothing stays with the clients"]
        if isinstance(choice, Mapping):
            new = {key: value for key, value in choice.items() if key not in without[label]}
            defaults = {option.name: default_of(option) for option in fields(method)}
            shared[label] = {key: value for key, value in new.items() if value != defaults[key]}
    settings = told(config_of(experiment))
    guess = 100 * int(experiment.data.y_test.bincount().max()) / len(experiment.data.y_test)
    return About(experiment.data.classes, frozenset(untrained), shared, settings, notes, guess)


@contextmanager
def _claimed(folder: Path | None, planned: Unfinished) -> Iterator[None]:
    """One process at a time trains a comparison; the tables of an earlier call are gone."""
    if folder is None:
        yield
        return
    directory = RunDirectory(folder)
    try:
        with writing(folder, "choose another --out"):
            folder.mkdir(parents=True, exist_ok=True)
            directory.lock()
            for name in FILES:
                (folder / name).unlink(missing_ok=True)
            planned.write(folder)
        yield
    finally:
        directory.unlock()


@contextmanager
def _all_finished(folder: Path | None) -> Iterator[None]:
    """Ctrl-C while the tables are made: says what is lost (nothing) and how to get them."""
    try:
        yield
    except KeyboardInterrupt as error:
        if folder:
            end(error, cause="the tables are not written", left=0, command=SAME_COMMAND)
        raise


@dataclass(frozen=True)
class Cell:
    """One method with one seed."""

    label: str
    seed: int
    values: dict[str, Any]
    given: dict[str, Any]
    path: Path | None
    overwrite: bool

    @property
    def exists(self) -> bool:
        return self.path is not None and not self.overwrite and (self.path / "config.toml").exists()

    @property
    def ended(self) -> bool:
        """Whether there is nothing to train: finished, or diverged."""
        return self.path is not None and self.exists and ended(RunDirectory.open(self.path), self.rounds)

    @property
    def rounds(self) -> int:
        rounds: int = self.values.get("rounds", Settings.rounds)
        return rounds

    def job(self) -> Job | None:
        """What is to be trained; None if it is finished."""
        if not self.exists:
            return begin(self.values, given=self.given, out=self.path, overwrite=self.overwrite)
        assert self.path is not None
        changes = {key: self.values.get(key) for key in settings_where(on_resume="free")}
        changes["rounds"] = self.rounds  # there may have been fewer
        return take_up(self.path, given=self.given, changes=changes)


def _train_all(
    plan: Sequence[Cell], on_start: Callable[[str, int, int, int], Callbacks] | None
) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {cell.label: [] for cell in plan}
    left = sum(not cell.ended for cell in plan)
    tell_old(cell.path for cell in plan if cell.path and cell.ended)
    try:
        for cell in plan:
            job = None if cell.ended else cell.job()
            if job is None:
                assert cell.path is not None
                runs[cell.label].append(load_run(cell.path))
                continue
            left -= 1
            watch = on_start(cell.label, cell.seed, job.rounds, left) if on_start else None
            runs[cell.label].append(attempt(job, watch))
    except (KeyboardInterrupt, RunStopped) as error:
        if cell.path:
            end(error, run=f"{cell.label}, seed {cell.seed}", command=SAME_COMMAND, mend=False)
        raise
    return runs


def _check(plan: Sequence[Cell]) -> Experiment:
    """Refuse what cannot work before the first run starts; gives the experiment of the first cell."""
    first = None
    for number, cell in enumerate(plan):
        if cell.path and not cell.exists:
            RunDirectory(cell.path).check_free(cell.overwrite)
        if not cell.exists and number:
            continue
        experiment = prepare(cell.values, **cell.given)
        first = first or experiment
        if not cell.exists:
            continue
        assert cell.path is not None
        run = RunDirectory.open(cell.path)
        there, here = run.began, config_of(experiment)
        before, now = by_name(there), by_name(here)
        different = [
            f"{k} is {before.get(k)!r} there and {now.get(k)!r} here"
            for k in {**now, **before}
            if k not in (*settings_where(result=False), *settings_where(on_resume="free"))
            and before.get(k) != now.get(k)
            and k.partition(".")[0] in here
        ]
        if different:
            raise UserError(
                f"{cell.path} holds a run with other settings ({different[0]}): choose another --out, or --overwrite"
            )
        if there["rounds"] > here["rounds"]:
            raise UserError(
                f"{cell.path} has {there['rounds']} rounds: --rounds {there['rounds']} takes all runs that far, "
                "or choose another --out"
            )
        if run.summary is not None and not cell.ended:
            run.latest(experiment.network.layout)  # refuses one that cannot be trained any further
    assert first is not None
    return first


def _write(comparison: Comparison, folder: Path) -> None:
    """The table as Markdown, CSV and LaTeX, the numbers as JSON, the curves as a picture."""
    from fedcsd.results.curves import plot_curves

    assert comparison.picture is not None
    histories = {label: [run.history for run in runs] for label, runs in comparison.runs.items()}
    rounds = max(run.settings["rounds"] for runs in comparison.runs.values() for run in runs)
    plot_curves(histories, comparison.picture, rounds=rounds)
    content = {
        "settings": comparison.settings,
        "seeds": comparison.seeds,
        "rows": [row.to_json() for row in comparison.rows],
    }
    for suffix, text in (
        ("md", comparison.markdown()),
        ("csv", comparison.csv()),
        ("tex", comparison.latex()),
        ("json", json.dumps(content, indent=2) + "\n"),
    ):
        write_whole(folder / f"comparison.{suffix}", text.encode())
    (folder / PLANNED).unlink(missing_ok=True)
