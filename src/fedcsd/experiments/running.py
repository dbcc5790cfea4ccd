"""Runs from begin to end: start, train, stop, and take up again what was cut off."""

import math
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedcsd.config.options import native
from fedcsd.config.settings import settings_where
from fedcsd.config.toml import merge
from fedcsd.data.partition import counts_of
from fedcsd.errors import Diverged, Divergence, MethodFailed, RunStopped, UserError, end, note
from fedcsd.experiments import tracking
from fedcsd.experiments.choices import FROM_PYTHON
from fedcsd.experiments.experiment import Experiment, config_of, folder_of, prepare, split_objects
from fedcsd.experiments.identity import (
    CODE,
    changed_code,
    check_same,
    check_there,
    code_now,
    facts_of,
    move,
)
from fedcsd.experiments.machine import Place, here, sigterm_as_interrupt
from fedcsd.experiments.run_folder import RunDirectory
from fedcsd.experiments.summary import summarise
from fedcsd.experiments.tracking import EachRound, OnRound
from fedcsd.federation.callbacks import Callbacks
from fedcsd.federation.evaluation import Record
from fedcsd.federation.rounds import Federation
from fedcsd.files import writing
from fedcsd.methods import Method
from fedcsd.plugins import short
from fedcsd.weights import Value, Weights

CHANGEABLE = settings_where(on_resume=("free", "mends"))


@dataclass(frozen=True)
class Run:
    """A run that has ended: finished, or diverged."""

    settings: dict[str, Any]
    history: list[Record]
    """one record a round, as in metrics.jsonl"""
    summary: dict[str, Any]
    """the result; empty for a run that diverged"""
    weights: dict[str, Tensor]
    """the final global model's state, for `load_state_dict`; empty for a run that diverged"""
    path: Path | None
    """the run directory, if one was asked for"""
    diverged: Divergence | None = None
    """in which round the run ended, and why; None if it is finished"""
    mended: tuple[str, ...] = ()
    """what was changed in mid-run after a divergence, so that it could go on"""

    @property
    def accuracy(self) -> float:
        """Test accuracy after the final round; NaN for a run that diverged."""
        return math.nan if self.diverged else float(self.summary["final_accuracy"])

    def __repr__(self) -> str:
        """One line; all of its weights and rounds would be pages."""
        chosen = (self.settings.get(key, "?") for key in ("method", "data"))
        method, data = (str(c.get("name") if isinstance(c, Mapping) else c) for c in chosen)
        rounds = "1 round" if len(self.history) == 1 else f"{len(self.history)} rounds"
        end = self.diverged or f"accuracy {round(self.summary.get('final_accuracy', math.nan), 4)}"
        return f"<Run: {short(method)} on {data}, {rounds}, {end}{f', in {self.path}' if self.path else ''}>"


@dataclass(frozen=True)
class Job:
    """A run that is checked and claimed, ready to train from where it stands."""

    experiment: Experiment
    config: dict[str, Any]
    directory: RunDirectory | None
    history: list[Record]
    saved: tuple[dict[str, Any], dict[str, Value]] | None

    @property
    def rounds(self) -> int:
        return self.experiment.settings.rounds


def run(
    *,
    method: Method | type[Method] | str | Mapping[str, Any] = "fedcsd",
    data: Any = "digits",
    model: str | Mapping[str, Any] | Callable[..., nn.Module] = "auto",
    out: str | Path | None = None,
    overwrite: bool = False,
    on_round: OnRound | None = None,
    **settings: Any,
) -> Run:
    """Train a federation and return the finished run.

    A choice with options is a dict: `data={"name": "femnist", "classes": 62}`.

    Args:
        method: a name (`"fedcsd:m1:mu=0.01"`, `"my_method.py:MyMethod"`), or an object such as
            `fedcsd.FedCSD(mu=0.01)`
        data: a name, a path, arrays (x_train, y_train, x_test, y_test) or (x, y), or two torch data sets
        model: a name, or a function or class that makes an `nn.Module` ending in a Linear layer;
            it is called with the image shape and the number of classes if it takes arguments
        out: the run directory; without one nothing stays on disk
        overwrite: replace what is at `out`
        on_round: called after every round with its record and the number of rounds in all
        **settings: everything else by name, as in `fedcsd run --help`: clients, beta, rounds, lr, …
    """
    values, given = split_objects(method=method, data=data, model=model)
    folder = folder_of(out) if out is not None else None
    job = begin(merge(settings, values), given=given, out=folder, overwrite=overwrite)
    return train(job, EachRound(on_round))


