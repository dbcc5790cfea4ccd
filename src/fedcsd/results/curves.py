"""The picture of a run or a comparison against rounds: a panel for each measurement that has one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedcsd.measurements import MEASUREMENTS, Measurement
from fedcsd.results.rows import LOCAL, PERSONAL
from fedcsd.results.style import COLOURS, look, verbatim

LEGEND_ROWS = 22

History = Sequence[Mapping[str, Any]]


def plot_curves(histories: Mapping[str, Sequence[History]], path: Path, *, rounds: int = 0) -> Path:
    """Draw the curves of each method: the mean over its runs (seeds) as a line, their range as a band.

    With so many methods that bands would hide the lines there are none. A run with fewer rounds than
    `rounds` diverged: a cross marks its end, and the line goes on as the mean of the others.
    """
    panels = _panels([record for runs in histories.values() for history in runs for record in history])
    many = len(histories) > len(COLOURS)
    beside = -(-len(histories) // LEGEND_ROWS) if many else 0
    figure = Figure(figsize=(4.6 * len(panels) + 2.2 * beside, 3.6), dpi=150, layout="constrained")
    axes: Sequence[Axes] = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for index, (label, runs) in enumerate(histories.items()):
            values = [[panel.shown(record) for record in history] for history in runs]
            line(axis, values, label, index, rounds, band=not many)
        axis.set(xlabel="round", ylabel=panel.axis)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.grid(alpha=0.3, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    if beside:  # too many to lie on the curves
        handles, labels = axes[0].get_legend_handles_labels()
        options: dict[str, Any] = {"fontsize": 7, "frameon": False, "handlelength": 3.4}  # shows a whole dash
        figure.legend(handles, labels, loc="outside right upper", ncols=beside, **options)
    else:
        axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(path)
    return path


def _panels(records: Sequence[Mapping[str, Any]]) -> list[Measurement]:
    """Return the measurements with a panel that were recorded; the first of them if there are none."""
    panels = [row for row in MEASUREMENTS.values() if row.panel]
    shown = [row for row in panels if any(np.isfinite(row.value(record)) for record in records)]
    if not any(record.get(key) is not None for record in records for key in (PERSONAL, LOCAL)):
        shown = [row for row in shown if row.name != "own_accuracy"]  # would say little beside test accuracy
    return shown or panels[:1]


def line(
    axis: Axes,
    runs: Sequence[Sequence[float]],
    label: str,
    index: int,
    rounds: int,
    *,
    band: bool = True,
    width: float = 1.8,
    x: NDArray[np.float64] | None = None,
) -> None:
    """Draw one method's runs against `x`, the rounds unless it is given."""
    values = padded(runs)
    length, shown = values.shape[1], look(index)
    at = np.arange(1.0, length + 1) if x is None else x
    dot = "." if length == 1 else ""  # one round makes no line
    axis.plot(at, values.mean(0), marker=dot, label=verbatim(label), linewidth=width, **shown)
    if band and len(runs) > 1:
        axis.fill_between(at, values.min(0), values.max(0), color=shown["color"], alpha=0.15, linewidth=0)
    for run in runs:
        if 0 < len(run) < rounds:
            axis.plot(at[len(run) - 1], run[-1], "x", color=shown["color"], markersize=6)


def padded(runs: Sequence[Sequence[float]]) -> Any:
    """Return an array [runs, rounds], masked where a run has no number (any more)."""
    length = max(map(len, runs), default=0)
    rows = [[*run, *[np.nan] * (length - len(run))] for run in runs]
    return np.ma.masked_invalid(np.array(rows, dtype=float).reshape(len(runs), length))
