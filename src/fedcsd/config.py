"""The settings: typed, each with its meaning, checked before any work is done."""

import inspect
import math
import operator
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from fedcsd.errors import UserError, no_option, unknown
from fedcsd.naming import located, method_table, toml_value

T = TypeVar("T")


def option(
    default: Any,
    meaning: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """A dataclass field with one line of meaning and the range of its values."""
    return field(default=default, metadata={"meaning": meaning, "ge": ge, "gt": gt, "le": le, "lt": lt})


@dataclass(frozen=True)
class Settings:
    """Everything that defines a run but the method, which has settings of its own."""

    data_dir: str = option("", "folder that holds named data sets, in place of the hub (also FEDCSD_DATA)")
    train_size: int = option(0, "use only this many training samples (0: all)", ge=0)
    classifier: str = option("", "layer whose input are the features, for models that do not end in a Linear")
    augment: str = option("auto", "augmentation of training images: auto, none, cifar or office")
    clients: int = option(10, "number of clients in the federation", ge=1)
    beta: float = option(0.1, "Dirichlet concentration: smaller is more skewed", gt=0)
    min_samples: int = option(10, "smallest number of samples a client may hold", ge=1)
    participation: float = option(1.0, "share of the clients that take part in a round", gt=0, le=1)
    dropout: float = option(0.0, "share of the drawn clients that fail to answer", ge=0, lt=1)
    holdout: float = option(
        0.0, "share of each client's data kept to test on it, for per-client results", ge=0, lt=1
    )
    rounds: int = option(30, "communication rounds", ge=1)
    epochs: int = option(5, "local epochs a round", ge=1)
    batch_size: int = option(64, "samples in a local batch", ge=1)
    lr: float = option(0.01, "learning rate of local SGD (the paper uses 0.1)", gt=0)
    momentum: float = option(0.9, "momentum of local SGD", ge=0, lt=1)
    weight_decay: float = option(1e-5, "weight decay of local SGD", ge=0)
    seed: int = option(0, "seed of training: initial weights, cohorts, batches", ge=0)
    partition_seed: int = option(0, "seed of the partition, apart from the training seed", ge=0)
    workers: int = option(
        0, "clients that train at once: processes, or streams on a GPU (0: as many as are of use)", ge=0
    )
    device: Literal["cpu", "cuda"] = option("cpu", "where clients train: on the cores or on a GPU")
    precision: Literal["fp32", "tf32", "bf16"] = option(
        "fp32", "arithmetic of training on a GPU: float32, its fast approximation, or bfloat16"
    )
    engine: Literal["auto", "eager", "graphs", "stacked"] = option(
        "auto", "how a GPU trains: step by step, by recorded steps, or many clients as one; auto measures"
    )
    compile: bool = option(False, "compile the model with torch.compile, for long runs on a GPU")
    track_drift: bool = option(False, "measure logit and feature drift in every round")
    checkpoint_every: int = option(
        0, "rounds between checkpoints (0: as often as they take a small part of the time)", ge=0
    )
    client_state: Literal["memory", "disk"] = option(
        "memory", "where what methods keep of each client lies between its rounds; does not change results"
    )
    on_divergence: Literal["stop", "skip"] = option(
        "stop", "when a client's loss is not finite: end the run, or leave that client out of the round"
    )
    tensorboard: bool = option(False, "write TensorBoard's event files into the run directory")
    mlflow: str = option("", "send every round to the MLflow server at this address as well")


IRRELEVANT = (
    "workers",
    "engine",
    "compile",
    "checkpoint_every",
    "client_state",
    "data_dir",
    "tensorboard",
    "mlflow",
)
"""Settings that do not change a result."""


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """An instance of a settings dataclass from plain values, each checked for name, type and range."""
    return cls(**checked(cls, values, where))


def checked(cls: type, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """The values of a settings dataclass as their types, or a UserError that says what is wrong."""
    known = {f.name: f for f in fields(cls)}
    hints = get_type_hints(cls)
    for name in values:
        if name not in known:
            raise no_option(name, where, known) if where else unknown("setting", name, [*known, *TABLES])
    return {
        name: check(where, name, value, hints[name], known[name].metadata) for name, value in values.items()
    }


def check(where: str, name: str, value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
    """The value as its type, or a UserError that says what it should be."""
    label = f"{where}.{name}" if where else name
    value = native(value)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            raise unknown(f"value of {label}", value, map(str, choices))
        return value
    if kind not in (int, float, bool, str):
        return value  # a method's own kind of option, for it to check
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise UserError(f"{label} must be {names[kind]}, not {value!r}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        check_range(label, value, limits)
    return value


def native(value: Any) -> Any:
    """A number of NumPy's as one of Python's, which files can hold; anything else as it is."""
    numeric = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
    return value.item() if numeric else value


def check_range(label: str, value: float, limits: Mapping[str, Any]) -> None:
    tests = {
        "ge": ("at least", operator.ge),
        "gt": ("more than", operator.gt),
        "le": ("at most", operator.le),
        "lt": ("less than", operator.lt),
    }
    limits = {key: limit for key, limit in limits.items() if key in tests and limit is not None}
    if not math.isfinite(value):
        raise UserError(f"{label} must be a finite number, not {value}")
    if not all(tests[key][1](value, limit) for key, limit in limits.items()):
        wanted = [f"{tests[key][0]} {limit}" for key, limit in limits.items()]
        raise UserError(f"{label} must be {' and '.join(wanted)}, not {value}")


def default_of(option: "Field[Any]") -> Any:
    """What an option is if it is not given; MISSING if it has to be."""
    return option.default if option.default_factory is MISSING else option.default_factory()


def describe(cls: type) -> list[tuple[str, str, str]]:
    """(name, default, meaning) of every option of a settings dataclass."""
    rows = []
    for f in fields(cls):
        kind = get_type_hints(cls)[f.name]
        choices = f" ({', '.join(map(str, get_args(kind)))})" if get_origin(kind) is Literal else ""
        rows.append(
            (
                f.name,
                "" if default_of(f) is MISSING else toml_text(default_of(f)),
                f.metadata.get("meaning", "") + choices,
            )
        )
    return rows


def toml_text(value: Any) -> str:
    """A value as one writes it in a config."""
    return str(value).lower() if isinstance(value, bool) else str(value)


FACTS = ("versions", "host", "facts", "deploy")
"""Tables of a run's config.toml that describe it and are not settings of training."""


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a file; the tables that describe a finished run are left out."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except IsADirectoryError:
        instead = f": give {path / 'config.toml'}" if (path / "config.toml").is_file() else ""
        raise UserError(f"{path} is a folder, not a file of settings{instead}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no file of settings; if it is data, give it as --data {path}") from None
    except (tomllib.TOMLDecodeError, OSError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return {key: value for key, value in values.items() if key not in FACTS}


def parse_assignments(assignments: Iterable[str], what: str = "--set") -> dict[str, Any]:
    """`["rounds=50", "method.mu=0.01"]` as nested values; text that is not TOML is taken as text."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UserError(
                f"{what} takes KEY=VALUE, such as rounds=50 or method.mu=0.01, not {assignment!r}"
            )
        *parents, last = key.strip().split(".")
        if not parents and last in TABLES:
            parents, last = [last], "name"
        table = values
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise UserError(f"{what} sets {parent} both to a value and to a table")
        table[last] = toml_value(text)
    return values


TABLES = {"data": "digits", "model": "auto", "partition": "auto", "method": "fedcsd"}
"""What is chosen by name and has options of its own, and the default of each."""
SKEWED = ("dirichlet", "quantity")
"""Partitions that `beta` is for."""


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers over earlier ones; `method = "name"` is short for a table with that name.

    Naming another method (model, data set, partition) drops the options of the one before. A method's
    name may carry presets and options (see naming.py); what stands beside it in the table goes over them.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if key not in TABLES:
                merged[key] = native(value)
                continue
            if not isinstance(value, (str, Mapping)):
                raise UserError(f"{key} must be a name or a table, not {value!r}")
            table = {"name": value} if isinstance(value, str) else {k: native(v) for k, v in value.items()}
            if key == "method" and isinstance(name := table.get("name"), str):
                named = method_table(name)
                table = {**named, **table, "name": named["name"]}
            if key == "model" and isinstance(name := table.get("name"), str):
                table["name"] = located(name)
            before = merged.get(key, {})
            same = table.get("name") in (None, before.get("name")) or "name" not in before
            merged[key] = {**before, **table} if same else table
    return merged


def by_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """Tables by their options: `method`, its name, and `method.tau`."""
    tables = {k: v if isinstance(v, Mapping) else {"name": v} for k, v in config.items()}
    return {k if o == "name" else f"{k}.{o}": v for k, table in tables.items() for o, v in table.items()}


def applied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that do something in it, by name, what is chosen by name first. What an older run
    does not have is as it is by default."""
    chosen = {key: settings[key] for key in TABLES if key in settings}
    found = by_name({**chosen, **{f.name: default_of(f) for f in fields(Settings)}, **settings})
    if found.get("partition", SKEWED[0]) not in SKEWED:
        del found["beta"]
    return found


def plain(settings: Any) -> dict[str, Any]:
    """A settings dataclass as plain values; None, which TOML does not have, is left out."""
    return {key: value for key, value in asdict(settings).items() if value is not None}


def call_with(
    function: Callable[..., T], options: Mapping[str, Any], where: str, *arguments: Any, **fixed: Any
) -> T:
    """Call a function with options, its keyword-only parameters, each checked for name and type."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in fixed]
    for name in options:
        if name not in known:
            raise no_option(name, f"this {where}", known)
    hints = get_type_hints(function)
    return function(*arguments, **{n: check(where, n, v, hints[n], {}) for n, v in options.items()}, **fixed)
