"""Write a table or figure as Markdown, CSV and LaTeX, and every number as JSON."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from fedcsd.experiments.running import Run
from fedcsd.experiments.runs.archive import open_run
from fedcsd.experiments.runs.provenance import commit, environment
from fedcsd.files import write_whole
from fedcsd.measurements import MEASUREMENTS
from fedcsd.paper.exhibits import PRINTED
from fedcsd.paper.measured import HIGHER_IS_BETTER, Result, order_of
from fedcsd.paper.report import Report, findings, footnotes, legend, missing_line, settings_lines, table
from fedcsd.results.tables import Cell, Mark, Table, known, plain, unbroken


def write(report: Report, folder: Path, pictures: list[Path]) -> list[Path]:
    """Write all files but the pictures; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    name = report.exhibit.name
    texts = {
        f"{name}.md": markdown(report, folder, pictures),
        f"{name}.csv": csv_text(report),
        **{f"{name}-{shown.name}.csv": shown.table.csv() for shown in report.pictured},
        f"{name}.tex": latex(report),
        "results.json": json.dumps(to_json(report, folder), indent=1) + "\n",
    }
    for file, text in texts.items():
        write_whole(folder / file, text.encode())
    return [folder / file for file in texts]


def markdown(report: Report, folder: Path, pictures: list[Path]) -> str:
    """Return the tables with their pictures, footnotes, findings and settings."""
    exhibit = report.exhibit
    lines = [f"# {exhibit.name}: {exhibit.title}", "", *_listed(legend(report)), ""]
    for picture in (p for p in pictures if p.suffix == ".png"):
        what = picture.stem.removeprefix(exhibit.name).strip("-")
        lines.append(f"![{exhibit.title}{': ' * bool(what)}{what}]({picture.name})\n")
    tables = [(report.title(section), table(report, section)) for section in report.sections]
    for title, shown in [*tables, *((shown.title, shown.table) for shown in report.pictured)]:
        lines += [f"## {sentence(title)}", "", *shown.markdown(), ""]
    lines += [f"- {plain(Mark(mark)).strip()}: {unbroken(text)}" for mark, text in _all_footnotes(report)]
    for title, texts in (
        ("What it says", findings(report)),
        ("What was run", [*settings_lines(report), missing_line(report)]),
    ):
        if any(texts):
            lines += ["", f"## {title}", "", *_listed(texts)]
    for runs in {path.parent for path in report.paths.values()}:
        where = os.path.relpath(runs, folder)
        lines += ["", f"The runs are in [{where}]({where}); `results.json` names the runs of each cell."]
    return "\n".join(lines) + "\n"


def _listed(texts: list[str]) -> list[str]:
    return [f"- {unbroken(text)}" for text in texts if text]


def _all_footnotes(report: Report) -> list[tuple[str, str]]:
    return footnotes(report, report.results)


def sentence(text: str) -> str:
    """Return a text with a capital."""
    return text[:1].upper() + text[1:]


def latex(report: Report) -> str:
    """Return a tabular for each section, to \\input into a document that uses booktabs and graphicx."""
    comments = [r"needs \usepackage{booktabs,graphicx}", report.exhibit.title, *legend(report)]
    comments += [*findings(report), *settings_lines(report), missing_line(report)]
    lines = [f"% {unbroken(line)}" for line in comments if line]
    scale = "" if report.choices.scale == "paper" else f", {report.choices.scale} scale"
    for section in report.sections:
        notes: list[Cell] = [[Mark(mark), f": {text}"] for mark, text in footnotes(report, section.results)]
        lines += ["", *table(report, section).latex(report.title(section) + scale, notes)]
    for shown in report.pictured:
        lines += ["", *shown.table.latex(sentence(shown.title))]
    return "\n".join(lines) + "\n"


def csv_text(report: Report) -> str:
    """Return a line for each cell; a number that is not there is empty."""
    lines = []
    for section in report.sections:
        for result in section.results:
            entry, point = result.entry, result.entry.point
            told = {
                "part": section.section.title,
                "row": entry.row,
                "column": entry.column,
                "measure": entry.measure,
                "method": point.method,
                "data": report.choices.stand_ins.get(point.data, point.data),
                "beta": point.beta,
                "pool": point.pool,
                "mean": _finite(result.mean),
                "std": _finite(result.spread),
                "printed": _finite(entry.printed),
                "difference": _finite(result.difference) if report.comparable else None,
                "best_round_mean": _best_round(result),
                "suspect": entry.suspect,
                "seeds": len(result.seeds),
                "finished": len(known(result.values)),
                "diverged": sum(end is not None for end in result.ends),
                "notes": "; ".join(result.notes),
            }
            lines.append({key: "" if value is None else value for key, value in told.items()})
    return Table.of(lines).csv()


def _best_round(result: Result) -> float | None:
    """Return the mean of the best rounds, of a measure that has best ones."""
    some = known(result.best) if result.entry.measure in HIGHER_IS_BETTER else []
    return _finite(mean(some)) if some else None


def _finite(value: float | None) -> float | None:
    return round(value, 6) if value is not None and math.isfinite(value) else None


def to_json(report: Report, folder: Path) -> dict[str, Any]:
    """Return every number: measured, printed, differences, and the curves of each run."""
    exhibit, choices = report.exhibit, report.choices
    runs = {path: report.runs[key] for key, path in report.paths.items()}
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
        "footnotes": [f"{mark}: {text}" for mark, text in _all_footnotes(report)],
        "missing": [run.label for run in report.missing],
        "parts": [
            {
                "title": part.section.title,
                "cells": [_cell(result, report, folder) for result in part.results],
                "order": {column: _order(part.column(column)) for column in part.section.columns},
            }
            for part in report.sections
        ],
        "numbers": [
            {"title": shown.title, "head": shown.table.head, "rows": shown.table.texts}
            for shown in report.pictured
        ],
        "runs": {
            os.path.relpath(path, folder): _run(run, open_run(path).config) for path, run in runs.items()
        },
        "commit": commit(),
        **environment(),
    }


def _cell(result: Result, report: Report, folder: Path) -> dict[str, Any]:
    entry, paths = result.entry, report.paths
    keys = [(entry.point, seed) for seed in result.seeds]
    return {
        "row": entry.row,
        "column": entry.column,
        "measure": entry.measure,
        "point": {key: value for key, value in vars(entry.point).items() if value is not None},
        "values": [_finite(value) for value in result.values],
        "best_round_values": [_finite(value) for value in result.best],
        "diverged": [end and vars(end) for end in result.ends],
        "mean": _finite(result.mean),
        "std": _finite(result.spread),
        "printed": entry.printed,
        "implied": entry.implied,
        "suspect": entry.suspect,
        "difference": _finite(result.difference),
        "runs": [os.path.relpath(paths[key], folder) for key in keys if key in paths],
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
        "differ": order.differ,
        "within_spread": order.unclear,
    }


def _run(run: Run, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "settings": dict(run.settings),
        "host": config.get("host", {}),
        "versions": {**config.get("versions", {}), "package": config["facts"]["code"].get("package", "")},
        "diverged": run.diverged and vars(run.diverged),
        "changed": [str(change) for change in run.changes],
        "curves": {
            name: [_rounded(record.get(name)) for record in run.history]
            for name, measurement in MEASUREMENTS.items()
            if measurement.chart and any(record.get(name) is not None for record in run.history)
        },
    }


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else value
