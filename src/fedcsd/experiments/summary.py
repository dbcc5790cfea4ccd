"""A run in a few numbers."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcsd.experiments.archive import open_run, paths_in
from fedcsd.experiments.comparison_folder import Unfinished

OWN_DATA = (
    "client_accuracy_mean",
    "client_accuracy_worst_decile",
    "client_accuracy_personal_mean",
    "client_accuracy_personal_worst_decile",
)  # of the final round: the global model, and each client's own, on the clients' own test data

DROPPED = ("refused", "late", "missing", "lost_states")  # of a deployed run: answers that did not count


def summarise(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of a run: the final round counts; the best one is shown as what it is."""
    accuracies = [number(r.get("test_accuracy")) for r in history]
    last = history[-1]
    best = max(range(len(history)), key=lambda i: -1.0 if math.isnan(accuracies[i]) else accuracies[i])
    summary = {
        "rounds": len(history),
        "final_accuracy": accuracies[-1],
        "final_loss": number(last.get("test_loss")),
        "mean_of_last_ten_accuracy": sum(accuracies[-10:]) / len(accuracies[-10:]),
        "best_accuracy": accuracies[best],
        "best_round": history[best]["round"],
        "bytes_down": sum(number(r.get("bytes_down")) for r in history),
        "bytes_up": sum(number(r.get("bytes_up")) for r in history),
        "seconds": sum(number(r.get("seconds")) for r in history),
        "diverged": sum(number(r.get("diverged")) for r in history),
    }
    for name in DROPPED:
        if any(name in r for r in history):
            summary[name] = sum(r.get(name, 0) for r in history)
    for name in ("logit_drift", "feature_drift", "local_accuracy"):
        values = [r[name] for r in history if r.get(name) is not None]
        if values:
            summary[f"mean_{name}"] = sum(values) / len(values)
    return summary | {name: last[name] for name in OWN_DATA if last.get(name) is not None}


def number(value: Any) -> float:
    """A number as it is; NaN for what is lost, or none."""
    return value if isinstance(value, (int, float)) else math.nan


def progress_of(folder: Path) -> list[list[str]]:
    """Of each run in a folder: its name, the rounds done and the accuracy so far."""
    rows, planned = [], Unfinished.of(folder)
    for run in map(open_run, paths_in(folder)):
        history = run.history()
        latest = number(history[-1].get("test_accuracy")) if history else math.nan
        accuracy = f"{100 * latest:.2f}" if math.isfinite(latest) else "–" * bool(history)
        if end := run.divergence:
            accuracy = f"diverged (round {end.round})"
        name, rounds = run.path.name, run.settings["rounds"]
        if planned and name in planned.runs:  # it may be taken further, and not yet be told
            rounds = max(rounds, planned.rounds)
        rows.append([name, f"{len(history)} of {rounds}", accuracy])
    begun = {row[0] for row in rows}
    return rows + [[name, "to do", ""] for name in (planned.runs if planned else ()) if name not in begun]


def left_in(folder: Path) -> str:
    """What is to be said of the runs in a folder that has no table of them."""
    again = "the same command again goes on with it"
    if not (planned := Unfinished.of(folder)):
        return f"the runs in {folder}; if a comparison was cut off there, {again}"
    of = f"{', '.join(planned.methods)} (seeds {', '.join(map(str, planned.seeds))})"
    left = f"{len(planned.left(folder))} of {len(planned.runs)} runs are left"
    return f"a comparison of {of}, not finished: {left}; {again}"
