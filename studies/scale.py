"""Seconds a round and memory, as clients, samples and parameters grow; and what is not training.

    python studies/scale.py                              # a table, in about four minutes on two cores
    python studies/scale.py --json scale.json
    python studies/scale.py --only cohort,w1 --quick     # some of it, small
    python studies/scale.py --device cuda                # clients one after another on a GPU

FedAvg on images made here (a noisy pattern a class), through `fedcsd.experiments.running`: the same path that
`fedcsd run --out` takes, with a line of metrics after every round and checkpoints on disk. Every point
is measured in a process of its own. The first round is not counted. Seconds are medians, shares are of
the middle half of the rounds. Times of a busy machine are not worth much.

    cohort      10 to 10,000 clients that hold 6 images each, 10 of them a round, 10 epochs of one batch
    everyone    10 to 10,000 clients that share 10,000 images, all of them in every round, batches of 10
    samples     1,000 to 60,000 images, dealt to 10 clients with label skew, simple CNN
    parameters  an MLP of growing width, and ResNet-18, with 10 clients of 32 images
    w1          10 clients, simple CNN, 20,000 images with label skew, two epochs: the round whose time
                outside training should be under 5 %

**Time outside training** is the wall seconds of a round (from the end of the last one's checkpoint to the
end of this one's) minus the seconds that lanes spent answering `train` for clients, or waited for another
to finish its last client (`imbalance`, shown beside it), divided by the number of lanes; as a share of the
wall seconds. It consists of:

    cohort       drawing and sorting the clients, keeping what is needed to undo the round, the ledger
    messages     lanes idle for dealing, packing, pipes and unpacking (on a GPU: copies to and from it)
    aggregation  lanes idle while the server takes in replies, and what it does after the last one
    evaluation   the global model on 2,000 test images, on the same lanes
    metrics      accuracies by client, and the line in metrics.jsonl
    checkpoint   the checkpoint on disk (with fsync)
    rest         everything else

What the server does while lanes are training is not outside training, though it may take a core.

**Memory** is the proportional set size (PSS, from /proc/*/smaps_rollup) of the main process and its
lanes, the largest sum seen in rounds. It is looked at after every round; the round before the timed ones
and, where they are short, some after them are watched all along, since looking takes time as well. "own"
is without what is mapped from files (PyTorch itself), which is shared with whoever else uses it on the
machine; slopes are taken from that. The peak before the first round (`before` in the JSON) is no part of it.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from peaks import Memory

PARTS = ("cohort", "messages", "aggregation", "evaluation", "metrics", "checkpoint", "rest")
MIB = 2**20
GOAL = 0.05  # of a round outside training, for w1


@dataclass(frozen=True)
class Point:
    """A federation that is measured."""

    series: str
    name: str
    clients: int
    samples: int
    """in all; `each` of them a client, if that is given"""
    each: int = 0
    cohort: int = 0
    """clients in a round (0: all)"""
    model: str = "mlp:64"
    epochs: int = 1
    batch: int = 64
    tests: int = 2000
    timed: int = 5
    """rounds to time, after one to warm up"""
    watched: int = 2
    """rounds after those, in which memory is measured, as in the first"""
    cost: float = 5
    """seconds that it takes on two cores, roughly: for the time left"""


def points(quick: bool) -> list[Point]:
    """Return the points in the order of their measurement."""
    few = Point("cohort", "", 0, 60_000, each=6, cohort=10, epochs=10, batch=6, timed=15, watched=20, cost=6)
    found = [replace(few, name=f"{n:,} clients", clients=n) for n in (10, 100, 1000, 10_000)]
    for n, timed, cost in ((10, 9, 4), (100, 9, 5), (1000, 5, 15), (10_000, 1, 45)):
        watched = 0 if n > 1000 else 3
        found.append(
            Point("everyone", f"{n:,} clients", n, 10_000, batch=10, timed=timed, watched=watched, cost=cost)
        )
    for n, timed, cost in ((1000, 9, 4), (5000, 7, 8), (20_000, 3, 12), (60_000, 2, 25)):
        found.append(
            Point("samples", f"{n:,} images", 10, n, model="simple_cnn", timed=timed, watched=0, cost=cost)
        )
    wide = Point("parameters", "", 10, 320, batch=32, tests=500, timed=7, watched=3)
    found += [replace(wide, name=f"MLP of {n:,}", model=f"mlp:{n}") for n in (64, 1024, 8192)]
    found.append(replace(wide, name="ResNet-18", model="resnet18", timed=2, watched=0, cost=30))
    w1 = Point("w1", "10 clients, CNN", 10, 20_000, model="simple_cnn", epochs=2, watched=0, cost=35)
    return [_small(p) for p in [*found, w1]] if quick else [*found, w1]


def _small(point: Point) -> Point:
    """The same in little, to see whether it works."""
    clients, samples = min(point.clients, 10 + point.clients // 50), min(point.samples, 1500)
    name = f"{clients:,} clients" if point.series in ("cohort", "everyone") else point.name
    name = f"{samples:,} images" if point.series == "samples" else name
    few = replace(point, name=name, clients=clients, samples=samples)
    return replace(few, epochs=1, tests=500, timed=2, watched=1, cost=3)


# The rest of a point's life is in a process of its own.


def pictures(samples: int, tests: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images of a noisy pattern a class, made a few at a time so that memory has no peak here."""
    random = np.random.default_rng(0)
    patterns = random.integers(0, 120, (10, 28, 28), dtype=np.uint8)
    y = random.permutation(np.arange(samples + tests) % 10)
    x = patterns[y]
    for some in np.array_split(x, max(1, len(x) // 1000)):
        some += random.integers(0, 136, some.shape, dtype=np.uint8)
    return x[:samples], y[:samples], x[samples:], y[samples:]


def model(spec: str) -> Any:
    """Return a model's name, or a factory for an MLP with one hidden layer of this width."""
    from torch import nn

    name, _, width = spec.partition(":")
    if name != "mlp":
        return None

    def mlp(shape: Any, classes: int) -> nn.Module:
        inputs = int(np.prod(shape))
        return nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, int(width)), nn.ReLU(), nn.Linear(int(width), classes)
        )

    return mlp


