"""Any recorded measurement of several runs against rounds, time or bytes; seeds of the same settings are one
line with a band."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedcsd.config.options import toml_text
from fedcsd.config.settings import labelling
from fedcsd.errors import UserError, note, unknown
from fedcsd.experiments.archive import is_run, open_run, paths_in
from fedcsd.experiments.comparison_folder import run_name
from fedcsd.experiments.recorded import RecordedRun
from fedcsd.experiments.tracking import flattened
from fedcsd.methods import methods
from fedcsd.plugins import free, short, spec_of
from fedcsd.results.curves import PANELS, History, line
from fedcsd.results.rows import other_code
from fedcsd.results.style import PAGE, below, dress, grid, printed, verbatim

MASK = {
    "wrong_filtered": "wrong soft labels filtered",
    "right_lost": "right soft labels lost",
    "mask_rate": "soft labels kept",
    "teacher_accuracy": "teacher's accuracy",
}
MOST = 32  # lines that can be told apart: colours by dashes
TIMES = {"round": "round", "seconds": "training time (s)", "bytes": "sent and received (MB)"}
NAMES = {key: (name, factor) for key, name, factor in PANELS} | {
    "target_entropy": ("target's entropy / log C", 1.0),
    "train_accuracy": ("global model on training data (%)", 100.0),
    "local_train_accuracy": ("local models on training data (%)", 100.0),
    "bytes_down": ("sent to clients (MB)", 1e-6),
    "bytes_up": ("sent by clients (MB)", 1e-6),
    **{key: (f"{name} (%)", 100.0) for key, name in MASK.items()},
}
TRACKED = ("logit_drift", "feature_drift", "local_accuracy", "train_accuracy", "local_train_accuracy")
VERSIONS = {"device": "device", "method": "code", "model": "model code", "data": "data"}
"""what makes other runs of the same settings and seed: where config.toml has it, and its name in a label"""
UNIFORM = 1e-7  # where a uniform target is shown on a logarithmic axis: about the rounding of float32
SHARES = ("accuracy", "domain_mean")  # in the name of what is a share


def found(paths: Sequence[Path]) -> list[RecordedRun]:
    """The runs at these paths; a folder of runs, such as a comparison's, stands for all of them."""
    runs = [open_run(folder) for path in paths for folder in folders(path)]
    tell_skipped(paths)
    return list({run.path.resolve(): run for run in runs}.values())


def tell_skipped(paths: Sequence[Path]) -> None:
    """Say which folders of runs lie among the runs of a folder: they are looked into only if they are named."""
    given = {path.resolve() for path in paths}
    deeper = {
        c.parent.parent for path in paths if path not in folders(path) for c in path.glob("*/*/config.toml")
    }
    left = sorted(str(f) for f in deeper if f.resolve() not in given and not is_run(f))
    if left:
        note(f"without the runs in {_listed(left)}: name such a folder as well to have them")


def folders(path: Path) -> list[Path]:
    """The folders of the runs that a path stands for; the path itself if there is none in it. A comparison's
    are in its own order, so that a method has the same colour in all its pictures."""
    inside = [] if is_run(path) else paths_in(path)
    order: dict[str, int] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        rows = json.loads((path / "comparison.json").read_text(encoding="utf-8"))["rows"]
        order = {run_name(row["label"], 0).removesuffix("0"): place for place, row in enumerate(rows)}
    found = sorted(inside, key=lambda folder: order.get(folder.name.rstrip("0123456789"), len(order)))
    return found or [path]


def grouped(runs: Sequence[RecordedRun]) -> dict[str, list[History]]:
    """Histories by label; runs that differ in their seed only are together."""
    groups = by_label(runs)
    if len(groups) > MOST:
        raise UserError(
            f"these runs have {len(groups)} different settings, more than {MOST} lines: name fewer"
        )
    for label, some in groups.items():
        for run in some:
            for text in other_code(run):
                note(f"{label}, seed {run.settings['seed']}: {text}")
    return {label: [flat(run.history()) for run in some] for label, some in groups.items()}