def begin(
    values: Mapping[str, Any],
    *,
    given: Mapping[str, Any] | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    deploy: Mapping[str, Any] | None = None,
) -> Job:
    """A new run from plain settings; `given` holds objects from Python that have no name, `deploy` what
    there is to know of a run over Flower."""
    experiment = prepare(values, **(given or {}))
    config = config_of(experiment)
    tracking.check(config)
    if out is None:
        return Job(experiment, config, None, [], None)
    needed = 20 * experiment.weights.nbytes + (1 << 20)
    data, parts = experiment.data, experiment.parts
    at_sites = len(data.x_train) != len(data.y_train)  # only its size is known here
    partition = (parts, experiment.held, len(data.y_train), None if at_sites else counts_of(data, parts))
    described = {**config, **({"deploy": dict(deploy)} if deploy else {}), "facts": facts_of(experiment)}
    directory = RunDirectory.create(out, described, partition, needed=needed, overwrite=overwrite)
    return Job(experiment, config, directory, [], None)


def take_up(
    path: Path,
    *,
    given: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    deployed: bool = False,
) -> Job | None:
    """A run as it was left, from its newest complete checkpoint; None if it is finished.

    `changes` are settings that may differ from here on (CHANGEABLE), of which the config keeps note, and where
    files of one's own and the data are now.
    """
    directory = RunDirectory.open(path)
    changes = {key: native(value) for key, value in (changes or {}).items() if value is not None}
    places = {key: changes.pop(key) for key in settings_where(on_resume="moves") if key in changes}
    if places:
        move(directory, places, given or {})
    for key in changes:
        if key not in CHANGEABLE:
            raise UserError(
                f"{key} cannot change in a run: start a new one, or change {', '.join(CHANGEABLE)}"
            )
    if _is_finished(directory, changes):
        return None
    if ("deploy" in directory.config) != deployed:
        raise UserError(
            f"{path} is trained on this machine alone: go on with fedcsd resume {shlex.quote(str(path))}"
            if deployed
            else f"{path} is trained over Flower: go on with {directory.again}"
        )
    check_there(directory, given or {})
    experiment = prepare({**directory.settings, **changes}, parts=directory.partition(), **(given or {}))
    check_same(experiment, directory)
    tracking.check(config_of(experiment))
    with writing(path):
        directory.lock()
    try:
        saved = directory.latest(experiment.network.layout)
        with writing(path):
            history = _history_until(directory, saved[0] if saved else None)
            if len(history) > experiment.settings.rounds:
                raise UserError(f"{path} has {len(history)} rounds already: --rounds must be at least that")
            directory.reopen()
            directory.settle(len(history))
            directory.change(len(history), changes, changed_code(experiment, directory))
    except BaseException:
        directory.unlock()
        raise
    return Job(experiment, config_of(experiment), directory, history, saved)


def _is_finished(directory: RunDirectory, changes: Mapping[str, Any]) -> bool:
    """Whether no round is left to train; what would have no effect then is refused."""
    if directory.summary is None or changes.get("rounds", 0) > directory.summary["rounds"]:
        return False
    for key in settings_where(on_resume="mends"):
        if key in changes:
            flag = "--" + key.replace("_", "-")
            raise UserError(
                f"{directory.path} is finished, {flag} would have no effect: give --rounds as well"
            )
    return True


def resume(
    path: str | Path,
    *,
    method: Method | str | None = None,
    data: Any = None,
    model: Callable[..., nn.Module] | str | None = None,
    on_round: OnRound | None = None,
    **changes: Any,
) -> Run:
    """Go on with a run from its newest complete checkpoint; a finished run is returned as it is.

    Objects that were given from Python must be given again. Where a file of your own or the data has
    moved, `method`, `model` and `data` say where it is now. `changes` may be rounds (to train for longer than was meant),
    and what else `fedcsd resume --help` lists.
    """
    objects = {"method": method, "data": data, "model": model}
    changes |= {key: choice for key, choice in objects.items() if isinstance(choice, (str, Path))}
    given = {key: value for key, value in objects.items() if value is not None and key not in changes}
    job = take_up(folder_of(path, "path"), given=given, changes=changes)
    return train(job, EachRound(on_round)) if job else load_run(path)


def _history_until(directory: RunDirectory, header: dict[str, Any] | None) -> list[Record]:
    """The records up to a checkpoint. Its own may be missing, if the run ended just after it."""
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