def say(stage: str) -> None:
    """Tell the parent what comes next, and wait until it has looked at the memory once."""
    print(stage, flush=True)
    sys.stdin.readline()


def measure(point: Point, device: str, workers: int, disk: str | None) -> dict[str, Any]:
    """Measure a point. Tell when memory should be watched."""
    import torch
    from meter import Meter

    from fedcsd.experiments import running as jobs
    from fedcsd.experiments.runs import provenance

    def tell(done: int, rounds: int) -> None:
        watch = done == 0 or done > point.timed
        if done == 1:  # copies all pages that are shared with lanes, once: in every point, not by chance
            gc.collect()
        say("rounds" if watch else "look away")

    meter = Meter(tell)
    meter.install()
    make, data = model(point.model), pictures(point.samples, point.tests)
    given: dict[str, Any] = {"data": data} | ({"model": make} if make else {})
    if point.each:
        rows = np.random.default_rng(0).permutation(point.samples)[: point.clients * point.each]
        given["parts"] = np.array_split(rows, point.clients), []
    values = {
        "method": "fedavg",
        "data": "given from Python",
        "model": "given from Python" if make else point.model,
        "clients": point.clients,
        "partition": "iid" if point.series != "samples" and point.series != "w1" else "dirichlet",
        "beta": 0.5,
        "min_samples": 1,
        "participation": (point.cohort or point.clients) / point.clients,
        "epochs": point.epochs,
        "batch_size": point.batch,
        "rounds": 1 + point.timed + point.watched,
        "device": device,
        "workers": workers,
    }
    say("before")
    with tempfile.TemporaryDirectory(dir=disk, prefix="scale-") as folder:
        job = jobs.begin(values, given=given, out=Path(folder) / "run")
        jobs.train(job, meter)
    rounds = meter.rounds[1 : 1 + point.timed]
    facts = provenance.environment()
    found = {
        "rounds": rounds,
        "model_bytes": job.experiment.weights.nbytes,
        "data_bytes": sum(a.nbytes for a in data),
        "facts": {**facts["versions"], **facts["host"]},
    }
    if device == "cuda":
        found["device_bytes"] = torch.cuda.max_memory_allocated()
    return found


# The parent: starts children, watches their memory, makes tables.


