"""The work that every contender does, as files: a folder of arrays and one JSON.

Needs only numpy and torch, since every contender's environment has those. The arrays lie in one file
each and are mapped into memory, so that contenders of several processes hold the images once.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

IMAGES = ("x_train", "y_train", "x_test", "y_test")
FORWARD_BATCH = 500


class SimpleCNN(nn.Module):
    """The network does the arithmetic of fedcsd's `simple_cnn`, line for line, for 28×28 images."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 4 * 4, 120)
        self.fc2 = nn.Linear(120, 84)
        self.classifier = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.classifier(x)  # type: ignore[no-any-return]


class DropoutCNN(nn.Module):
    """The network is the small CNN of pfl-research's CIFAR-10 benchmark: two 3×3 convolutions of 32 and 64 channels,
    one pooling, dropout, and a hidden layer of 128; 1.6 million weights for 32×32 images."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.hidden = nn.Linear(64 * 14 * 14, 128)
        self.classifier = nn.Linear(128, classes)
        for layer in (self.conv1, self.conv2, self.hidden, self.classifier):
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.dropout(F.max_pool2d(x, 2), 0.25, self.training)
        x = F.dropout(F.relu(self.hidden(x.flatten(1))), 0.5, self.training)
        return self.classifier(x)  # type: ignore[no-any-return]


NETWORKS: dict[str, Callable[[int, int], nn.Module]] = {"simple_cnn": SimpleCNN, "dropout_cnn": DropoutCNN}


@dataclass(frozen=True)
class Settings:
    """Settings of local training, which are the same for all."""

    network: str
    data: str
    batch_size: int
    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    classes: int = 10


@dataclass(frozen=True)
class Work:
    """A workload that is read into memory."""

    settings: Settings
    arrays: Mapping[str, Tensor]
    """x_train and x_test [N, C, H, W] uint8, y_train and y_test [N], scale and shift [C, 1, 1]"""
    parts: list[Tensor]
    """the rows of each client"""
    cohorts: list[list[int]]
    """the clients of each round"""
    weights: dict[str, Tensor]
    """the initial ones"""

    def images(self, x: Tensor) -> Tensor:
        """Pixels as the network sees them."""
        return torch.addcmul(self.arrays["shift"], x.float(), self.arrays["scale"])

    def client(self, number: int) -> tuple[Tensor, Tensor]:
        """Images and labels of a client."""
        rows = self.parts[number]
        return self.images(self.arrays["x_train"][rows]), self.arrays["y_train"][rows]

    def test(self) -> tuple[Tensor, Tensor]:
        return self.images(self.arrays["x_test"]), self.arrays["y_test"]

    def network(self) -> nn.Module:
        """The network with its initial weights."""
        module = NETWORKS[self.settings.network](self.arrays["x_train"].shape[1], self.settings.classes)
        module.load_state_dict(self.weights)
        return module

    def optimizer(self, module: nn.Module) -> torch.optim.SGD:
        s = self.settings
        return torch.optim.SGD(module.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)


class Batches:
    """Give shuffled batches of tensors in memory: an index for each batch, and no collating."""

    def __init__(self, x: Tensor, y: Tensor, size: int):
        self.x, self.y, self.size = x, y, size

    def __len__(self) -> int:
        return -(-len(self.y) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.split(torch.randperm(len(self.y)), self.size):
            yield self.x[rows], self.y[rows]


def choose_threads(work: Work) -> int:
    """Set PyTorch to one thread or to all cores', whichever trains the largest client's batches faster here.

    Small batches are often faster with one, and threads that wait for one another are slow on a busy machine.
    """
    number = max(range(len(work.parts)), key=lambda k: len(work.parts[k]))
    x, y = work.client(number)
    some = x[: 16 * work.settings.batch_size], y[: 16 * work.settings.batch_size]
    best: dict[int, float] = {}
    for _ in range(4):  # alternating, and the best of each: the first also warms up
        for threads in sorted({1, torch.get_num_threads(), *best}):
            torch.set_num_threads(threads)
            module = work.network()
            sgd = work.optimizer(module)
            began = time.perf_counter()
            for images, labels in Batches(*some, work.settings.batch_size):
                sgd.zero_grad()
                F.cross_entropy(module(images), labels).backward()  # type: ignore[no-untyped-call]
                sgd.step()
            best[threads] = min(best.get(threads, float("inf")), time.perf_counter() - began)
    chosen = min(best, key=lambda threads: best[threads])
    torch.set_num_threads(chosen)
    return chosen


def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    module.eval()
    with torch.no_grad():
        right = sum(
            int((module(some).argmax(1) == labels).sum())
            for some, labels in zip(torch.split(x, FORWARD_BATCH), torch.split(y, FORWARD_BATCH), strict=True)
        )
    return right / len(y)


def write(
    folder: Path,
    settings: Settings,
    arrays: Mapping[str, np.ndarray],
    parts: Sequence[np.ndarray],
    cohorts: Sequence[Sequence[int]],
    weights: Mapping[str, Tensor],
) -> None:
    """Put a workload where `read` finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
    np.savez(folder / "weights.npz", allow_pickle=False, **{n: w.numpy() for n, w in weights.items()})
    facts = {
        "settings": vars(settings),
        "arrays": sorted(arrays),
        "parts": [[int(row) for row in rows] for rows in parts],
        "cohorts": [[int(k) for k in some] for some in cohorts],
    }
    (folder / "workload.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def read(folder: Path) -> Work:
    facts = json.loads((folder / "workload.json").read_text(encoding="utf-8"))
    # Copy-on-write maps: PyTorch wants arrays it could write to, and pages nobody writes are shared.
    arrays = {
        name: torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False))
        for name in facts["arrays"]
    }
    with np.load(folder / "weights.npz", allow_pickle=False) as stored:
        weights = {name: torch.from_numpy(stored[name]) for name in stored.files}
    parts = [torch.tensor(rows) for rows in facts["parts"]]
    return Work(Settings(**facts["settings"]), arrays, parts, facts["cohorts"], weights)


@dataclass
class Marks:
    """Report the time and the accuracy at the end of each round."""

    out: Path
    times: list[float]
    accuracies: list[float]

    def round(self, accuracy: float) -> None:
        """Note the end of a round and its evaluation; the first call is before any training."""
        self.times.append(time.time())
        self.accuracies.append(float(accuracy))

    def write(self, **facts: Any) -> None:
        figures = {"times": self.times, "accuracies": self.accuracies, **facts}
        self.out.write_text(json.dumps(figures) + "\n", encoding="utf-8")


def arguments() -> tuple[Path, int, Marks]:
    """The workload's folder, the rounds (the one to warm up is among them), and where to report to."""
    folder, rounds, out = sys.argv[1:4]
    return Path(folder), int(rounds), Marks(Path(out), [], [])
