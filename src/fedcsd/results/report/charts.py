"""Choose the line charts of the report, and compute their numbers over runs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcsd.measurements import MEASUREMENTS, Measurement, measurement
from fedcsd.results.curves import History
from fedcsd.results.plots import TIMES, times

COST = {"seconds": 0.0, "bytes_down": 0, "bytes_up": 0}


@dataclass(frozen=True)
class Chart:
    """A chart shows the measurements that name it."""

    title: str
    caption: str
    """its content and why that matters, in one sentence"""
    against: tuple[str, ...] = ("round",)


CHARTS = {
    "accuracy": Chart(
        "Accuracy of the global model",
        "Test accuracy after each round: against rounds to see how fast a method learns, against time or bytes "
        "to see what that costs.",
        tuple(TIMES),
    ),
    "own": Chart(
        "On the clients' own data",
        "Accuracy on data like each client's own: a good average can hide clients that are served badly, "
        "which the worst tenth shows.",
    ),
    "domains": Chart(
        "Domains",
        "Accuracy on each domain of the test data: skewed training tends to favour some of them.",
    ),
    "drift": Chart(
        "Drift",
        "How far local models are from the global one after local training, in logits and in features, and what "
        "they are worth by themselves: large drift makes averaging lossy.",
    ),
    "mask": Chart(
        "Mask",
        "What the method's mask does with the teacher's soft labels: it should filter wrong ones and lose few "
        "right ones.",
    ),
    "target": Chart(
        "Target",
        "Entropy of the distillation target as a share of log C: at 1 the target is uniform and says nothing "
        "about the classes; the distance from it is on a logarithmic axis.",
    ),
    "method": Chart("Measured by the method", "Measurements of the method's own, as it names them."),
    "cost": Chart(
        "Cost of a round",
        "Time and bytes of single rounds: what a method adds to plain averaging, and whether rounds get slower.",
    ),
}


def usable(history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the records by round, each round once and none left out; a missing or damaged one has no values."""
    found: dict[int, dict[str, Any]] = {}
    for record in history:
        number = record.get("round")
        whole = all(isinstance(record.get(key), (int, float)) for key in COST)
        if isinstance(number, int) and 0 < number <= 10_000_000 and whole:
            found[number] = dict(record)
    return [found.get(n, {"round": n, **COST}) for n in range(1, max(found, default=0) + 1)]


def charts(groups: Mapping[str, Sequence[History]]) -> list[dict[str, Any]]:
    """Return the charts for which something was recorded, with their measurements."""
    records = [record for runs in groups.values() for history in runs for record in history]
    rows = map(measurement, sorted({key for record in records for key in record}))
    recorded = [row for row in rows if any(_shown(row, record) for record in records)]
    places = {name: place for place, name in enumerate(MEASUREMENTS)}
    shown = []
    for id, chart in CHARTS.items():
        wanted = [row for row in recorded if row.chart == id]
        wanted.sort(key=lambda row: places.get(row.name.partition(".")[0], len(places)))
        if wanted:
            against = [{"key": x, "name": TIMES[x]} for x in chart.against]
            parts = {"id": id, "title": chart.title, "caption": chart.caption}
            shown.append({**parts, "measures": list(map(_described, wanted)), "against": against})
    return shown


def _shown(row: Measurement, record: Mapping[str, Any]) -> bool:
    """Tell whether a number is of interest; a count of clients is not where it is 0."""
    value = row.value(record)
    return math.isfinite(value) and (row.unit != "clients" or value > 0)


def _described(row: Measurement) -> dict[str, Any]:
    return {
        "key": row.name,
        "short": row.short or row.title,
        "axis": row.axis,
        "factor": row.factor,
        "log": row.log,
        "uniform": row.reference,
    }


def series(
    groups: Mapping[str, Sequence[History]],
    shown: Sequence[Mapping[str, Any]],
    diverged: Mapping[str, Sequence[bool]],
) -> dict[str, dict[str, Any]]:
    """Return by label the places of rounds on each axis, and each measurement's mean over runs and their range.

    `ends` has, for each run that diverged, the place and value of its last round.
    """
    rows = [measurement(m["key"]) for chart in shown for m in chart["measures"]]
    found = {}
    for label, runs in groups.items():
        some = [h for h in runs if h]
        bad = [end for h, end in zip(runs, diverged[label], strict=True) if h]
        if some:
            x = {axis: _listed(times(some, axis)) for axis in TIMES}
            values = {row.name: _over_runs(some, row, bad) for row in rows}
            found[label] = {"x": x, "y": {key: y for key, y in values.items() if y}}
    return found


def _over_runs(runs: Sequence[History], row: Measurement, diverged: Sequence[bool]) -> dict[str, Any] | None:
    values = np.full((len(runs), max(map(len, runs))), np.nan)
    for line, history in zip(values, runs, strict=True):
        line[: len(history)] = [row.shown(record) for record in history]
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
        [len(h) - 1, _rounded(line[len(h) - 1])]
        for line, h, end in zip(values, runs, diverged, strict=True)
        if end and math.isfinite(line[len(h) - 1])
    ]
    return found | ({"ends": ends} if ends else {})


def _rounded(value: float) -> float | None:
    """Return seven digits, more than a screen shows."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.7g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _listed(values: Any) -> list[float | None]:
    return [_rounded(float(v)) for v in values]
