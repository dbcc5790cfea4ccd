"""What the report's line charts show: which measurements, under which heading, and the numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcsd.results.curves import History
from fedcsd.results.plots import TIMES, from_uniform, named, times

COST = {"seconds": 0.0, "bytes_down": 0, "bytes_up": 0}


@dataclass(frozen=True)
class Chart:
    id: str
    title: str
    caption: str
    """what it shows and why that matters, in one sentence"""
    measures: tuple[str, ...]
    against: tuple[str, ...] = ("round",)


CHARTS = (
    Chart(
        "accuracy",
        "Accuracy of the global model",
        "Test accuracy after each round: against rounds to see how fast a method learns, against time or bytes "
        "to see what that costs.",
        ("test_accuracy", "test_loss", "train_loss"),
        tuple(TIMES),
    ),
    Chart(
        "own",
        "On the clients' own data",
        "Accuracy on data like each client's own: a good average can hide clients that are served badly, "
        "which the worst tenth shows.",
        (
            "client_accuracy_mean",
            "client_accuracy_worst_decile",
            "client_accuracy_personal_mean",
            "client_accuracy_personal_worst_decile",
            "client_accuracy_local_mean",
            "client_accuracy_std",
        ),
    ),
    Chart(
        "domains",
        "Domains",
        "Accuracy on each domain of the test data: skewed training tends to favour some of them.",
        ("domain_mean", "domain_accuracy."),
    ),
    Chart(
        "drift",
        "Drift",
        "How far local models are from the global one after local training, in logits and in features, and what "
        "they are worth by themselves: large drift makes averaging lossy.",
        ("logit_drift", "feature_drift", "local_accuracy", "local_train_accuracy", "train_accuracy"),
    ),
    Chart(
        "mask",
        "Mask",
        "What the method's mask does with the teacher's soft labels: it should filter wrong ones and lose few right ones.",
        ("mask_rate", "wrong_filtered", "right_lost", "teacher_accuracy"),
    ),
    Chart(
        "target",
        "Target",
        "Entropy of the distillation target as a share of log C: at 1 the target is uniform and says nothing "
        "about the classes; the distance from it is on a logarithmic axis.",
        ("target_entropy", "target_distance"),
    ),
    Chart(
        "cost",
        "Cost of a round",
        "Time and bytes of single rounds: what a method adds to plain averaging, and whether rounds get slower.",
        ("seconds", "seconds_evaluating", "bytes_down", "bytes_up", "failed", "diverged"),
    ),
)
SHORT = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "train_loss": "train loss",
    "client_accuracy_mean": "mean",
    "client_accuracy_worst_decile": "worst tenth",
    "client_accuracy_personal_mean": "own models",
    "client_accuracy_personal_worst_decile": "own models, worst tenth",
    "client_accuracy_local_mean": "local models",
    "client_accuracy_std": "spread",
    "domain_mean": "mean",
    "logit_drift": "logits",
    "feature_drift": "features",
    "local_accuracy": "local accuracy",
    "local_train_accuracy": "local, train data",
    "train_accuracy": "global, train data",
    "mask_rate": "kept",
    "wrong_filtered": "wrong filtered",
    "right_lost": "right lost",
    "teacher_accuracy": "teacher",
    "target_entropy": "entropy",
    "target_distance": "distance",
    "seconds": "seconds",
    "seconds_evaluating": "evaluation",
    "bytes_down": "to clients",
    "bytes_up": "from clients",
    "failed": "failed",
    "diverged": "left out",
}
"""what a switch between a chart's measurements says"""
AXES = {
    "target_distance": ("1 − target's entropy / log C", 1.0),
    "seconds": ("seconds", 1.0),
    "seconds_evaluating": ("seconds for evaluation", 1.0),
    "failed": ("clients that failed", 1.0),
    "diverged": ("clients left out", 1.0),
    "client_accuracy_mean": ("global model on own data (%)", 100.0),
    "client_accuracy_worst_decile": ("global model, worst tenth of clients (%)", 100.0),
    "client_accuracy_personal_mean": ("own models on own data (%)", 100.0),
    "client_accuracy_personal_worst_decile": ("own models, worst tenth of clients (%)", 100.0),
    "client_accuracy_local_mean": ("local models on own data (%)", 100.0),
    "client_accuracy_std": ("standard deviation over clients (%)", 100.0),
}
FLAT = ("failed", "diverged")  # of no interest where they are 0 throughout


