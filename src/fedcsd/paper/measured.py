"""What was measured, beside what was printed: cells over seeds, their differences, the order of methods."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from statistics import mean, stdev
from typing import Any

from fedcsd.errors import Divergence
from fedcsd.experiments.running import Run
from fedcsd.paper.exhibits import OFFICE, PRINTED, Cell, Part, Point
from fedcsd.results.rows import blown_up
from fedcsd.results.tables import known

History = Sequence[Mapping[str, Any]]
CLASSES = {"cifar100": 100}  # of the others ten
DOMAINS = PRINTED["table2"]["columns"][:-1]


def _percent(key: str) -> Callable[[History], list[float]]:
    return lambda history: [100 * _number(record.get(key)) for record in history]


def _domain(name: str) -> Callable[[History], list[float]]:
    return lambda history: [
        100 * _number((record.get("domain_accuracy") or {}).get(name)) for record in history
    ]


def _average(history: History) -> list[float]:
    """Mean of the domains; of data without domains, the test accuracy."""
    return [100 * _number(record.get("domain_mean", record["test_accuracy"])) for record in history]


def _megabytes(history: History) -> list[float]:
    """Sent both ways, up to each round."""
    return list(accumulate((r["bytes_up"] + r["bytes_down"]) / 1e6 for r in history))


MEASURES: dict[str, Callable[[History], list[float]]] = {
    "accuracy": _percent("test_accuracy"),
    "average": _average,
    **{name: _domain(name) for name in DOMAINS},
    **{
        key: _percent(key)
        for key in ("wrong_filtered", "right_lost", "mask_rate", "teacher_accuracy", "target_entropy")
    },
    "megabytes": _megabytes,
}
"""By name: a run's records to one number a round; the last one counts."""
HIGHER_IS_BETTER = ("accuracy", "average", *DOMAINS)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class Result:
    """One cell over the seeds; lists have one entry a seed."""

    cell: Cell
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    """of the final round; NaN where a run has not ended, diverged, or does not have this"""
    best: tuple[float, ...]
    """of the best round; not the result"""
    ends: tuple[Divergence | None, ...]
    missing: tuple[int, ...]
    """seeds whose run has not ended"""
    notes: tuple[str, ...] = ()
    """what makes a run something else than its row says"""

    @property
    def mean(self) -> float:
        """Over the finished runs; NaN without any."""
        some = known(self.values)
        return mean(some) if some else math.nan

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; one seed has none."""
        some = known(self.values)
        return stdev(some) if len(some) > 1 else None

    @property
    def difference(self) -> float | None:
        """Measured less printed."""
        value = self.mean
        return value - self.cell.printed if self.cell.printed is not None and math.isfinite(value) else None

    @property
    def whole(self) -> bool:
        """Whether every seed has a result that was trained as asked."""
        return bool(self.values) and not self.notes and all(map(math.isfinite, self.values))


def measure(cell: Cell, seeds: Sequence[int], outcomes: Mapping[tuple[Point, int], Run]) -> Result:
    """A cell from the runs that have ended."""
    values, best, ends, missing, notes = [], [], [], [], []
    for seed in seeds:
        outcome = outcomes.get((cell.point, seed))
        end = outcome.diverged if outcome else None
        curve = MEASURES[cell.measure](outcome.history) if outcome and not end else []
        values.append(curve[-1] if curve else math.nan)
        best.append(max(known(curve), default=math.nan))
        ends.append(end)
        if outcome is None:
            missing.append(seed)
            continue
        mends = (str(change) for change in outcome.changes if change.mends)
        unusual = [*mends, *blown_up(outcome, CLASSES.get(cell.point.data, 10))]
        notes += [f"{cell.point.label(cell.point.data)} seed {seed}: {text}" for text in unusual]
    return Result(cell, tuple(seeds), tuple(values), tuple(best), tuple(ends), tuple(missing), tuple(notes))


def best_in(results: Sequence[Result]) -> set[str]:
    """Rows of a column with the highest mean, as it is shown; none where all are equal. One that leaves out
    a seed is not compared."""
    shown = {r.cell.row: f"{r.mean:.2f}" for r in results if r.whole}
    top = max(shown.values(), key=float, default="")
    return {row for row, text in shown.items() if text == top} if len(set(shown.values())) > 1 else set()


@dataclass(frozen=True)
class Order:
    """Two by two: whether what the paper prints higher is measured higher."""

    agree: int
    differ: tuple[tuple[str, str], ...]
    """(higher in the paper, lower in the paper)"""
    unclear: tuple[tuple[str, str], ...]
    """those of `differ` that are no further apart than the seeds spread"""

    @property
    def compared(self) -> int:
        return self.agree + len(self.differ)

    @property
    def tau(self) -> float | None:
        """Kendall's τ over the pairs that are not tied."""
        return (self.agree - len(self.differ)) / self.compared if self.compared else None


