"""Measure how busy other programs keep the machine. Threads that wait for one another suffer most from that:
with load from elsewhere a plain loop of two threads was seen to take twenty times as long."""

import time
from pathlib import Path

BUSY = 0.25  # cores that others may use before a run is marked


def jiffies(stat: str) -> tuple[int, int]:
    """Return all ticks and the idle ticks of all cores, from the text of /proc/stat."""
    ticks = [int(field) for field in stat.splitlines()[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def busy_cores(cores: int, seconds: float = 1.0) -> float:
    """Return the cores in use over the next moment, while nothing of our own runs."""
    path = Path("/proc/stat")
    everything, idle = jiffies(path.read_text())
    time.sleep(seconds)
    later, idle_later = jiffies(path.read_text())
    return cores * (1 - (idle_later - idle) / max(1, later - everything))


def wait(cores: int, patience: float) -> float:
    """Wait until others leave the machine alone, at most so long; what they use then, in cores."""
    deadline = time.monotonic() + patience
    while (busy := busy_cores(cores)) > BUSY and time.monotonic() < deadline:
        time.sleep(2)
    return busy
