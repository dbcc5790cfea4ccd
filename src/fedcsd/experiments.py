"""From settings to a finished run: check everything, train, and take up again what was cut off."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedcsd import data as fedcsd_data
from fedcsd import seeds
from fedcsd.backends.local import LocalBackend, cores
from fedcsd.config import TABLES, Settings, build, checked, layered, plain
from fedcsd.data import Dataset
from fedcsd.data.augment import AUGMENTATIONS
from fedcsd.data.partition import Rows, hold_out
from fedcsd.errors import Diverged, RunStopped, UserError, unknown
from fedcsd.federation import Experiment, Federation, Record, Watch, cohort, initial_network
from fedcsd.methods import Method, methods
from fedcsd.models import Factory, choose, factory
from fedcsd.models.network import Network
from fedcsd.runs import RunDirectory, summarise
from fedcsd.weights import Value, Weights

CHANGEABLE = ("rounds", "lr", "on_divergence", "checkpoint_every", "workers")
FROM_PYTHON = "given from Python"
OnRound = Callable[[Record, int], object]
"""Called after every round with its record and the number of rounds in all."""


class EachRound(Watch):
    """Calls a function after each round."""

    def __init__(self, on_round: OnRound | None):
        self.on_round = on_round

    def round(self, record: Record, rounds: int) -> None:
        if self.on_round:
            self.on_round(record, rounds)


@dataclass(frozen=True)
class Run:
    """A finished run."""

    settings: dict[str, Any]
    history: list[Record]
    """one record a round, as in metrics.jsonl"""
    summary: dict[str, Any]
    weights: dict[str, Tensor]
    """the final global model's state, for `load_state_dict`"""
    path: Path | None
    """the run directory, if one was asked for"""

    @property
    def accuracy(self) -> float:
        """Test accuracy after the final round."""
        return float(self.summary["final_accuracy"])


def prepare(
    values: Mapping[str, Any],
    *,
    method: Method | None = None,
    data: Any = None,
    model: Any = None,
    parts: tuple[list[Rows], list[Rows]] | None = None,
) -> Experiment:
    """Check all settings, data and the model, and make what training needs; nothing is written."""
    values = layered(TABLES, values)
    chosen = method or make_method(values["method"])
    checked(type(chosen), plain(chosen), where="method")  # an object from Python is checked like the rest
    settings, tables, dataset = _choices(values, data, model)
    if parts is None:
        parts = _deal(settings, tables, dataset)
    train, held = parts
    settings = replace(settings, clients=len(train))
    make = _factory(tables["model"], model, dataset)
    network = initial_network(settings, dataset, make)
    _check_model(network, dataset)
    return Experiment(settings, tables, chosen, dataset, train, held, make, network, network.weights())


def deal(values: Mapping[str, Any]) -> tuple[Dataset, list[Rows], list[Rows]]:
    """The data and who would hold what of it: the clients' training rows, and what they hold out."""
    settings, tables, dataset = _choices(layered(TABLES, values))
    return dataset, *_deal(settings, tables, dataset)


def _deal(settings: Settings, tables: Mapping[str, Any], dataset: Dataset) -> tuple[list[Rows], list[Rows]]:
    dealt = fedcsd_data.split(dataset.y_train.numpy(), settings, tables["partition"], dataset.groups)
    return hold_out(dealt, settings.holdout, settings.partition_seed)


def _choices(
    values: dict[str, Any], data: Any = None, model: Any = None
) -> tuple[Settings, dict[str, Any], Dataset]:
    """Settings, the tables of data, model and partition, and the data set; every choice made."""
    tables = {key: values[key] for key in ("data", "model", "partition")}
    settings = build(Settings, {key: value for key, value in values.items() if key not in TABLES})
    dataset = _load(tables["data"], data, settings)
    return *_resolved(settings, tables, dataset, model), dataset


def _load(table: Mapping[str, Any], given: Any, settings: Settings) -> Dataset:
    options = dict(table)
    name = options.pop("name")
    if given is None and name == FROM_PYTHON:
        raise UserError(f"the data of this run was {FROM_PYTHON}: use fedcsd.resume(path, data=…) there")
    folder = settings.data_dir or os.environ.get("FEDCSD_DATA") or None
    dataset = fedcsd_data.load(name if given is None else given, options, Path(folder) if folder else None)
    if settings.train_size:
        dataset = dataset.smaller(settings.train_size, seeds.rng(settings.partition_seed, "train size"))
    return dataset


def _factory(table: Mapping[str, Any], given: Any, dataset: Dataset) -> Factory:
    options = dict(table)
    name = options.pop("name")
    if given is None and name == FROM_PYTHON:
        raise UserError(f"the model of this run was {FROM_PYTHON}: use fedcsd.resume(path, model=…) there")
    return factory(name if given is None else given, options, dataset.shape, dataset.classes)


