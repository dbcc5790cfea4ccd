"""Start a run, train it, and read one that has ended."""

import math
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedcsd.config.toml import merge
from fedcsd.data.partition import counts_of
from fedcsd.errors import Diverged, Divergence, MethodFailed, RunStopped, UserError, end, note
from fedcsd.experiments import tracking
from fedcsd.experiments.choices import FROM_PYTHON
from fedcsd.experiments.experiment import (
    Experiment,
    config_of,
    folder_of,
    prepare,
    split_objects,
)
from fedcsd.experiments.machine import Host, sigterm_as_interrupt, this_machine
from fedcsd.experiments.runs.provenance import code_now, digests
from fedcsd.experiments.runs.recorded import FORMAT, Change
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.experiments.summary import summarise
from fedcsd.experiments.tracking import EachRound, OnRound
from fedcsd.federation.callbacks import Callbacks
from fedcsd.federation.evaluation import Record
from fedcsd.federation.rounds import Federation
from fedcsd.files import writing
from fedcsd.methods import Method
from fedcsd.plugins import short
from fedcsd.weights import Value, Weights


@dataclass(frozen=True)
class Run:
    """A run that has finished or diverged."""

    settings: dict[str, Any]
    history: list[Record]
    """one record a round, as in metrics.jsonl"""
    summary: dict[str, Any]
    """the result; empty for a run that diverged"""
    weights: dict[str, Tensor]
    """the final global model's state, for `load_state_dict`; empty for a run that diverged"""
    path: Path | None
    """the run's folder, if it has one"""
    diverged: Divergence | None = None
    """the divergence that ended the run; None if it is finished"""
    changes: tuple[Change, ...] = ()
    """settings and code that were changed while it was trained"""

    @property
    def accuracy(self) -> float:
        """Test accuracy after the final round; NaN for a run that diverged."""
        return math.nan if self.diverged else float(self.summary["final_accuracy"])

    def __repr__(self) -> str:
        chosen = (self.settings.get(key, "?") for key in ("method", "data"))
        method, data = (str(c.get("name") if isinstance(c, Mapping) else c) for c in chosen)
        rounds = "1 round" if len(self.history) == 1 else f"{len(self.history)} rounds"
        end = self.diverged or f"accuracy {round(self.summary.get('final_accuracy', math.nan), 4)}"
        return f"<Run: {short(method)} on {data}, {rounds}, {end}{f', in {self.path}' if self.path else ''}>"


@dataclass(frozen=True)
class Job:
    """A run that is checked and locked, ready to train from its present state."""

    experiment: Experiment
    config: dict[str, Any]
    directory: RunDirectory | None = None
    saved: tuple[dict[str, Any], dict[str, Value]] | None = None
    """header and values of the checkpoint to continue from"""
    history: list[Record] = field(default_factory=list)
    """the records so far"""

    @property
    def rounds(self) -> int:
        """Number of rounds in all."""
        return self.experiment.settings.rounds

    def ended(self, summary: Record, weights: dict[str, Tensor], diverged: Divergence | None = None) -> Run:
        """Return the run that came of it."""
        path, changes = (self.directory.path, self.directory.changes) if self.directory else (None, [])
        return Run(self.config, self.history, summary, weights, path, diverged, tuple(changes))


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
        out: the run's folder; without one nothing stays on disk
        overwrite: replace the run in that folder
        on_round: called after every round with its record and the number of rounds in all
        **settings: all other settings by name, as in `fedcsd run --help`: clients, beta, rounds, lr, …
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
    """Check settings, create the run's folder and return the run, ready to train.

    Args:
        values: plain settings
        given: objects from Python (method, data, model) that have no name
        out: the run's folder
        overwrite: replace the run in that folder
        deploy: facts about a run over Flower, for its config
    """
    experiment = prepare(values, **(given or {}))
    config = config_of(experiment)
    tracking.check_trackers(config)
    if out is None:
        return Job(experiment, config)
    needed = 20 * experiment.weights.nbytes + (1 << 20)
    data, parts = experiment.data, experiment.parts
    at_sites = len(data.x_train) != len(data.y_train)  # only its size is known here
    partition = (parts, experiment.held, len(data.y_train), None if at_sites else counts_of(data, parts))
    described = {**config, "facts": {"format": FORMAT, **digests(experiment)}}
    if deploy:
        described["deploy"] = dict(deploy)
    directory = RunDirectory.create(out, described, partition, needed=needed, overwrite=overwrite)
    return Job(experiment, config, directory)


