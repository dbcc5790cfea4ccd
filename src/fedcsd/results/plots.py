"""Pictures of recorded measurements against rounds, time or bytes; seeds of the same settings are one band."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedcsd.errors import UserError, note, unknown
from fedcsd.experiments.runs.recorded import RecordedRun
from fedcsd.experiments.tracking import flattened
from fedcsd.measurements import MEASUREMENTS, UNIFORM, Measurement, measurement, number, of_chart
from fedcsd.results.curves import History, line
from fedcsd.results.groups import few_by_label
from fedcsd.results.style import PAGE, below, dress, grid, printed, verbatim

TIMES = {"round": "round", "seconds": "training time (s)", "bytes": "sent and received (MB)"}


def grouped(runs: Sequence[RecordedRun]) -> dict[str, list[History]]:
    """Return flat histories by label."""
    groups = few_by_label(runs)
    return {label: [flat(run.history()) for run in some] for label, some in groups.items()}


def flat(history: History) -> list[dict[str, Any]]:
    """Return records whose groups are names with a dot (`domain_accuracy.amazon`), with derived measurements."""
    derived = [row for row in MEASUREMENTS.values() if row.derived]
    flat = [flattened(record) for record in history]
    return [{**r, **{row.name: value for row in derived if np.isfinite(value := row.value(r))}} for r in flat]


def recorded(histories: Mapping[str, Sequence[History]]) -> list[str]:
    """Return the names of all numbers in any of the runs."""
    records = [r for runs in histories.values() for h in runs for r in h]
    return sorted({k for r in records for k, v in r.items() if isinstance(v, (int, float)) and k != "round"})


def check_recorded(histories: Mapping[str, Sequence[History]], wanted: Sequence[str]) -> None:
    """Refuse a measurement that no run has, and note which runs lack one."""
    known = recorded(histories)
    if not known:
        raise UserError("these runs have no finished round yet")
    for name in wanted:
        if name not in known and (option := measurement(name).option):
            raise UserError(f"{name} was not measured in these runs: train them with {option}")
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
    """Draw a panel for each measurement in `y`, and in it a line for each label: mean and range of its runs.

    The ending of `stem` is the format; without one, PNG, SVG and PDF are written.
    """
    check_recorded(histories, y)
    if x not in TIMES:
        raise unknown("axis (--x)", x, TIMES)
    written: list[Path] = []
    with _panels(len(y), stem, written) as axes:
        for axis, row in zip(axes, map(measurement, y), strict=True):
            for index, (name, runs) in enumerate(histories.items()):
                some = [h for h in runs if any(row.name in r for r in h)]
                if some:
                    _line(axis, some, row, name, index, x)
            dress(axis, xlabel=TIMES[x], ylabel=row.axis)
            axis.xaxis.set_major_locator(MaxNLocator(integer=x == "round", nbins=6))
    return written


@contextmanager
def _panels(number: int, stem: Path, written: list[Path], **shared: Any) -> Iterator[list[Axes]]:
    """Return so many axes to draw on; at the end add the legend and write the picture."""
    rows, columns, width, height = grid(number)
    with printed(width, height, stem, written) as figure:
        axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
        yield axes[:number]
        for axis in axes[number:]:
            axis.set_visible(False)
        below(figure, axes)


def _line(axis: Axes, runs: Sequence[History], row: Measurement, name: str, index: int, x: str) -> None:
    values = [[row.shown(record) for record in history] for history in runs]
    longest = max(map(len, values))  # a run that ended before the others has a cross at its end
    line(axis, values, name, index, longest, width=1.2, x=times(runs, x))


def times(runs: Sequence[History], x: str) -> NDArray[np.float64]:
    """Return the place of each round on the axis; for time and bytes the mean over the runs that got there."""
    if x == "round":
        return np.array([record["round"] for record in max(runs, key=len)], dtype=float)
    sums = np.full((len(runs), max(map(len, runs))), np.nan)
    for row, history in zip(sums, runs, strict=True):
        row[: len(history)] = list(accumulate(_cost(record, x) for record in history))
    found: NDArray[np.float64] = np.nanmean(sums, axis=0)
    return found


def _cost(record: Mapping[str, Any], x: str) -> float:
    keys, unit = (("seconds",), 1.0) if x == "seconds" else (("bytes_down", "bytes_up"), 1e6)
    if lost := [key for key in keys if record.get(key) is None]:
        raise UserError(f"a round of these runs lacks {lost[0]}: draw them against rounds, with --x round")
    return sum(number(record[key]) for key in keys) / unit


def plot_mask(histories: Mapping[str, Sequence[History]], stem: Path) -> list[Path]:
    """Draw what FedCSD's mask does, round by round, a panel for each label.

    Shown are the paper's filter rate of wrong soft labels, what it costs of right ones, and the teacher's accuracy.
    """
    known = {
        label: [h for h in runs if any("mask_rate" in r for r in h)] for label, runs in histories.items()
    }
    known = {label: runs for label, runs in known.items() if runs}
    if not known:
        raise UserError("none of these runs has a mask: --mask is for runs of fedcsd")
    written: list[Path] = []
    with _panels(len(known), stem, written, sharey=True) as axes:
        for axis, (label, runs) in zip(axes, known.items(), strict=True):
            for index, row in enumerate(of_chart("mask")):
                if any(row.name in r for h in runs for r in h):
                    _line(axis, runs, row, row.title, index, "round")
            dress(axis, verbatim(label), xlabel="round", ylim=(-3, 103))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            if axis.get_subplotspec().is_first_col():  # type: ignore[union-attr]
                axis.set_ylabel("share (%)")
    return written


def plot_target(histories: Mapping[str, Sequence[History]], stem: Path) -> list[Path]:
    """Draw the distance of FedCSD's target from uniform, `1 − H(q) / log C`, and beside it the accuracy."""
    distance = MEASUREMENTS["target_distance"]
    if not any(np.isfinite(distance.value(r)) for runs in histories.values() for h in runs for r in h):
        raise UserError("none of these runs has a target: --target is for runs of fedcsd")
    written: list[Path] = []
    with printed(PAGE * 0.75, 2.6, stem, written) as figure:
        left, right = figure.subplots(1, 2)
        left.set(ylim=(UNIFORM / 2, 1), yscale="log")
        for index, (label, runs) in enumerate(histories.items()):
            _line(right, runs, MEASUREMENTS["test_accuracy"], label, index, "round")
            if any(np.isfinite(distance.value(r)) for h in runs for r in h):
                _line(left, runs, distance, label, index, "round")
        dress(left, "(a) distance from a uniform target", xlabel="round", ylabel=distance.axis)
        dress(right, "(b) accuracy", xlabel="round", ylabel="test accuracy (%)")
        for axis in (left, right):
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        below(figure, [right])
    return written