def make_method(table: Mapping[str, Any]) -> Method:
    """A method from its name and options."""
    options = dict(table)
    name = options.pop("name")
    if FROM_PYTHON in str(name):
        raise UserError(f"the method of this run was {FROM_PYTHON}: use fedcsd.resume(path, method=…) there")
    made: Method = build(methods.load(name), options, where="method")
    return made


def _resolved(
    settings: Settings, tables: dict[str, dict[str, Any]], dataset: Dataset, model: Any
) -> tuple[Settings, dict[str, dict[str, Any]]]:
    """The settings and tables with every choice made that was left open."""
    tables = {key: dict(table) for key, table in tables.items()}
    if tables["model"]["name"] == "auto" and model is None:
        tables["model"]["name"] = choose(dataset.shape) if dataset.model == "auto" else dataset.model
    if tables["partition"]["name"] == "auto":
        tables["partition"]["name"] = dataset.partition
    augment = dataset.augment if settings.augment == "auto" else settings.augment
    if augment not in AUGMENTATIONS:
        raise unknown("augmentation", augment, ["auto", *AUGMENTATIONS])
    if AUGMENTATIONS[augment].active and len(dataset.shape) != 3:
        raise UserError(f"--augment {augment} is for images, {dataset.name} is a table: use --augment none")
    folder = settings.data_dir or os.environ.get("FEDCSD_DATA", "")
    return replace(settings, augment=augment, data_dir=folder, workers=settings.workers or cores()), tables


def _check_model(network: Network, data: Dataset) -> None:
    """Try the model on two images before any work is done."""
    network.eval()
    with torch.no_grad():
        logits = network(data.example()).logits
    if tuple(logits.shape) != (2, data.classes):
        raise UserError(
            f"the model gives {logits.shape[-1]} outputs and the data has {data.classes} classes: they must match"
        )


def config_of(experiment: Experiment) -> dict[str, Any]:
    """The complete config of a run, as its config.toml holds it."""
    name = type(experiment.method).__module__.rpartition(".")[2]
    if name not in methods.names or methods.load(name) is not type(experiment.method):
        name = f"{type(experiment.method).__name__}, {FROM_PYTHON}"
    named = {key: table["name"] if len(table) == 1 else table for key, table in experiment.tables.items()}
    return {**named, **plain(experiment.settings), "method": {"name": name, **plain(experiment.method)}}


def run(
    *,
    method: Method | str = "fedcsd",
    data: Any = "digits",
    model: str | Callable[..., nn.Module] = "auto",
    out: str | Path | None = None,
    overwrite: bool = False,
    on_round: OnRound | None = None,
    **settings: Any,
) -> Run:
    """Train a federation and return the finished run.

    method    a name, or an object such as `fedcsd.FedCSD(mu=0.01)`
    data      a name, an .npz file, or arrays: (x_train, y_train, x_test, y_test)
    model     a name, or a function or class that makes an `nn.Module` ending in a Linear layer;
              it is called with the image shape and the number of classes if it takes arguments
    out       the run directory; without one nothing is written
    settings  everything else by name, as in `fedcsd run --help`: clients, beta, rounds, lr, …
    """
    objects = {"method": method, "data": data, "model": model}
    given = {
        key: None if isinstance(value, (str, Path, Mapping)) else value for key, value in objects.items()
    }
    if isinstance(data, Mapping) and "name" not in data:
        given["data"] = data
    named = {key: FROM_PYTHON if given[key] is not None else value for key, value in objects.items()}
    named = {key: str(value) if isinstance(value, Path) else value for key, value in named.items()}
    values = layered(settings, named)
    job = begin(values, given=given, out=Path(out) if out is not None else None, overwrite=overwrite)
    return train(job, EachRound(on_round))


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


def begin(
    values: Mapping[str, Any],
    *,
    given: Mapping[str, Any] | None = None,
    out: Path | None = None,
    overwrite: bool = False,
) -> Job:
    """A new run from plain settings; `given` holds objects from Python that have no name."""
    given = given or {}
    experiment = prepare(values, **given)
    config = config_of(experiment)
    if out is None:
        return Job(experiment, config, None, [], None)
    described = {**config, "facts": {"data": experiment.data.fingerprint()}}
    needed = 20 * experiment.weights.nbytes + (1 << 20)
    partition = (experiment.parts, experiment.held)
    directory = RunDirectory.create(out, described, partition, needed=needed, overwrite=overwrite)
    return Job(experiment, config, directory, [], None)


