"""Ask where FedCSD's accuracy comes from: from the teacher, or from a target near the uniform distribution?

    python studies/target.py --data mnist --train-size 10000 --betas 0.05,0.5 --mus 0.001,0.01 \\
        --out runs/target-mnist --json results/methods/target-mnist.json

Trains fedavg, fedcsd, fedcsd:uniform (same mask and weight, uniform target) and fedcsd:scaled (similarity
times C, so that the refined logits keep their size) with every seed, and prints accuracy beside the entropy
of the target as a share of log C. If fedcsd and fedcsd:uniform end alike, it was not the teacher. Calling
again goes on where it was cut off; `--device cuda` trains on a GPU.
"""

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import fedcsd
from fedcsd.experiments.running import Run
from fedcsd.experiments.runs.provenance import environment
from fedcsd.results.plots import flat, plot_target
from fedcsd.results.terminal import ProgressDisplay

TARGETS = ("fedcsd", "fedcsd:uniform", "fedcsd:scaled")


def entropy(run: Run) -> float | None:
    """Return the target's entropy in the final round as a share of log C; None for a method without a target."""
    found = run.history[-1].get("target_entropy") if run.history else None
    return None if found is None else float(found)


def result(run: Run) -> dict[str, Any]:
    end = run.diverged
    return {
        "seed": run.settings["seed"],
        "accuracy": None if end else round(100 * run.accuracy, 2),
        "target_entropy": entropy(run),
        "logit_drift": run.summary.get("mean_logit_drift"),
        **({"diverged_in_round": end.round} if end else {}),
    }


def spread(values: list[float | None], digits: int = 2, sign: str = "") -> str:
    """Mean ± standard deviation of those that there are, and how many there are not."""
    good = [value for value in values if value is not None]
    if not good:
        return "–"
    text = f"{statistics.mean(good):{sign}.{digits}f}"
    if len(good) > 1:
        text += f" ± {statistics.stdev(good):.{digits}f}"
    return text + (f" ({len(values) - len(good)} diverged)" if len(good) < len(values) else "")


def show(rows: list[dict[str, Any]]) -> None:
    print("| β | lr | μ | method | accuracy (%) | vs fedavg | target's entropy / log C | logit drift |")
    print("|---" * 8 + "|")
    for row in rows:
        runs, first = row["runs"], row["fedavg"]
        apart = [
            None if run["accuracy"] is None or other is None else run["accuracy"] - other
            for run, other in zip(runs, first, strict=True)
        ]
        cells = [
            f"{row['beta']:g}",
            f"{row['lr']:g}",
            f"{row['mu']:g}" if row["mu"] is not None else "",
            row["method"],
            spread([run["accuracy"] for run in runs]),
            spread(apart, sign="+") if row["mu"] is not None else "",
            spread([run["target_entropy"] for run in runs if run["target_entropy"] is not None], 6),
            spread([run["logit_drift"] for run in runs], 3),
        ]
        print("| " + " | ".join(cells) + " |")


def numbers(value: str) -> list[float]:
    return [float(part) for part in value.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--model", default="auto")
    parser.add_argument("--train-size", type=int, default=10_000)
    parser.add_argument("--betas", type=numbers, default=[0.05, 0.5])
    parser.add_argument("--lrs", type=numbers, default=[0.01])
    parser.add_argument("--mus", type=numbers, default=[0.001])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    shared = {
        name: getattr(options, name) for name in ("data", "model", "train_size", "rounds", "epochs", "device")
    }
    seeds = [int(seed) for seed in options.seeds.split(",")]
    chosen = ["fedavg", *(f"{name}:mu={mu:g}" for mu in options.mus for name in TARGETS)]
    rows: list[dict[str, Any]] = []
    with ProgressDisplay() as progress:
        for beta, lr in itertools.product(options.betas, options.lrs):
            folder = options.out / f"beta{beta:g}-lr{lr:g}"
            found = fedcsd.compare(
                chosen,
                seeds,
                out=folder,
                beta=beta,
                lr=lr,
                track_drift=True,
                on_start=lambda label, seed, rounds, more: progress.follow(
                    f"{label} seed {seed}", rounds, more
                ),
                **shared,
            )
            runs = {label: [result(run) for run in some] for label, some in found.runs.items()}
            first = [run["accuracy"] for run in runs["fedavg"]]
            for label, some in runs.items():
                name, _, mu = label.partition(":mu=")
                row = {"beta": beta, "lr": lr, "mu": float(mu) if mu else None, "method": name}
                rows.append({**row, "runs": some, "fedavg": first})
            plot_target(
                {label: [flat(run.history) for run in some] for label, some in found.runs.items()},
                folder / "target",
            )
    if options.json:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
        told: dict[str, Any] = {
            "command": "python " + shlex.join(sys.argv),
            "commit": commit.stdout.strip(),
            **environment(),
        }
        told |= {"settings": shared, "rows": rows}
        options.json.write_text(json.dumps(told) + "\n", encoding="utf-8")
    show(rows)


if __name__ == "__main__":
    main()
