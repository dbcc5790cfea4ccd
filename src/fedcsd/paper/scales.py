"""The scales of the paper's experiments, and what a user chooses of them."""

import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from fedcsd.config.options import toml_text
from fedcsd.config.settings import by_name, settings_where
from fedcsd.config.toml import merge
from fedcsd.errors import UserError, note, unknown
from fedcsd.paper.exhibits import CIFAR, FEMNIST, OFFICE, SETUP, TITLES, Point


@dataclass(frozen=True)
class Scale:
    """A scale has settings for all runs and for each data set, and expected times."""

    meaning: str
    seeds: tuple[int, ...]
    common: Mapping[str, Any]
    data: Mapping[str, Mapping[str, Any]]
    drift_epochs: int
    """local epochs of the long round of fig1"""
    seconds: Mapping[str, float]
    """expected seconds of one run, by data set"""
    machine: str
    """where a run takes so long"""


IMAGES = {CIFAR: 50_000, FEMNIST: 342_000, "mnist": 60_000}  # to train on
_COMMON = {
    **{key: SETUP[key] for key in ("clients", "participation", "rounds")},
    **{key: value for key, value in SETUP["optimizer"].items() if key != "name"},
}
_DATA = {
    data: {
        "model": SETUP["model"][data],
        "batch_size": SETUP["batch_size"][data],
        "partition": "column" if data == OFFICE else "dirichlet",
        "track_drift": data == CIFAR,  # for fig1; with small models it costs a tenth and more
    }
    for data in TITLES
}


def _scales() -> dict[str, Scale]:
    """Return the scales of scales.toml over the paper's setup."""
    tables = tomllib.loads(resources.files("fedcsd.paper").joinpath("scales.toml").read_text("utf-8"))
    scales = {}
    for name, table in tables.items():
        common = _COMMON | {"epochs": SETUP["local_epochs"]} | table.pop("common")
        data = {key: merge(usual, table["data"].get(key, {})) for key, usual in _DATA.items()}
        scales[name] = Scale(**{**table, "seeds": tuple(table["seeds"]), "common": common, "data": data})
    return scales


SCALES = _scales()


@dataclass(frozen=True)
class Choices:
    """The scale, seeds, data and settings that a user chooses."""

    scale: str = "paper"
    seeds: tuple[int, ...] = (0,)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """settings in place of the scale's"""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """by data set of the paper: the data in its place"""
    notes: Mapping[str, str] = field(default_factory=dict)
    """by data set of the paper: a note for readers"""

    @property
    def of_scale(self) -> Scale:
        return SCALES[self.scale]

    def values(self, point: Point, seed: int) -> dict[str, Any]:
        """Return the settings of one run, as `fedcsd run` takes them."""
        scale = self.of_scale
        layers = [scale.common, {"data": point.data}, scale.data[point.data], {"method": point.method}]
        if point.beta is not None:
            layers.append({"beta": float(point.beta)})
        if other := self.stand_ins.get(point.data):
            layers.append(_in_place(point, other))
        elif point.pool is not None:
            layers.append({"data": {"train_pool": float(point.pool)}})
        return merge(*layers, self.overrides, {"seed": seed})

    @property
    def changed(self) -> list[str]:
        """Return the settings in place of the scale's that change results, such as `lr=0.01`."""
        same = settings_where(result=False)
        return sorted(
            f"{key}={toml_text(value)}" for key, value in by_name(self.overrides).items() if key not in same
        )

    @property
    def text(self) -> str:
        """Return the scale and the settings in place of its own as a sentence."""
        if not self.changed:
            return f"scale {self.scale}: {self.of_scale.meaning}"
        return f"scale {self.scale} with {', '.join(self.changed)} (the scale: {self.of_scale.meaning})"

    def folder(self, data: Iterable[str]) -> str:
        """Return the name of the folder for tables of these data sets; other settings have another folder."""
        instead = [f"{name}={self.stand_ins[name]}" for name in dict.fromkeys(data) if name in self.stand_ins]
        return "-".join(re.sub(r"[^\w.=+-]", "_", part) for part in (self.scale, *self.changed, *instead))

    def seconds(self, point: Point) -> float:
        """Return the expected seconds of a run."""
        scale = self.of_scale
        usual = {**scale.common, **scale.data[point.data]}
        data = self.stand_ins.get(point.data, point.data)
        longer: list[float] = [
            self.overrides[key] / usual[key] for key in ("rounds", "epochs") if key in self.overrides
        ]
        images = usual.get("train_size", IMAGES.get(data, 0))
        if images and 0 < self.overrides.get("train_size", 0) < images:
            longer.append(self.overrides["train_size"] / images)
        return scale.seconds.get(data, scale.seconds[point.data]) * math.prod(longer)

    @property
    def machine(self) -> str:
        """Return the machine to which `seconds` refers."""
        other = "; another model may take much more or less" if "model" in self.overrides else ""
        return self.of_scale.machine + other


