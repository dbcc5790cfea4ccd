"""Measure images per second on a GPU: engines and precisions, a plain PyTorch loop, and a ceiling.

    python benchmarks/gpu.py --json results/speed/gpu.json
    python benchmarks/gpu.py --only cnn10,cnn100 --rounds 5

Whole rounds are timed: dealing, local training, aggregation, evaluation on the test data. The plain
loop is what one writes first, with the data on the device already and torch.optim.SGD; 60 of its steps
are timed, without averaging, evaluation and augmentation. The ceiling is one model trained without a
federation on batches of 640, ten clients' worth, as recorded steps: the faster of two rounds of two
epochs. All run in this process, in turn; medians of the rounds after the first are printed, and final
accuracies beside them, so that nothing is fast by doing less.

The paper's workloads: the simple CNN on MNIST with 10 and 100 clients and ResNet-50 on CIFAR-100 with
10, Dirichlet 0.5, batches of 64, 5 local epochs. Without these data sets (FEDCSD_DATA) made-up images
of the same shapes serve. Without a GPU it says so and ends.
"""

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_loop import plain_model
from torch import Tensor
from torch.nn import functional as F

from fedcsd.data import Dataset
from fedcsd.errors import UserError
from fedcsd.experiments.experiment import Experiment, prepare
from fedcsd.experiments.runs.provenance import commit
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.rounds import Federation
from fedcsd.methods import methods


@dataclass(frozen=True)
class Workload:
    data: str
    model: str
    clients: int
    shape: tuple[int, ...]
    samples: int
    classes: int
    contenders: tuple[tuple[str, dict[str, Any]], ...]
    ceiling: dict[str, Any] = field(default_factory=dict)