def by_label(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Runs by label, those that differ in their seed only together; a seed that is there twice counts once."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        same = labelling(run.settings)
        groups.setdefault(repr(sorted(same.items())), []).append(run)
    labelled: dict[str, list[RecordedRun]] = {}
    left: list[str] = []
    labels = labels_of([some[0].settings for some in groups.values()])
    for label, some in zip(labels, groups.values(), strict=True):
        for version, alike in _versions(some).items():
            labelled[free(f"{label}{version}", labelled)] = _once(alike, left)
    if left:
        note(f"left out, for they have the settings and seed of another run: {_listed(left)}")
    return labelled


def _versions(runs: Sequence[RecordedRun]) -> dict[str, Sequence[RecordedRun]]:
    """Runs of the same settings, apart where one seed is there with other code, data or device."""
    known = [
        {
            "device": run.settings.get("device", ""),
            **run.config["facts"]["code"],
            "data": run.config["facts"]["data"],
        }
        for run in runs
    ]
    told = [{name: str(one.get(key, "")) for key, name in VERSIONS.items()} for one in known]
    made = {(run.settings.get("seed"), repr(one)) for run, one in zip(runs, told, strict=True)}
    if len(made) == len({seed for seed, _ in made}):
        return {"": runs}
    differ = [name for name in told[0] if any(one[name] != told[0][name] for one in told)]
    found: dict[str, Sequence[RecordedRun]] = {}
    for run, one in zip(runs, told, strict=True):
        version = "".join(f", {name}={one[name][:8]}" for name in differ)
        found[version] = [*found.get(version, ()), run]
    return found


def _once(runs: Sequence[RecordedRun], left: list[str]) -> list[RecordedRun]:
    """One run a seed, the one with the most measurements; `left` gets the others."""
    seeds: dict[Any, list[RecordedRun]] = {}
    for run in runs:
        seeds.setdefault(run.settings.get("seed"), []).append(run)
    kept = [max(some, key=_measured) if len(some) > 1 else some[0] for some in seeds.values()]
    for one, some in zip(kept, seeds.values(), strict=True):
        left += [f"{run.path} (as {one.path})" for run in some if run is not one]
    return kept


def _measured(run: RecordedRun) -> tuple[bool, int]:
    return not any(change.mends for change in run.changes), sum(len(record) for record in run.history())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def labels_of(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A label for each: the method as one names it, and the settings in which they differ."""
    tables = [s["method"] for s in settings]
    differ = _differing([labelling(s) for s in settings])
    keys = {key for some in differ for key in some}
    ends = [key.rpartition(".")[2] for key in keys]
    names = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}
    labels = [
        ", ".join([method_label(table, tables), *(f"{names[key]}={_brief(v)}" for key, v in some.items())])
        for table, some in zip(tables, differ, strict=True)
    ]
    homes = [spec_of(table["name"]).home for table in tables]
    taken = set(zip(labels, homes, strict=True))  # two files may have a class of the same name
    return [
        f"{Path(home).stem}.{label}" if home and sum(label == other for other, _ in taken) > 1 else label
        for label, home in zip(labels, homes, strict=True)
    ]


def _differing(every: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each what sets it apart: its data, and what is not the same in all runs of that data."""
    told = [{k: v for k, v in s.items() if k.partition(".")[0] != "method"} for s in every]
    same = [[other for other in told if other.get("data") == one.get("data")] for one in told]
    return [
        {k: v for k, v in one.items() if any(o.get(k) != v for o in (told if k == "data" else alike))}
        for one, alike in zip(told, same, strict=True)
    ]


def _brief(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else toml_text(value)


def method_label(table: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> str:
    """`fedcsd:uniform`, `fedcsd:mu=0.01`: the name with what differs from the defaults, by preset if one says it.

    Of a method that cannot be loaded any more, with what differs from the same method's other tables."""
    name, options = table["name"], {key: value for key, value in table.items() if key != "name"}
    presets: dict[str, Mapping[str, Any]] = {}
    try:
        made = methods.load(name)
    except UserError:
        same = [other for other in others if other["name"] == name]
        changed = {k: v for k, v in options.items() if any(other.get(k) != v for other in same)}
    else:
        defaults, presets = {f.name: _default(f) for f in fields(made)}, made.presets
        changed = {key: value for key, value in options.items() if value != defaults.get(key)}
    fitting = [(preset, sets) for preset, sets in presets.items() if sets.items() <= options.items()]
    preset, sets = max(fitting, key=lambda some: len(some[1].keys() & changed), default=("", {}))
    rest = [f"{key}={toml_text(value)}" for key, value in changed.items() if key not in sets]
    return ":".join((short(name), *[preset] * bool(sets.keys() & changed), *rest))


def _default(option: Field[Any]) -> Any:
    """As config.toml has it, which has lists only."""
    value = option.default if option.default_factory is MISSING else option.default_factory()
    return list(value) if isinstance(value, tuple) else value


def flat(history: History) -> list[dict[str, Any]]:
    """Records whose groups (`domain_accuracy`) are names with a dot (`domain_accuracy.amazon`)."""
    return [flattened(record) for record in history]


def metrics_of(histories: Mapping[str, Sequence[History]]) -> list[str]:
    """What was measured in any of the runs."""
    records = [r for runs in histories.values() for h in runs for r in h]
    return sorted({k for r in records for k, v in r.items() if isinstance(v, (int, float)) and k != "round"})


def checked(histories: Mapping[str, Sequence[History]], wanted: Sequence[str]) -> None:
    """Refuse what was not measured, and say of which runs a measurement is missing."""
    known = metrics_of(histories)
    if not known:
        raise UserError("these runs have no finished round yet")
    for name in wanted:
        if name not in known and name in TRACKED:
            raise UserError(f"{name} was not measured in these runs: train them with --track-drift")
        if name not in known:
            raise unknown("metric", name, known)
        without = []
        for label, runs in histories.items():
            lacking = sum(not any(name in r for r in h) for h in runs)
            if lacking:
                some = f" ({lacking} of its {len(runs)} runs)" if lacking < len(runs) else ""
                without.append(f"{label}{some}")
        if without:
            note(f"{', '.join(without)}: {name} was not measured there, or no round was finished")


def plot(
    histories: Mapping[str, Sequence[History]],
    stem: Path,
    *,
    y: Sequence[str] = ("test_accuracy",),
    x: str = "round",
) -> list[Path]:
    """A panel for each measurement in `y`, a line for each label: the mean over its runs, their range as a
    band. The ending of `stem` says what is written; without one it is PNG, SVG and PDF."""
    checked(histories, y)
    if x not in TIMES:
        raise unknown("axis (--x)", x, TIMES)
    written: list[Path] = []
    rows, columns, width, height = grid(len(y))
    with printed(width, height, stem, written) as figure:
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, key in zip(axes, y, strict=False):
            label, factor = named(key)
            for index, (name, runs) in enumerate(histories.items()):
                some = [h for h in runs if any(key in r for r in h)]
                if some:
                    _line(axis, some, key, factor, name, index, x)
            dress(axis, xlabel=TIMES[x], ylabel=label)
            axis.xaxis.set_major_locator(MaxNLocator(integer=x == "round", nbins=6))
        for axis in axes[len(y) :]:
            axis.set_visible(False)
        below(figure, axes)
    return written


def named(key: str) -> tuple[str, float]:
    """What an axis says of a measurement, and what its values are multiplied with."""
    if key in NAMES:
        return NAMES[key]
    share = any(part in key for part in SHARES)
    return key.replace("_", " ") + (" (%)" if share else ""), 100.0 if share else 1.0


def _line(
    axis: Axes, runs: Sequence[History], key: str, factor: float, name: str, index: int, x: str
) -> None:
    values = [[factor * v if (v := r.get(key)) is not None else np.nan for r in h] for h in runs]
    longest = max(map(len, values))  # a run that ended before the others has a cross at its end
    line(axis, values, name, index, longest, width=1.2, x=times(runs, x))


def times(runs: Sequence[History], x: str) -> NDArray[np.float64]:
    """Where each round lies on the axis; of time and bytes the mean over the runs that got there."""
    length = max(len(h) for h in runs)
    if x == "round":
        return np.array([r["round"] for r in max(runs, key=len)], dtype=float)
    sums = np.full((len(runs), length), np.nan)
    for row, history in zip(sums, runs, strict=True):
        row[: len(history)] = list(accumulate(_cost(record, x) for record in history))
    found: NDArray[np.float64] = np.nanmean(sums, axis=0)
    return found


def _cost(record: Mapping[str, Any], x: str) -> float:
    keys, unit = (("seconds",), 1.0) if x == "seconds" else (("bytes_down", "bytes_up"), 1e6)
    if lost := [key for key in keys if record.get(key) is None]:
        raise UserError(f"a round of these runs lacks {lost[0]}: draw them against rounds, with --x round")
    return sum(float(record[key]) for key in keys) / unit


def plot_mask(histories: Mapping[str, Sequence[History]], stem: Path) -> list[Path]:
    """What FedCSD's mask does, round by round, a panel for each label: the paper's filter rate of wrong
    soft labels, what it costs of right ones, and how good the teacher is."""
    known = {
        label: [h for h in runs if any("mask_rate" in r for r in h)] for label, runs in histories.items()
    }
    known = {label: runs for label, runs in known.items() if runs}
    if not known:
        raise UserError("none of these runs has a mask: --mask is for runs of fedcsd")
    written: list[Path] = []
    rows, columns, width, height = grid(len(known))
    with printed(width, height, stem, written) as figure:
        axes = list(figure.subplots(rows, columns, squeeze=False, sharey=True).flat)
        for axis, (label, runs) in zip(axes, known.items(), strict=False):
            for index, (key, name) in enumerate(MASK.items()):
                if any(key in r for h in runs for r in h):
                    _line(axis, runs, key, 100.0, name, index, "round")
            dress(axis, verbatim(label), xlabel="round", ylim=(-3, 103))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        for axis in axes[::columns]:
            axis.set_ylabel("share (%)")
        for axis in axes[len(known) :]:
            axis.set_visible(False)
        below(figure, axes)
    return written


def plot_target(histories: Mapping[str, Sequence[History]], stem: Path) -> list[Path]:
    """How far FedCSD's target is from uniform, `1 − H(q) / log C` (logarithmic), and accuracy beside it."""
    measured = {
        label: [[{**r, "distance": from_uniform(r)} for r in h] for h in runs]
        for label, runs in histories.items()
        if any("target_entropy" in r for h in runs for r in h)
    }
    if not measured:
        raise UserError("none of these runs has a target: --target is for runs of fedcsd")
    written: list[Path] = []
    with printed(PAGE * 0.75, 2.6, stem, written) as figure:
        left, right = figure.subplots(1, 2)
        left.set(ylim=(UNIFORM / 2, 1), yscale="log")
        for index, (label, runs) in enumerate(histories.items()):
            _line(right, runs, "test_accuracy", 100.0, label, index, "round")
            if label in measured:
                _line(left, measured[label], "distance", 1.0, label, index, "round")
        dress(
            left, "(a) distance from a uniform target", xlabel="round", ylabel="1 − target's entropy / log C"
        )
        dress(right, "(b) accuracy", xlabel="round", ylabel="test accuracy (%)")
        for axis in (left, right):
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        below(figure, [right])
    return written


def from_uniform(record: Mapping[str, Any]) -> float:
    """`1 − H(q) / log C`, as it is shown."""
    entropy = record.get("target_entropy")
    return float("nan") if entropy is None else max(UNIFORM, 1 - entropy)
