"""The picture of a run or a comparison, against rounds: accuracy, and where they were measured, accuracy on
the clients' own data and drift."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedcsd.results.rows import PERSONAL
from fedcsd.results.style import COLOURS, look, verbatim

LEGEND_ROWS = 22
HELD_OUT = "client_accuracy_local_mean"
PANELS = (
    ("test_accuracy", "test accuracy (%)", 100.0),
    ("own", "accuracy on clients' own data (%)", 100.0),
    ("logit_drift", "logit drift (KL, global ‖ local)", 1.0),
    ("local_accuracy", "local models' test accuracy (%)", 100.0),
)

History = Sequence[Mapping[str, Any]]


def plot_curves(histories: Mapping[str, Sequence[History]], path: Path, *, rounds: int = 0) -> Path:
    """Curves of each method, by label: the mean over its runs (seeds) as a line, their range as a band
    unless there are so many methods that bands would hide the lines.

    A run that has fewer rounds than `rounds` diverged: a cross marks its end, and the line goes on as
    the mean of the others.
    """
    histories = _with_own(histories)
    panels = [
        panel for panel in PANELS if any(panel[0] in h[0] for runs in histories.values() for h in runs if h)
    ] or [PANELS[0]]  # where nothing was measured, an empty picture
    many = len(histories) > len(COLOURS)
    beside = -(-len(histories) // LEGEND_ROWS) if many else 0
    figure = Figure(figsize=(4.6 * len(panels) + 2.2 * beside, 3.6), dpi=150, layout="constrained")
    axes: Sequence[Axes] = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (key, name, factor) in zip(axes, panels, strict=True):
        for index, (label, runs) in enumerate(histories.items()):
            values = [[_number(r.get(key)) * factor for r in h] for h in runs]
            line(axis, values, label, index, rounds, band=not many)
        axis.set(xlabel="round", ylabel=name)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.grid(alpha=0.3, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    if beside:  # too many to lie on the curves
        handles, labels = axes[0].get_legend_handles_labels()
        look: dict[str, Any] = {"fontsize": 7, "frameon": False, "handlelength": 3.4}  # shows a whole dash
        figure.legend(handles, labels, loc="outside right upper", ncols=beside, **look)
    else:
        axes[0].legend(frameon=False, loc="lower right")
    figure.savefig(path)
    return path


def _with_own(histories: Mapping[str, Sequence[History]]) -> Mapping[str, Sequence[History]]:
    """With the accuracy on the clients' own data, of their own models where there are any, else of the
    global one; as they are where neither personal models nor held-out data make that worth a look."""
    records = [r for runs in histories.values() for h in runs for r in h]
    if not any(r.get(key) is not None for r in records for key in (PERSONAL, HELD_OUT)):
        return histories

    def own(record: Mapping[str, Any]) -> dict[str, Any]:
        return {**record, "own": record.get(PERSONAL, record.get("client_accuracy_mean"))}

    return {label: [[own(r) for r in h] for h in runs] for label, runs in histories.items()}


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
    """One method's runs against `x`, the rounds unless it is given."""
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
    """[runs, rounds], masked where a run has no number (any more)."""
    length = max(map(len, runs), default=0)
    rows = [[*run, *[np.nan] * (length - len(run))] for run in runs]
    return np.ma.masked_invalid(np.array(rows, dtype=float).reshape(len(runs), length))


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
