"""`fedcsd reproduce --jobs`: the other processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SLOW = """
import sys, time
if any("spawn_main" in argument for argument in sys.orig_argv):
    time.sleep(60)
"""  # as where importing PyTorch takes its time


def test_ctrl_c_while_other_processes_start_is_one_line(tmp_path: Path) -> None:
    arguments = ["reproduce", "table4", "--scale", "smoke", "--stand-in", "cifar100=digits", "--jobs", "2"]
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow/sitecustomize.py").write_text(SLOW)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'slow'}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "fedcsd", *arguments, "--workers", "1", "--rounds", "500"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not any(b"spawn_main" in _command(pid) for pid in children.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)  # which is the same to a shell
    assert errors.strip().startswith("interrupted")
    assert errors.strip().count("\n") == 0


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
