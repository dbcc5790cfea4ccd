"""Fixtures that run the program as a user does, and the marks of tests."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("helpers")  # before anything of it is imported
from helpers.program import Fedcsd, FedcsdRun, Forks, pass_on_no_ignored_signals  # noqa: E402

pass_on_no_ignored_signals()

settings.register_profile("fedcsd", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedcsd")
torch.set_num_threads(1)

NO_BROWSER = "no browser: the report's pages need chromium and chromium-driver (apt-get install chromium chromium-driver)"


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def fedcsd(tmp_path: Path, forks: Forks) -> Fedcsd:
    """Run `fedcsd …` in an empty folder."""

    def call(*arguments: str, timeout: float = 120) -> "subprocess.CompletedProcess[str]":
        return forks.run(arguments, tmp_path, timeout, {**os.environ, "COLUMNS": "100"})

    return call


@pytest.fixture
def fedcsd_run(fedcsd: Fedcsd, tmp_path: Path) -> FedcsdRun:
    """Run `fedcsd run …` to its end, with one short round by default, and return the run's folder."""

    def call(*arguments: str, out: str = "r", rounds: int = 1, epochs: int = 1) -> Path:
        length = ("--rounds", str(rounds), "--epochs", str(epochs))
        result = fedcsd("run", *arguments, *length, "--out", out)
        assert result.returncode == 0, result.stderr
        return tmp_path / out

    return call


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of a method that keeps states, in memory."""
    from helpers.states import run

    path = tmp_path_factory.mktemp("states") / "whole"
    run(path)
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs the program; start with Flower, whose tests wait more than they compute."""
    for item in items:
        if "forks" in item.fixturenames:  # type: ignore[attr-defined]
            item.add_marker("program")
    items.sort(key=lambda item: item.get_closest_marker("flower") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what this machine cannot run; in CI a missing browser is an error."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("browser") and not (shutil.which("chromium") and shutil.which("chromedriver")):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(NO_BROWSER)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one line if the tests in a browser were left out."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests were left out for want of a browser: {NO_BROWSER}")
