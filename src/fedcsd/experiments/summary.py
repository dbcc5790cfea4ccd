"""A run in a few numbers, its settings in a few words, and how far the runs of a folder are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fedcsd.config import Settings
from fedcsd.config.settings import used
from fedcsd.experiments.comparison_folder import Unfinished
from fedcsd.experiments.runs.archive import open_run, paths_in
from fedcsd.measurements import MEASUREMENTS, number


def summarise(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result of a run: the final round counts; the best one is shown as what it is."""
    accuracies = [number(record.get("test_accuracy")) for record in history]
    best = max(range(len(history)), key=lambda i: -1.0 if math.isnan(accuracies[i]) else accuracies[i])
    summary: dict[str, Any] = {
        "rounds": len(history),
        "final_accuracy": accuracies[-1],
        "mean_of_last_ten_accuracy": sum(accuracies[-10:]) / len(accuracies[-10:]),
        "best_accuracy": accuracies[best],
        "best_round": history[best]["round"],
    }
    for row in MEASUREMENTS.values():
        recorded = [record[row.name] for record in history if record.get(row.name) is not None]
        if row.summary == "final" and history[-1].get(row.name) is not None:
            summary[row.key] = history[-1][row.name]
        elif row.summary == "mean" and recorded:
            summary[row.key] = sum(recorded) / len(recorded)
        elif row.summary == "sum" and any(row.name in record for record in history):
            summary[row.key] = sum(number(record.get(row.name)) for record in history)
    return summary


def notable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a reader wants to know: the important ones, and all that are not the default.

    A path is shortened to its last part, for the text may be printed.
    """
    values = {"data": _choice(config["data"])}
    if config["train_size"]:
        values["train_size"] = config["train_size"]
    values["model"] = _choice(config["model"])
    partition = _choice(config["partition"])
    if partition != "dirichlet":
        values["partition"] = partition
    for option in fields(Settings):
        name, value, traits = option.name, config.get(option.name, option.default), option.metadata
        changed = value not in (option.default, "none") and traits["result"] and name != "seed"
        if (traits["stated"] or changed) and used(traits, partition.partition(" ")[0]):
            values.setdefault(name, value)
    return values


def _choice(choice: Any) -> str:
    """Return the name of a choice, with its options."""
    table = {"name": choice} if isinstance(choice, str) else dict(choice)
    options = [f"{key}={_short(value)}" for key, value in table.items() if key != "name"]
    return _short(table["name"]) + (f" ({', '.join(options)})" if options else "")


def _short(value: Any) -> str:
    text = str(value)
    return Path(text).name if Path(text).is_absolute() else text


def progress_of(folder: Path) -> list[list[str]]:
    """Return a line for each run in a folder: its name, the rounds done and the accuracy so far."""
    rows, planned = [], Unfinished.of(folder)
    for run in map(open_run, paths_in(folder)):
        history = run.history()
        latest = number(history[-1].get("test_accuracy")) if history else math.nan
        accuracy = f"{100 * latest:.2f}" if math.isfinite(latest) else "–" * bool(history)
        if end := run.divergence:
            accuracy = f"diverged (round {end.round})"
        name, rounds = run.path.name, run.settings["rounds"]
        if planned and name in planned.runs:  # more rounds may be planned than its settings have
            rounds = max(rounds, planned.rounds)
        rows.append([name, f"{len(history)} of {rounds}", accuracy])
    begun = {row[0] for row in rows}
    return rows + [[name, "to do", ""] for name in (planned.runs if planned else ()) if name not in begun]


def left_in(folder: Path) -> str:
    """Describe the runs in a folder that has no table of them."""
    again = "the same command again goes on with it"
    if not (planned := Unfinished.of(folder)):
        return f"the runs in {folder}; if a comparison was cut off there, {again}"
    of = f"{', '.join(planned.methods)} (seeds {', '.join(map(str, planned.seeds))})"
    left = f"{len(planned.left(folder))} of {len(planned.runs)} runs are left"
    return f"a comparison of {of}, not finished: {left}; {again}"
