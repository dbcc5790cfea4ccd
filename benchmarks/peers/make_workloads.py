"""Makes the three workloads with fedcsd's own data, partitions, weights and cohorts."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import workload
from workload import NETWORKS, Settings

from fedcsd import seeds
from fedcsd.config import Settings as Config
from fedcsd.data import Dataset, load, split
from fedcsd.errors import UserError
from fedcsd.federation.cohort import cohort

TEST = 2000
Rows = list[np.ndarray]


def images(samples: int, shape: tuple[int, ...], seed: int = 0) -> Dataset:
    """Make images of a noisy pattern for each of ten classes."""
    random = np.random.default_rng(seed)
    patterns = random.integers(0, 120, (10, *shape))
    y = random.integers(0, 10, samples + TEST)
    x = (patterns[y] + random.integers(0, 136, (len(y), *shape))).astype(np.uint8)
    return Dataset.of_arrays(x[:samples], y[:samples], x[samples:], y[samples:], name="made-up patterns")


def real_or_made(name: str, samples: int, shape: tuple[int, ...], folder: Path | None) -> Dataset:
    """Return the first test images of a data set and a random part of its training images."""
    try:
        data = load(name, {}, folder)
    except UserError as error:
        print(f"{name} cannot be had ({error}); made-up images take its place", file=sys.stderr)
        return images(samples, shape)
    return data.smaller(samples, seeds.rng(0, "train size"))


def arrays_of(data: Dataset) -> dict[str, np.ndarray]:
    """Return the contents of the files."""
    assert data.scale is not None
    assert data.shift is not None
    return {
        "x_train": data.x_train.numpy(),
        "y_train": data.y_train.numpy(),
        "x_test": data.x_test.numpy()[:TEST],
        "y_test": data.y_test.numpy()[:TEST],
        "scale": data.scale.numpy(),
        "shift": data.shift.numpy(),
    }


def skewed(labels: np.ndarray, clients: int) -> Rows:
    """Deal rows with Dirichlet label skew, beta 0.5."""
    config = Config(clients=clients, beta=0.5)
    return list(split(labels, config, {"name": "dirichlet"}, None))


def even(labels: np.ndarray, clients: int) -> Rows:
    """Deal the same number of random rows to each client."""
    return list(np.random.default_rng(0).permutation(len(labels)).reshape(clients, -1))


def make(
    folder: Path,
    settings: Settings,
    data: Dataset,
    deal: Callable[[np.ndarray, int], Rows],
    clients: int,
    a_round: int,
    rounds: int,
) -> None:
    arrays = arrays_of(data)
    parts = deal(arrays["y_train"], clients)
    config = Config(clients=clients, participation=a_round / clients)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = NETWORKS[settings.network](data.shape[0], settings.classes)
    cohorts = [cohort(config, number) for number in range(rounds)]
    workload.write(folder, settings, arrays, parts, cohorts, network.state_dict())


def w1(folder: Path, rounds: int, data_dir: Path | None) -> None:
    """Make W1: ten skewed clients with 20,000 digits, all in every round."""
    data = real_or_made("mnist", 20_000, (1, 28, 28), data_dir)
    settings = Settings("simple_cnn", data.name, 64, 2, 0.01, 0.9, 1e-5)
    make(folder, settings, data, skewed, 10, 10, rounds)


def w2(folder: Path, rounds: int, data_dir: Path | None) -> None:
    """Make W2: 200 clients with 50 digits each, 20 in a round."""
    data = real_or_made("mnist", 10_000, (1, 28, 28), data_dir)
    settings = Settings("simple_cnn", data.name, 10, 1, 0.05, 0.9, 1e-5)
    make(folder, settings, data, even, 200, 20, rounds)


def w3(folder: Path, rounds: int, data_dir: Path | None) -> None:
    """Make W3, pfl-research's CIFAR-10 set-up: 1,000 clients with 50 images of 3×32×32, 50 in a round.

    The images are made up: what they show does not change the speed, and these are learnt in few rounds,
    so that the accuracies say whether all did the same.
    """
    data = images(50_000, (3, 32, 32))
    settings = Settings("dropout_cnn", data.name, 10, 1, 0.1, 0.0, 0.0)
    make(folder, settings, data, even, 1000, 50, rounds)


WORKLOADS = {"W1": w1, "W2": w2, "W3": w3}
