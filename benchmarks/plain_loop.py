"""Compare seconds per round with those of a plain PyTorch loop, measured in the same run.

    python benchmarks/plain_loop.py

The work: the simple CNN, 20,000 images of 28×28 dealt to 10 clients with label skew, batches of 64,
two local epochs a round. The plain loop is what one writes first: a deepcopy of the model for each
client, a DataLoader, torch.optim.SGD, an average of state dicts; it may use all cores inside PyTorch.
Both train the same batches' worth of images and evaluate on the same test images. Rounds are
interleaved and medians reported, since the machine may be noisy. The images are made here (a noisy
pattern a class), since speed does not depend on what they show; both accuracies are printed.
"""

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedcsd.data import Dataset
from fedcsd.experiments.experiment import Experiment, prepare
from fedcsd.federation.backends.local import LocalBackend, cores
from fedcsd.federation.rounds import Federation
from fedcsd.methods.fedavg import FedAvg


def images(samples: int, seed: int = 0) -> Dataset:
    random = np.random.default_rng(seed)
    patterns = random.integers(0, 120, (10, 28, 28))
    y = random.integers(0, 10, samples + 2000)
    x = (patterns[y] + random.integers(0, 136, (len(y), 28, 28))).astype(np.uint8)
    return Dataset.of_arrays(x[:samples], y[:samples], x[samples:], y[samples:], name="patterns")


class PlainCNN(nn.Module):
    """The simple CNN is made of PyTorch's own layers: the same function, parameters and names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.classifier = nn.Linear(256, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        return self.classifier(x)  # type: ignore[no-any-return]


def plain_model(experiment: Experiment) -> nn.Module:
    """Return a copy of the experiment's model without the fused kernels of the simple CNN."""
    if experiment.tables["model"]["name"] != "simple_cnn":
        return copy.deepcopy(experiment.network.module)
    model = PlainCNN()
    model.load_state_dict(experiment.network.module.state_dict())
    return model


class PlainLoop:
    """FedAvg as one writes it first."""

    def __init__(self, experiment: Experiment):
        data, self.settings = experiment.data, experiment.settings
        self.model = plain_model(experiment)
        x = data.images(data.x_train)
        self.clients = [
            TensorDataset(x[torch.from_numpy(p)], data.y_train[torch.from_numpy(p)]) for p in experiment.parts
        ]
        self.test = DataLoader(TensorDataset(data.images(data.x_test), data.y_test), batch_size=500)
        self.accuracy = 0.0

    def round(self) -> None:
        states: list[tuple[int, dict[str, Tensor]]] = []
        for client in self.clients:
            local = copy.deepcopy(self.model)
            local.train()
            sgd = torch.optim.SGD(local.parameters(), lr=self.settings.lr, momentum=0.9, weight_decay=1e-5)
            loader = DataLoader(client, batch_size=self.settings.batch_size, shuffle=True)
            for _ in range(self.settings.epochs):
                for x, y in loader:
                    sgd.zero_grad()
                    F.cross_entropy(local(x), y).backward()  # type: ignore[no-untyped-call]
                    sgd.step()
            states.append((len(client), local.state_dict()))
        total = sum(n for n, _ in states)
        mean = {name: torch.stack([s[name] * (n / total) for n, s in states]).sum(0) for name in states[0][1]}
        self.model.load_state_dict(mean)
        self.evaluate()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            right = sum(int((self.model(x).argmax(1) == y).sum()) for x, y in self.test)
        self.accuracy = right / len(self.test.dataset)  # type: ignore[arg-type]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each, after one to warm up")
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()

    values = {"data": "given from Python", "epochs": 2, "beta": 0.5, "lr": 0.01, "model": "simple_cnn"}
    experiment = prepare(values, method=FedAvg(), data=images(arguments.samples))
    plain = PlainLoop(experiment)
    backend = LocalBackend(experiment.worker(), experiment.network.layout, arguments.workers)
    federation = Federation(experiment, backend)
    contenders: dict[str, Callable[[], object]] = {
        "plain PyTorch loop": plain.round,
        "fedcsd": federation.step,
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(arguments.rounds + 1):
        for name, work in contenders.items():
            took = seconds(work)
            if number:
                times[name].append(took)
    backend.close()

    medians = {name: statistics.median(t) for name, t in times.items()}
    accuracies = {"plain PyTorch loop": plain.accuracy, "fedcsd": federation.record["test_accuracy"]}
    ratio = medians["fedcsd"] / medians["plain PyTorch loop"]
    print(f"{'':22}{'s a round':>10}{'range':>16}{'images/s':>12}{'accuracy':>10}")
    for name, median in medians.items():
        spread = f"{min(times[name]):.2f} to {max(times[name]):.2f}"
        speed = arguments.samples * 2 / median
        print(f"{name:22}{median:10.2f}{spread:>16}{speed:12,.0f}{100 * accuracies[name]:9.1f}%")
    how = f"{arguments.workers} workers; {torch.get_num_threads()} threads in the plain loop"
    print(f"fedcsd takes {ratio:.2f} of the plain loop's time ({how})")
    if arguments.json:
        facts = {
            "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(),
            "cores": cores(),
        }
        figures = {
            "seconds": times,
            "median": medians,
            "ratio": ratio,
            "accuracy": accuracies,
            "facts": facts,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