def child(point: Point, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure a point in a fresh process; return its numbers and the peaks of its memory."""
    task = json.dumps(asdict(point))
    command = [sys.executable, __file__, "--child", task, "--device", arguments.device]
    command += ["--workers", str(arguments.workers)] + (["--disk", arguments.disk] if arguments.disk else [])
    last = "{}"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        watch = Memory(process.pid)
        watch.start()
        assert process.stdout is not None
        assert process.stdin is not None
        for line in process.stdout:
            if watch.hear(line.strip()):
                process.stdin.write("\n")
                process.stdin.flush()
            else:
                last = line
        peaks = watch.end()
    if process.returncode:
        sys.exit(f"{point.series}, {point.name}: ended with status {process.returncode}")
    found: dict[str, Any] = json.loads(last)
    return {**asdict(point), **found, **summary(found["rounds"]), **peaks}


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return the median seconds of a round, and shares of the middle half of all rounds, which add up."""
    walls = sorted(r["wall"] for r in rounds)
    cut = len(rounds) // 4
    middle = sorted(rounds, key=lambda r: r["wall"])[cut : len(rounds) - cut]
    wall = sum(r["wall"] for r in middle)
    shares = {part: sum(r[part] for r in middle) / wall for part in PARTS}
    figures = {"seconds": statistics.median(walls), "range": [walls[0], walls[-1]]}
    figures["imbalance"] = sum(r["imbalance"] for r in middle) / wall
    return {**figures, "outside": sum(shares.values()), "shares": shares}


def head() -> str:
    parts = "".join(f"{name:>12}" for name in PARTS)
    figures = f"{'s a round':>10}{'range':>18}{'peak MiB':>10}{'own MiB':>9}{'imbalance':>11}{'outside':>9}"
    return f"{'':29}{figures}  of it:{parts}"


def row(found: dict[str, Any]) -> str:
    low, high = found["range"]
    spread, outside = f"{low:.3f} to {high:.3f}", f"{100 * found['outside']:.1f}%"
    peak, own = found["peak"] / MIB, found["own"] / MIB
    parts = "".join(f"{100 * found['shares'][name]:11.1f}%" for name in PARTS)
    imbalance = f"{100 * found['imbalance']:.1f}%"
    figures = f"{found['seconds']:10.3f}{spread:>18}{peak:10.0f}{own:9.0f}{imbalance:>11}{outside:>9}"
    return f"{found['series']:11}{found['name']:18}{figures}{'':8}{parts}"


def slopes(results: list[dict[str, Any]]) -> dict[str, float]:
    """Return the cost of one more client, and the copies of the model that 1,000 clients make beyond 10."""
    found: dict[str, float] = {}
    for series in ("cohort", "everyone"):
        of = [r for r in results if r["series"] == series]
        if len(of) < 2:
            continue
        small, large = of[0], of[-1]
        more = large["clients"] - small["clients"]
        found[f"{series}: bytes a client"] = (large["own"] - small["own"]) / more
        found[f"{series}: microseconds a client"] = (large["seconds"] - small["seconds"]) / more * 1e6
        middle = next((r for r in of if r["clients"] == 1000), large)
        if series == "everyone":
            found["models"] = (middle["own"] - small["own"]) / small["model_bytes"]
            found["models' clients"] = middle["clients"]
    return found


def tell_slopes(found: dict[str, float], results: list[dict[str, Any]]) -> None:
    for series, words in (("cohort", "10 of them in a round"), ("everyone", "all in every round")):
        if f"{series}: bytes a client" in found:
            size, time = found[f"{series}: bytes a client"], found[f"{series}: microseconds a client"]
            print(
                f"one more client, {words}: {size:,.0f} bytes of memory, {time:,.1f} microseconds of a round"
            )
    if "models" in found:
        size = next(r["model_bytes"] for r in results if r["series"] == "everyone")
        clients = int(found["models' clients"])
        print(
            f"{clients:,} clients in every round take {found['models']:.1f} times the model ({size / MIB:.2f} MiB) "
            f"more memory than 10; a copy for each would be {clients - 10:,} times"
        )
    for r in results:
        if r["series"] == "w1":
            verdict = "reached" if r["outside"] < GOAL else "missed"
            print(
                f"time outside training with 10 clients and the simple CNN: {100 * r['outside']:.1f} % of a round "
                f"(goal: under {100 * GOAL:.0f} %, {verdict}); lanes wait {100 * r['imbalance']:.1f} % for the last client"
            )


def survey(chosen: list[Point], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All points, one after another, each told as it is done."""
    results: list[dict[str, Any]] = []
    began, total = time.perf_counter(), sum(p.cost for p in chosen)
    print(head(), flush=True)
    for number, point in enumerate(chosen):
        done, took = sum(p.cost for p in chosen[:number]), time.perf_counter() - began
        left = (total - done) * (took / done if done else 1)
        progress = f"[{number + 1}/{len(chosen)}] {point.series}, {point.name}; about {left:.0f} s left"
        print(progress, file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n", flush=True)
        results.append(child(point, arguments))
        if sys.stderr.isatty():
            print(" " * len(progress), file=sys.stderr, end="\r", flush=True)
        print(row(results[-1]), flush=True)
    return results


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="series to measure, with commas between")
    parser.add_argument("--quick", action="store_true", help="small federations and few rounds")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workers", type=int, default=0, help="lanes (0: one for each core)")
    parser.add_argument("--disk", help="folder for the runs' files (default: the system's temporary one)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = options()
    if arguments.child:
        point = Point(**json.loads(arguments.child))
        print(json.dumps(measure(point, arguments.device, arguments.workers, arguments.disk)), flush=True)
        return
    if platform.system() != "Linux":
        sys.exit("the memory of processes is read from /proc: this benchmark needs Linux")
    if arguments.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("skipped: this needs a CUDA device and a PyTorch that was built for it (docs/gpu.md)")
            return
    every = points(arguments.quick)
    names = list(dict.fromkeys(p.series for p in every))
    wanted = arguments.only.split(",") if arguments.only else names
    if unknown := set(wanted) - set(names):
        sys.exit(f"--only: there is no {min(unknown)}; there are {', '.join(names)}")
    results = survey([p for p in every if p.series in wanted], arguments)
    found = slopes(results)
    tell_slopes(found, results)
    if arguments.json:
        figures = {"cores": len(os.sched_getaffinity(0)), "points": results, "slopes": found}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