def order_of(results: Sequence[Result]) -> Order:
    """The order of a column. Left out are cells without a whole result, ties, and pairs whose order in the
    paper depends on which of its two statements one believes."""
    agree, differ, unclear = 0, [], []
    for a, b in combinations([r for r in results if r.whole and r.cell.printed is not None], 2):
        printed = _higher(a.cell, b.cell)
        measured = round(a.mean, 2) - round(b.mean, 2)
        if not printed or not measured:
            continue
        if printed * measured > 0:
            agree += 1
            continue
        pair = (a, b) if printed > 0 else (b, a)
        differ.append((pair[0].cell.row, pair[1].cell.row))
        if a.spread is not None and b.spread is not None and abs(measured) <= math.hypot(a.spread, b.spread):
            unclear.append(differ[-1])
    return Order(agree, tuple(differ), tuple(unclear))


def _higher(a: Cell, b: Cell) -> int:
    """1 if the paper has a above b, −1 if below, 0 if they are equal or it contradicts itself."""
    assert a.printed is not None
    assert b.printed is not None
    readings = {
        (x > y) - (x < y)
        for x in {a.printed, a.implied or a.printed}
        for y in {b.printed, b.implied or b.printed}
    }
    return readings.pop() if len(readings) == 1 else 0


def apart(results: Sequence[Result], best: bool = False) -> float | None:
    """Mean absolute difference to the printed numbers that are not suspect."""
    found = []
    for result in results:
        values = known(result.best if best else result.values)
        if values and result.cell.printed is not None and not result.cell.suspect:
            found.append(abs(mean(values) - result.cell.printed))
    return mean(found) if found else None


@dataclass(frozen=True)
class Measured:
    """A part of a table or figure with its results."""

    part: Part
    results: tuple[Result, ...]

    def column(self, name: str) -> list[Result]:
        return [r for r in self.results if r.cell.column == name]

    def at(self, row: str, column: str) -> Result | None:
        return next((r for r in self.results if (r.cell.row, r.cell.column) == (row, column)), None)


def nearer_pool(parts: Sequence[Measured]) -> str:
    """Which pool of Office-Caltech-10 is nearer to the paper, over the cells that all pools have."""
    pools = [part for part in parts if part.results and part.results[0].cell.point.data == OFFICE]
    printed = [r for part in pools for r in part.results if r.cell.printed is not None]
    places = {(r.cell.row, r.cell.column) for r in printed}
    both = {place for place in places if all(_finite(part.at(*place)) for part in pools)}
    if len(pools) < 2 or not both:
        return ""
    far = {}
    for part in pools:
        distance = apart([r for r in part.results if (r.cell.row, r.cell.column) in both])
        if distance is None:
            return ""
        far[part.part.title.partition(", ")[2]] = distance
    near = min(far, key=lambda title: far[title])
    said = ", ".join(f"{title}: {distance:.2f}" for title, distance in far.items())
    return f"nearer to the paper: {near} (mean absolute difference, {said})"


def _finite(result: Result | None) -> bool:
    return result is not None and math.isfinite(result.mean)
