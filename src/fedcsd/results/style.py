"""Set the look of figures for print: sizes of a two-column paper, lines that anyone can tell apart."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcsd.files import writing

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
COLUMN, PAGE = 3.5, 7.16  # inches: a column and the whole width of a two-column page
SUFFIXES = (".png", ".svg", ".pdf")
LOOK: Any = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "legend.fontsize": 6.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "pdf.fonttype": 42,  # letters stay letters, as journals ask
    "svg.hashsalt": "fedcsd",  # the same picture is the same file
}


def look(index: int) -> dict[str, Any]:
    """Return colour and style of the line of this number; the first 32 all look different."""
    style = STYLES[(index + index // len(COLOURS)) % len(STYLES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": style}


def verbatim(name: str) -> str:
    """Return a name as text: dollars begin no formula, and a legend shows it also if it begins with `_`."""
    return " " * name.startswith("_") + name.replace("$", r"\$")


@contextmanager
def printed(
    width: float, height: float, stem: Path, written: list[Path], caption: str = ""
) -> Iterator[Figure]:
    """Return a figure to draw on, in inches; at the end write it and add the paths to `written`.

    The ending of `stem` is the format; without one, PNG, SVG and PDF are written.
    """
    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.03, h_pad=0.03)  # type: ignore[union-attr,call-arg]
        yield figure
        with writing(stem, "choose another -o"):
            stem.parent.mkdir(parents=True, exist_ok=True)
            written += save(figure, stem, caption)


def save(figure: Figure, stem: Path, caption: str = "") -> list[Path]:
    """Write a figure without a date, so that the same picture is the same file; the caption stands above it."""
    if caption:
        figure.suptitle(caption, fontsize=6, color="0.4")
    endings = ("",) if stem.suffix in SUFFIXES else SUFFIXES
    paths = [stem.with_name(stem.name + suffix) for suffix in endings]
    for path in paths:
        dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix)
        figure.savefig(path, dpi=300, metadata=dated)
    return paths


def dress(axis: Axes, title: str = "", **labels: Any) -> None:
    """Add a thin grid, the title and labels."""
    axis.grid(alpha=0.3, linewidth=0.4)
    if title:
        axis.set_title(title, loc="left")
    axis.set(**labels)


def below(figure: Figure, axes: Sequence[Axes]) -> None:
    """Add one legend below all panels, in as many columns as fit; it breaks long names and makes the figure higher."""
    handles = {n: h for axis in axes for h, n in zip(*axis.get_legend_handles_labels(), strict=True)}
    letters, width = 0.05, figure.get_figwidth()  # inches
    names = [fill(name, int((width - 0.5) / letters)) for name in handles]
    widest = 0.45 + letters * max((len(name.partition("\n")[0]) for name in names), default=0)
    columns = max(1, min(4, int(width / widest)))
    columns = -(-len(names) // -(-len(names) // columns)) if names else 1  # of even length
    lines = sum(1 + name.count("\n") for name in names) / columns
    figure.set_figheight(figure.get_figheight() + max(0.0, 0.125 * lines - 0.4))
    figure.legend(handles.values(), names, loc="outside lower center", ncols=columns, handlelength=3)


def grid(panels: int) -> tuple[int, int, float, float]:
    """Return rows, columns, width and height for so many panels, at most three beside each other."""
    rows = -(-panels // 3)
    columns = -(-panels // rows)
    return rows, columns, COLUMN if columns == 1 else min(PAGE, 2.5 * columns), 2.0 * rows + 0.4


def lettered(titles: Sequence[str]) -> list[str]:
    return [f"({letter}) {title}" for letter, title in zip("abcdefghijkl", titles, strict=False)]
