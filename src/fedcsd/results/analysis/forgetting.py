"""Measure what local training forgets: accuracy on classes that a client holds, and on other classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MEANING = (
    "on the classes that a client holds and on those it does not (accuracy in percent, mean over clients)"
)


@dataclass(frozen=True)
class Forgetting:
    """Test images of each class that are right before local training and after it."""

    clients: list[int]
    held: list[list[bool]]
    """whether each client has training samples of each class [K][C]"""
    images: list[int]
    """test images of each class [C]"""
    before: list[int]
    """of those, how many the global model gets right [C]"""
    after: dict[str, list[list[int]]]
    """by method: how many each client's local model gets right [K][C]"""

    def rows(self) -> list[list[float | None]]:
        """Return for each method the accuracy on held classes before and after, and on other classes.

        Each is a mean over the clients that have such classes; None if no client has."""
        held = np.array(self.held, dtype=bool)
        before = np.broadcast_to(np.array(self.before), held.shape)
        return [
            [
                self._mean(right, chosen)
                for chosen in (held, ~held)
                for right in (before, np.array(after).reshape(held.shape))
            ]
            for after in self.after.values()
        ]

    def _mean(self, right: NDArray[Any], chosen: NDArray[np.bool_]) -> float | None:
        """Average over clients the accuracy on each one's chosen classes: [K, C], [K, C]."""
        images = (np.array(self.images) * chosen).sum(1)
        some = images > 0
        return float(((right * chosen).sum(1)[some] / images[some]).mean()) if some.any() else None

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return head and cells of a table, in percent."""
        head = [
            "method",
            "held:\nbefore",
            "held:\nafter",
            "not held:\nbefore",
            "not held:\nafter",
            "forgotten",
        ]
        cells = []
        for label, row in zip(self.after, self.rows(), strict=True):
            lost = None if row[2] is None or row[3] is None else row[2] - row[3]
            cells.append([label, *(_percent(value) for value in [*row, lost])])
        return head, cells


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def draw(forgetting: Forgetting, stem: Path, caption: str = "") -> list[Path]:
    """Draw heat maps of accuracy by class, one for each method; a dot marks the classes of a client."""
    from fedcsd.results.style import COLUMN, PAGE, printed, verbatim

    methods, clients, classes = list(forgetting.after), len(forgetting.clients), len(forgetting.images)
    columns = min(4, len(methods))
    rows = -(-len(methods) // columns)
    width = COLUMN if columns < 3 else PAGE
    height = rows * min(4.0, 0.75 + 0.125 * (clients + 1))
    written: list[Path] = []
    with printed(width, height, stem, written, caption) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axis in axes.flat[len(methods) :]:
            axis.set_visible(False)
        for axis, label in zip(axes.flat, methods, strict=False):
            image = _panel(axis, forgetting, label)
            axis.set_title(verbatim(label))
        for axis in axes[:, 0]:
            step = max(1, -(-clients // 12))
            places = range(0, clients, step)
            names = [str(forgetting.clients[place]) for place in places]
            axis.set_yticks([0, *(1 + place for place in places)], labels=["global", *names])
            axis.set_ylabel("local model of client")
        figure.supxlabel("class (a dot: the client holds it)", fontsize=7)
        bar = figure.colorbar(image, ax=axes, label="test accuracy (%)", pad=0.01, fraction=0.05)
        bar.outline.set_linewidth(0.4)
        for axis in axes.flat[: len(methods)]:
            axis.set_xticks(range(0, classes, max(1, -(-classes // 10))))
    return written


def _panel(axis: Any, forgetting: Forgetting, label: str) -> Any:
    images = np.maximum(1, forgetting.images)
    right = np.array([forgetting.before, *forgetting.after[label]])
    shown = np.where(np.array(forgetting.images) > 0, 100 * right / images, np.nan)
    image = axis.imshow(shown, aspect="auto", cmap="cividis", vmin=0, vmax=100, interpolation="nearest")
    held = np.array(forgetting.held, dtype=bool)
    if held.size <= 2500:
        clients, classes = np.nonzero(held)
        bright = shown[clients + 1, classes] > 55
        few = held.shape[1] <= 30
        for chosen, colour in ((bright, "black"), (~bright, "white")):
            below = clients[chosen] + 1 + (0 if few else 0.36)  # of many classes dots would hide the colours
            axis.scatter(classes[chosen], below, s=2.2 if few else 0.6, color=colour, linewidth=0)
    axis.axhline(0.5, color="white", linewidth=1.5)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=2)
    return image


def counts(right: Sequence[bool] | NDArray[np.bool_], labels: NDArray[np.int64], classes: int) -> list[int]:
    """Count the right images of each class: [N], [N] -> [C]."""
    found: list[int] = np.bincount(labels[np.asarray(right, dtype=bool)], minlength=classes).tolist()
    return found
