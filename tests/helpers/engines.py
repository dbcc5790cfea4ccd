"""Experiments and methods that tests of engines use."""

import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcsd.data import Dataset
from fedcsd.experiments.experiment import Experiment, prepare
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.rounds import Federation
from fedcsd.methods import Method
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client


def pictures(samples: int = 300, side: int = 16) -> Dataset:
    random = np.random.default_rng(0)
    patterns = random.integers(0, 120, (10, side, side))
    y = random.integers(0, 10, samples + 60)
    x = (patterns[y] + random.integers(0, 136, (len(y), side, side))).astype(np.uint8)
    return Dataset.of_arrays(x[:samples], y[:samples], x[samples:], y[samples:], name="patterns")


def experiment(method: Method, given: Dataset | None = None, **values: Any) -> Experiment:
    chosen = {
        "data": "given from Python",
        "clients": 6,
        "beta": 0.5,
        "epochs": 2,
        "batch_size": 16,
        "participation": 0.7,
        "min_samples": 1,
        "model": "simple_cnn",
        "lr": 0.05,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prepare({**chosen, **values}, method=method, data=given or pictures())


def close(one: Federation, other: Federation, tolerance: float = 2e-5) -> None:
    for name, value in one.server.values.items():
        mine, yours = (getattr(v, "flat", v) for v in (value, other.server.values[name]))
        if isinstance(mine, Tensor) and mine.is_floating_point():
            torch.testing.assert_close(mine, yours, rtol=tolerance, atol=tolerance)
    for name, value in one.record.items():
        if isinstance(value, float) and not name.startswith("seconds"):
            assert other.record[name] == pytest.approx(value, abs=1e-2 if "accuracy" in name else 1e-4), name


class Enclosed(FedAvg):
    """A method that gives a change of the gradient with a tensor enclosed."""

    def train(self, client: Client, weights: Any) -> Any:
        return client.train(weights, self.loss, gradient=lambda w, g: g.add_(w - weights.parameters))


class Wrong(FedAvg):
    """A method that fails at one client."""

    def train(self, client: Client, weights: Any) -> Any:
        if client.number == 3:
            raise KeyError("mine")
        return super().train(client, weights)


class Assigning(nn.Module):
    """A model that assigns new tensors to its buffers, one of which is not saved."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(256))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.head = nn.Linear(256, classes)
        self.read: list[tuple[int, int]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if self.training:
            self.read.append((self.mean.data_ptr(), self.count.data_ptr()))
            self.mean, self.count = 0.9 * self.mean + 0.1 * x.mean(0), self.count + 1
        return self.head((x - self.mean) * (1 + 1 / (1 + self.count)))


def assigning(**values: Any) -> Experiment:
    chosen = {"data": "given from Python", "partition": "iid", "clients": 4, "epochs": 2, "batch_size": 16}
    return prepare({**chosen, **values}, method=FedAvg(), data=pictures(), model=Assigning)


@contextmanager
def interrupted(after: float) -> Iterator[None]:
    """Press Ctrl-C after so many seconds, and check that it ends the block."""
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # whoever was here may have left another
    timer = threading.Timer(after, signal.pthread_kill, (main, signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)


def trained(prepared: Experiment, engine: str = "", rounds: int = 3) -> Federation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = prepared.settings
        backend = DeviceBackend(prepared.worker(), engine or settings.engine, settings.workers)
        federation = Federation(prepared, backend)
        for _ in range(rounds):
            federation.step()
    backend.close()
    return federation
