"""The picture of a run or a comparison: accuracy, and drift where it was tracked, against rounds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#999933",
)  # told apart by colour-blind readers
STYLES = ("-", "--", "-.", ":")
PANELS = (
    ("test_accuracy", "test accuracy (%)", 100.0),
    ("logit_drift", "logit drift (KL, global ‖ local)", 1.0),
    ("local_accuracy", "local models' test accuracy (%)", 100.0),
)

History = Sequence[Mapping[str, Any]]


def plot_curves(histories: Mapping[str, Sequence[History]], path: Path, title: str = "") -> Path:
    """Curves of each method, by label: the mean over its runs (seeds) as a line, their range as a band."""
    panels = [
        panel for panel in PANELS if any(panel[0] in h[0] for runs in histories.values() for h in runs if h)
    ]
    figure = Figure(figsize=(4.6 * len(panels), 3.6), dpi=150, layout="constrained")
    axes: Sequence[Axes] = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (key, name, factor) in zip(axes, panels, strict=True):
        for index, (label, runs) in enumerate(histories.items()):
            _line(axis, [[_number(r.get(key)) * factor for r in h] for h in runs], label, index)
        axis.set(xlabel="round", ylabel=name)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="lower right")
    if title:
        figure.suptitle(title, fontsize=10)
    figure.savefig(path)
    return path


def _line(axis: Axes, runs: Sequence[Sequence[float]], label: str, index: int) -> None:
    length = min(len(run) for run in runs)
    values = np.array([run[:length] for run in runs])
    rounds = np.arange(1, length + 1)
    colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
    axis.plot(rounds, values.mean(0), color=colour, linestyle=style, label=label, linewidth=1.8)
    if len(runs) > 1:
        axis.fill_between(rounds, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
