"""The content of the report page, from runs on disk, as plain JSON."""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from fedcsd.__version__ import __version__
from fedcsd.config.settings import applied, settings_where
from fedcsd.data.partition import Counts
from fedcsd.experiments.summary import notable, summarise
from fedcsd.experiments.tracking import settings_text
from fedcsd.measurements import MEASUREMENTS, number
from fedcsd.messages import finite
from fedcsd.results.comparison import duration, heading, in_words, legend, remarks, seeds_text, table
from fedcsd.results.report.charts import charts, series
from fedcsd.results.report.runs import DAMAGE, ReportRuns, SeenRun, find
from fedcsd.results.rows import About, Row, rows
from fedcsd.results.style import look
from fedcsd.results.tables import NOTHING, known

CELLS = 300_000  # numbers of a heat map, or of all partitions, that a page has room for
POINTS = 1_000  # clients, or rounds, above which not every one is drawn
FIRST = "vs first"  # heading of the differences unless they are to one method with a short name
WIDE = 24  # characters of a heading
RECENT = 10  # rounds that the time of the next ones is estimated from

Json = dict[str, Any]


def collect(paths: Sequence[Path], *, live: bool = False) -> Json:
    """Return all that one page shows; `live` allows runs that still train or do not exist yet."""
    found = find(paths, waiting=live)
    groups = found.groups
    histories = {label: [run.history for run in runs] for label, runs in groups.items()}
    shown = charts(histories)
    diverged = {label: [run.diverged is not None for run in runs] for label, runs in groups.items()}
    content: Json = {
        "title": _title(paths),
        "made": f"fedcsd {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "summary": _summary(found),
        "methods": [{"label": label, **_look(index)} for index, label in enumerate(groups)],
        "table": _table(found) if groups else None,
        "alerts": _alerts(found),
        "charts": shown,
        "series": series(histories, shown, diverged),
        "classes": _classes(groups),
        "clients": _clients(groups),
        "partitions": _partitions(groups),
        "settings": _settings(groups),
        "runs": _runs(found),
        "progress": _progress(found) if live else None,
    }
    finished: Json = finite(content)
    return finished


def _title(paths: Sequence[Path]) -> str:
    names = [path.resolve().name or str(path) for path in paths]
    return ", ".join(names) if len(names) < 4 else f"{len(names)} runs"


def _look(index: int) -> Json:
    """Return the look of a line as in the figures; the page adds marks, and its own black for dark mode."""
    shown = look(index)
    dashes = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
    return {"colour": shown["color"], "dash": dashes[shown["linestyle"]], "mark": index}


def _summary(found: ReportRuns) -> str:
    """Describe the settings and seeds in one line."""
    every = [run.settings for runs in found.groups.values() for run in runs]
    if not every:
        return ""
    try:
        same = [notable(settings) for settings in every]
    except DAMAGE:
        return ""
    common = {k: v for k, v in same[0].items() if all(some.get(k) == v for some in same)}
    values = found.settings or common
    seeds = sorted({int(settings["seed"]) for settings in every})
    return ", ".join(filter(None, (in_words(values), seeds_text(seeds))))


def _table(found: ReportRuns) -> Json:
    """Return the final table, a line for each method; methods on the same data are compared."""
    ended = {label: some for label, runs in found.groups.items() if (some := [r for r in runs if r.ended])}
    groups = _alike(ended)
    made = [rows for labels in groups if (rows := _rows({k: ended[k] for k in labels}))]
    made = [found.rows] if found.rows else made
    every = [row for rows in made for row in rows]
    versus = f"vs {every[0].label}" if every and len(groups) == 1 else FIRST
    versus = versus if len(versus) <= WIDE else FIRST
    lines: dict[str, dict[str, tuple[str, bool]]] = {}
    for rows in made:
        part = table(rows, time=True, first=versus)
        for row, texts, best in zip(rows, part.texts, part.best, strict=True):
            lines[row.label] = dict(zip(part.head, zip(texts, best, strict=True), strict=True))
    headings = [heading(row) for row in MEASUREMENTS.values() if row.column]
    there = {name for line in lines.values() for name in line}
    head = [name for name in ("method", headings[0], versus, *headings[1:]) if name in there]
    head = head or ["method", headings[0]]
    filled = [_with_unfinished(label, runs, lines.get(label), head) for label, runs in found.groups.items()]
    seeds = sorted({int(run.config["seed"]) for runs in found.groups.values() for run in runs})
    notes = [*legend(every, seeds), *remarks(every)] if every else []
    if FIRST in head:
        notes.insert(
            0, f"{FIRST}: less the accuracy of the first method above with the same data and partition"
        )
    if len(groups) > 1:
        notes.insert(
            0, "of different data or partitions: the best is marked among methods that have the same"
        )
    cells, strong = [cell for cell, _ in filled], [strong for _, strong in filled]
    return {"head": head, "cells": cells, "strong": strong, "notes": notes}


