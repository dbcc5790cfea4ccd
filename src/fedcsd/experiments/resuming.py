"""Continue a run from its newest complete checkpoint.

A run knows its data and model by their digests, and a method by its class and options. So its folder can be
copied, and continues there. The files and folders outside it (the data, files of a method or model) are given
anew where they are no longer at their old paths.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedcsd.config.options import native
from fedcsd.config.settings import settings_where
from fedcsd.config.toml import merge
from fedcsd.errors import UserError, note
from fedcsd.experiments import tracking
from fedcsd.experiments.choices import FROM_PYTHON
from fedcsd.experiments.experiment import (
    Experiment,
    absolute,
    config_of,
    folder_of,
    load_data,
    prepare,
    settings_of,
)
from fedcsd.experiments.running import Job, Run, load_run, train
from fedcsd.experiments.runs import provenance
from fedcsd.experiments.runs.archive import open_run
from fedcsd.experiments.runs.recorded import MENDING
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.experiments.tracking import EachRound, OnRound
from fedcsd.federation.evaluation import Record
from fedcsd.files import writing
from fedcsd.methods import Method
from fedcsd.plugins import file_of, spec_of


def resume(
    path: str | Path,
    *,
    method: Method | str | None = None,
    data: Any = None,
    model: Callable[..., nn.Module] | str | None = None,
    on_round: OnRound | None = None,
    **changes: Any,
) -> Run:
    """Continue a run from its newest complete checkpoint. A finished run is returned as it is.

    Args:
        path: the run's folder
        method: an object from Python must be given again; a file only if it is no longer at its old path
        data: as for method
        model: as for method
        on_round: called after every round with its record and the number of rounds in all
        **changes: rounds (to train for longer), and the other settings that `fedcsd resume --help` lists
    """
    objects = {"method": method, "data": data, "model": model}
    changes |= {key: choice for key, choice in objects.items() if isinstance(choice, (str, Path))}
    given = {key: value for key, value in objects.items() if value is not None and key not in changes}
    job = continued(folder_of(path, "path"), given=given, changes=changes)
    return train(job, EachRound(on_round)) if job else load_run(path)


def continued(
    path: Path,
    *,
    given: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    deployed: bool = False,
) -> Job | None:
    """Return a run ready to train from its newest complete checkpoint, or None if it is finished.

    Args:
        path: the run's folder
        given: objects from Python (method, data, model) that have no name
        changes: settings that differ from here on, and files and folders that are given anew
        deployed: the caller trains over Flower
    """
    directory, given = RunDirectory.open(path), given or {}
    changes = {key: native(value) for key, value in (changes or {}).items() if value is not None}
    anew = _anew(
        directory, {key: changes.pop(key) for key in settings_where(on_resume="moves") if key in changes}
    )
    changeable = settings_where(on_resume=("free", "mends"))
    if fixed := [key for key in changes if key not in changeable]:
        raise UserError(
            f"{fixed[0]} cannot change in a run: start a new one, or change {', '.join(changeable)}"
        )
    finished = _is_finished(directory, changes)
    if finished and not anew:
        return None
    if not finished and ("deploy" in directory.config) != deployed:
        here = f"on this machine alone: go on with fedcsd resume {shlex.quote(str(path))}"
        raise UserError(
            f"{path} is trained {here if deployed else f'over Flower: go on with {directory.again}'}"
        )
    values = {**directory.settings, **anew, **changes}
    check_outside(path, values, given)
    if "data" in anew:  # before a model is made for it
        _check_digest("data", load_data(anew["data"], None, settings_of(values)).fingerprint(), directory)
    experiment = prepare(values, parts=directory.partition(), **given)
    _check_same(experiment, directory)
    if anew:
        directory.relocate(anew)
    return None if finished else _opened(experiment, directory, changes)


def _opened(experiment: Experiment, directory: RunDirectory, changes: Mapping[str, Any]) -> Job:
    """Lock a run's folder and prepare it for more rounds."""
    path = directory.path
    tracking.check_trackers(config_of(experiment))
    with writing(path):
        directory.lock()
    try:
        saved = directory.latest(experiment.network.layout)
        with writing(path):
            history = _history_until(directory, saved[0] if saved else None)
            if len(history) > experiment.settings.rounds:
                raise UserError(f"{path} has {len(history)} rounds already: --rounds must be at least that")
            directory.remove_ending()
            directory.checkpoints.remove_after(len(history))
            directory.change(len(history), changes, _changed_code(experiment, directory))
    except BaseException:
        directory.unlock()
        raise
    return Job(experiment, config_of(experiment), directory, saved, history)