def usable(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records by round, each round once and none left out; one that is missing or damaged has no values."""
    found: dict[int, dict[str, Any]] = {}
    for record in history:
        number = record.get("round")
        whole = all(isinstance(record.get(key), (int, float)) for key in COST)
        if isinstance(number, int) and 0 < number <= 10_000_000 and whole:
            found[number] = dict(record)
    return [found.get(n, {"round": n, **COST}) for n in range(1, max(found, default=0) + 1)]


def with_derived(history: History) -> list[dict[str, Any]]:
    return [
        {**r, "target_distance": from_uniform(r)} if r.get("target_entropy") is not None else dict(r)
        for r in history
    ]


def charts(groups: Mapping[str, Sequence[History]]) -> list[dict[str, Any]]:
    """The charts for which something was recorded, each with its measurements and where it lies in `series`."""
    recorded = {
        key
        for runs in groups.values()
        for h in runs
        for r in h
        for key, value in r.items()
        if _number(value) is not None and (key not in FLAT or value)
    }
    shown = []
    for chart in CHARTS:
        wanted = [key for name in chart.measures for key in _expanded(name, recorded)]
        if wanted:
            described = [_described(key) for key in wanted]
            parts = {"id": chart.id, "title": chart.title, "caption": chart.caption}
            against = [{"key": x, "name": TIMES[x]} for x in chart.against]
            shown.append({**parts, "measures": described, "against": against})
    return shown


def _expanded(name: str, recorded: Iterable[str]) -> list[str]:
    """The recorded measurements of this name; one that ends in a dot is a group."""
    return sorted(key for key in recorded if key == name or (name.endswith(".") and key.startswith(name)))


def _described(key: str) -> dict[str, Any]:
    axis, factor = AXES.get(key) or named(key)
    short = SHORT.get(key) or key.rpartition(".")[2]
    return {
        "key": key,
        "short": short,
        "axis": axis,
        "factor": factor,
        "log": key == "target_distance",
        "uniform": 1.0 if key == "target_entropy" else None,
    }


def series(
    groups: Mapping[str, Sequence[History]],
    shown: Sequence[Mapping[str, Any]],
    diverged: Mapping[str, Sequence[bool]],
) -> dict[str, dict[str, Any]]:
    """By label: where rounds lie on each axis, and of every measurement the mean over runs and their range.

    `ends` has, for each run that diverged, the place and value of its last round.
    """
    measures = [measure for chart in shown for measure in chart["measures"]]
    found = {}
    for label, runs in groups.items():
        some = [h for h in runs if h]
        bad = [end for h, end in zip(runs, diverged[label], strict=True) if h]
        if some:
            x = {axis: [_short(v) for v in times(some, axis)] for axis in TIMES}
            values = {m["key"]: _over_runs(some, m["key"], m["factor"], bad) for m in measures}
            found[label] = {"x": x, "y": {key: y for key, y in values.items() if y}}
    return found


def _over_runs(
    runs: Sequence[History], key: str, factor: float, diverged: Sequence[bool]
) -> dict[str, Any] | None:
    length = max(map(len, runs))
    values = np.full((len(runs), length), np.nan)
    for row, history in zip(values, runs, strict=True):
        row[: len(history)] = [
            math.nan if (v := _number(r.get(key))) is None else factor * v for r in history
        ]
    known = np.isfinite(values)
    if not known.any():
        return None
    number = known.sum(0)
    mean = np.where(known, values, 0).sum(0) / np.where(number, number, 1)
    found: dict[str, Any] = {"mean": _listed(np.where(number, mean, np.nan))}
    if len(runs) > 1:
        found["low"] = _listed(np.where(number, np.where(known, values, np.inf).min(0), np.nan))
        found["high"] = _listed(np.where(number, np.where(known, values, -np.inf).max(0), np.nan))
    ends = [
        [len(h) - 1, _short(row[len(h) - 1])]
        for row, h, end in zip(values, runs, diverged, strict=True)
        if end and math.isfinite(row[len(h) - 1])
    ]
    return found | ({"ends": ends} if ends else {})


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def _short(value: float) -> float | None:
    """Seven digits are more than a screen shows."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.7g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _listed(values: Any) -> list[float | None]:
    return [_short(float(v)) for v in values]