def train(job: Job, watch: Callbacks | None = None, host: Host = this_machine) -> Run:
    """Train the rounds that are left, record each, and save checkpoints."""
    directory = job.directory
    try:
        path = directory.path if directory else None
        clients = host(job.experiment, path)
        tracked = tracking.tracked(watch, job.config, path, job.history)
        with sigterm_as_interrupt(), clients as (backend, states), tracked as watches:
            federation = Federation(job.experiment, backend, watches, states)
            if job.saved:
                federation.load(*job.saved)
            try:
                while federation.round < job.rounds:
                    job.history.append(federation.step())
                    _save_round(job, federation)
                    federation.callbacks.round(federation.record, job.rounds)
            except (KeyboardInterrupt, RunStopped) as error:
                _save_ending(error, job.directory, federation)
                raise
        return _finish(job, federation.server.weights, backend.engine)
    except (KeyboardInterrupt, RunStopped) as error:
        if directory:
            again = directory.again + " --lr …" * isinstance(error, Diverged)
            mend = isinstance(error, MethodFailed)
            end(error, saved=directory.checkpoints.rounds_saved, command=again, mend=mend)
        raise
    finally:
        if directory:
            directory.unlock()


def attempt(job: Job, watch: Callbacks | None = None) -> Run:
    """Train as `train` does, but return a run that diverged instead of raising an error."""
    try:
        return train(job, watch)
    except Diverged as error:
        if watch:
            watch.diverged(error.divergence.round)
        return job.ended({}, {}, error.divergence)


def _save_round(job: Job, federation: Federation) -> None:
    if job.directory is None:
        return
    with writing(job.directory.path, error=RunStopped):
        job.directory.record(federation.record)
        checkpoints = job.directory.checkpoints
        if federation.round == job.rounds or checkpoints.due(job.experiment.settings, federation.round):
            checkpoints.save(*federation.save())


def _save_ending(error: BaseException, directory: RunDirectory | None, federation: Federation) -> None:
    """Save the rounds since the last checkpoint, and a divergence."""
    if isinstance(error, Diverged):
        error.divergence = replace(error.divergence, round=federation.round + 1)
    with suppress(OSError):  # a full disk may have ended the run
        if directory and federation.round > directory.checkpoints.rounds_saved:
            directory.checkpoints.save(*federation.save())
        if directory and isinstance(error, Diverged):
            directory.diverged(error.divergence)


def _finish(job: Job, weights: Weights, engine: str) -> Run:
    network, directory = job.experiment.network, job.directory
    network.load(weights)
    state = {name: tensor.detach().clone() for name, tensor in network.module.state_dict().items()}
    summary = summarise(job.history) | ({"engine": engine} if engine else {})
    if directory:
        with writing(directory.path, error=RunStopped):
            directory.finish(summary, save(state))
    return job.ended(summary, state)


def load_run(path: str | Path) -> Run:
    """Return a run that has ended from its folder."""
    directory = RunDirectory.open(folder_of(path, "path"))
    path, settings, summary = directory.path, directory.settings, directory.summary
    diverged = directory.divergence
    if summary is None and not diverged:
        rounds = f"{directory.checkpoints.rounds_saved} of {settings['rounds']} rounds"
        raise UserError(f"{path} is not finished ({rounds}): fedcsd resume {shlex.quote(str(path))}")
    _note_if_old(directory)
    weights = {} if diverged else _weights(directory)
    changes = tuple(directory.changes)
    return Run(settings, directory.history(), summary or {}, weights, path, diverged, changes)


def _weights(directory: RunDirectory) -> dict[str, Tensor]:
    """Return the final model of a finished run."""
    path, model = directory.path, directory.path / "model.safetensors"
    if not model.exists():
        further = f", or further, {directory.again} --rounds …" if directory.checkpoints.rounds_saved else ""
        raise UserError(
            f"the weights of {path} are not there (results that are shared come without them): train the run again, "
            f"fedcsd run {shlex.quote(str(path / 'config.toml'))}{further}"
        )
    try:
        return load_file(model)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot read the model of {path}: {error}") from None


def _note_if_old(directory: RunDirectory) -> None:
    """Tell the user if a method's or model's file has changed since it trained a run that has ended."""
    settings, code = merge(directory.settings), directory.config["facts"]["code"]
    for component in ("method", "model"):
        name, before = settings[component]["name"], code.get(component)
        if before not in (None, FROM_PYTHON) and code_now(component, name) not in ("", before):
            home = name.rpartition(":")[0] or name
            note(f"{directory.path} was trained before {home} changed: remove that folder to train it again")
