"""The paper's figures, for print: column width, lines told apart without colour, seeds as a band."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedcsd.errors import UserError
from fedcsd.experiments.running import Run, load_run
from fedcsd.files import write_whole
from fedcsd.paper.exhibits import DRIFT_METHODS, TITLES, Cell, Point
from fedcsd.paper.measured import Measured, Result, curve
from fedcsd.paper.report import Numbers, Report
from fedcsd.results.curves import padded
from fedcsd.results.style import COLOURS, STYLES, save
from fedcsd.results.tables import Table

COLUMN, PAGE = 3.4, 7.0  # inches, of a two-column page
SPAN = 4.0  # points that a sweep's axis shows at least, so that chance does not look like a finding
LOOK: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedcsd",
}
MARKERS = ("o", "s", "^", "D")
Picture = Callable[[Report, Path, Callable[[str, int, int], None]], list[Path]]


def draw(report: Report, stem: Path, on_step: Callable[[str, int, int], None]) -> list[Path]:
    """The picture of a figure, as stem.png, .svg and .pdf; none before a run of it has ended."""
    if not report.exhibit.figure or not report.outcomes:
        return []
    stem.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(LOOK):
        return PICTURES[report.exhibit.figure](report, stem, on_step)


def caption(report: Report, data: bool = True) -> str:
    """What a picture of another scale than the paper's, or of other data, says of that; the last not where
    its panels do."""
    chosen = report.choices
    used = dict.fromkeys(point.data for point in report.exhibit.points) if data else ()
    parts = [
        f"{chosen.stand_ins[name]} in place of {TITLES[name]}" for name in used if name in chosen.stand_ins
    ]
    return ", ".join([f"{chosen.scale} scale"] * (chosen.scale != "paper") + parts)


def sweep(report: Report, stem: Path, on_step: object = None) -> list[Path]:
    """Accuracy against the values of an option, a panel each."""
    width = COLUMN * (0.7 if len(report.parts) == 1 else 1)
    figure, axes = _panels(1, len(report.parts), (width, 1.75), sharey="row")
    for axis, measured in zip(axes[0], report.parts, strict=True):
        runs = _by_seed(measured)
        places = range(len(measured.part.x))
        _band(axis, places, runs, 0, "FedCSD", marker="o")
        best = measured.part.x.index(measured.part.paper_best)
        axis.axvline(best, color="0.55", linestyle=":", linewidth=0.9, zorder=0)
        axis.set(xlabel=f"${_math(measured.part.head)}$", xticks=places, xlim=(-0.4, len(places) - 0.6))
        axis.set_xticklabels(measured.part.x)
        axis.annotate(
            "paper's best", (best, 1), (2, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="left", va="top", rotation=90, fontsize=6, color="0.4",
        )  # fmt: skip
    axes[0][0].set_ylabel("test accuracy (%)" + ("\none seed" if len(report.choices.seeds) == 1 else ""))
    low, high = axes[0][0].get_ylim()
    more = max(0.0, SPAN - (high - low)) / 2
    axes[0][0].set_ylim(max(0.0, low - more), high + more)
    return save(figure, stem, caption(report))


def _math(symbol: str) -> str:
    return {"μ": r"\mu", "τ": r"\tau", "α": r"\alpha"}[symbol]


def _by_seed(measured: Measured) -> list[list[float]]:
    """[seeds][cells] of a part with one column."""
    return [list(column) for column in zip(*(result.values for result in measured.results), strict=True)]


def mask(report: Report, stem: Path, on_step: object = None) -> list[Path]:
    """What the mask filters, against rounds, a panel for each data set."""
    (measured,) = report.parts
    names = {
        "wrong_filtered": "wrong, filtered",
        "right_lost": "right, lost",
        "mask_rate": "kept of all",
        "teacher_accuracy": "teacher right",
    }
    cells_of = {row: [r.cell for r in measured.results if r.cell.row == row] for row in measured.part.rows}
    shown = [row for row, cells in cells_of.items() if any(_ended(report, cell.point) for cell in cells)]
    shown = shown or list(cells_of)
    figure, axes = _panels(1, len(shown), (COLUMN, 2.1), sharey="row")
    for axis, row in zip(axes[0], shown, strict=True):
        cells = cells_of[row]
        for index, cell in enumerate(cells):
            _curves(axis, _ended(report, cell.point), cell.measure, index, names[cell.measure])
        first = measured.column(measured.part.columns[0])
        result = next(result for result in first if result.cell.row == row)
        axis.set_title("\n".join(_titles(row, result, report)), fontsize=7)
        _rounds(axis)
        axis.set_ylim(-3, 103)
    axes[0][0].set_ylabel("soft labels (%)")
    _legend(figure, axes)
    return save(figure, stem, caption(report, data=False))


def communication(report: Report, stem: Path, on_step: object = None) -> list[Path]:
    """Accuracy against rounds, above, and against what was sent, below."""
    parts = [m for m in report.parts if any(_ended(report, r.cell.point) for r in m.results)]
    parts = parts or report.parts
    figure, axes = _panels(2, len(parts), (PAGE, 3.3), sharey="col")
    for column, measured in enumerate(parts):
        cells = measured.column(measured.part.columns[0])
        most = [_sent(_ended(report, result.cell.point)) for result in cells]
        unit, name = (1000, "GB") if max((s[-1] for s in most if len(s)), default=0) > 5000 else (1, "MB")
        for index, cell in enumerate(result.cell for result in cells):
            ended = _ended(report, cell.point)
            _curves(axes[0][column], ended, cell.measure, index, cell.row)
            _against_bytes(axes[1][column], ended, cell.measure, index, unit)
        _zoom(axes[0][column], [result.cell for result in cells], report)
        _note_lost(axes[0][column], [result.cell for result in cells], report)
        axes[0][column].set_title("\n".join(_titles(measured.part.title, cells[0], report)), fontsize=7)
        _rounds(axes[0][column])
        axes[1][column].set_xlabel(f"sent ({name})")
    for row in axes:
        row[0].set_ylabel("test accuracy (%)")
    _legend(figure, axes, [result.cell.row for part in parts for result in part.results])
    return save(figure, stem, caption(report, data=False))


def _zoom(axis: Axes, cells: Sequence[Cell], report: Report) -> None:
    """What comes after the first tenth of the rounds fills the panel, and the steep climb before need not."""
    later = [
        value
        for cell in cells
        for outcome in _ended(report, cell.point)
        for value in curve(cell.measure, outcome.history)[len(outcome.history) // 10 :]
        if math.isfinite(value)
    ]
    if later:
        pad = 0.05 * (max(later) - min(later)) or 1.0
        axis.set_ylim(min(later) - pad, max(later) + pad)


def _note_lost(axis: Axes, cells: Sequence[Cell], report: Report) -> None:
    """Which runs have no line, for they diverged before a round was finished."""
    lines = []
    for cell in cells:
        found = [outcome for seed in report.seeds if (outcome := report.outcomes.get((cell.point, seed)))]
        if lost := sum(not outcome.history for outcome in found):
            lines.append(f"{cell.row}: {lost} of {len(found)} diverged in round 1")
    place: dict[str, Any] = {"transform": axis.transAxes, "ha": "right", "va": "bottom", "fontsize": 6}
    axis.text(0.98, 0.03, "\n".join(lines), **place)


def _titles(title: str, result: Result, report: Report) -> tuple[str, str]:
    """The data, with what stands in for it, and the skew, in two lines."""
    data, _, skew = title.partition(", ")
    other = report.choices.stand_ins.get(result.cell.point.data)
    return f"{other} in place of {data}" if other else data, skew


def drift(report: Report, stem: Path, on_step: Callable[[str, int, int], None]) -> list[Path]:
    """Fig. 1, by analysis/drift.py. The study is kept: it takes as long as some rounds of training."""
    analysis = import_module("fedcsd.results.analysis.drift")
    start, path = next(iter(report.outcomes.values())), next(iter(report.paths.values()))
    if start.diverged:
        return []
    epochs = report.choices.of_scale.drift_epochs
    methods = tuple(DRIFT_METHODS)
    asked = json.dumps([path.name, epochs, methods])
    kept = path.parent.parent / "studies" / f"drift-{blake2b(asked.encode(), digest_size=6).hexdigest()}.json"
    if kept.exists():
        study = analysis.Drift.from_json(json.loads(kept.read_text(encoding="utf-8")))
    else:
        study = analysis.study(_with_model(report, path), epochs=epochs, methods=methods, report=on_step)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, (json.dumps(study.to_json()) + "\n").encode())
    numbers = stem.with_name(f"{stem.name}.json")
    write_whole(numbers, (json.dumps(study.to_json(), indent=1) + "\n").encode())
    named = study.named(DRIFT_METHODS)
    forgotten = import_module("fedcsd.results.analysis.forgetting").draw(
        named.forgetting, stem.with_name(f"{stem.name}-forgetting"), caption(report)
    )
    return [*analysis.draw(named, stem, caption(report)), *forgotten, numbers]


def numbers(report: Report, files: Sequence[Path]) -> list[Numbers]:
    """Of pictures that are of more than runs: the tables of what was saved beside them."""
    saved = next(
        (json.loads(file.read_text(encoding="utf-8")) for file in files if file.suffix == ".json"), None
    )
    if saved is None:
        return []
    if report.exhibit.figure == "tsne":
        analysis = import_module("fedcsd.results.analysis.tsne")
        return [
            Numbers("features", "how well features tell the classes apart", Table(*analysis.table(saved)))
        ]
    analysis = import_module("fedcsd.results.analysis.drift")
    study = analysis.Drift.from_json(saved).named(DRIFT_METHODS)
    forgetting = import_module("fedcsd.results.analysis.forgetting")
    return [
        Numbers("drift", study.when, Table(*study.table())),
        Numbers("forgetting", forgetting.MEANING, Table(*study.forgetting.table())),
    ]


def tsne(report: Report, stem: Path, on_step: Callable[[str, int, int], None]) -> list[Path]:
    """The t-SNE figure, by analysis/tsne.py, once both of its runs are finished."""
    analysis = import_module("fedcsd.results.analysis.tsne")
    keys = {result.cell.row: (result.cell.point, report.seeds[0]) for result in report.results}
    ended = [report.outcomes.get(key) for key in keys.values()]
    if not all(run and not run.diverged for run in ended):
        return []
    runs = {row: _with_model(report, report.paths[key]) for row, key in keys.items()}
    return list(analysis.picture(runs, stem, report=on_step, caption=caption(report)))


def _with_model(report: Report, path: Path) -> Run:
    if not (path / "model.safetensors").exists():
        again = "remove that folder, and the run is trained again"
        raise UserError(f"{report.exhibit.name} needs the model of {path}, which is not there: {again}")
    return load_run(path)


PICTURES: Mapping[str, Picture] = {
    "sweep": sweep,
    "mask": mask,
    "communication": communication,
    "drift": drift,
    "tsne": tsne,
}


def _panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _ended(report: Report, point: Point) -> list[Run]:
    """The runs of a point that have ended and have something to show."""
    found = (report.outcomes.get((point, seed)) for seed in report.seeds)
    return [outcome for outcome in found if outcome and outcome.history]


def _curves(axis: Axes, ended: Sequence[Run], measure: str, index: int, label: str) -> None:
    """Against rounds; a cross where a run diverged."""
    runs = [curve(measure, outcome.history) for outcome in ended]
    if not runs:
        return
    rounds = range(1, max(map(len, runs)) + 1)
    _band(axis, rounds, runs, index, label)
    _crosses(axis, rounds, runs, ended, index)


def _crosses(axis: Axes, x: Any, runs: Sequence[Sequence[float]], ended: Sequence[Run], index: int) -> None:
    for run, outcome in zip(runs, ended, strict=True):
        if outcome.diverged:
            axis.plot(x[len(run) - 1], run[-1], "x", color=COLOURS[index % len(COLOURS)], markersize=5)


def _sent(ended: Sequence[Run]) -> Any:
    """Megabytes up to each round: the same for all seeds, but for clients that fail; the mean of it."""
    return padded([curve("megabytes", outcome.history) for outcome in ended]).mean(0) if ended else []


def _against_bytes(axis: Axes, ended: Sequence[Run], measure: str, index: int, unit: float) -> None:
    if ended:
        sent = _sent(ended) / unit
        runs = [curve(measure, outcome.history) for outcome in ended]
        _band(axis, sent, runs, index, "")
        _crosses(axis, sent, runs, ended, index)


def _band(
    axis: Axes, x: Any, runs: Sequence[Sequence[float]], index: int, label: str, marker: str = ""
) -> None:
    """Mean over seeds as a line, their range as a band."""
    values = padded(runs)
    colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
    few = values.shape[1] <= 12
    axis.plot(
        x, values.mean(0), color=colour, linestyle=style, linewidth=1.2, label=label,
        marker=marker or (MARKERS[index % len(MARKERS)] if few else ""), markersize=3,
    )  # fmt: skip
    if len(runs) > 1:
        axis.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)


def _rounds(axis: Axes) -> None:
    axis.set_xlabel("round")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def _legend(figure: Figure, axes: Any, order: Sequence[str] = ()) -> None:
    """Of the lines of all panels, in this order: one of them may lack a method whose runs are not there."""
    found = {
        label: handle
        for axis in axes.flat
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    if order:
        found = {label: found[label] for label in dict.fromkeys(order) if label in found}
    look: dict[str, Any] = {"frameon": False, "handlelength": 2.6, "columnspacing": 1.4}
    columns = 2 if len(found) > 3 and figure.get_figwidth() <= COLUMN else len(found)
    figure.legend(found.values(), found, loc="outside lower center", ncols=columns, **look)
