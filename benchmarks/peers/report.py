"""From runs to figures, and from figures to a table that a person can read."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from quiet import BUSY

ALIKE = 0.05  # accuracies further from the plain loop's than this are flagged
OUR_NAMES = ("plain", "fedcsd")
"""contenders that are not peers"""


def round_seconds(times: Sequence[float]) -> list[float]:
    """Return the seconds of each round after the first; the first time is before any training."""
    return [later - earlier for earlier, later in pairwise(times[1:])]


def start_up(began: float, times: Sequence[float]) -> float:
    """Return the seconds to the end of the first round less one ordinary round: imports, data, processes."""
    return max(0.0, times[1] - began - statistics.median(round_seconds(times)))


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over repetitions of what one contender's runs measured; each run counts once."""
    a_round = [statistics.median(run["seconds"]) for run in runs]
    return {
        "seconds": statistics.median(a_round),
        "seconds_range": [min(a_round), max(a_round)],
        "start_up": statistics.median(run["start_up"] for run in runs),
        "peak_bytes": statistics.median(run["peak_bytes"] for run in runs),
        "accuracy": statistics.median(run["accuracy"] for run in runs),
        "accuracy_range": [min(run["accuracy"] for run in runs), max(run["accuracy"] for run in runs)],
        "repetitions": len(runs),
        "threads": sorted({run["threads"] for run in runs}),
        "others_busy": max(run["others_busy"] for run in runs),
    }


def figures(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return each contender's summary with its ratios to the plain loop and to the fastest peer."""
    found = {name: summary(some) for name, some in runs.items() if some}
    peers = [figure["seconds"] for name, figure in found.items() if name not in OUR_NAMES]
    plain = found.get("plain")
    for figure in found.values():
        figure["to_plain"] = figure["seconds"] / plain["seconds"] if plain else None
        figure["to_fastest_peer"] = figure["seconds"] / min(peers) if peers else None
    reference = plain["accuracy"] if plain else statistics.median(f["accuracy"] for f in found.values())
    for figure in found.values():
        figure["accuracy_differs"] = abs(figure["accuracy"] - reference) > ALIKE
    return found


def table(
    title: str, found: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str], order: Sequence[str]
) -> str:
    """Return the numbers of one workload as lines of text."""
    heads = ("", "s a round", "range", "to plain", "to best peer", "start-up s", "peak MiB", "accuracy")
    widths = (9, 11, 20, 10, 14, 12, 10, 24)
    lines = [title, "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    for name in order:
        if name in found:
            cells = [name, *_cells(found[name])]
            lines.append("".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
        if name in failures:
            lines.append(f"{name:>9}  failed: {failures[name]}")
    if any(found[name]["accuracy_differs"] for name in found):
        lines.append(f"! more than {100 * ALIKE:.0f} points from the plain loop: it may not do the same work")
    busy = [name for name in order if name in found and found[name]["others_busy"] > BUSY]
    if busy:
        lines.append(
            f"NOT TO BE RELIED ON: other programs used the machine (up to "
            f"{max(found[name]['others_busy'] for name in busy):.1f} cores) around runs of {', '.join(busy)}"
        )
    return "\n".join(lines)


def _cells(figure: Mapping[str, Any]) -> list[str]:
    low, high = figure["seconds_range"]
    worst, best = figure["accuracy_range"]
    flag = " !" if figure["accuracy_differs"] else ""
    return [
        f"{figure['seconds']:.3f}",
        f"{low:.3f} to {high:.3f}",
        _ratio(figure["to_plain"]),
        _ratio(figure["to_fastest_peer"]),
        f"{figure['start_up']:.1f}",
        f"{figure['peak_bytes'] / 2**20:,.0f}",
        f"{100 * figure['accuracy']:.1f}% ({100 * worst:.1f} to {100 * best:.1f}){flag}",
    ]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