def take_up(
    path: Path, *, given: Mapping[str, Any] | None = None, changes: Mapping[str, Any] | None = None
) -> Job | None:
    """A run as it was left, from its newest complete checkpoint; None if it is finished.

    `changes` are settings that may differ from here on (CHANGEABLE); the config keeps note of them.
    """
    given, directory = given or {}, RunDirectory.open(path)
    changes = {key: value for key, value in (changes or {}).items() if value is not None}
    for key in changes:
        if key not in CHANGEABLE:
            raise UserError(
                f"{key} cannot change in a run: start a new one, or change {', '.join(CHANGEABLE)}"
            )
    if directory.summary is not None and changes.get("rounds", 0) <= directory.summary["rounds"]:
        return None
    experiment = prepare({**directory.settings, **changes}, parts=directory.partition(), **given)
    if experiment.data.fingerprint() != directory.config["facts"]["data"]:
        raise UserError(
            f"the data is not the data that {path} was started with: restore it, or start a new run"
        )
    directory.lock()
    saved = directory.latest(experiment.network.layout)
    history = _history_until(directory, saved[0] if saved else None)
    if len(history) > experiment.settings.rounds:
        raise UserError(f"{path} has {len(history)} rounds already: --rounds must be at least that")
    (directory.path / "summary.json").unlink(missing_ok=True)
    directory.change(len(history), changes)
    return Job(experiment, config_of(experiment), directory, history, saved)


def resume(
    path: str | Path,
    *,
    method: Method | None = None,
    data: Any = None,
    model: Callable[..., nn.Module] | None = None,
    on_round: OnRound | None = None,
    **changes: Any,
) -> Run:
    """Go on with a run from its newest complete checkpoint; a finished run is returned as it is.

    Objects that were given from Python must be given again. `changes` may be rounds (to train for
    longer than was meant), lr, on_divergence, checkpoint_every and workers.
    """
    given = {"method": method, "data": data, "model": model}
    job = take_up(Path(path), given=given, changes=changes)
    return train(job, EachRound(on_round)) if job else load_run(path)


def _history_until(directory: RunDirectory, header: dict[str, Any] | None) -> list[Record]:
    """The records up to a checkpoint. Its own may be missing, if the run ended just after it."""
    rounds = header["round"] if header else 0
    history = directory.keep_history(rounds)
    if header and len(history) == rounds - 1:
        directory.record(header["record"])
        history.append(header["record"])
    return history


def load_run(path: str | Path) -> Run:
    """A finished run from its directory."""
    from safetensors.torch import load_file

    directory = RunDirectory.open(Path(path))
    if directory.summary is None:
        raise UserError(
            f"{path} is not finished ({directory.rounds_saved} of {directory.settings['rounds']} rounds): `fedcsd resume {path}`"
        )
    weights = load_file(directory.path / "model.safetensors")
    return Run(directory.settings, directory.history(), directory.summary, weights, directory.path)


def train(job: Job, watch: Watch | None = None) -> Run:
    """The rounds that are still to do, each recorded and checkpointed."""
    experiment, directory, history = job.experiment, job.directory, job.history
    settings = experiment.settings
    with _sigterm_as_interrupt(), _backend(experiment) as backend:
        federation = Federation(experiment, backend, watch)
        if job.saved:
            federation.load(*job.saved)
        try:
            while federation.round < settings.rounds:
                record = federation.step()
                history.append(record)
                if directory:
                    directory.record(record)
                    if (
                        federation.round % settings.checkpoint_every == 0
                        or federation.round == settings.rounds
                    ):
                        directory.checkpoint(*federation.save())
                federation.watch.round(record, settings.rounds)
        except (KeyboardInterrupt, RunStopped) as error:
            if directory and federation.round > directory.rounds_saved:
                directory.checkpoint(*federation.save())
            change = " --lr …" if isinstance(error, Diverged) else ""
            message = _with_saved(str(error), directory, change)
            raise type(error)(message).with_traceback(error.__traceback__) from error.__cause__
        except OSError as error:
            raise RunStopped(_with_saved(f"cannot write: {error.strerror or error}", directory)) from error
    return _finish(job, federation.server.weights)


def _with_saved(message: str, directory: RunDirectory | None, change: str = "") -> str:
    """A message about a run that ended early, with what is saved and how to go on."""
    if directory is None:
        return message
    rounds, path = directory.rounds_saved, directory.path
    saved = f"rounds 1 to {rounds} are saved" if rounds else "no round was finished"
    return f"{message}{'; ' if message else ''}{saved}; go on with: fedcsd resume {path}{change}"


def _finish(job: Job, weights: Weights) -> Run:
    network, directory = job.experiment.network, job.directory
    network.load(weights)
    state = {name: tensor.detach().clone() for name, tensor in network.module.state_dict().items()}
    summary = summarise(job.history)
    if directory:
        directory.finish(summary, save(state))
        directory.unlock()
    return Run(job.config, job.history, summary, state, directory.path if directory else None)


@contextmanager
def _backend(experiment: Experiment) -> Iterator[LocalBackend]:
    workers = min(experiment.settings.workers or cores(), len(cohort(experiment.settings, 0)))
    backend = LocalBackend(experiment.site(), experiment.network.layout, workers)
    try:
        yield backend
    finally:
        backend.close()


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM, a scheduler's way of asking, ends a run like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
