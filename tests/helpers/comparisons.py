"""Rows and runs of comparisons, made by hand."""

import math
from typing import Any

from fedcsd.errors import Divergence
from fedcsd.experiments.running import Run
from fedcsd.experiments.summary import summarise
from fedcsd.results.rows import Row

NAN = math.nan
END = Divergence(7, "client 3: the loss is no longer finite in local epoch 1")
SMALL: dict[str, Any] = {"clients": 4, "min_samples": 2, "epochs": 1, "workers": 2, "rounds": 3}


def a_row(label: str, accuracies: list[float], first: list[float] | None = None, **more: Any) -> Row:
    differences = [a - b for a, b in zip(accuracies, first or accuracies, strict=True)]
    ends = [END if math.isnan(a) else None for a in accuracies]
    measured = {
        "megabytes": [1.5] * len(ends),
        "best_accuracy": [97.0] * len(ends),
        "seconds": [2.0] * len(ends),
    }
    return Row(label, accuracies, differences, measured, **{"diverged": ends, **more})


FIRST = [90.0, 92.0, 94.0]
ROWS = [
    a_row("fedavg", FIRST),
    a_row("a_b:c=5%", [93.0, 95.0, 94.6], FIRST),
    a_row("shaky", [99.0, NAN, 98.0], FIRST, notes=[f"seed 1: {END}"]),
    Row("gone", [NAN] * 3, [NAN] * 3, diverged=[END, Divergence(3, "x"), END]),
]


def a_run(label: str, accuracy: float, holdout: float = 0.0, seed: int = 0, **measured: float) -> Run:
    record = {"round": 1, "test_accuracy": accuracy, "test_loss": 1.0, "bytes_up": 1, "bytes_down": 2}
    history = [{**record, "seconds": 1.0, "diverged": 0, **measured}]
    settings = {"method": {"name": label}, "holdout": holdout, "seed": seed, "rounds": 1}
    return Run(settings, history, summarise(history), {}, None)
