"""Seconds of a round on a GPU with either engine, beside the engine that `--engine auto` takes.

    python benchmarks/engines.py
    python benchmarks/engines.py --only simple_cnn --rounds 5

The rule of `auto` knows sizes only (`engine_for` in federation/backends/device.py). This benchmark
measures both engines on made-up images and marks the lines where the rule takes the slower one by more
than a tenth. The times are medians of whole rounds after a first one, in which steps are recorded.
Without a GPU it says so and ends.
"""

import argparse
import itertools
import math
import statistics

import torch
from gpu import Workload, made_up, prepared, rounds

from fedcsd.errors import UserError
from fedcsd.federation.backends.device import engine_for

MODELS = {"mlp": (28, 28), "simple_cnn": (28, 28), "alexnet": (64, 64, 3), "resnet18": (32, 32, 3)}
CLIENTS = (3, 10, 100)
METHODS = ("fedavg", "fedcsd")


def seconds(workload: Workload, method: str, engine: str, arguments: argparse.Namespace) -> float:
    """Return the median of a round; NaN if the engine refuses the workload."""
    values = {"engine": engine, "method": method}
    experiment = prepared(workload, made_up(workload), arguments.epochs, values)
    try:
        return statistics.median(rounds(experiment, arguments.rounds)[0])
    except UserError:
        return math.nan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(MODELS), help="models, of " + ", ".join(MODELS))
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, after one to warm up")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: this needs a CUDA device and a PyTorch that was built for it (docs/gpu.md)")
        return
    print(f"{'model':12}{'clients':>8}  {'method':8}{'graphs (s)':>12}{'stacked (s)':>12}  auto")
    for model, clients, method in itertools.product(arguments.only.split(","), CLIENTS, METHODS):
        workload = Workload("made up", model, clients, MODELS[model], 14_000, 10, ())
        took = {engine: seconds(workload, method, engine, arguments) for engine in ("graphs", "stacked")}
        network = prepared(workload, made_up(workload), 1, {}).network
        chosen = engine_for(clients, network)
        best = min(time for time in took.values() if not math.isnan(time))
        wrong = "" if took[chosen] <= 1.1 * best else "  slower"
        print(
            f"{model:12}{clients:8}  {method:8}{took['graphs']:12.3f}{took['stacked']:12.3f}  {chosen}{wrong}"
        )


if __name__ == "__main__":
    main()