def _engines(*precisions: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    return tuple(
        (f"{engine}, {precision}", {"engine": engine, "precision": precision})
        for precision in precisions
        for engine in ("graphs", "stacked")
    )


AUTO: tuple[str, dict[str, Any]] = ("auto, fp32", {})
CSD = ("auto, fp32, FedCSD", {"method": "fedcsd"})
TURNED = ("auto, fp32, augmented", {"augment": "office"})
TURNED_CSD = ("auto, fp32, augmented, FedCSD", {"augment": "office", "method": "fedcsd"})
BF16 = {"precision": "bf16"}
DEEP = (
    ("graphs, tf32", {"precision": "tf32"}),
    ("graphs, bf16", BF16),
    ("graphs, bf16, compiled", BF16 | {"compile": True}),
    ("graphs, bf16, FedCSD", BF16 | {"method": "fedcsd"}),
    ("graphs, bf16, not augmented", BF16 | {"augment": "none"}),
    ("graphs, bf16, not augmented, FedCSD", BF16 | {"augment": "none", "method": "fedcsd"}),
)
WORKLOADS = {
    "cnn10": Workload(
        "mnist",
        "simple_cnn",
        10,
        (28, 28),
        70_000,
        10,
        (AUTO, *_engines("fp32", "tf32", "bf16"), CSD, TURNED, TURNED_CSD),
    ),
    "cnn100": Workload("mnist", "simple_cnn", 100, (28, 28), 70_000, 10, (AUTO, *_engines("fp32"), CSD)),
    "resnet": Workload("cifar100", "resnet50", 10, (32, 32, 3), 60_000, 100, DEEP, BF16),
}


def made_up(workload: Workload) -> Dataset:
    random = np.random.default_rng(0)
    patterns = random.integers(0, 120, (workload.classes, *workload.shape))
    y = random.integers(0, workload.classes, workload.samples)
    x = (patterns[y] + random.integers(0, 136, (len(y), *workload.shape), dtype=np.uint8)).astype(np.uint8)
    cut = len(y) * 6 // 7
    return Dataset.of_arrays(x[:cut], y[:cut], x[cut:], y[cut:], name="made up")


def prepared(workload: Workload, data: Dataset | None, epochs: int, values: dict[str, Any]) -> Experiment:
    options = {
        "data": workload.data if data is None else "given from Python",
        "model": workload.model,
        "clients": workload.clients,
        "beta": 0.5,
        "epochs": epochs,
        "device": "cuda",
        **{name: value for name, value in values.items() if name != "method"},
    }
    return prepare(options, method=methods.load(values.get("method", "fedavg"))(), data=data)


def rounds(experiment: Experiment, number: int) -> tuple[list[float], dict[str, Any]]:
    """Seconds of whole rounds, and what is known after the last."""
    settings = experiment.settings
    torch.cuda.reset_peak_memory_stats()
    backend = DeviceBackend(experiment.worker(), settings.engine, settings.workers)
    federation = Federation(experiment, backend)
    seconds = []
    try:
        for _ in range(number + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            federation.step()
            seconds.append(time.perf_counter() - began)
    finally:
        backend.close()
    facts = {
        "engine": backend.engine,
        "accuracy": federation.record["test_accuracy"],
        "gigabytes": torch.cuda.max_memory_allocated() / 1e9,
        "first_round": seconds[0],
        "evaluating": federation.record["seconds_evaluating"],
    }
    return seconds[1:], facts


def plain_loop(experiment: Experiment, tf32: bool, steps: int = 60) -> float:
    """Images a second of local training as one writes it first, over so many steps."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    settings, data = experiment.settings, experiment.data.to(torch.device("cuda"))
    model = plain_model(experiment).cuda()
    model.train()
    sgd = torch.optim.SGD(
        model.parameters(), settings.lr, settings.momentum, weight_decay=settings.weight_decay
    )

    def batches() -> Iterator[Tensor]:
        while True:
            order = torch.from_numpy(np.random.default_rng(0).permutation(len(data.y_train))).cuda()
            yield from torch.split(order, settings.batch_size)[:-1]

    began = 0.0
    for step, rows in enumerate(batches()):
        if step == 10:
            torch.cuda.synchronize()
            began = time.perf_counter()
        if step == 10 + steps:
            break
        sgd.zero_grad()
        F.cross_entropy(model(data.images(data.x_train[rows])), data.y_train[rows]).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    torch.cuda.synchronize()
    return steps * settings.batch_size / (time.perf_counter() - began)


def ceiling(workload: Workload, data: Dataset | None, values: dict[str, Any]) -> float:
    """Return the images per second of one model on batches of 640."""
    alone = {**values, "batch_size": 640, "engine": "graphs", "partition": "iid", "clients": 1}
    experiment = prepared(workload, data, 2, alone)
    seconds, _ = rounds(experiment, 2)
    return 2 * len(experiment.data.y_train) / min(seconds)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    workload = WORKLOADS[name]
    data = None
    try:
        prepared(workload, None, 1, {})
    except UserError:
        data = made_up(workload)
    first = prepared(workload, data, 1, {})
    images = len(first.data.y_train) * arguments.epochs
    plain = {"fp32": plain_loop(first, False), "tf32": plain_loop(first, True)}
    found: dict[str, Any] = {"data": first.data.name, "plain": plain, "contenders": {}}
    print(
        f"\n{name}: {workload.model} on {first.data.name}, {workload.clients} clients, {arguments.epochs} epochs"
    )
    print(f"{'':40}{'images/s':>12}{'× plain':>9}{'s a round':>11}{'first':>8}{'GB':>7}{'accuracy':>10}")
    for precision, speed in plain.items():
        print(f"{'plain loop, ' + precision:40}{speed:12,.0f}{speed / plain['tf32']:9.1f}")
    for title, values in workload.contenders:
        if arguments.contender and arguments.contender not in title:
            continue
        seconds, facts = rounds(prepared(workload, data, arguments.epochs, values), arguments.rounds)
        speed = images / statistics.median(seconds)
        found["contenders"][title] = {"seconds": seconds, "images_per_second": speed, **facts}
        shown = f"{title} ({facts['engine']})" if title.startswith("auto") else title
        print(
            f"{shown:40}{speed:12,.0f}{speed / plain['tf32']:9.1f}{statistics.median(seconds):11.3f}"
            f"{facts['first_round']:8.1f}{facts['gigabytes']:7.2f}{100 * facts['accuracy']:9.1f}%",
            flush=True,
        )
    found["ceiling"] = ceiling(workload, data, workload.ceiling)
    print(
        f"{'ceiling: one model, batches of 640':40}{found['ceiling']:12,.0f}{found['ceiling'] / plain['tf32']:9.1f}"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, of " + ", ".join(WORKLOADS))
    parser.add_argument("--contender", default="", help="only those with this in their name")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each, after one to warm up")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: this needs a CUDA device and a PyTorch that was built for it (docs/gpu.md)")
        return
    facts = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rounds": arguments.rounds,
        "epochs": arguments.epochs,
    }
    figures = {"facts": facts, "workloads": {}}
    for name in arguments.only.split(","):
        figures["workloads"][name] = measure(name, arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
