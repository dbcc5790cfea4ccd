"""Make an experiment from settings: decide open choices and check everything before any work."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedcsd import data as fedcsd_data
from fedcsd import seeds
from fedcsd.config import Settings
from fedcsd.config.options import build, plain
from fedcsd.config.settings import COMPONENTS, DEFAULTS, defaults_where
from fedcsd.config.toml import merge
from fedcsd.data import SOURCES, Dataset
from fedcsd.data.augment import AUGMENTATIONS
from fedcsd.data.partition import Rows, hold_out
from fedcsd.errors import UserError, unknown
from fedcsd.experiments.choices import FROM_PYTHON, make_method, method_from, resolved, taken_apart
from fedcsd.experiments.machine import require_cuda
from fedcsd.federation.backends.local import cores
from fedcsd.federation.setup import Setup
from fedcsd.methods import methods
from fedcsd.models import Factory, choose, factory
from fedcsd.models.network import Network

Parts = tuple[list[Rows], list[Rows]]
"""The clients' rows to train on, and the rows that they hold out."""


@dataclass(frozen=True)
class Experiment(Setup):
    """A federation with the names that it was made from, for the run's config."""

    tables: dict[str, dict[str, Any]]
    """names and options of data, model and partition, and the method's name if it has one"""


def initial_network(settings: Settings, data: Dataset, factory: Factory) -> Network:
    """Make the model with its initial weights, a function of the seed alone."""
    cuda = settings.device == "cuda"
    with seeds.kept(cuda=cuda and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        seeds.start(seeds.torch_seed(settings.seed, "weights"), cuda=cuda)
        return Network(factory(), data.example(), settings.classifier)


def split_objects(**choices: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate names with options from objects given from Python, which have no name."""
    values: dict[str, Any] = {}
    given: dict[str, Any] = {}
    for key, choice in choices.items():
        if choice is None:
            raise UserError(f"{key} must be a name or an object, not None")
        if isinstance(choice, (str, Path)) or (
            isinstance(choice, Mapping) and (key != "data" or "name" in choice)
        ):
            values[key] = str(choice) if isinstance(choice, Path) else choice
        else:
            values[key], given[key] = FROM_PYTHON, choice
    return values, given


def folder_of(path: Any, what: str = "out") -> Path:
    """Return the path of a folder that was given from Python."""
    try:
        return Path(path).expanduser()
    except TypeError:
        raise UserError(f"{what} must be the path of a folder, not {path!r}") from None


def prepare(
    values: Mapping[str, Any],
    *,
    method: Any = None,
    data: Any = None,
    model: Any = None,
    parts: Parts | None = None,
    like: Experiment | None = None,
) -> Experiment:
    """Check settings, data and model, and make everything that training needs; write nothing.

    Args:
        method, data, model: objects in place of what the settings name
        parts: the partition, if it is known
        like: an experiment that differs in nothing but method, seed and rounds; its data and partition are used
    """
    values = resolved(values)
    chosen = make_method(values["method"]) if method is None else method_from(method)
    settings, tables, dataset = _components(values, data, model, like)
    if parts is None:
        parts = (like.parts, like.held) if like else _deal(settings, tables["partition"], dataset)
    settings = replace(settings, clients=len(parts[0]))
    make = like.factory if like else factory_of(tables["model"], model, dataset)
    network = initial_network(settings, dataset, make)
    _check_model(network, dataset)
    if method is None:
        tables["method"] = {"name": values["method"]["name"]}
    return Experiment(settings, chosen, dataset, *parts, make, network, network.weights(), tables)


def deal(values: Mapping[str, Any]) -> tuple[Dataset, list[Rows], list[Rows]]:
    """Return the data, and the rows that each client would train on and hold out."""
    settings, tables, dataset = _components(merge(COMPONENTS, values))
    return dataset, *_deal(settings, tables["partition"], dataset)


def _deal(settings: Settings, table: Mapping[str, Any], dataset: Dataset) -> Parts:
    dealt = fedcsd_data.split(dataset.y_train.numpy(), settings, table, dataset.groups)
    return hold_out(dealt, settings.holdout, settings.partition_seed)


def _components(
    values: Mapping[str, Any], data: Any = None, model: Any = None, like: Experiment | None = None
) -> tuple[Settings, dict[str, dict[str, Any]], Dataset]:
    """Return the settings and the tables of data, model and partition, with no choice left open, and the data."""
    tables = {key: dict(values[key]) for key in ("data", "model", "partition")}
    settings = settings_of(values)
    _check_device(settings)
    dataset = like.data if like else load_data(tables["data"], data, settings)
    tables["data"]["name"] = absolute(tables["data"]["name"])
    if "file" in tables["partition"]:
        tables["partition"]["file"] = absolute(tables["partition"]["file"])
    if tables["model"]["name"] == "auto" and model is None:
        tables["model"]["name"] = choose(dataset.shape) if dataset.model == "auto" else dataset.model
    if tables["partition"]["name"] == "auto":
        tables["partition"]["name"] = dataset.partition
    augment = dataset.augment if settings.augment == "auto" else settings.augment
    if augment not in AUGMENTATIONS:
        raise unknown("augmentation", augment, ["auto", *AUGMENTATIONS])
    if AUGMENTATIONS[augment].active and len(dataset.shape) != 3:
        raise UserError(f"--augment {augment} is for images, {dataset.name} is a table: use --augment none")
    workers = settings.workers or (cores() if settings.device == "cpu" else 0)
    folder = absolute(_data_folder(settings))
    return replace(settings, augment=augment, data_dir=folder, workers=workers), tables, dataset


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Return the settings among these values, checked; the components are left out."""
    flat = {key: value for key, value in values.items() if key not in COMPONENTS}
    for key in flat.keys() - DEFAULTS.keys():
        if option_of_method(key):
            raise UserError(f"{key} is an option of the method: --set method.{key}=…")
        raise unknown("setting", key, DEFAULTS)
    return build(Settings, flat)


def option_of_method(name: str) -> bool:
    """Tell if a built-in method has an option of this name."""
    return any(name in methods.load(m).__dataclass_fields__ for m in methods.names)


def _data_folder(settings: Settings) -> str:
    return settings.data_dir or os.environ.get("FEDCSD_DATA", "")


def load_data(table: Mapping[str, Any], given: Any, settings: Settings) -> Dataset:
    """Load the data that a table names, or take the given data; `train_size` is applied."""
    choice, options = taken_apart("data", table, given)
    folder = _data_folder(settings)
    where = Path(folder).expanduser() if folder else None
    dataset = fedcsd_data.load(absolute(choice) if given is None else given, options, where)
    if settings.train_size:
        dataset = dataset.smaller(settings.train_size, seeds.rng(settings.partition_seed, "train size"))
    return dataset


def factory_of(table: Mapping[str, Any], given: Any, dataset: Dataset) -> Factory:
    """Return a function that makes the model that a table names, or the given one."""
    make = factory(*taken_apart("model", table, given), dataset.shape, dataset.classes)
    if given is not None and make() is make():
        raise UserError(
            "model: the function gave the same model twice; it must make a new one each time it is called"
        )
    return make


def _check_device(settings: Settings) -> None:
    if settings.device == "cuda":
        require_cuda()
        return
    for name, default in defaults_where(gpu=True).items():
        if getattr(settings, name) not in (default, "eager"):
            raise UserError(f"--{name} is for a GPU: add --device cuda, or leave it out")


def absolute(name: str) -> str:
    """Return the absolute path of a file that exists, so that a run can be resumed from any folder."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name and name not in SOURCES and path.exists() else name


def _check_model(network: Network, data: Dataset) -> None:
    """Run the model on two images."""
    network.eval()
    with torch.no_grad():
        logits = network(data.example()).logits
    if tuple(logits.shape) != (2, data.classes):
        raise UserError(
            f"the model gives {logits.shape[-1]} outputs and the data has {data.classes} classes: they must match"
        )


def config_of(experiment: Experiment) -> dict[str, Any]:
    """Return the complete settings of a run, as its config.toml holds them."""
    name = type(experiment.method).__module__.rpartition(".")[2]
    if "method" in experiment.tables:
        name = experiment.tables["method"]["name"]
    elif name not in methods.names or methods.load(name) is not type(experiment.method):
        name = f"{type(experiment.method).__name__}, {FROM_PYTHON}"
    named = {key: table["name"] if len(table) == 1 else table for key, table in experiment.tables.items()}
    return {**named, **plain(experiment.settings), "method": {"name": name, **plain(experiment.method)}}
