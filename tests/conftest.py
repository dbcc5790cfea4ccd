"""What many tests need: a small skewed federation, and the program as a user runs it."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import Forks
from hypothesis import HealthCheck, settings

from fedcsd.data import Dataset
from fedcsd.experiments.experiment import prepare
from fedcsd.federation.backends.local import LocalBackend
from fedcsd.federation.rounds import Experiment
from fedcsd.messages import Request

settings.register_profile("fedcsd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedcsd")
torch.set_num_threads(1)

NO_BROWSER = "no browser: the report's pages need chromium and chromium-driver (apt-get install chromium chromium-driver)"

Fedcsd = Callable[..., "subprocess.CompletedProcess[str]"]
FedcsdRun = Callable[..., Path]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def fedcsd(tmp_path: Path, forks: Forks) -> Fedcsd:
    """Runs `fedcsd …` in an empty folder."""

    def call(*arguments: str, timeout: float = 120) -> "subprocess.CompletedProcess[str]":
        return forks.run(arguments, tmp_path, timeout, {**os.environ, "COLUMNS": "100"})

    return call


@pytest.fixture
def fedcsd_run(fedcsd: Fedcsd, tmp_path: Path) -> FedcsdRun:
    """Runs `fedcsd run …` to its end, one short round unless told, and gives the run's folder."""

    def call(*arguments: str, out: str = "r", rounds: int = 1, epochs: int = 1) -> Path:
        length = ("--rounds", str(rounds), "--epochs", str(epochs))
        result = fedcsd("run", *arguments, *length, "--out", out)
        assert result.returncode == 0, result.stderr
        return tmp_path / out

    return call


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of a method that keeps states, in memory."""
    from test_states import run

    path = tmp_path_factory.mktemp("states") / "whole"
    run(path)
    return path


def blobs(samples: int = 120, classes: int = 3, seed: int = 0) -> Dataset:
    """Points around one centre a class: learned in a moment, and skewed as one likes."""
    random = np.random.default_rng(seed)
    centres = random.normal(size=(classes, 6)) * 2
    labels = random.integers(0, classes, 2 * samples)
    points = (centres[labels] + random.normal(size=(2 * samples, 6))).astype(np.float32)
    return Dataset.of_arrays(
        points[:samples], labels[:samples], points[samples:], labels[samples:], name="blobs", classes=classes
    )


def small(method: Any = None, **values: Any) -> Experiment:
    """A checked experiment on blobs."""
    defaults = {"clients": 4, "min_samples": 2, "rounds": 2, "epochs": 2, "batch_size": 16, "beta": 0.5}
    values = {**defaults, "data": "given from Python", **values}
    given = {"data": values.pop("dataset", None) or blobs(), "model": values.pop("factory", None)}
    return prepare(values, method=method, **given)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A suite that left out the browser says so in one line."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests were left out for want of a browser: {NO_BROWSER}")


def assert_found_by_workers(experiment: Experiment) -> None:
    """Forked workers and those that share nothing with us train the same."""
    request = Request(0, "train", {"weights": experiment.weights})
    results = []
    for start in ("fork", "spawn"):
        backend = LocalBackend(experiment.site(), experiment.network.layout, 1, start)
        try:
            results.append([reply.weights.flat for reply in backend.ask(request, range(2), {})])
        finally:
            backend.close()
    assert all(map(torch.equal, *results))
