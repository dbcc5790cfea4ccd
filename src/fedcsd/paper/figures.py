"""Draw the paper's figures for print: column width, lines that differ without colour, seeds as a band."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedcsd.errors import UserError
from fedcsd.experiments.running import Run, load_run
from fedcsd.files import write_whole
from fedcsd.paper.exhibits import DRIFT_METHODS, TITLES, Entry, Point
from fedcsd.paper.measured import Result, curve
from fedcsd.paper.report import PictureTable, Report
from fedcsd.results.analysis import drift as drifts
from fedcsd.results.analysis import forgetting, tsne
from fedcsd.results.curves import padded
from fedcsd.results.style import COLOURS, STYLES, save
from fedcsd.results.tables import Table

COLUMN, PAGE = 3.4, 7.0  # inches, of a two-column page
SPAN = 4.0  # smallest range of a sweep's axis in points, so that chance does not look like a result
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
SYMBOLS = {"μ": r"\mu", "τ": r"\tau", "α": r"\alpha"}
MASK = {
    "wrong_filtered": "wrong, filtered",
    "right_lost": "right, lost",
    "mask_rate": "kept of all",
    "teacher_accuracy": "teacher right",
}
OnStep = Callable[[str, int, int], None]
Picture = Callable[[Report, Path, OnStep], list[Path]]


def draw(report: Report, stem: Path, on_step: OnStep) -> list[Path]:
    """Draw a figure as stem.png, .svg and .pdf; nothing before a run has ended."""
    if not report.exhibit.figure or not report.runs:
        return []
    stem.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(LOOK):
        return PICTURES[report.exhibit.figure](report, stem, on_step)


def caption(report: Report, data: bool = True) -> str:
    """Return the line above a picture: its scale and the data in place of the paper's, if they are others.

    Panels that name the data themselves need no `data`.
    """
    chosen = report.choices
    used = dict.fromkeys(point.data for point in report.exhibit.points) if data else ()
    others = [
        f"{chosen.stand_ins[name]} in place of {TITLES[name]}" for name in used if name in chosen.stand_ins
    ]
    return ", ".join([f"{chosen.scale} scale"] * (chosen.scale != "paper") + others)


def draw_sweep(report: Report, stem: Path, on_step: object = None) -> list[Path]:
    """Draw accuracy against the values of an option, with a panel for each option."""
    width = COLUMN * (0.7 if len(report.sections) == 1 else 1)
    figure, axes = _panels(1, len(report.sections), (width, 1.75), sharey="row")
    for axis, part in zip(axes[0], report.sections, strict=True):
        section, places = part.section, range(len(part.section.x))
        runs = [list(values) for values in zip(*(result.values for result in part.results), strict=True)]
        _band(axis, places, runs, 0, "FedCSD", marker="o")
        best = section.x.index(section.paper_best)
        axis.axvline(best, color="0.55", linestyle=":", linewidth=0.9, zorder=0)
        axis.set(xlabel=f"${SYMBOLS[section.head]}$", xticks=places, xlim=(-0.4, len(places) - 0.6))
        axis.set_xticklabels(section.x)
        axis.annotate(
            "paper's best", (best, 1), (2, -3), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="left", va="top", rotation=90, fontsize=6, color="0.4",
        )  # fmt: skip
    axes[0][0].set_ylabel("test accuracy (%)" + ("\none seed" if len(report.choices.seeds) == 1 else ""))
    low, high = axes[0][0].get_ylim()
    more = max(0.0, SPAN - (high - low)) / 2
    axes[0][0].set_ylim(max(0.0, low - more), high + more)
    return save(figure, stem, caption(report))


def draw_mask(report: Report, stem: Path, on_step: object = None) -> list[Path]:
    """Draw the effect of the mask against rounds, with a panel for each data set."""
    (part,) = report.sections
    rows = {row: [r for r in part.results if r.entry.row == row] for row in part.section.rows}
    with_runs = {row: some for row, some in rows.items() if _ended(report, some[0].entry.point)} or rows
    figure, axes = _panels(1, len(with_runs), (COLUMN, 2.1), sharey="row")
    for axis, (row, results) in zip(axes[0], with_runs.items(), strict=True):
        for index, entry in enumerate(result.entry for result in results):
            _curves(axis, _ended(report, entry.point), entry.measure, index, MASK[entry.measure])
        axis.set_title("\n".join(_titles(row, results[0], report)), fontsize=7)
        _label_rounds(axis)
        axis.set_ylim(-3, 103)
    axes[0][0].set_ylabel("soft labels (%)")
    _legend(figure, axes)
    return save(figure, stem, caption(report, data=False))


def draw_communication(report: Report, stem: Path, on_step: object = None) -> list[Path]:
    """Draw accuracy against rounds above, and against the bytes sent below."""
    parts = [some for some in report.sections if any(_ended(report, r.entry.point) for r in some.results)]
    parts = parts or report.sections
    figure, axes = _panels(2, len(parts), (PAGE, 3.3), sharey="col")
    for column, part in enumerate(parts):
        above, below = axes[0][column], axes[1][column]
        results = part.column(part.section.columns[0])
        entries = [result.entry for result in results]
        sent = [_sent(_ended(report, entry.point)) for entry in entries]
        unit, name = (1000, "GB") if max((s[-1] for s in sent if len(s)), default=0) > 5000 else (1, "MB")
        for index, (entry, megabytes) in enumerate(zip(entries, sent, strict=True)):
            ended = _ended(report, entry.point)
            _curves(above, ended, entry.measure, index, entry.row)
            if ended:
                _curves(below, ended, entry.measure, index, "", x=megabytes / unit)
        _zoom(above, entries, report)
        _note_lost(above, entries, report)
        above.set_title("\n".join(_titles(part.section.title, results[0], report)), fontsize=7)
        _label_rounds(above)
        below.set_xlabel(f"sent ({name})")
    for row in axes:
        row[0].set_ylabel("test accuracy (%)")
    _legend(figure, axes, [result.entry.row for part in parts for result in part.results])
    return save(figure, stem, caption(report, data=False))


def _zoom(axis: Axes, entries: Sequence[Entry], report: Report) -> None:
    """Let the rounds after the first tenth fill the panel."""
    curves = [
        curve(entry.measure, run.history)[len(run.history) // 10 :]
        for entry in entries
        for run in _ended(report, entry.point)
    ]
    if later := [value for values in curves for value in values if math.isfinite(value)]:
        pad = 0.05 * (max(later) - min(later)) or 1.0
        axis.set_ylim(min(later) - pad, max(later) + pad)


def _note_lost(axis: Axes, entries: Sequence[Entry], report: Report) -> None:
    """Write into the panel which runs diverged before the end of a round, and have no line."""
    lines = []
    for entry in entries:
        found = [run for seed in report.seeds if (run := report.runs.get((entry.point, seed)))]
        if lost := sum(not run.history for run in found):
            lines.append(f"{entry.row}: {lost} of {len(found)} diverged in round 1")
    place: dict[str, Any] = {"transform": axis.transAxes, "ha": "right", "va": "bottom", "fontsize": 6}
    axis.text(0.98, 0.03, "\n".join(lines), **place)


def _titles(title: str, result: Result, report: Report) -> tuple[str, str]:
    """Return the data, with the data in its place, and the skew, in two lines."""
    data, _, skew = title.partition(", ")
    other = report.choices.stand_ins.get(result.entry.point.data)
    return f"{other} in place of {data}" if other else data, skew


def draw_drift(report: Report, stem: Path, on_step: OnStep) -> list[Path]:
    """Draw Fig. 1. The study is kept in studies/, since it takes as long as some rounds of training."""
    (key, path), *_ = report.paths.items()
    if report.runs[key].diverged:
        return []
    epochs, methods = report.choices.of_scale.drift_epochs, tuple(DRIFT_METHODS)
    asked = json.dumps([path.name, epochs, methods])
    digest = blake2b(asked.encode(), digest_size=6).hexdigest()
    kept = path.parent.parent / "studies" / f"drift-{digest}.json"
    if kept.exists():
        study = drifts.Drift.from_json(json.loads(kept.read_text(encoding="utf-8")))
    else:
        study = drifts.study(_with_model(report, path), epochs=epochs, methods=methods, report=on_step)
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, (json.dumps(study.to_json()) + "\n").encode())
    numbers = stem.with_name(f"{stem.name}.json")
    write_whole(numbers, (json.dumps(study.to_json(), indent=1) + "\n").encode())
    named, forgotten = study.named(DRIFT_METHODS), stem.with_name(f"{stem.name}-forgetting")
    pictures = drifts.draw(named, stem, caption(report))
    return [*pictures, *forgetting.draw(named.forgetting, forgotten, caption(report)), numbers]


def draw_tsne(report: Report, stem: Path, on_step: OnStep) -> list[Path]:
    """Draw the t-SNE figure; nothing before both of its runs are finished."""
    keys = {result.entry.row: (result.entry.point, report.seeds[0]) for result in report.results}
    ended = [report.runs.get(key) for key in keys.values()]
    if not all(run and not run.diverged for run in ended):
        return []
    runs = {row: _with_model(report, report.paths[key]) for row, key in keys.items()}
    return list(tsne.picture(runs, stem, report=on_step, caption=caption(report)))


def pictured(report: Report, files: Sequence[Path]) -> list[PictureTable]:
    """Return the tables of the numbers that were saved beside a picture."""
    for file in (file for file in files if file.suffix == ".json"):
        saved = json.loads(file.read_text(encoding="utf-8"))
        if report.exhibit.figure == "tsne":
            title = "how well features tell the classes apart"
            return [PictureTable("features", title, Table(*tsne.table(saved)))]
        study = drifts.Drift.from_json(saved).named(DRIFT_METHODS)
        return [
            PictureTable("drift", study.when, Table(*study.table())),
            PictureTable("forgetting", forgetting.MEANING, Table(*study.forgetting.table())),
        ]
    return []


def _with_model(report: Report, path: Path) -> Run:
    if not (path / "model.safetensors").exists():
        raise UserError(
            f"{report.exhibit.name} needs the model of {path}, which is not there: remove that folder, and the run is "
            "trained again"
        )
    return load_run(path)


PICTURES: Mapping[str, Picture] = {
    "sweep": draw_sweep,
    "mask": draw_mask,
    "communication": draw_communication,
    "drift": draw_drift,
    "tsne": draw_tsne,
}


def _panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for axis in axes.flat:
        axis.grid(alpha=0.3, linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _ended(report: Report, point: Point) -> list[Run]:
    """Return the runs of a point that have ended and have a round to show."""
    found = (report.runs.get((point, seed)) for seed in report.seeds)
    return [run for run in found if run and run.history]


def _curves(axis: Axes, ended: Sequence[Run], measure: str, index: int, label: str, x: Any = None) -> None:
    """Draw a measure against rounds, or x; a cross marks where a run diverged."""
    values = [curve(measure, run.history) for run in ended]
    if not values:
        return
    x = range(1, max(map(len, values)) + 1) if x is None else x
    _band(axis, x, values, index, label)
    for some, run in zip(values, ended, strict=True):
        if run.diverged:
            axis.plot(x[len(some) - 1], some[-1], "x", color=COLOURS[index % len(COLOURS)], markersize=5)


def _sent(ended: Sequence[Run]) -> Any:
    """Return the megabytes sent up to each round, as a mean over runs: failing clients send less."""
    return padded([curve("megabytes", run.history) for run in ended]).mean(0) if ended else []


def _band(
    axis: Axes, x: Any, runs: Sequence[Sequence[float]], index: int, label: str, marker: str = ""
) -> None:
    """Draw the mean over seeds as a line, and their range as a band."""
    values = padded(runs)
    colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
    few = values.shape[1] <= 12
    axis.plot(
        x, values.mean(0), color=colour, linestyle=style, linewidth=1.2, label=label,
        marker=marker or (MARKERS[index % len(MARKERS)] if few else ""), markersize=3,
    )  # fmt: skip
    if len(runs) > 1:
        axis.fill_between(x, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)


def _label_rounds(axis: Axes) -> None:
    axis.set_xlabel("round")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def _legend(figure: Figure, axes: Any, order: Sequence[str] = ()) -> None:
    """Put one legend for all panels below them; a panel may lack a line."""
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
