"""Compare measured numbers with printed ones: means over seeds, differences, the order of methods."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from statistics import mean, stdev
from typing import Any

from fedcsd.errors import Divergence
from fedcsd.experiments.running import Run
from fedcsd.paper.exhibits import OFFICE, PRINTED, Entry, Point, Section
from fedcsd.results.rows import blown_up
from fedcsd.results.tables import known

CLASSES = {"cifar100": 100}  # the other data sets have ten
DOMAINS = PRINTED["table2"]["columns"][:-1]
HIGHER_IS_BETTER = ("accuracy", "average", *DOMAINS)


def curve(measure: str, history: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return a measure's number in each round; the last one is the result, and NaN is none.

    Megabytes are those sent both ways up to a round. The average is that of the domains, or else the test
    accuracy. Everything else is in percent.
    """
    if measure == "megabytes":
        return list(accumulate((r["bytes_up"] + r["bytes_down"]) / 1e6 for r in history))
    if measure in DOMAINS:
        values = [(record.get("domain_accuracy") or {}).get(measure) for record in history]
    elif measure == "average":
        values = [record.get("domain_mean", record["test_accuracy"]) for record in history]
    else:
        name = "test_accuracy" if measure == "accuracy" else measure
        values = [record.get(name) for record in history]
    return [math.nan if value is None else 100 * value for value in values]


@dataclass(frozen=True)
class Result:
    """The result of an entry has a number for each seed."""

    entry: Entry
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    """of the final round; NaN for a run that has not ended, has diverged, or lacks this number"""
    best: tuple[float, ...]
    """of the best round, which is not the result"""
    ends: tuple[Divergence | None, ...]
    missing: tuple[int, ...]
    """seeds whose run has not ended"""
    notes: tuple[str, ...] = ()
    """reasons why a run is not what its row says"""

    @property
    def mean(self) -> float:
        """Return the mean over finished runs; NaN without any."""
        some = known(self.values)
        return mean(some) if some else math.nan

    @property
    def spread(self) -> float | None:
        """Return the standard deviation over seeds; None for one seed."""
        some = known(self.values)
        return stdev(some) if len(some) > 1 else None

    @property
    def difference(self) -> float | None:
        """Return the measured number less the printed one."""
        value = self.mean
        return value - self.entry.printed if self.entry.printed is not None and math.isfinite(value) else None

    @property
    def whole(self) -> bool:
        """Tell if every seed has a result that was trained as asked."""
        return bool(self.values) and not self.notes and all(map(math.isfinite, self.values))


def measure(entry: Entry, seeds: Sequence[int], runs: Mapping[tuple[Point, int], Run]) -> Result:
    """Measure an entry in the runs that have ended."""
    values, best, ends, missing, notes = [], [], [], [], []
    for seed in seeds:
        run = runs.get((entry.point, seed))
        end = run.diverged if run else None
        rounds = curve(entry.measure, run.history) if run and not end else []
        values.append(rounds[-1] if rounds else math.nan)
        best.append(max(known(rounds), default=math.nan))
        ends.append(end)
        if run is None:
            missing.append(seed)
            continue
        mends = (str(change) for change in run.changes if change.mends)
        unusual = [*mends, *blown_up(run, CLASSES.get(entry.point.data, 10))]
        notes += [f"{entry.point.label(entry.point.data)} seed {seed}: {text}" for text in unusual]
    return Result(entry, tuple(seeds), tuple(values), tuple(best), tuple(ends), tuple(missing), tuple(notes))


def best_in(results: Sequence[Result]) -> set[str]:
    """Return the rows with the highest mean, as it is printed; none if all are equal.

    A mean that leaves out a seed is not compared.
    """
    shown = {r.entry.row: f"{r.mean:.2f}" for r in results if r.whole}
    top = max(shown.values(), key=float, default="")
    return {row for row, text in shown.items() if text == top} if len(set(shown.values())) > 1 else set()


@dataclass(frozen=True)
class Order:
    """The order of a column's rows is compared pair by pair with the printed order."""

    agree: int
    differ: tuple[tuple[str, str], ...]
    """(higher in the paper, lower in the paper)"""
    unclear: tuple[tuple[str, str], ...]
    """pairs of `differ` whose means are no further apart than the seeds spread"""

    @property
    def compared(self) -> int:
        return self.agree + len(self.differ)

    @property
    def tau(self) -> float | None:
        """Return Kendall's τ over the pairs that are not tied."""
        return (self.agree - len(self.differ)) / self.compared if self.compared else None


def order_of(results: Sequence[Result]) -> Order:
    """Compare the order of a column with the printed one.

    Cells without a whole result and ties are left out, and so are pairs whose printed order is not certain
    because the paper makes two statements.
    """
    agree, differ, unclear = 0, [], []
    for a, b in combinations([r for r in results if r.whole and r.entry.printed is not None], 2):
        printed = _higher(a.entry, b.entry)
        measured = round(a.mean, 2) - round(b.mean, 2)
        if not printed or not measured:
            continue
        if printed * measured > 0:
            agree += 1
            continue
        pair = (a, b) if printed > 0 else (b, a)
        differ.append((pair[0].entry.row, pair[1].entry.row))
        if a.spread is not None and b.spread is not None and abs(measured) <= math.hypot(a.spread, b.spread):
            unclear.append(differ[-1])
    return Order(agree, tuple(differ), tuple(unclear))


def _higher(a: Entry, b: Entry) -> int:
    """Return 1 if the paper has `a` above `b`, −1 if below, 0 if they are equal or it contradicts itself."""
    assert a.printed is not None
    assert b.printed is not None
    readings = {
        (x > y) - (x < y)
        for x in {a.printed, a.implied or a.printed}
        for y in {b.printed, b.implied or b.printed}
    }
    return readings.pop() if len(readings) == 1 else 0


def apart(results: Sequence[Result], best: bool = False) -> float | None:
    """Return the mean absolute difference to the printed numbers that are not suspect."""
    found = []
    for result in results:
        values = known(result.best if best else result.values)
        if values and result.entry.printed is not None and not result.entry.suspect:
            found.append(abs(mean(values) - result.entry.printed))
    return mean(found) if found else None


@dataclass(frozen=True)
class SectionResults:
    """A section that is measured."""

    section: Section
    results: tuple[Result, ...]

    def column(self, name: str) -> list[Result]:
        return [r for r in self.results if r.entry.column == name]


def nearer_pool(sections: Sequence[SectionResults]) -> str:
    """Return which pool of Office-Caltech-10 is nearer to the paper, over the cells that all pools have."""
    pools = [part for part in sections if part.results and part.results[0].entry.point.data == OFFICE]
    measured = [
        {(r.entry.row, r.entry.column) for r in part.results if r.entry.printed and known(r.values)}
        for part in pools
    ]
    common = set.intersection(*measured) if len(pools) > 1 else set()
    far = {}
    for part in pools if common else ():
        results = [r for r in part.results if (r.entry.row, r.entry.column) in common]
        far[part.section.title.partition(", ")[2]] = apart(results)
    if not far or None in far.values():
        return ""
    distances = {title: distance or 0.0 for title, distance in far.items()}
    texts = ", ".join(f"{title}: {distance:.2f}" for title, distance in distances.items())
    nearest = min(distances, key=lambda title: distances[title])
    return f"nearer to the paper: {nearest} (mean absolute difference, {texts})"