def _is_finished(directory: RunDirectory, changes: Mapping[str, Any]) -> bool:
    """Tell if no round is left to train; a change that would have no effect then is refused."""
    if directory.summary is None or changes.get("rounds", 0) > directory.summary["rounds"]:
        return False
    for key in MENDING:
        if key in changes:
            flag = "--" + key.replace("_", "-")
            raise UserError(
                f"{directory.path} is finished, {flag} would have no effect: give --rounds as well"
            )
    return True


def _history_until(directory: RunDirectory, header: dict[str, Any] | None) -> list[Record]:
    """Return the records up to a checkpoint. Its own may be missing, if the run ended just after it."""
    rounds = header["round"] if header else 0
    history = directory.keep_history(rounds)
    if header and len(history) == rounds - 1:
        directory.record(header["record"])
        history.append(header["record"])
    if [r["round"] for r in history] != list(range(1, rounds + 1)):
        raise UserError(
            f"{directory.path / 'metrics.jsonl'} is damaged: not all of rounds 1 to {rounds} are in it; restore it"
        )
    return history


def _anew(directory: RunDirectory, places: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of settings that differ with these files and folders in place of the run's own.

    The class or function may be left out of the name of a method's or model's file.
    """
    settings, tables = merge(directory.settings), dict[str, Any]()
    for key, place in places.items():
        if key == "data_dir":
            tables[key] = absolute(str(place))
            continue
        name, now = settings[key]["name"], absolute(str(place))
        if key != "data":
            before, spec = spec_of(name), spec_of(str(place))
            now = ":".join(filter(None, (spec.home, spec.name or before.name)))
            if (spec_of(now).name, bool(spec.home), spec.parts) != (before.name, bool(before.home), ()):
                raise UserError(
                    f"{directory.path} was started with {name}: --{key} gives the file of the same {key} anew, "
                    "and nothing else; start a new run"
                )
        tables[key] = {**settings[key], "name": now}
    return {key: table for key, table in tables.items() if table != settings.get(key)}


def check_outside(path: Path, settings: Mapping[str, Any], given: Iterable[str] = ()) -> None:
    """Refuse a run whose data, or whose method's or model's file, does not exist and is not given from Python."""
    settings = merge(settings)
    for component in (name for name in ("method", "model", "data") if name not in given):
        name = settings[component]["name"]
        place = Path(name) if component == "data" else file_of(name)
        if place and place.is_absolute() and not place.exists():
            raise UserError(
                f"{place}, the {component} of {path}, is not there: give its new place, "
                f"fedcsd resume {shlex.quote(str(path))} --{component} …"
            )


def _check_same(experiment: Experiment, directory: RunDirectory) -> None:
    """Refuse other data, another model, and a method of another name or with other options."""
    here = provenance.digests(experiment)
    for what in ("data", "model"):
        _check_digest(what, here[what], directory)
    before, now = (merge(some)["method"] for some in (directory.settings, config_of(experiment)))
    before, now = ({**some, "name": spec_of(some["name"]).name} for some in (before, now))
    if now != before:
        raise UserError(f"{directory.path} was started with {before}, not {now}: start a new run")


def _check_digest(what: str, here: str, directory: RunDirectory) -> None:
    if directory.config["facts"][what] != here:
        raise UserError(
            f"the {what} is not the {what} that {directory.path} was started with: restore it, or start a new run"
        )


def _changed_code(experiment: Experiment, directory: RunDirectory) -> dict[str, str]:
    """Return the digests of code that is not what it was, and tell the user."""
    before, here = directory.config["facts"]["code"], provenance.digests(experiment)["code"]
    settings, path = merge(directory.settings), directory.path
    changed = {what: here.get(what, FROM_PYTHON) for what in before}
    changed = {what: digest for what, digest in changed.items() if digest != before[what]}
    for what, digest in changed.items():
        name = "fedcsd itself" if what == "package" else settings[what]["name"]
        if digest == FROM_PYTHON:  # a model: a method from Python has another name
            note(f"{path} was started with {name}: from here on its {what} is the one {FROM_PYTHON}")
        else:
            note(
                f"the code of {name} has changed since {path} was started: from here on it trains with the new code"
            )
    return changed


def note_other_code(runs: Iterable[Path]) -> None:
    """Tell the user which of these runs were trained, wholly or in part, with other code of this package."""
    every = sorted(runs)
    old = [path for path in every if {d for _, d in open_run(path).code("package")} != {provenance.package()}]
    if old:
        named = ", ".join(map(str, old[:3])) + (f" and {len(old) - 3} more" if len(old) > 3 else "")
        note(
            f"trained with other code of fedcsd than this: {len(old)} of the {len(every)} runs that are there "
            f"({named}); to train a run again, remove its folder"
        )
