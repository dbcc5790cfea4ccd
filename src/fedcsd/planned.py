"""The runs that a comparison is to have: kept in its folder until its tables are there."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fedcsd.runs import write_whole

FILE = "planned.json"


@dataclass(frozen=True)
class Unfinished:
    """A comparison that is not finished: what it is to have."""

    methods: list[str]
    seeds: list[int]
    runs: list[str]
    """names of their folders"""

    @classmethod
    def of(cls, folder: Path) -> "Unfinished | None":
        """None where no comparison was cut off."""
        with suppress(OSError, ValueError, TypeError):
            return cls(**json.loads((folder / FILE).read_text(encoding="utf-8")))
        return None

    def write(self, folder: Path) -> None:
        write_whole(folder / FILE, (json.dumps(asdict(self), indent=2) + "\n").encode())

    def left(self, folder: Path) -> Sequence[str]:
        """The runs that have not ended."""
        ends = ("summary.json", "diverged.json")
        return [run for run in self.runs if not any((folder / run / end).exists() for end in ends)]
