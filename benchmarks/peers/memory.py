"""Measure the memory of a process and all its descendants from /proc; shared pages count once (PSS)."""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
INTERVAL, SHARE = 0.2, 0.05  # seconds between looks; looking may take this share of the time at most


def processes() -> dict[int, tuple[int, int]]:
    """Return the parent and session of each process."""
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = int(fields[1]), int(fields[3])
    return found


def family(root: int) -> set[int]:
    """The process, its descendants, and whoever is of its session, should a parent have gone."""
    everyone = processes()
    members = {pid for pid, (_, session) in everyone.items() if pid == root or session == root}
    grown = True
    while grown:
        more = {pid for pid, (parent, _) in everyone.items() if parent in members} - members
        members |= more
        grown = bool(more)
    return members


def pss(pid: int) -> int:
    """Return the bytes of one process; 0 if it has ended."""
    with suppress(OSError, ValueError):
        for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class Peak(threading.Thread):
    """The largest memory of a family seen until it is told to stop."""

    def __init__(self, root: int):
        super().__init__(daemon=True)
        self.root, self.peak, self.over = root, 0, threading.Event()
        self.seen: set[int] = set()

    def look(self) -> None:
        members = family(self.root)
        self.seen |= members
        self.peak = max(self.peak, sum(pss(pid) for pid in members))

    def run(self) -> None:
        pause = 0.0
        while not self.over.wait(pause):
            began = time.perf_counter()
            self.look()
            pause = max(INTERVAL, (time.perf_counter() - began) / SHARE)

    def stop(self) -> int:
        self.over.set()
        self.join()
        return self.peak


def end(root: int, patience: float = 10.0) -> None:
    """Kill what is left of a family that we started in a session of its own, and wait until it is gone.

    A child that is killed lets go of its memory a moment later; the next run is not to begin before that.
    """
    members = family(root) - {os.getpid()}
    for pid in members:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + patience
    while any(pss(pid) for pid in members) and time.monotonic() < deadline:
        time.sleep(0.02)