def _alike(groups: Mapping[str, Sequence[SeenRun]]) -> list[list[str]]:
    """Return the labels whose runs have the same data, dealt to clients in the same way, together."""
    found: dict[str, list[str]] = {}
    for label, runs in groups.items():
        same = applied(runs[0].settings, deals=True, result=True)
        found.setdefault(repr(sorted(same.items())), []).append(label)
    return list(found.values())


def _rows(ended: Mapping[str, Sequence[SeenRun]]) -> list[Row]:
    runs = {label: [run.run() for run in some] for label, some in ended.items()}
    classes = [run.counts.shape[1] for some in ended.values() for run in some if run.counts is not None]
    try:
        return rows(runs, About(classes=classes[0]) if classes else About())
    except DAMAGE:
        return []


def _with_unfinished(
    label: str, runs: Sequence[SeenRun], line: Mapping[str, tuple[str, bool]] | None, head: Sequence[str]
) -> tuple[list[str], list[bool]]:
    """Return a line of the table that says which of its runs are not finished."""
    waiting = [run for run in runs if not run.ended]
    if line is not None:
        cell, strong = map(list, zip(*(line.get(name, (NOTHING, False)) for name in head), strict=True))
        if waiting:
            cell[1] += f" ({len(waiting)} of {len(runs)} not finished)"
            strong = [False] * len(head)
        return cell, strong
    newest = [
        number(run.summary["final_accuracy"] if run.summary else (run.raw or [{}])[-1].get("test_accuracy"))
        for run in runs
    ]
    shown = f"{100 * mean(known(newest)):.2f}{' so far' * bool(waiting)}" if known(newest) else NOTHING
    if waiting and not known(newest):
        shown = "no round yet"
    return [label, shown, *[NOTHING] * (len(head) - 2)], [False] * len(head)


def _alerts(found: ReportRuns) -> list[str]:
    """Return lines on runs that did not end as they should, or do not count."""
    several = sum(map(len, found.groups.values())) + len(found.damaged) > 1
    bad = [run for runs in found.groups.values() for run in runs if run.summary is None]
    said = [f"{run.path.name}: {run.state}" if several else run.state for run in [*bad, *found.damaged]]
    for runs in found.groups.values():
        for run in runs:
            rounds = int((run.summary or {}).get("rounds", 0))
            lost = max(rounds, len(run.history)) - sum("test_accuracy" in r for r in run.history)
            if lost:
                said.append(f"{run.path.name}: {lost} of its rounds cannot be read")
    return said + [
        f"{run.path.name}: left out, for it has the settings and seed of another run" for run in found.left
    ]


def _last(run: SeenRun, key: str) -> list[Any] | None:
    """Return a list of numbers from the newest round that has one."""
    lists = (record[key] for record in reversed(run.raw) if isinstance(record.get(key), list))
    return next(lists, None)


def _mean(lists: Sequence[Sequence[Any]]) -> list[float | None]:
    """Return the mean place by place, over known numbers, in percent."""
    columns = [known(list(map(number, some))) for some in zip(*lists, strict=False)]
    return [round(100.0 * mean(some), 2) if some else None for some in columns]


