"""Measure the cost of a round of each method relative to FedAvg's, in seconds and bytes.

    python benchmarks/overhead.py                     # a table
    python benchmarks/overhead.py --json overhead.json

Simple CNN on made-up 28×28 images, 4 clients of 2,000, batches of 64, five local epochs, one thread, or
with `--device cuda` a GPU. Since machines are noisy, the methods take turns round by round, each round is
compared with FedAvg's of the same turn, and the median of those ratios counts; evaluation is left out. So
are the first rounds, in which methods have nothing to remember yet and a GPU records its steps.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from plain_loop import images

from fedcsd.data import Dataset
from fedcsd.experiments.experiment import prepare
from fedcsd.experiments.runs.provenance import commit, environment
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.rounds import Federation
from fedcsd.methods import methods

CLIENTS = 4


def federation(name: str, data: Dataset, options: argparse.Namespace) -> Federation:
    """Train one client after another in one process, so that only arithmetic is timed."""
    values = {
        "method": name,
        "clients": CLIENTS,
        "partition": "iid",
        "epochs": options.epochs,
        "augment": options.augment,
        "device": options.device,
        "model": "simple_cnn",
        "data": "given from Python",
    }
    experiment = prepare(values, data=data)
    engine = "eager" if options.device == "cpu" else "auto"
    return Federation(experiment, DeviceBackend(experiment.worker(), engine))


def measure(names: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Median seconds of a round, what it is of FedAvg's, and bytes of the last one, by method."""
    data = images(CLIENTS * options.samples)
    federations = {name: federation(name, data, options) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    left_out = 1 if options.device == "cpu" else 3
    for _ in range(options.rounds + left_out):
        for name, each in federations.items():
            record = each.step()
            seconds[name].append(record["seconds"] - record["seconds_evaluating"])
    found = {}
    for name, each in federations.items():
        size = CLIENTS * each.server.weights.nbytes
        mine, plain = seconds[name][left_out:], seconds["fedavg"][left_out:]
        ratios = sorted(one / other for one, other in zip(mine, plain, strict=True))
        found[name] = {
            "seconds": statistics.median(mine),
            "ratio": statistics.median(ratios),
            "middle_half": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
            "models_down": each.record["bytes_down"] / size,
            "models_up": each.record["bytes_up"] / size,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--methods", default=",".join(methods.names))
    parser.add_argument("--samples", type=int, default=2000, help="of each client")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--augment", default="none", help="none, cifar or office")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ["fedavg", *(n for n in options.methods.split(",") if n != "fedavg")]
    found = measure(names, options)
    print(
        "| method | median seconds a round | of FedAvg's in the same turn, median | models down | models up |"
    )
    print("|---|---|---|---|---|")
    for name, row in found.items():
        print(
            f"| {name} | {row['seconds']:.3f} | {row['ratio']:.2f} | {row['models_down']:.2f} | {row['models_up']:.2f} |"
        )
    if options.json:
        told = {"settings": {**vars(options), "json": str(options.json)}, "commit": commit(), **environment()}
        options.json.write_text(json.dumps({**told, "methods": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
