"""What a reader gets: the table as Markdown, CSV and LaTeX, and every number as JSON."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcsd.experiments.archive import open_run
from fedcsd.experiments.provenance import commit, environment
from fedcsd.experiments.running import Run
from fedcsd.files import write_whole
from fedcsd.measurements import MEASUREMENTS
from fedcsd.paper.exhibits import PRINTED
from fedcsd.paper.measured import HIGHER_IS_BETTER, Result, order_of
from fedcsd.paper.report import (
    Report,
    findings,
    legend,
    missing_line,
    remarks,
    settings_lines,
    table,
    title_of,
)
from fedcsd.results.tables import Cell, Mark, Table, known, plain, unbroken


def write(report: Report, folder: Path, pictures: list[Path]) -> list[Path]:
    """All files of a table or figure but its pictures; each is there completely or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    name, written = report.exhibit.name, []
    numbers = [(f"{name}-{shown.name}.csv", shown.table.csv()) for shown in report.numbers]
    for file, text in (
        (f"{name}.md", markdown(report, folder, pictures)),
        (f"{name}.csv", csv_text(report)),
        *numbers,
        (f"{name}.tex", latex(report)),
        ("results.json", json.dumps(to_json(report, folder), indent=1) + "\n"),
    ):
        write_whole(folder / file, text.encode())
        written.append(folder / file)
    return written


def markdown(report: Report, folder: Path, pictures: list[Path]) -> str:
    exhibit = report.exhibit
    lines = [
        f"# {exhibit.name}: {exhibit.title}",
        "",
        *(f"- {unbroken(line)}" for line in legend(report)),
        "",
    ]
    for picture in (p for p in pictures if p.suffix == ".png"):
        what = picture.stem.removeprefix(exhibit.name).strip("-")
        lines.append(f"![{exhibit.title}{': ' * bool(what)}{what}]({picture.name})\n")
    for measured in report.parts:
        lines += [
            f"## {sentence(title_of(measured.part, report))}",
            "",
            *table(report, measured).markdown(),
            "",
        ]
    for shown in report.numbers:
        lines += [f"## {sentence(shown.title)}", "", *shown.table.markdown(), ""]
    notes = remarks(report)
    lines += [f"- {plain(Mark(note[0])).strip()}{unbroken(note[1:])}" for note in notes]
    found = findings(report)
    for title, texts in (
        ("What it says", found),
        ("What was run", [*settings_lines(report), missing_line(report)]),
    ):
        texts = [f"- {unbroken(text)}" for text in texts if text]
        lines += ["", f"## {title}", "", *texts] if texts else []
    for run in {path.parent for path in report.paths.values()}:
        where = os.path.relpath(run, folder)
        lines += ["", f"The runs are in [{where}]({where}); `results.json` says which cell is of which run."]
    return "\n".join(lines) + "\n"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def latex(report: Report) -> str:
    """A tabular for each part, a paragraph each, to \\input into a document that uses booktabs."""
    comments = [
        r"needs \usepackage{booktabs,graphicx}",
        report.exhibit.title,
        *legend(report),
        *findings(report),
    ]
    comments += [*settings_lines(report), missing_line(report)]
    lines = [f"% {unbroken(line)}" for line in comments if line]
    for measured in report.parts:
        notes: list[Cell] = [[Mark(note[0]), note[1:]] for note in remarks(report, measured)]
        scale = "" if report.choices.scale == "paper" else f", {report.choices.scale} scale"
        lines += ["", *table(report, measured).latex(title_of(measured.part, report) + scale, notes)]
    for shown in report.numbers:
        lines += ["", *shown.table.latex(sentence(shown.title))]
    return "\n".join(lines) + "\n"


def csv_text(report: Report) -> str:
    """A line for each cell; what there is no number for is empty."""
    lines = [
        {"part": measured.part.title, **_flat(report, result)}
        for measured in report.parts
        for result in measured.results
    ]
    return Table.of(lines).csv()