def _in_place(point: Point, other: str) -> dict[str, Any]:
    """Return the settings for other data; data without domains is dealt to four clients with label skew."""
    layer: dict[str, Any] = {"data": other}
    if other == "digits":
        layer |= {"model": "mlp", "augment": "none"}  # its images of 8×8 are too small for the other models
    if point.data == OFFICE:
        clients = 4
        pool = int(point.pool or 0)
        layer |= {"partition": "dirichlet", "clients": clients, "beta": 0.5, "train_size": clients * pool}
    return layer


def stand_ins(
    needed: Iterable[str],
    scale: str,
    given: Mapping[str, str],
    overrides: Mapping[str, Any],
    train: bool = True,
    ended: Callable[[str, str], bool] | None = None,
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the data that replaces missing data sets, and notes about it.

    MNIST may replace FEMNIST. At smoke scale nothing is downloaded, and digits may replace any data set.
    Data with finished runs comes first: `ended(name, other)` tells if runs of a data set, or of another
    in its place, are there. `given` names replacements that the user chose.
    """
    for name in given:
        if name not in TITLES:
            raise unknown("data set of the paper", name, TITLES)
    chosen, notes = {}, {}
    for name in dict.fromkeys(needed):
        usual = [name, *["mnist"] * (name == FEMNIST), *["digits"] * (scale == "smoke")]
        other, reason = given.get(name), ""
        if other is None:
            other = next((other for other in usual if ended and ended(name, other)), None)
        if other is None:
            reason = _missing(name, scale, overrides, train)
            there = (other for other in usual[1:] if not _missing(other, scale, overrides, train))
            other = next(there, None) if reason else name
        if other is None and train:
            raise UserError(
                f"{TITLES[name]} is needed: {reason}; or choose other data in its place with --stand-in {name}=…"
            )
        other = other or usual[-1]
        if other != name:
            chosen[name] = other
            notes[name] = _note(name, other)
            if reason:
                note(f"{TITLES[name]} was not found: {reason}")
    return chosen, notes


def _missing(name: str, scale: str, overrides: Mapping[str, Any], read: bool) -> str:
    """Return the reason why a data set is not available; empty if it is.

    Without `read` only its files are looked for, and the hub is expected to have it.
    """
    from fedcsd import data
    from fedcsd.data.sources.folder import office_folder
    from fedcsd.data.sources.hub import local_folder

    folder = overrides.get("data_dir") or os.environ.get("FEDCSD_DATA") or ""
    if folder and not Path(folder).expanduser().is_dir():
        what = "is a file" if Path(folder).expanduser().exists() else "does not exist"
        raise UserError(f"the data folder {folder} {what}: correct --data-dir or FEDCSD_DATA")
    if name == "digits":
        return ""
    if scale == "smoke" and not folder:
        return "no --data-dir is given"
    table = merge({"data": name}, SCALES[scale].data.get(name, {}), overrides)["data"]
    options = {key: value for key, value in table.items() if key != "name"}
    where = Path(folder).expanduser() if folder else None
    try:
        if read:
            data.load(name, options, where)
        else:
            office_folder(where) if name == OFFICE else local_folder(name, where)
    except UserError as error:
        return str(error)
    return ""


def _note(name: str, other: str) -> str:
    text = f"{other} in place of {TITLES[name]}"
    if name == OFFICE:
        text += ", which has no domains and is dealt to four clients by label (β 0.5)"
    return f"{text}: only the order of methods can be compared with the paper"
