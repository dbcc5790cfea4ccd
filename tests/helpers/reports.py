"""Run folders for reports, made by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

import fedcsd as package
from fedcsd.experiments.summary import summarise
from helpers.federations import blobs
from helpers.runs import FACTS

HOSTILE = "</script><script>document.title='owned'</script><!-- %{x} <b>&amp;"
SMALL = {"clients": 4, "min_samples": 2, "rounds": 3, "epochs": 1, "batch_size": 16, "beta": 0.5}


def record(number: int, accuracy: float, **more: Any) -> dict[str, Any]:
    base = {"round": number, "test_accuracy": accuracy, "test_loss": 1 - accuracy, "train_loss": 0.5}
    cost = {"bytes_down": 1_000_000, "bytes_up": 1_000_000, "seconds": 2.0, "seconds_evaluating": 0.1}
    return {**base, "clients": 2, "failed": 0, "diverged": 0, **cost, **more}


def made(folder: Path, accuracies: list[float], *, ended: bool = True, **settings: Any) -> Path:
    """A run directory with these accuracies, as a run of two clients leaves it."""
    folder.mkdir(parents=True)
    values = {
        "data": "digits",
        "model": "mlp",
        "partition": "dirichlet",
        "rounds": len(accuracies),
        "seed": 0,
    }
    values |= {"clients": 2, "epochs": 1, "lr": 0.1, "train_size": 0, "holdout": 0.0, "beta": 0.5}
    facts = {"versions": {"fedcsd": "0"}, "host": {"system": "x"}, "facts": FACTS}
    config = {**values, "method": {"name": "fedavg"}, **settings, **facts}
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    each = {"class_accuracies": [0.5, 1.0, 0.25], "client_accuracies": [0.9, 0.1]}
    records = [record(n, a, **each) for n, a in enumerate(accuracies, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    counts = np.array([[5, 0, 1], [0, 7, 2]])
    np.savez_compressed(folder / "partition.npz", rows=np.arange(15), sizes=[6, 9], samples=15, counts=counts)
    if ended:
        (folder / "summary.json").write_text(json.dumps(summarise(records)))
    return folder


def thirty(folder: Path) -> Path:
    """Ten methods, three seeds, a hundred rounds, everything recorded."""
    first = folder / "first"
    package.run(data=blobs(), method="fedcsd", out=first, track_drift=True, **{**SMALL, "rounds": 1})
    line = json.loads((first / "metrics.jsonl").read_text())
    random = np.random.default_rng(0)
    for method in range(10):
        for seed in range(3):
            run = folder / "c" / f"m{method}-{seed}"
            accuracies = (
                0.9 - 0.6 * np.exp(-np.arange(100) / (method + 5)) + random.normal(0, 0.01, 100)
            ).tolist()
            made(run, accuracies, seed=seed, lr=0.01 * (method + 1))
            noisy = [
                {
                    **line,
                    **{k: v * float(random.uniform(0.5, 1)) for k, v in line.items() if isinstance(v, float)},
                }
                | {
                    "round": n,
                    "test_accuracy": a,
                    "class_accuracies": random.random(100).tolist(),
                    "client_accuracies": random.random(100).tolist(),
                }
                for n, a in enumerate(accuracies, 1)
            ]
            (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in noisy))
    return folder / "c"
