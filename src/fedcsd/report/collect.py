"""From runs on disk to all that the page shows, as plain JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fedcsd import __version__
from fedcsd.analysis.figures import look
from fedcsd.analysis.rows import About, rows, told
from fedcsd.analysis.summary import summarise
from fedcsd.analysis.tables import Row, best_of, in_words, legend, remarks, table
from fedcsd.config import IRRELEVANT
from fedcsd.data.partition import Counts
from fedcsd.packing import finite
from fedcsd.report.measures import charts, series
from fedcsd.report.runs import DAMAGE, Found, Seen, common, find
from fedcsd.tracking import settings_text

CELLS = 300_000  # numbers of a heat map, or of all partitions, that a page has room for
POINTS = 1_000  # clients, or rounds, beyond which not every one is drawn
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
    """The final table: a line for each method, and what its columns are."""
    ended = {label: [run for run in runs if run.ended] for label, runs in found.groups.items()}
    made = _rows({label: runs for label, runs in ended.items() if runs}, found.about)
    lines: dict[str, tuple[list[str], list[bool]]] = {}
    head, notes = ["method", "accuracy (%)"], []
    seeds = sorted({int(run.config["seed"]) for runs in found.groups.values() for run in runs})
    if made:
        head, cells = table(made)
        own = head.index("own data (%)") if "own data (%)" in head else 0
        best, best_own = best_of(made), best_of(made, "own")
        for index, (row, cell) in enumerate(zip(made, cells, strict=True)):
            strong = [
                (i == 1 and best[index]) or (own and i == own and best_own[index]) for i in range(len(head))
            ]
            lines[row.label] = [*cell, _seconds(row.seconds)], [*map(bool, strong), False]
        head = [*head, "time"]
        notes = [*legend(made, seeds, {}), *remarks(made)]
    filled = [
        _with_unfinished(label, runs, lines.get(label), len(head)) for label, runs in found.groups.items()
    ]
    if len(filled) == 1 and "vs" in " ".join(head):  # nothing to compare with
        head = head[:2] + head[3:]
        filled = [(cell[:2] + cell[3:], strong[:2] + strong[3:]) for cell, strong in filled]
    return {
        "head": head,
        "cells": [cell for cell, _ in filled],
        "strong": [strong for _, strong in filled],
        "notes": notes,
    }


def _rows(ended: Mapping[str, Sequence[Seen]], about: About | None) -> list[Row]:
    if not ended:
        return []
    runs = {label: [run.run() for run in some] for label, some in ended.items()}
    classes = [run.counts.shape[1] for some in ended.values() for run in some if run.counts is not None]
    known = about or About()
    about = replace(known, classes=classes[0]) if classes else known
    try:
        return rows(runs, about)
    except DAMAGE:
        return []


def _with_unfinished(
    label: str, runs: Sequence[Seen], line: tuple[list[str], list[bool]] | None, width: int
) -> tuple[list[str], list[bool]]:
    """A line of the table that says which of its runs are not finished."""
    waiting = [run for run in runs if not run.ended]
    if line is not None:
        cell, strong = line
        if waiting:
            cell = [cell[0], f"{cell[1]} ({len(waiting)} of {len(runs)} not finished)", *cell[2:]]
            strong = [False] * width
        return cell, strong
    newest = [run.summary["final_accuracy"] if run.summary else _newest(run) for run in runs]
    known = [float(a) for a in newest if isinstance(a, (int, float))]
    shown = f"{100 * sum(known) / len(known):.2f}{' so far' * bool(waiting)}" if known else "–"
    if waiting and not known:
        shown = "no round yet"
    return [label, shown, *["–"] * (width - 2)], [False] * width


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
        *IRRELEVANT,
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
