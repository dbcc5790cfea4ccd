"""Show a partition as the picture that papers print, and as a table."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedcsd.data import Dataset
from fedcsd.data.partition import Rows, counts_of, names_of

CIRCLES = 400  # cells up to which areas can be told apart; more have colours
CLIENTS = 60  # rows of the printed table


def plot_partition(data: Dataset, parts: Sequence[Rows], path: Path) -> Path:
    """Draw clients against classes: circles with the area of the count, or colours if there are many."""
    counts = counts_of(data, parts)
    clients, classes = counts.shape
    figure = Figure(
        figsize=(min(12, 2.2 + 0.42 * clients), min(9, 1.6 + 0.34 * classes)), dpi=150, layout="constrained"
    )
    axis = figure.subplots()
    if counts.size <= CIRCLES:
        x, y = np.nonzero(counts)
        axis.scatter(x, y, s=260 * counts[x, y] / counts.max(), color="#0072B2", alpha=0.85, linewidth=0)
        axis.grid(alpha=0.25, linewidth=0.5)
        axis.set(xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3))
        axis.set_xlabel("client")
    else:
        image = axis.imshow(
            np.log10(np.maximum(counts.T, 0.5)),
            aspect="auto",
            cmap="viridis",
            origin="lower",
            interpolation="nearest",
        )
        bar = figure.colorbar(image, ax=axis, label="samples")
        ticks = [t for t in range(5) if 10**t <= counts.max()]
        bar.set_ticks([np.log10(0.5), *ticks], labels=["0", *(str(10**t) for t in ticks)])
        axis.set_xlabel("client")
    if clients <= 30:
        axis.set_xticks(range(clients))
        if names := names_of(data, parts):
            axis.set_xticklabels(names, rotation=90)
    if classes <= 20:
        axis.set_yticks(range(classes))
    axis.set_ylabel("class")
    sizes = counts.sum(1)
    axis.set_title(f"{data.name}: {clients} clients of {sizes.min()} to {sizes.max()} samples", fontsize=10)
    figure.savefig(path)
    return path


def table_of(data: Dataset, parts: Sequence[Rows]) -> tuple[list[str], list[list[str]]]:
    """Return head and cells: size and classes of the first clients, with their names if any, and of all together."""
    counts, names = counts_of(data, parts), names_of(data, parts)
    rows = []
    for client, row in enumerate(counts[:CLIENTS]):
        largest = int(row.argmax())
        rows.append(
            [
                f"{client}: {names[client]}" if names else str(client),
                f"{row.sum():,}",
                str((row > 0).sum()),
                f"{largest} ({100 * row[largest] / row.sum():.0f} %)",
            ]
        )
    if len(counts) > CLIENTS:
        rows.append([f"… {len(counts) - CLIENTS} more", "", "", ""])
    sizes = counts.sum(1)
    held = (counts > 0).sum(1)
    rows.append(
        ["all", f"{sizes.sum():,} ({sizes.min():,} to {sizes.max():,})", f"{held.min()} to {held.max()}", ""]
    )
    return ["client", "samples", "classes", "largest class"], rows
