"""The folder of a comparison holds its files, its runs and the plan of what is left to train."""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fedcsd.errors import UserError
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.files import names_in, write_whole

PLANNED = "planned.json"
FILES = (*(f"comparison.{end}" for end in ("md", "csv", "tex", "json")), "curves.png", "report.html", PLANNED)
LONGEST = 255  # bytes of a folder's name


@dataclass(frozen=True)
class Unfinished:
    """A plan of a comparison, which stays in its folder until the tables are written."""

    methods: list[str]
    seeds: list[int]
    runs: list[str]
    """names of the runs' folders"""
    rounds: int
    """of each run"""

    @classmethod
    def of(cls, folder: Path) -> "Unfinished | None":
        """Return the plan in a folder, or None if no comparison was cut off there."""
        with suppress(OSError, ValueError, TypeError):
            return cls(**json.loads((folder / PLANNED).read_text(encoding="utf-8")))
        return None

    def write(self, folder: Path) -> None:
        write_whole(folder / PLANNED, (json.dumps(asdict(self), indent=2) + "\n").encode())

    def left(self, folder: Path) -> Sequence[str]:
        """Return the names of the runs that have not ended."""
        return [run for run in self.runs if not ended(RunDirectory(folder / run), self.rounds)]


def ended(run: RunDirectory, rounds: int) -> bool:
    """Tell if nothing is left to train: the run diverged, or has finished this many rounds."""
    return run.divergence is not None or (run.summary is not None and run.summary["rounds"] >= rounds)


def run_name(label: str, seed: int) -> str:
    return f"{label.replace(':', '-').replace('/', '_')}-seed{seed}"


def check_folder(folder: Path, runs: Sequence[tuple[str, int]]) -> None:
    """Refuse a folder with a run or other files in it, and labels that do not name a folder each."""
    taken: dict[str, str] = {}
    for label, seed in runs:
        name = run_name(label, seed)
        if len(os.fsencode(name)) > LONGEST:
            raise UserError(
                f"{label[:20] + '…'!r} is too long for the name of a folder: choose a shorter label"
            )
        if (other := taken.setdefault(name, label)) != label:
            raise UserError(f"{other!r} and {label!r} would both be in {name}: choose other labels")
    if (folder / "config.toml").is_file():
        raise UserError(f"{folder} holds a run, not a comparison: choose another --out")
    strange = sorted(name for name in names_in(folder) - {"lock"} if not name.startswith("."))
    if strange and not _is_comparison(folder):
        raise UserError(f"{folder} holds other files ({strange[0]}): choose another --out")


def _is_comparison(folder: Path) -> bool:
    """Tell if a folder has the files of a comparison, or the runs of one that was cut off."""
    with suppress(OSError, ValueError):
        content = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
        return isinstance(content, dict) and {"seeds", "rows"} <= content.keys()
    return bool(Unfinished.of(folder)) or any(folder.glob("*-seed*/config.toml"))
