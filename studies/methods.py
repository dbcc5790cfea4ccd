"""Train every method on the same federations, for the tables of docs/methods/.

    python studies/methods.py --data mnist --train-size 10000 --betas 0.05,0.5 --lrs 0.01,0.1 \\
        --rounds 30 --epochs 1 --seeds 0,1,2 --out runs/methods-mnist --json results/methods/mnist.json

Runs stand side by side, one core each; calling again goes on where it was cut off. `--json` collects
what is finished, also while the rest is not, and what is in it is not run again. `python studies/method_pages.py` puts the numbers
into the pages.
"""

import argparse
import itertools
import json
import multiprocessing
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedcsd.config.toml import read_toml
from fedcsd.errors import Diverged
from fedcsd.experiments.comparison_folder import run_name
from fedcsd.experiments.resuming import resume
from fedcsd.experiments.running import run
from fedcsd.experiments.runs.provenance import environment
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.methods import methods

PRESETS = [f"fedcsd:{name}" for name in methods.load("fedcsd").presets]


def one(label: str, seed: int, settings: dict[str, Any], path: Path) -> None:
    """Train one run, or what is left of it. A divergence is a result, which the run's folder keeps."""
    torch.set_num_threads(1)
    with suppress(Diverged):
        if (path / "config.toml").exists():
            resume(path)
        else:
            run(method=label, seed=seed, out=path, workers=1, **settings)


def result(path: Path) -> dict[str, Any] | None:
    """Return the result of a run; None while it has not ended."""
    if not (path / "config.toml").exists():
        return None
    directory = RunDirectory.open(path)
    history, summary = directory.history(), directory.summary
    end = directory.divergence
    if summary is None and end is None:
        return None
    found: dict[str, Any] = {
        "seed": directory.settings["seed"],
        "accuracy": None if end else round(100 * history[-1]["test_accuracy"], 2),
        "curve": [round(100 * r["test_accuracy"], 2) for r in history],
        "seconds": round(sum(r["seconds"] for r in history), 1),
        "megabytes": round(sum(r["bytes_up"] + r["bytes_down"] for r in history) / 1e6, 2),
    }
    if end:
        return found | {"diverged_in_round": end.round}
    last = history[-1]
    for name in ("client_accuracy_mean", "client_accuracy_personal_mean", "domain_mean"):
        if last.get(name) is not None:
            found[name.removesuffix("_mean")] = round(100 * last[name], 2)
    if last.get("domain_accuracy"):
        found["domains"] = {k: round(100 * v, 2) for k, v in last["domain_accuracy"].items()}
    return found


Key = tuple[str, float, float, int]
"""method, beta, learning rate, seed"""


def known(path: Path | None) -> dict[Key, dict[str, Any]]:
    """Return the runs that a results file has already."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(r["method"], r["beta"], r["lr"], run["seed"]): run for r in rows for run in r["runs"]}


def collect(found: dict[Key, dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    rows: dict[tuple[str, float, float], list[dict[str, Any]]] = {}
    for (label, beta, lr, _), ended in sorted(found.items(), key=lambda item: item[0][3]):
        rows.setdefault((label, beta, lr), []).append(ended)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    host = environment()["host"]["processor"]
    return {
        "command": "python " + shlex.join(sys.argv),
        "commit": commit.stdout.strip() or "unknown",
        "device": torch.cuda.get_device_name() if settings["device"] == "cuda" else host,
        "versions": environment()["versions"],
        "settings": settings,
        "rows": [
            {"method": label, "beta": beta, "lr": lr, "runs": runs}
            for (label, beta, lr), runs in rows.items()
        ],
    }


def show(rows: list[dict[str, Any]]) -> None:
    columns = sorted({(r["beta"], r["lr"]) for r in rows})
    print("| method | " + " | ".join(f"β {b:g}, lr {lr:g}" for b, lr in columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for label in dict.fromkeys(r["method"] for r in rows):
        cells = {(r["beta"], r["lr"]): text(r["runs"]) for r in rows if r["method"] == label}
        print(f"| {label} | " + " | ".join(cells.get(c, "") for c in columns) + " |")


def text(runs: list[dict[str, Any]], key: str = "accuracy") -> str:
    """Mean ± standard deviation over the seeds that ended, and how many did not."""
    good = [r[key] for r in runs if r.get(key) is not None]
    gone = [r["diverged_in_round"] for r in runs if "diverged_in_round" in r]
    if not good:
        return f"diverged (round {', '.join(map(str, gone))})" if gone else ""
    mean = f"{statistics.mean(good):.2f}" + (f" ± {statistics.stdev(good):.2f}" if len(good) > 1 else "")
    return mean + (f" ({len(gone)} of {len(runs)} diverged)" if gone else "")


def numbers(value: str) -> list[float]:
    return [float(part) for part in value.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--methods", default=",".join([*methods.names, *PRESETS]))
    parser.add_argument("--experiment", type=Path, help="settings that differ from the defaults, as TOML")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--train-size", type=int, default=0)
    parser.add_argument("--betas", type=numbers, default=[0.05, 0.5])
    parser.add_argument("--lrs", type=numbers, default=[0.01, 0.1])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this long; the rest later")
    return parser.parse_args()


def train(tasks: list[tuple[Any, ...]], jobs: int, seconds: float) -> None:
    """All runs, so many at a time, for so long; what is cut off is saved up to its last round."""
    began, context = time.time(), multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context)
    try:
        waiting = [pool.submit(one, *task) for task in tasks]
        for done, future in enumerate(as_completed(waiting, timeout=seconds), 1):
            future.result()
            left = (time.time() - began) / done * (len(tasks) - done)
            print(f"{done} of {len(tasks)} runs, about {left:.0f} s left", file=sys.stderr, flush=True)
    except TimeoutError:
        print("the time is up: the same command again goes on", file=sys.stderr)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()


def main() -> None:
    options = arguments()
    shared: dict[str, Any] = read_toml(options.experiment) if options.experiment else {}
    for name in ("data", "train_size", "rounds", "epochs", "device"):
        shared[name] = getattr(options, name)
    labels, seeds = options.methods.split(","), [int(s) for s in options.seeds.split(",")]
    found, paths, tasks = known(options.json), {}, []
    for seed, beta, lr, label in itertools.product(seeds, options.betas, options.lrs, labels):
        path = options.out / f"beta{beta:g}-lr{lr:g}" / run_name(label, seed)
        if (label, beta, lr, seed) in found:
            continue
        paths[label, beta, lr, seed] = path
        if result(path) is None:
            tasks.append((label, seed, {**shared, "beta": beta, "lr": lr}, path))
    try:
        train(tasks, options.jobs, 60 * options.minutes)
    finally:
        found |= {key: run for key, path in paths.items() if (run := result(path))}
        content = collect(found, shared)
        if options.json:
            options.json.write_text(json.dumps(content) + "\n", encoding="utf-8")
        show(content["rows"])


if __name__ == "__main__":
    main()