def _flat(report: Report, result: Result) -> dict[str, Any]:
    cell, point = result.cell, result.cell.point
    numbers = {
        "mean": result.mean,
        "std": result.spread,
        "printed": cell.printed,
        "difference": None if report.untold else result.difference,
        "best_round_mean": _mean(result.best) if cell.measure in HIGHER_IS_BETTER else None,
    }
    return {
        "row": cell.row,
        "column": cell.column,
        "measure": cell.measure,
        "method": point.method,
        "data": report.choices.stand_ins.get(point.data, point.data),
        "beta": "" if point.beta is None else point.beta,
        "pool": "" if point.pool is None else point.pool,
        **{name: "" if _finite(value) is None else _finite(value) for name, value in numbers.items()},
        "suspect": cell.suspect,
        "seeds": len(result.seeds),
        "finished": len(known(result.values)),
        "diverged": sum(end is not None for end in result.ends),
        "notes": "; ".join(result.notes),
    }


def _mean(values: tuple[float, ...]) -> float:
    some = known(values)
    return sum(some) / len(some) if some else math.nan


def _finite(value: float | None) -> float | None:
    return round(value, 6) if value is not None and math.isfinite(value) else None


def to_json(report: Report, folder: Path) -> dict[str, Any]:
    """Every number: measured, printed, the differences, and each run's curves."""
    exhibit, choices = report.exhibit, report.choices
    return {
        "name": exhibit.name,
        "title": exhibit.title,
        "source": PRINTED["source"],
        "scale": choices.scale,
        "scale_meaning": choices.of_scale.meaning,
        "overrides": dict(choices.overrides),
        "stand_ins": dict(choices.stand_ins),
        "seeds": list(report.seeds),
        "notes": [*legend(report), *settings_lines(report)],
        "findings": findings(report),
        "footnotes": remarks(report),
        "missing": [run.label for run in report.missing],
        "parts": [
            {
                "title": measured.part.title,
                "cells": [_cell(result, report, folder) for result in measured.results],
                "order": {column: _order(measured.column(column)) for column in measured.part.columns},
            }
            for measured in report.parts
        ],
        "numbers": [
            {"title": shown.title, "head": shown.table.head, "rows": shown.table.texts}
            for shown in report.numbers
        ],
        "runs": {
            os.path.relpath(path, folder): _run(report.outcomes[key], open_run(path).config)
            for path, key in {path: key for key, path in report.paths.items()}.items()
        },
        "commit": commit(),
        **environment(),
    }


def _cell(result: Result, report: Report, folder: Path) -> dict[str, Any]:
    cell, point = result.cell, result.cell.point
    paths = [path for seed in result.seeds if (path := report.paths.get((point, seed)))]
    return {
        "row": cell.row,
        "column": cell.column,
        "measure": cell.measure,
        "point": {key: value for key, value in vars(point).items() if value is not None},
        "values": [_finite(value) for value in result.values],
        "best_round_values": [_finite(value) for value in result.best],
        "diverged": [end and vars(end) for end in result.ends],
        "mean": _finite(result.mean),
        "std": _finite(result.spread),
        "printed": cell.printed,
        "implied": cell.implied,
        "suspect": cell.suspect,
        "difference": _finite(result.difference),
        "runs": [os.path.relpath(path, folder) for path in paths],
        "notes": list(result.notes),
    }


def _order(results: list[Result]) -> dict[str, Any] | None:
    order = order_of(results)
    if order.tau is None:
        return None
    return {
        "holds": not order.differ,
        "kendall_tau": _finite(order.tau),
        "pairs": order.compared,
        "agree": order.agree,
        "differ": [list(pair) for pair in order.differ],
        "within_spread": [list(pair) for pair in order.unclear],
    }


def _run(outcome: Run, config: Mapping[str, Any]) -> dict[str, Any]:
    curves: Mapping[str, list[Any]] = {
        name: [_rounded(record.get(name)) for record in outcome.history]
        for name, row in MEASUREMENTS.items()
        if row.chart and any(record.get(name) is not None for record in outcome.history)
    }
    return {
        "settings": dict(outcome.settings),
        "host": config.get("host", {}),
        "versions": {**config.get("versions", {}), "package": config["facts"]["code"].get("package", "")},
        "diverged": outcome.diverged and vars(outcome.diverged),
        "changed": [str(change) for change in outcome.changes],
        "curves": curves,
    }


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value