def load_run(path: str | Path) -> Run:
    """A run that has ended, from its directory."""
    directory = RunDirectory.open(folder_of(path, "path"))
    if end := directory.divergence:
        _tell_if_old(directory)
        mended = tuple(directory.mended)
        return Run(directory.settings, directory.history(), {}, {}, directory.path, end, mended)
    if directory.summary is None:
        rounds = f"{directory.rounds_saved} of {directory.settings['rounds']} rounds"
        raise UserError(f"{path} is not finished ({rounds}): fedcsd resume {shlex.quote(str(path))}")
    _tell_if_old(directory)
    model = directory.path / "model.safetensors"
    if not model.exists():
        raise UserError(
            f"the weights of {path} are not there (results that are shared come without them): train the run again, "
            f"fedcsd run {shlex.quote(str(directory.path / 'config.toml'))}"
            + (f", or further, {directory.again} --rounds …" if directory.rounds_saved else "")
        )
    try:
        weights = load_file(model)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read the model of {path}: {error}") from None
    history, mended = directory.history(), tuple(directory.mended)
    return Run(directory.settings, history, directory.summary, weights, directory.path, mended=mended)


def _tell_if_old(directory: RunDirectory) -> None:
    """A run that has ended, of a method or model whose file has changed since, is still what the old code gave."""
    settings, facts = merge(directory.settings), directory.config["facts"]
    for what, fact in CODE.items():
        name, before = settings[what]["name"], facts.get(fact)
        if before not in (None, FROM_PYTHON) and code_now(what, name) not in ("", before):
            home = name.rpartition(":")[0] or name
            note(f"{directory.path} was trained before {home} changed: remove that folder to train it again")


def train(job: Job, watch: Callbacks | None = None, place: Place = here) -> Run:
    """The rounds that are still to do, each recorded and checkpointed."""
    directory = job.directory
    try:
        path = directory.path if directory else None
        at = place(job.experiment, path)
        followed = tracking.tracked(watch, job.config, path, job.history)
        with sigterm_as_interrupt(), at as (backend, states), followed as watches:
            federation = Federation(job.experiment, backend, watches, states)
            if job.saved:
                federation.load(*job.saved)
            try:
                while federation.round < job.rounds:
                    job.history.append(federation.step())
                    _save_round(job, federation)
                    federation.callbacks.round(federation.record, job.rounds)
            except (KeyboardInterrupt, RunStopped) as error:
                if directory and federation.round > directory.rounds_saved:
                    with suppress(OSError):  # the disk may be what ended the run
                        directory.checkpoint(*federation.save())
                if isinstance(error, Diverged):
                    _note_divergence(error, federation.round + 1, directory)
                _say_what_is_saved(error, directory)
                raise
        return _finish(job, federation.server.weights, {"engine": backend.engine} if backend.engine else {})
    finally:
        if directory:
            directory.unlock()


def attempt(job: Job, watch: Callbacks | None = None) -> Run:
    """As `train`, but a divergence is a result too."""
    try:
        return train(job, watch)
    except Diverged as error:
        if watch:
            watch.diverged(error.divergence.round)
        path, mended = (job.directory.path, tuple(job.directory.mended)) if job.directory else (None, ())
        return Run(job.config, job.history, {}, {}, path, error.divergence, mended)


def _note_divergence(error: Diverged, round: int, directory: RunDirectory | None) -> None:
    error.divergence = replace(error.divergence, round=round)
    if directory:
        with suppress(OSError):  # what is not written down is trained, and diverges, once more
            directory.diverged(error.divergence)


def _save_round(job: Job, federation: Federation) -> None:
    if job.directory is None:
        return
    with writing(job.directory.path, error=RunStopped):
        job.directory.record(federation.record)
        if federation.round == job.rounds or job.directory.due(job.experiment.settings, federation.round):
            job.directory.checkpoint(*federation.save())


def _say_what_is_saved(error: BaseException, directory: RunDirectory | None) -> None:
    """Add to what ended a run early the rounds that are saved and the command that continues it."""
    if directory:
        change = " --lr …" if isinstance(error, Diverged) else ""
        again = directory.again + change
        end(error, saved=directory.rounds_saved, command=again, mend=isinstance(error, MethodFailed))


def _finish(job: Job, weights: Weights, how: Mapping[str, Any]) -> Run:
    network, directory = job.experiment.network, job.directory
    network.load(weights)
    state = {name: tensor.detach().clone() for name, tensor in network.module.state_dict().items()}
    summary = {**summarise(job.history), **how}
    if directory is None:
        return Run(job.config, job.history, summary, state, None)
    try:
        with writing(directory.path, error=RunStopped):
            directory.finish(summary, save(state))
    except RunStopped as error:
        _say_what_is_saved(error, directory)
        raise
    mended = tuple(directory.mended)
    return Run(job.config, job.history, summary, state, directory.path, mended=mended)