def _classes(groups: Mapping[str, Sequence[SeenRun]]) -> list[Json]:
    """Return the accuracy of each class, in the final round and over rounds; fewer rounds where many do not fit."""
    shown: list[Json] = []
    room = CELLS // max(1, len(groups))
    for label, runs in groups.items():
        final = [some for run in runs if (some := _last(run, "class_accuracies"))]
        if not final:
            continue
        by_round: dict[int, list[Any]] = {}
        for record in (r for run in runs for r in run.raw if isinstance(r.get("class_accuracies"), list)):
            by_round.setdefault(int(record["round"]), []).append(record["class_accuracies"])
        step = max(1, math.ceil(len(by_round) / min(POINTS, max(2, room // len(final[0])))))
        numbers = sorted(by_round)[::-1][::step][::-1]  # the last one is always there
        means = [_mean(by_round[n]) for n in numbers]
        shown.append({"label": label, "final": _mean(final), "rounds": numbers, "by_round": means})
    return shown


def _clients(groups: Mapping[str, Sequence[SeenRun]]) -> list[Json]:
    """Return the accuracy of each client, worst first, mean over seeds that have the same partition."""
    shown = []
    for label, runs in groups.items():
        same = [run for run in runs if _equal(run.counts, runs[0].counts)]
        for key, model in (("client_accuracies", "global"), ("client_accuracies_personal", "personal")):
            lists = [some for run in same if (some := _last(run, key))]
            values = [(v, client) for client, v in enumerate(_mean(lists)) if v is not None]
            if not values:
                continue
            step = max(1, math.ceil(len(values) / POINTS))
            places, chosen = zip(*list(enumerate(sorted(values), 1))[::step], strict=True)
            accuracies, clients = zip(*chosen, strict=True)
            parts = {"place": places, "accuracy": accuracies, "client": clients}
            shown.append({"label": label, "model": model, **{key: list(some) for key, some in parts.items()}})
    return shown


def _equal(a: Counts | None, b: Counts | None) -> bool:
    return a is b if a is None or b is None else bool(np.array_equal(a, b))


def _partitions(groups: Mapping[str, Sequence[SeenRun]]) -> list[Json]:
    """Return the different partitions with the names of their runs, as many as there is room for."""
    different: list[tuple[Counts, list[str]]] = []
    for label, runs in groups.items():
        for run in runs:
            if run.counts is None:
                continue
            names = next((names for counts, names in different if _equal(counts, run.counts)), None)
            if names is None:
                different.append((run.counts, names := []))
            names.append(label if len(runs) == 1 else f"{label} seed {run.config['seed']}")
    shown: list[Json] = []
    room = CELLS
    for counts, names in different:
        room -= counts.size
        if room < 0 and shown:
            break
        name = ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
        name = "all runs" if len(different) == 1 else name
        shown.append({"name": name, "counts": counts[: 10 * POINTS].tolist()})
    return shown


def _settings(groups: Mapping[str, Sequence[SeenRun]]) -> Json:
    """Return every setting, the versions and the machine, and the settings that differ between the methods."""
    firsts = {label: runs[0] for label, runs in groups.items()}
    every = _across({label: settings_text(run.settings) for label, run in firsts.items()})
    parts = {
        label: {key: run.config.get(key, {}) for key in ("versions", "host")} for label, run in firsts.items()
    }
    facts = _across({label: settings_text(values) for label, values in parts.items()})
    untold = (*settings_where(result=False), "seed", "method.name")  # labels name the method
    differ = [line for line in every if line["differs"] and line["key"] not in untold]
    return {"labels": list(groups), "differ": differ, "settings": every, "facts": facts}


def _across(tables: Mapping[str, Mapping[str, str]]) -> list[Json]:
    """Return a line for each key: its value for each label, or one value if all have the same."""
    lines = []
    for key in dict.fromkeys(key for some in tables.values() for key in some):
        values = [some.get(key, "") for some in tables.values()]
        differs = len(set(values)) > 1
        lines.append({"key": key, "values": values if differs else values[:1], "differs": differs})
    return lines


def _runs(found: ReportRuns) -> list[list[str]]:
    """Return a line for each run: folder, method, seed, rounds, accuracy, time and state."""
    lines = []
    for label, run in ((label, run) for label, runs in found.groups.items() for run in runs):
        try:
            summary = finite(run.summary or (summarise(run.raw) if run.raw else {}))
        except DAMAGE:
            summary = {}
        accuracy, seconds = summary.get("final_accuracy"), summary.get("seconds")
        lines.append(
            [
                run.path.name,
                label,
                str(run.config["seed"]),
                f"{len(run.history)} of {run.config['rounds']}",
                NOTHING if accuracy is None else f"{100 * accuracy:.2f}",
                NOTHING if seconds is None else duration(seconds),
                run.state,
            ]
        )
    return lines + [[run.path.name, "", "", "", "", "", run.state] for run in found.damaged]


def _progress(found: ReportRuns) -> Json:
    """Return how far the newest run is: rounds done of those begun, and the seconds that are left of them."""
    runs = [run for some in found.groups.values() for run in some]
    going = [run for run in runs if not run.ended]
    over = found.whole and bool(runs) and not going
    state: Json = {"over": over, "runs": len(runs), "run": "", "done": 0, "rounds": 0, "left": None}
    if not going:
        return state
    run = max(going, key=_modified)
    recent = [float(record["seconds"]) for record in run.history[-RECENT:]]
    pace = mean(recent) if recent else None
    done, rounds = len(run.history), int(run.config["rounds"])
    left = None if pace is None else pace * (rounds - done)
    shown = {"run": run.path.name, "done": done, "rounds": rounds, "left": left}
    return state | shown | {"updated": _modified(run), "pace": pace}


def _modified(run: SeenRun) -> float:
    for name in ("metrics.jsonl", "config.toml"):
        try:
            return (run.path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0
