"""Watch the memory of a process and its children from outside, for scale.py."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def family(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in children.read_text().split():
                yield from family(int(child))


def memory(pid: int) -> tuple[int, int]:
    """Return the bytes of a process and its children, in all and without files; shared pages count once.

    Nothing if a process came or went meanwhile: pages that it shares would count twice."""
    total = own = 0
    processes = list(family(pid))
    for each in processes:
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()
        except OSError:
            return 0, 0
        sizes = {name: int(rest.split()[0]) for name, _, rest in (s.partition(":") for s in lines[1:])}
        total += sizes.get("Pss", 0) * 1024
        own += (sizes.get("Pss", 0) - sizes.get("Pss_File", 0)) * 1024
    return (total, own) if list(family(pid)) == processes else (0, 0)


class Memory(threading.Thread):
    """The peaks of a child's memory, while it wants to be watched."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.pid, self.stage, self.over = pid, "", False
        self.peaks = {"before": (0, 0), "rounds": (0, 0)}
        self.watching, self.looking = threading.Event(), threading.Lock()

    def run(self) -> None:
        while self.watching.wait() and not self.over:
            self.look()
            time.sleep(0.01)

    def look(self) -> None:
        with self.looking:
            stage, found = self.stage, memory(self.pid)
            if stage and stage == self.stage:
                self.peaks[stage] = max(self.peaks[stage], found, key=lambda both: both[1])

    def hear(self, line: str) -> bool:
        """Do what a line of the child's says about watching, if it does."""
        if line not in (*self.peaks, "look away"):
            return False
        self.look()
        if line == "look away":
            self.watching.clear()
        else:
            self.stage = line
            self.watching.set()
        return True

    def end(self) -> dict[str, int]:
        self.over = True
        self.watching.set()
        self.join()
        names = {"before": ("before", "before_own"), "rounds": ("peak", "own")}
        return {
            name: size for stage in names for name, size in zip(names[stage], self.peaks[stage], strict=True)
        }
