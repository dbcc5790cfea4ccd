"""From runs on disk to all that the page shows, as plain JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedcsd.__version__ import __version__
from fedcsd.config.settings import applied, of_settings, settings_where
from fedcsd.data.partition import Counts
from fedcsd.experiments.summary import summarise
from fedcsd.experiments.tracking import settings_text
from fedcsd.messages import finite
from fedcsd.results.report.measures import charts, series
from fedcsd.results.report.runs import DAMAGE, Found, Seen, common, find
from fedcsd.results.rows import About, rows, told
from fedcsd.results.style import look
from fedcsd.results.tables import Row, best_of, in_words, legend, remarks, table

CELLS = 300_000  # numbers of a heat map, or of all partitions, that a page has room for
POINTS = 1_000  # clients, or rounds, beyond which not every one is drawn
COLUMNS = ("method", "accuracy (%)", "own data (%)", "logit drift", "sent (MB)", "best (%)", "time")
FIRST = "vs first"  # what the column of differences is called where it is not of one method of a short name
WIDE = 24  # characters of a column's name
RECENT = 10  # rounds from which the time of those to come is told

Json = dict[str, Any]


def collect(paths: Sequence[Path], *, live: bool = False) -> Json:
    """All of one page. `live` is for a run that may still be training, or not even be there yet."""
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
    cleaned: Json = finite(content)
    return cleaned


def _title(paths: Sequence[Path]) -> str:
    names = [path.resolve().name or str(path) for path in paths]
    return ", ".join(names) if len(names) < 4 else f"{len(names)} runs"


def _look(index: int) -> Json:
    """As in the figures; a page adds marks, and its own black for dark mode."""
    shown = look(index)
    dashes = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
    return {"colour": shown["color"], "dash": dashes[shown["linestyle"]], "mark": index}


def _summary(found: Found) -> str:
    """On what was trained, in one line."""
    every = [run.settings for runs in found.groups.values() for run in runs]
    if not every:
        return ""
    try:
        same = [told(settings) for settings in every]
    except DAMAGE:
        return ""
    values = found.settings or common(same)
    seeds = sorted({int(settings["seed"]) for settings in every})
    numbers = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    return ", ".join(filter(None, (in_words(values), numbers)))


def _table(found: Found) -> Json:
    """The final table: a line for each method, and what its columns are. Compared are methods on the same data."""
    ended = {label: some for label, runs in found.groups.items() if (some := [r for r in runs if r.ended])}
    parts = _alike(ended)
    tables = [made for labels in parts if (made := _rows({k: ended[k] for k in labels}, found.about))]
    every = [row for made in tables for row in made]
    versus = f"vs {every[0].label}" if every and len(parts) == 1 else FIRST
    versus = versus if len(versus) <= WIDE else FIRST
    lines = {label: line for made in tables for label, line in _lines(made, versus).items()}
    head = [
        name for name in (*COLUMNS[:2], versus, *COLUMNS[2:]) if any(name in line for line in lines.values())
    ]
    head = head or list(COLUMNS[:2])
    filled = [_with_unfinished(label, runs, lines.get(label), head) for label, runs in found.groups.items()]
    seeds = sorted({int(run.config["seed"]) for runs in found.groups.values() for run in runs})
    notes = [*legend(every, seeds, {}), *remarks(every)] if every else []
    if FIRST in head:
        notes.insert(
            0, f"{FIRST}: less the accuracy of the first method above with the same data and partition"
        )
    if len(parts) > 1:
        notes.insert(
            0, "of different data or partitions: the best is marked among methods that have the same"
        )
    return {
        "head": head,
        "cells": [cell for cell, _ in filled],
        "strong": [strong for _, strong in filled],
        "notes": notes,
    }


def _alike(groups: Mapping[str, Sequence[Seen]]) -> list[list[str]]:
    """The labels whose runs have the same data, dealt to clients in the same way, together."""
    found: dict[str, list[str]] = {}
    for label, runs in groups.items():
        same = of_settings(settings_where(deals=True, result=True), applied(runs[0].settings))
        found.setdefault(repr(sorted(same.items())), []).append(label)
    return list(found.values())


def _lines(made: Sequence[Row], versus: str) -> dict[str, dict[str, tuple[str, bool]]]:
    """By label and column what stands there, and whether it is the best."""
    head, cells = table(made)
    names = [versus if name.startswith("vs ") else name for name in head]
    best = {"accuracy (%)": best_of(made), "own data (%)": best_of(made, "own")}
    lines = {}
    for index, (row, line) in enumerate(zip(made, cells, strict=True)):
        marks = [name in best and best[name][index] for name in names]
        shown = dict(zip(names, zip(line, marks, strict=True), strict=True))
        lines[row.label] = {**shown, "time": (_seconds(row.seconds), False)}
    return lines


def _rows(ended: Mapping[str, Sequence[Seen]], about: About | None) -> list[Row]:
    runs = {label: [run.run() for run in some] for label, some in ended.items()}
    classes = [run.counts.shape[1] for some in ended.values() for run in some if run.counts is not None]
    known = about or About()
    about = replace(known, classes=classes[0]) if classes else known
    try:
        return rows(runs, about)
    except DAMAGE:
        return []


def _with_unfinished(
    label: str, runs: Sequence[Seen], line: Mapping[str, tuple[str, bool]] | None, head: Sequence[str]
) -> tuple[list[str], list[bool]]:
    """A line of the table that says which of its runs are not finished."""
    waiting = [run for run in runs if not run.ended]
    if line is not None:
        cell, strong = map(list, zip(*(line.get(name, ("–", False)) for name in head), strict=True))
        if waiting:
            cell[1] += f" ({len(waiting)} of {len(runs)} not finished)"
            strong = [False] * len(head)
        return cell, strong
    newest = [run.summary["final_accuracy"] if run.summary else _newest(run) for run in runs]
    known = [float(a) for a in newest if isinstance(a, (int, float))]
    shown = f"{100 * sum(known) / len(known):.2f}{' so far' * bool(waiting)}" if known else "–"
    if waiting and not known:
        shown = "no round yet"
    return [label, shown, *["–"] * (len(head) - 2)], [False] * len(head)


def _newest(run: Seen) -> Any:
    return run.raw[-1].get("test_accuracy") if run.raw else None


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(seconds, 60)
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(minutes)} min {int(rest)} s"


def _alerts(found: Found) -> list[str]:
    """What a reader must not overlook: runs that did not end as they should, or do not count."""
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


def _last(run: Seen, key: str) -> list[Any] | None:
    """A list of numbers in the newest round that has one."""
    for record in reversed(run.raw):
        if isinstance(record.get(key), list):
            return list(record[key])
    return None


def _mean(lists: Sequence[Sequence[Any]]) -> list[float | None]:
    """Place by place, over what is known, in percent."""
    columns = [[v for v in some if isinstance(v, (int, float))] for some in zip(*lists, strict=False)]
    return [round(100.0 * sum(some) / len(some), 2) if some else None for some in columns]


def _classes(groups: Mapping[str, Sequence[Seen]]) -> list[Json]:
    """Per-class accuracy of each method: of the final round, and over rounds where there is room for that."""
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


def _clients(groups: Mapping[str, Sequence[Seen]]) -> list[Json]:
    """Per-client accuracy of each method, worst first, mean over seeds that have the same partition."""
    shown = []
    for label, runs in groups.items():
        same = [run for run in runs if _equal(run.counts, runs[0].counts)]
        for key, model in (("client_accuracies", "global"), ("client_accuracies_personal", "personal")):
            lists = [some for run in same if (some := _last(run, key))]
            values = [(v, client) for client, v in enumerate(_mean(lists)) if v is not None]
            if not values:
                continue
            values.sort()
            step = max(1, math.ceil(len(values) / POINTS))
            chosen = list(enumerate(values, 1))[::step]
            shown.append(
                {
                    "label": label,
                    "model": model,
                    "place": [place for place, _ in chosen],
                    "accuracy": [v for _, (v, _) in chosen],
                    "client": [client for _, (_, client) in chosen],
                }
            )
    return shown


def _equal(a: Counts | None, b: Counts | None) -> bool:
    return a is b if a is None or b is None else bool(np.array_equal(a, b))


def _partitions(groups: Mapping[str, Sequence[Seen]]) -> list[Json]:
    """The different partitions, and whose they are; as many as there is room for."""
    different: list[tuple[Counts, list[str]]] = []
    for label, runs in groups.items():
        for run in runs:
            if run.counts is None:
                continue
            names = next((names for counts, names in different if _equal(counts, run.counts)), None)
            if names is None:
                different.append((run.counts, names := []))
            name = label if len(runs) == 1 else f"{label} seed {run.config['seed']}"
            names.append(name)
    shown: list[Json] = []
    room = CELLS
    for counts, names in different:
        room -= counts.size
        if room < 0 and shown:
            break
        everyone = len(different) == 1
        name = "all runs" if everyone else ", ".join(names[:3]) + (" and more" if len(names) > 3 else "")
        shown.append({"name": name, "counts": counts[: 10 * POINTS].tolist()})
    return shown


def _settings(groups: Mapping[str, Sequence[Seen]]) -> Json:
    """Every setting, versions and the machine, and those that differ between the methods."""
    labels = list(groups)
    firsts = {label: runs[0] for label, runs in groups.items()}
    tables = {label: settings_text(run.settings) for label, run in firsts.items()}
    facts = {
        label: settings_text({key: run.config.get(key, {}) for key in ("versions", "host")})
        for label, run in firsts.items()
    }
    every = _across(tables)
    untold = [
        *settings_where(result=False),
        "seed",
        *["method.name"] * (len(set(labels)) == len(labels)),
    ]  # labels name the method
    differ = [line for line in every if line["differs"] and line["key"] not in untold]
    return {"labels": labels, "differ": differ, "settings": every, "facts": _across(facts)}


def _across(tables: Mapping[str, Mapping[str, str]]) -> list[Json]:
    """A line for each key: its value for each label; one value if all have the same."""
    keys = list(dict.fromkeys(key for some in tables.values() for key in some))
    lines = []
    for key in keys:
        values = [some.get(key, "") for some in tables.values()]
        differs = len(set(values)) > 1
        lines.append({"key": key, "values": values if differs else values[:1], "differs": differs})
    return lines


def _runs(found: Found) -> list[list[str]]:
    """A line for each run: folder, method, seed, rounds, accuracy, time, and how it stands."""
    lines = []
    for label, runs in found.groups.items():
        for run in runs:
            try:
                summary = finite(run.summary or (summarise(run.raw) if run.raw else {}))
            except DAMAGE:
                summary = {}
            accuracy = summary.get("final_accuracy")
            shown = "–" if accuracy is None else f"{100 * accuracy:.2f}"
            done = f"{len(run.history)} of {run.config['rounds']}"
            lines.append(
                [
                    run.path.name,
                    label,
                    str(run.config["seed"]),
                    done,
                    shown,
                    _seconds(summary.get("seconds")),
                    run.state,
                ]
            )
    return lines + [[run.path.name, "", "", "", "", "", run.state] for run in found.damaged]


def _progress(found: Found) -> Json:
    """How far a run in training is: rounds done of those that are begun, and seconds left of them."""
    runs = [run for some in found.groups.values() for run in some]
    going = [run for run in runs if not run.ended]
    over = found.whole and bool(runs) and not going
    state: Json = {"over": over, "runs": len(runs), "run": "", "done": 0, "rounds": 0, "left": None}
    if not going:
        return state
    run = max(going, key=_modified)
    recent = [float(r["seconds"]) for r in run.history[-RECENT:]]
    pace = sum(recent) / len(recent) if recent else None
    done, rounds = len(run.history), int(run.config["rounds"])
    return state | {
        "run": run.path.name,
        "done": done,
        "rounds": rounds,
        "left": None if pace is None else pace * (rounds - done),
        "updated": _modified(run),
        "pace": pace,
    }


def _modified(run: Seen) -> float:
    for name in ("metrics.jsonl", "config.toml"):
        try:
            return (run.path / name).stat().st_mtime
        except OSError:
            continue
    return 0.0
