"""Several methods on one federation, over several seeds: planned, checked and trained."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcsd.config import Settings
from fedcsd.config.options import build
from fedcsd.config.settings import by_name, settings_where
from fedcsd.config.toml import merge
from fedcsd.errors import RunStopped, UserError, end
from fedcsd.experiments.choices import Choice, choices_of
from fedcsd.experiments.comparison_folder import FILES, PLANNED, Unfinished, check_folder, ended, run_name
from fedcsd.experiments.experiment import Experiment, config_of, folder_of, prepare, split_objects
from fedcsd.experiments.resuming import continued, note_other_code
from fedcsd.experiments.running import Job, Run, attempt, begin, load_run
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.federation.callbacks import Callbacks
from fedcsd.files import writing

SAME_COMMAND = "the same command again (without --overwrite)"
OnStart = Callable[[str, int, int, int], Callbacks]
"""Called with (label, seed, rounds, runs that come after it); returns the callbacks of that run."""


@dataclass(frozen=True)
class ComparedRuns:
    """The trained runs of a comparison, and what they have in common."""

    runs: dict[str, list[Run]]
    """by label, one run a seed"""
    seeds: list[int]
    path: Path | None
    experiment: Experiment
    """of the first run"""
    choices: Mapping[str, Any]
    """by label: the table or object of each method"""
    shared: Mapping[str, Mapping[str, Any]]
    """by label: options that were given for all methods together"""


@contextmanager
def compared(
    methods: str | Mapping[str, Choice] | Sequence[Choice],
    seeds: Sequence[int] | None,
    *,
    data: Any,
    model: Any,
    out: str | Path | None,
    overwrite: bool,
    on_start: OnStart | None,
    **settings: Any,
) -> Iterator[ComparedRuns]:
    """Train all runs and hold the folder's lock while the caller writes the tables."""
    seeds = _seeds(seeds, settings)
    shared = settings.pop("method", {})
    if isinstance(shared, str):
        raise UserError(f"method={shared!r} beside methods: name all methods in methods alone")
    alone, choices = choices_of(methods, {}), choices_of(methods, shared)
    folder = folder_of(out) if out is not None else None
    trials = []
    for label, choice in choices.items():
        for seed in seeds:
            values, given = split_objects(method=choice, data=data, model=model)
            path = folder / run_name(label, seed) if folder else None
            trials.append(Trial(label, seed, merge(settings, values, {"seed": seed}), given, path, overwrite))
    if folder:
        check_folder(folder, [(trial.label, trial.seed) for trial in trials])
    first = _check(trials)
    names = [trial.path.name for trial in trials if trial.path]
    with _claimed(folder, Unfinished(list(choices), seeds, names, first.settings.rounds)):
        runs = _train_all(trials, first, on_start)
        news = {
            label: {key: value for key, value in choice.items() if key not in alone[label]}
            for label, choice in choices.items()
            if isinstance(choice, Mapping)
        }
        try:
            yield ComparedRuns(runs, seeds, folder, first, choices, news)
        except KeyboardInterrupt as error:
            if folder:
                end(error, cause="the tables are not written", left=0, command=SAME_COMMAND)
            raise
        if folder:
            (folder / PLANNED).unlink(missing_ok=True)


def _seeds(seeds: Sequence[int] | None, settings: dict[str, Any]) -> list[int]:
    """Return the training seeds, checked; remove `seed` from the settings."""
    if seeds is not None and "seed" in settings:
        seed = settings["seed"]
        raise UserError(f"seed={seed} beside seeds: name all seeds in seeds alone, such as seeds=[{seed}]")
    seeds = [settings.pop("seed", Settings.seed)] if seeds is None else seeds
    if not isinstance(seeds, Iterable) or isinstance(seeds, str):
        raise UserError(f"seeds must be a list of whole numbers, such as [0, 1, 2], not {seeds!r}")
    found = [build(Settings, {"seed": each}).seed for each in seeds]
    if not found or len(set(found)) != len(found):
        raise UserError("seeds must be different whole numbers, such as [0, 1, 2]")
    return found


@contextmanager
def _claimed(folder: Path | None, planned: Unfinished) -> Iterator[None]:
    """Lock the folder of a comparison, remove the tables of an earlier call and note what is planned."""
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


@dataclass(frozen=True)
class Trial:
    """A trial is one method with one seed: a run to start, to resume or to take as it is."""

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
        """Tell if nothing is left to train: the run is finished, or it diverged."""
        return self.path is not None and self.exists and ended(RunDirectory.open(self.path), self.rounds)

    @property
    def rounds(self) -> int:
        rounds: int = self.values.get("rounds", Settings.rounds)
        return rounds

    def job(self, like: Experiment | None = None) -> Job | None:
        """Return the run ready to train, or None if it is finished; `like` is as for `prepare`."""
        given = {**self.given, "like": like}
        if not self.exists:
            return begin(self.values, given=given, out=self.path, overwrite=self.overwrite)
        assert self.path is not None
        changes = {key: self.values.get(key) for key in settings_where(on_resume="free")}
        changes["rounds"] = self.rounds  # there may have been fewer
        return continued(self.path, given=given, changes=changes)


def _train_all(trials: Sequence[Trial], first: Experiment, on_start: OnStart | None) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {trial.label: [] for trial in trials}
    left = sum(not trial.ended for trial in trials)
    note_other_code(trial.path for trial in trials if trial.path and trial.ended)
    try:
        for trial in trials:
            job = None if trial.ended else trial.job(first)
            if job is None:
                assert trial.path is not None
                runs[trial.label].append(load_run(trial.path))
                continue
            left -= 1
            callbacks = on_start(trial.label, trial.seed, job.rounds, left) if on_start else None
            runs[trial.label].append(attempt(job, callbacks))
    except (KeyboardInterrupt, RunStopped) as error:
        if trial.path:
            end(error, run=f"{trial.label}, seed {trial.seed}", command=SAME_COMMAND, mend=False)
        raise
    return runs


def _check(trials: Sequence[Trial]) -> Experiment:
    """Refuse what cannot work before the first run starts; return the experiment of the first trial."""
    first = prepare(trials[0].values, **trials[0].given)
    for trial in trials:
        if trial.path and not trial.exists:
            RunDirectory(trial.path).check_free(trial.overwrite)
        elif trial.path:
            _check_existing(trial.path, trial, prepare(trial.values, **trial.given, like=first))
    return first


def _check_existing(path: Path, trial: Trial, experiment: Experiment) -> None:
    """Refuse a run on disk with other settings, with more rounds, or without the checkpoint to go on from."""
    run = RunDirectory.open(path)
    there, here = run.began, config_of(experiment)
    before, now = by_name(there), by_name(here)
    may_differ = {*settings_where(result=False), *settings_where(on_resume="free")}
    different = [
        f"{k} is {before.get(k)!r} there and {now.get(k)!r} here"
        for k in {**now, **before}
        if k not in may_differ and before.get(k) != now.get(k) and k.partition(".")[0] in here
    ]
    if different:
        raise UserError(
            f"{path} holds a run with other settings ({different[0]}): choose another --out, or --overwrite"
        )
    if there["rounds"] > here["rounds"]:
        raise UserError(
            f"{path} has {there['rounds']} rounds: --rounds {there['rounds']} takes all runs that far, "
            "or choose another --out"
        )
    if run.summary is not None and not trial.ended:
        run.latest(experiment.network.layout)
