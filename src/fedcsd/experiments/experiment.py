"""From settings to an experiment: every choice made, everything checked before any work is done."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from fedcsd import data as fedcsd_data
from fedcsd import seeds
from fedcsd.config import TABLES, Settings, build, checked, layered, native, plain
from fedcsd.data import SOURCES, Dataset
from fedcsd.data.augment import AUGMENTATIONS
from fedcsd.data.partition import Rows, hold_out
from fedcsd.errors import UserError, no_option, unknown
from fedcsd.federation.backends.local import cores
from fedcsd.federation.setup import Setup
from fedcsd.methods import Method, methods
from fedcsd.models import Factory, choose, factory
from fedcsd.models.network import Network
from fedcsd.naming import short

FROM_PYTHON = "given from Python"


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
    """What a notebook gives for method, data and model: names with options, and objects without a name."""
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
    """The folder that Python names."""
    try:
        return Path(path).expanduser()
    except TypeError:
        raise UserError(f"{what} must be the path of a folder, not {path!r}") from None


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
    chosen = make_method(values["method"]) if method is None else _checked_method(method)
    settings, tables, dataset = _choices(values, data, model)
    if parts is None:
        parts = _deal(settings, tables, dataset)
    train, held = parts
    settings = replace(settings, clients=len(train))
    make = factory_of(tables["model"], model, dataset)
    network = initial_network(settings, dataset, make)
    _check_model(network, dataset)
    if method is None:
        tables["method"] = {"name": values["method"]["name"]}
    return Experiment(
        settings=settings,
        method=chosen,
        data=dataset,
        parts=train,
        held=held,
        factory=make,
        network=network,
        weights=network.weights(),
        tables=tables,
    )


def deal(values: Mapping[str, Any]) -> tuple[Dataset, list[Rows], list[Rows]]:
    """The data and who would hold what of it: the clients' training rows, and what they hold out."""
    settings, tables, dataset = _choices(layered(TABLES, values))
    return dataset, *_deal(settings, tables, dataset)


def option_of_method(name: str) -> bool:
    """Whether any method has an option of this name."""
    return any(name in methods.load(m).__dataclass_fields__ for m in methods.names)


def _deal(settings: Settings, tables: Mapping[str, Any], dataset: Dataset) -> tuple[list[Rows], list[Rows]]:
    dealt = fedcsd_data.split(dataset.y_train.numpy(), settings, tables["partition"], dataset.groups)
    return hold_out(dealt, settings.holdout, settings.partition_seed)


def _choices(
    values: dict[str, Any], data: Any = None, model: Any = None
) -> tuple[Settings, dict[str, Any], Dataset]:
    """Settings, the tables of data, model and partition, and the data set; every choice made."""
    tables = {key: values[key] for key in ("data", "model", "partition")}
    settings = settings_of(values)
    _check_device(settings)
    dataset = load_data(tables["data"], data, settings)
    return *_resolved(settings, tables, dataset, model), dataset


def settings_of(values: Mapping[str, Any]) -> Settings:
    """What is no choice by name, checked."""
    flat = {key: value for key, value in values.items() if key not in TABLES}
    for key in flat:
        if key not in Settings.__dataclass_fields__ and option_of_method(key):
            raise UserError(f"{key} is an option of the method: --set method.{key}=…")
    return build(Settings, flat)


def load_data(table: Mapping[str, Any], given: Any, settings: Settings) -> Dataset:
    options = dict(table)
    name = options.pop("name")
    if given is None and name == FROM_PYTHON:
        raise UserError(f"the data of this run was {FROM_PYTHON}: use fedcsd.resume(path, data=…) there")
    folder = settings.data_dir or os.environ.get("FEDCSD_DATA") or None
    where = Path(folder).expanduser() if folder else None
    dataset = fedcsd_data.load(absolute(name) if given is None else given, options, where)
    if settings.train_size:
        dataset = dataset.smaller(settings.train_size, seeds.rng(settings.partition_seed, "train size"))
    return dataset


