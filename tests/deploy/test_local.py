"""Test that nothing of what `fedcsd deploy local` started stays after its end."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def of(folder: Path) -> list[int]:
    """Return the processes that have this folder in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"FLWR_HOME={folder}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.flower
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_however_it_ends(how: signal.Signals, tmp_path: Path) -> None:
    command = [
        "-m",
        "fedcsd",
        "deploy",
        "local",
        "--nodes",
        "1",
        "--rounds",
        "50",
        "--epochs",
        "1",
        "--out",
        "run",
    ]
    process = subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    until = time.monotonic() + 300
    early = {
        signal.SIGINT: "metrics.jsonl",
        signal.SIGTERM: "config.toml",
        signal.SIGKILL: ".deploy/status-1.json",
    }
    wanted = tmp_path / "run" / early[how]
    while not wanted.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < until
        time.sleep(0.1)
    assert of(tmp_path)
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    if how is signal.SIGKILL:
        until = time.monotonic() + 60  # those that are left notice by themselves
        while of(tmp_path) and time.monotonic() < until:
            time.sleep(0.2)
    else:
        assert process.returncode == 130
        assert "go on with: fedcsd deploy local --resume" in said
    assert not of(tmp_path)
