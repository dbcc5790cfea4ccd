"""Test the other processes of `fedcsd reproduce --jobs`."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedcsd.experiments.runs.run_folder import RunDirectory

Started = tuple[subprocess.Popen[str], str]
"""The command, and the process id of the other one."""

SLOW = """
import sys, time
if any("spawn_main" in argument for argument in sys.orig_argv):
    time.sleep(60)
"""  # as where importing PyTorch takes its time


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Start `fedcsd reproduce` with two processes, and wait until the second one is there."""
    groups = []

    def start(env: Mapping[str, str]) -> Started:
        arguments = ["table4", "--scale", "smoke", "--stand-in", "cifar100=digits", "--jobs", "2"]
        process = subprocess.Popen(
            [sys.executable, "-m", "fedcsd", "reproduce", *arguments, "--workers", "1", "--rounds", "5000"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
            start_new_session=True,
        )
        groups.append(process.pid)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        return process, waited(
            lambda: [pid for pid in children.read_text().split() if b"spawn_main" in _command(pid)]
        )[0]

    yield start
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def waited(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 60
    while not (answer := found()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


@pytest.mark.slow
def test_ctrl_c_while_other_processes_start_is_one_line(
    tmp_path: Path, started: Callable[..., Started]
) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/sitecustomize.py").write_text(SLOW)
    process, _ = started({"PYTHONPATH": f"{tmp_path / 'slow'}:{os.environ.get('PYTHONPATH', '')}"})
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)  # which is the same to a shell
    assert errors.strip().startswith("interrupted")
    assert errors.strip().count("\n") == 0


@pytest.mark.slow
def test_no_process_goes_on_alone(tmp_path: Path, started: Callable[..., Started]) -> None:
    """The other process ends if the first is killed, and its run can be taken up."""
    process, other = started({})
    waited(lambda: len([*tmp_path.glob("**/metrics.jsonl")]) == 2)
    (log,) = tmp_path.glob("**/logs/job-2.log")
    waited(lambda: re.search(r"digits β 0\.\d+ seed 0: round \d+/5000  accuracy", log.read_text()))
    process.kill()
    process.communicate(timeout=60)
    waited(lambda: b"spawn_main" not in _command(other))
    for folder in {file.parent for file in tmp_path.glob("**/metrics.jsonl")}:
        run = RunDirectory(folder)
        run.lock()
        run.unlock()


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
