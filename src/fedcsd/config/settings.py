"""Describe the settings of a run; other modules ask for their traits with `settings_where`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from fedcsd.config.options import default_of, names_where, option

_federation = partial(option, panel="The federation", deals=True)
_training = partial(option, panel="Training")
_machine = partial(option, panel="Where it runs", deployed=False)
_gpu = partial(_machine, gpu=True)
_measuring = partial(option, panel="Reproducing and measuring")
_service = partial(_measuring, result=False, on_resume="free")


@dataclass(frozen=True)
class Components:
    """The parts of a run that are chosen by name; each has a table of options of its own."""

    data: str = _federation(
        "digits",
        "data set: a name (see `fedcsd list datasets`), an .npz file, a folder of images, parquet files, or hub:owner/name",
        on_resume="moves",
        in_paper=True,
    )
    model: str = _federation(
        "auto",
        "network: a name (see `fedcsd list models`), your own as file.py:factory or package.module:factory, or auto to fit the data",
        deals=False,
        on_resume="moves",
    )
    partition: str = _federation(
        "auto",
        "how the data is dealt to clients (see `fedcsd list partitions`), or auto for what the data is for",
        in_paper=True,
    )
    method: str = _training(
        "fedcsd",
        "method to train with: a name (see `fedcsd list methods`), my_method.py:Class or package.module:Class; "
        "presets and options go behind colons: fedcsd:m1:mu=0.01",
        on_resume="moves",
        in_paper=True,
    )


@dataclass(frozen=True)
class Settings:
    """Hold the settings of a run. A new one costs a field here and the line that uses it."""

    data_dir: str = _federation(
        "",
        "folder that holds named data sets, in place of the hub (also FEDCSD_DATA)",
        result=False,
        on_resume="moves",
    )
    train_size: int = _federation(0, "use only this many training samples (0: all)", ge=0)
    classifier: str = _training(
        "", "layer whose input are the features, for models that do not end in a Linear", in_paper=True
    )
    augment: str = _training("auto", "augmentation of training images: auto, none, cifar or office")
    clients: int = _federation(10, "number of clients in the federation", ge=1, deployed=False, stated=True)
    beta: float = _federation(
        0.1,
        "Dirichlet concentration: smaller is more skewed",
        gt=0,
        stated=True,
        partitions=("dirichlet", "quantity"),
        in_paper=True,
    )
    min_samples: int = _federation(10, "smallest number of samples a client may hold", ge=1)
    participation: float = _federation(
        1.0, "share of the clients that take part in a round", gt=0, le=1, deals=False
    )
    dropout: float = _federation(
        0.0, "share of the drawn clients that fail to answer", ge=0, lt=1, deals=False
    )
    holdout: float = _federation(
        0.0,
        "share of each client's data kept to test on it, for per-client results",
        ge=0,
        lt=1,
        in_paper=True,
    )
    rounds: int = _training(30, "communication rounds", ge=1, on_resume="free", stated=True)
    epochs: int = _training(5, "local epochs a round", ge=1, stated=True)
    batch_size: int = _training(64, "samples in a local batch", ge=1)
    lr: float = _training(
        0.01, "learning rate of local SGD (the paper uses 0.1)", gt=0, on_resume="mends", stated=True
    )
    momentum: float = _training(0.9, "momentum of local SGD", ge=0, lt=1)
    weight_decay: float = _training(1e-5, "weight decay of local SGD", ge=0)
    seed: int = _measuring(
        0, "seed of training: initial weights, cohorts, batches", ge=0, label=False, in_paper=True
    )
    partition_seed: int = _measuring(
        0, "seed of the partition, apart from the training seed", ge=0, deals=True
    )
    workers: int = _machine(
        0,
        "clients that train at once: processes, or streams on a GPU (0: as many as are of use)",
        ge=0,
        result=False,
        on_resume="free",
    )
    device: Literal["cpu", "cuda"] = _machine(
        "cpu", "where clients train: on the cores or on a GPU", label=False
    )
    precision: Literal["fp32", "tf32", "bf16"] = _gpu(
        "fp32", "arithmetic of training on a GPU: float32, its fast approximation, or bfloat16"
    )
    engine: Literal["auto", "eager", "graphs", "stacked"] = _gpu(
        "auto",
        "how a GPU trains: step by step, by recorded steps, or many clients as one; auto goes by sizes",
        result=False,
    )
    compile: bool = _gpu(False, "compile the model with torch.compile, for long runs on a GPU", result=False)
    track_drift: bool = _measuring(
        False, "measure logit and feature drift in every round", label=False, in_paper=True
    )
    checkpoint_every: int = _service(
        0, "rounds between checkpoints (0: as often as they take a small part of the time)", ge=0
    )
    client_state: Literal["memory", "disk"] = _service(
        "memory",
        "where what methods keep of each client lies between its rounds; does not change results",
        deployed=False,
    )
    on_divergence: Literal["stop", "skip"] = _training(
        "stop",
        "when a client's loss is not finite: end the run, or leave that client out of the round",
        on_resume="mends",
    )
    tensorboard: bool = _service(False, "write TensorBoard's event files into the run directory")
    mlflow: str = _service("", "send every round to the MLflow server at this address as well")


COMPONENTS: dict[str, str] = {f.name: default_of(f) for f in fields(Components)}
"""The default of each component."""
DEFAULTS: dict[str, Any] = COMPONENTS | {f.name: default_of(f) for f in fields(Settings)}
"""The default of each component and setting."""


def settings_where(**traits: object) -> tuple[str, ...]:
    """Return the names of the components and settings that have these traits."""
    return names_where(Components, Settings, **traits)


def defaults_where(**traits: object) -> dict[str, Any]:
    """Return the defaults of the components and settings that have these traits."""
    return {name: DEFAULTS[name] for name in settings_where(**traits)}


def by_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings flat: a component as `method`, its options as `method.tau`."""
    tables = {k: v if isinstance(v, Mapping) else {"name": v} for k, v in config.items()}
    return {k if o == "name" else f"{k}.{o}": v for k, table in tables.items() for o, v in table.items()}


def applied(settings: Mapping[str, Any], **traits: object) -> dict[str, Any]:
    """Return the settings of a run that have an effect and these traits, flat, components first."""
    found, names = by_name({**DEFAULTS, **settings}), settings_where(**traits)
    idle = [f.name for f in fields(Settings) if not used(f.metadata, found["partition"])]
    return {k: v for k, v in found.items() if k.partition(".")[0] in names and k not in idle}


def used(traits: Mapping[str, Any], partition: str) -> bool:
    """Tell if a setting with these traits may have an effect with a partition."""
    return not traits["partitions"] or partition in (*traits["partitions"], "auto")