def factory_of(table: Mapping[str, Any], given: Any, dataset: Dataset) -> Factory:
    options = dict(table)
    name = options.pop("name")
    if given is None and name == FROM_PYTHON:
        raise UserError(f"the model of this run was {FROM_PYTHON}: use fedcsd.resume(path, model=…) there")
    make = factory(name if given is None else given, options, dataset.shape, dataset.classes)
    if given is not None and make() is make():
        raise UserError(
            "model: the function gave the same model twice; it must make a new one each time it is called"
        )
    return make


def _checked_method(method: Any) -> Method:
    """A method object from Python (or its class, for the defaults), checked like the rest."""
    if isinstance(method, type) and issubclass(method, Method):
        method = method()
    if not isinstance(method, Method):
        raise UserError(f"method must be a name or a Method such as fedcsd.FedCSD(mu=0.01), not {method!r}")
    if "name" in plain(method):
        raise UserError("an option of a method cannot be called name: that is the method's own")
    return _checked_options(method)


def _checked_options(method: Method) -> Method:
    """The method if its options are right, defaults too, so that a run that is made can be resumed."""
    values = plain(method)
    checked(type(method), values, where="method")
    foreign = {key: native(value) for key, value in values.items() if native(value) is not value}
    return replace(method, **foreign) if foreign else method


def make_method(table: Mapping[str, Any]) -> Method:
    """A method from its name and options."""
    options = dict(table)
    name = options.pop("name")
    if FROM_PYTHON in str(name):
        raise UserError(f"the method of this run was {FROM_PYTHON}: use fedcsd.resume(path, method=…) there")
    made: type[Method] = methods.load(name)
    name = short(str(name))
    known = [option.name for option in fields(made)]
    for key in options:
        if key in Settings.__dataclass_fields__ and key not in known:
            raise UserError(
                f"{key} is a setting, not an option of {name}: put it above [method], or use --set {key}=…"
            )
        if key not in known:
            raise no_option(key, name, known)
    try:
        method = build(made, options, where="method")
    except UserError:
        raise
    except Exception as error:  # a check of its own, in somebody's __post_init__
        raise UserError(
            f"{name} cannot be made with these options: {type(error).__name__}: {error}"
        ) from error
    return _checked_options(method)


def method_of(choice: Any) -> Method:
    """The method that a table, a class or an object from Python stands for."""
    method = make_method(choice) if isinstance(choice, Mapping) else choice
    made: Method = method() if isinstance(method, type) else method
    return made


def _resolved(
    settings: Settings, tables: dict[str, dict[str, Any]], dataset: Dataset, model: Any
) -> tuple[Settings, dict[str, dict[str, Any]]]:
    """The settings and tables with every choice made that was left open."""
    tables = {key: dict(table) for key, table in tables.items()}
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
    folder = absolute(settings.data_dir or os.environ.get("FEDCSD_DATA", ""))
    return replace(settings, augment=augment, data_dir=folder, workers=workers), tables


def _check_device(settings: Settings) -> None:
    if settings.device == "cuda":
        require_cuda()
        return
    for name, plain_value in (("precision", "fp32"), ("engine", "auto"), ("compile", False)):
        if getattr(settings, name) not in (plain_value, "eager"):
            raise UserError(f"--{name} is for a GPU: add --device cuda, or leave it out")


def require_cuda() -> None:
    """Refuse where PyTorch cannot use a GPU, and say which of its parts is missing."""
    if torch.version.cuda is None and torch.version.hip is None:
        raise UserError(
            f"this PyTorch ({torch.__version__}) was built without CUDA: install one that was "
            "(pip install torch, see docs/gpu.md), or use --device cpu"
        )
    if not torch.cuda.is_available():
        raise UserError("PyTorch finds no CUDA device here: see whether nvidia-smi does, or use --device cpu")


def absolute(name: str) -> str:
    """A path as seen from everywhere, so that a run can be resumed from another folder."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name and name not in SOURCES and path.exists() else name


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
    if "method" in experiment.tables:
        name = experiment.tables["method"]["name"]
    elif name not in methods.names or methods.load(name) is not type(experiment.method):
        name = f"{type(experiment.method).__name__}, {FROM_PYTHON}"
    named = {key: table["name"] if len(table) == 1 else table for key, table in experiment.tables.items()}
    return {**named, **plain(experiment.settings), "method": {"name": name, **plain(experiment.method)}}
