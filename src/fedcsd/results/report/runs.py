"""The runs of a report on disk: finished, diverged, in training, or damaged."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedcsd.config.toml import FACTS
from fedcsd.data.partition import Counts
from fedcsd.errors import Divergence, UserError, no_run
from fedcsd.experiments.comparison_folder import run_name
from fedcsd.experiments.running import Run
from fedcsd.experiments.runs.archive import is_run, open_run
from fedcsd.experiments.runs.recorded import Change
from fedcsd.results.comparison import load_rows
from fedcsd.results.curves import History
from fedcsd.results.groups import by_label, folders, tell_skipped
from fedcsd.results.plots import flat
from fedcsd.results.report.charts import usable
from fedcsd.results.rows import Row

DAMAGE = (UserError, OSError, ValueError, TypeError, KeyError)
"""errors of reading a damaged run"""
WATCHED = ("config.toml", "metrics.jsonl", "summary.json", "diverged.json")


@dataclass(frozen=True)
class SeenRun:
    """One run on disk, as far as it can be read."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    raw: list[dict[str, Any]] = field(default_factory=list)
    """records as they are in metrics.jsonl"""
    summary: dict[str, Any] | None = None
    diverged: Divergence | None = None
    changes: tuple[Change, ...] = ()
    counts: Counts | None = None
    problem: str = ""
    """why it cannot be read"""

    @property
    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in self.config.items() if key not in FACTS}

    @cached_property
    def history(self) -> History:
        """Return every round; one that cannot be read has no values."""
        return flat(usable(self.raw))

    @property
    def ended(self) -> bool:
        return bool(self.summary) or self.diverged is not None

    @property
    def state(self) -> str:
        if self.problem:
            return f"damaged: {self.problem}"
        if self.diverged:
            return str(self.diverged)
        done = max((r.get("round", 0) for r in self.raw), default=0)
        return "finished" if self.summary else f"not finished: {done} of {self.settings['rounds']} rounds"

    def run(self) -> Run:
        """Return the run without its weights."""
        return Run(self.settings, self.raw, self.summary or {}, {}, self.path, self.diverged, self.changes)


@dataclass(frozen=True)
class ReportRuns:
    """All runs of a report, by label, with those that do not count."""

    groups: dict[str, list[SeenRun]]
    """by label: runs that differ in their seed only"""
    damaged: list[SeenRun]
    left: list[SeenRun]
    """runs with the settings and seed of another"""
    whole: bool
    """a finished comparison, or single runs that were asked for"""
    rows: list[Row] = field(default_factory=list)
    """of a finished comparison"""
    settings: dict[str, Any] = field(default_factory=dict)
    """that the runs of a finished comparison have in common"""


def read(folder: Path) -> SeenRun:
    try:
        run = open_run(folder)
        config, summary, end = run.config, run.summary, run.divergence
        int(config["seed"]), str(config["method"]["name"]), int(config["rounds"])
        if summary is not None:
            float(summary["final_accuracy"]), float(summary["seconds"]), int(summary.get("rounds", 0))
        return SeenRun(folder, config, run.history(), summary, end, tuple(run.changes), run.counts())
    except DAMAGE as error:
        return SeenRun(folder, problem=" ".join(str(error).split()) or type(error).__name__)


def find(paths: Sequence[Path], *, waiting: bool = False) -> ReportRuns:
    """Return the runs at these paths; a folder of runs, such as a comparison's, stands for all of them.

    A path without a run is an error, unless one waits for it.
    """
    if len(paths) == 1 and (paths[0] / "comparison.json").is_file():
        try:
            return _compared(paths[0])
        except DAMAGE:
            pass  # the runs themselves are there
    seen: dict[Path, SeenRun] = {}
    for path in paths:
        for folder in folders(path):
            if is_run(folder):
                seen.setdefault(folder.resolve(), read(folder))
            elif not waiting:
                raise no_run(path)
    tell_skipped(paths)
    whole, damaged = [s for s in seen.values() if not s.problem], [s for s in seen.values() if s.problem]
    if not whole and damaged and not waiting:
        raise UserError(f"{damaged[0].path} is damaged: {damaged[0].problem}")
    labels = by_label([open_run(s.path) for s in whole]) if whole else {}
    by_path = {s.path: s for s in whole}
    groups = {
        label: sorted((by_path[run.path] for run in some), key=lambda s: int(s.config["seed"]))
        for label, some in labels.items()
    }
    kept = {run.path for some in labels.values() for run in some}
    left = [s for s in whole if s.path not in kept]
    single = all(map(is_run, paths))
    return ReportRuns(groups, damaged, left, single)


def _compared(folder: Path) -> ReportRuns:
    """Return a finished comparison: its labels, in its order, and the runs that it names."""
    rows, seeds, settings = load_rows(folder)
    groups: dict[str, list[SeenRun]] = {}
    damaged: list[SeenRun] = []
    for row in rows:
        for seed in seeds:
            run = read(folder / run_name(row.label, seed))
            if run.problem:
                damaged.append(run)
            else:
                groups.setdefault(row.label, []).append(run)
    if not groups:
        raise UserError(f"{folder} holds no run any more")
    return ReportRuns(groups, damaged, [], True, rows, settings)


def stamp(paths: Sequence[Path]) -> str:
    """Return a text that changes when a file of these runs does."""
    found: list[Any] = []
    for path in paths:
        for folder in [path, *folders(path)]:
            for name in (*WATCHED, "comparison.json"):
                try:
                    state = (folder / name).stat()
                except OSError:
                    continue
                found.append((str(folder), name, state.st_mtime_ns, state.st_size))
    return json.dumps(found)
