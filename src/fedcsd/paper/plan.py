"""Plan the runs of a table or figure: their settings, where each lies, and how far it is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fedcsd.config import Settings
from fedcsd.config.options import build, plain
from fedcsd.config.settings import COMPONENTS, settings_where
from fedcsd.config.toml import merge
from fedcsd.errors import UserError, unknown
from fedcsd.experiments.choices import make_method
from fedcsd.experiments.resuming import continued
from fedcsd.experiments.running import Job, Run, begin
from fedcsd.experiments.runs import archive
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.methods import methods
from fedcsd.paper.exhibits import EXHIBITS, Exhibit, Point
from fedcsd.paper.scales import Choices


@dataclass(frozen=True)
class PlannedRun:
    """A planned run trains a point of the paper with one seed; it lies in a folder or an archive."""

    point: Point
    seed: int
    values: Mapping[str, Any]
    path: Path
    seconds: float
    """expected"""

    @property
    def label(self) -> str:
        return f"{self.point.label(_data(self.values))} seed {self.seed}"

    @property
    def begun(self) -> bool:
        return archive.is_run(self.path)

    @property
    def ended(self) -> bool:
        """Tell if the run is finished, has diverged, or lies in an archive."""
        ends = (self.path / name for name in ("summary.json", "diverged.json"))
        return self.path.parent.is_file() or any(end.exists() for end in ends)

    @property
    def seconds_left(self) -> float:
        """Return the expected seconds of the rounds that are not trained yet."""
        if self.ended:
            return 0.0
        try:
            done = (self.path / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return self.seconds
        return self.seconds * max(0.0, 1 - done / int(self.values["rounds"]))

    @property
    def state(self) -> str:
        """Return how far the run is, as text."""
        if run := self.run():
            return f"diverged in round {run.diverged.round}" if run.diverged else "done"
        if not self.begun:
            return "to do"
        folder = RunDirectory.open(self.path)
        return f"{folder.checkpoints.rounds_saved} of {folder.settings['rounds']} rounds"

    def job(self) -> Job | None:
        """Return the run ready to train; None if it is finished."""
        if not self.begun:
            return begin(self.values, out=self.path)
        changes = {key: self.values.get(key) for key in settings_where(on_resume="free")}
        return continued(self.path, changes=changes)

    def run(self) -> Run | None:
        """Return the run without its weights; None if it has not ended. Refuse a damaged run."""
        if not self.ended:
            return None
        run = archive.open_run(self.path)
        try:
            summary, end, history = run.summary or {}, run.divergence, run.history()
        except UserError as error:
            raise UserError(f"{error}, or remove {self.path} to train that run again") from None
        rounds = end.round - 1 if end else int(summary.get("rounds", 0))
        if [record.get("round") for record in history] != [*range(1, rounds + 1)]:
            raise UserError(
                f"{self.path / 'metrics.jsonl'} is damaged, rounds 1 to {rounds} should be in it: restore it, or "
                f"remove {self.path} to train that run again"
            )
        return Run(run.settings, history, summary, {}, self.path, end, tuple(run.changes))


Plan = Mapping[tuple[Point, int], PlannedRun]
"""The run of each point with each seed."""


def plan(exhibit: Exhibit, choices: Choices, out: Path) -> Plan:
    """Return the runs of a table or figure. Points with the same settings share one run.

    A run lies in its folder in `out`/runs, or else in the archive of `out`.
    """
    seeds = choices.seeds[:1] if exhibit.first_seed_only else choices.seeds
    archived = archive.read(out / archive.FILE) if (out / archive.FILE).is_file() else {}
    found = {}
    for point in exhibit.points:
        for seed in seeds:
            values = choices.values(point, seed)
            name = _run_name(point, seed, values)
            path = out / "runs" / name
            if name in archived and not path.exists():
                path = archived[name].path
            found[point, seed] = PlannedRun(point, seed, values, path, choices.seconds(point))
    return found


def _data(values: Mapping[str, Any]) -> str:
    return Path(values["data"]["name"]).stem


def _run_name(point: Point, seed: int, values: Mapping[str, Any]) -> str:
    skew = f"beta{point.beta:g}" if point.beta is not None else f"pool{point.pool:g}"
    return f"{point.facts['method'].replace(':', '-')}-{_data(values)}-{skew}-seed{seed}-{digest(values)}"


def digest(values: Mapping[str, Any]) -> str:
    """Return a digest of the settings that change a result and are not the default.

    An option with its default value and one left out are the same, and a new setting changes no digest.
    """
    values = merge(COMPONENTS, values)
    settings = plain(build(Settings, {key: value for key, value in values.items() if key not in COMPONENTS}))
    usual, relevant = Settings(), settings_where(result=True)
    told = {key: v for key, v in settings.items() if key in relevant and v != getattr(usual, key)}
    told |= {key: values[key] for key in ("data", "model", "partition")}
    told["method"] = _method(json.dumps(values["method"], sort_keys=True))
    return blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=6).hexdigest()


@cache
def _method(table: str) -> dict[str, Any]:
    """Return a method's name and those of its options that are not the default."""
    options = json.loads(table)
    made, usual = plain(make_method(options)), plain(methods.load(options["name"])())
    return {"name": options["name"], **{key: v for key, v in made.items() if usual[key] != v}}


Filter = Mapping[str, frozenset[str]]
"""By key of --only: the wanted values."""


def parse_only(text: str) -> Filter:
    """Return the filter of a text such as `method=fedcsd,beta=0.5,beta=5`."""
    wanted: dict[str, set[str]] = {}
    known = _facts()
    key = ""
    for part in filter(None, (part.strip() for part in text.split(","))):
        before = key
        key, equals, value = (side.strip() for side in part.partition("="))
        if not equals:
            meant = f"write {before}={part}" if before else "such as method=fedcsd,beta=0.5"
            raise UserError(f"--only takes KEY=VALUE, not {part!r}: {meant}")
        if key not in known:
            raise unknown("key of --only", key, known)
        value = _plain_number(value) if key != "method" else value
        if value not in known[key]:
            raise unknown(f"{key} of the paper's experiments", value, known[key])
        wanted.setdefault(key, set()).add(value)
    return {key: frozenset(values) for key, values in wanted.items()}


def _plain_number(text: str) -> str:
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


@cache
def _facts() -> dict[str, set[str]]:
    """Return all values of each key."""
    facts = [
        item for exhibit in EXHIBITS.values() for point in exhibit.points for item in point.facts.items()
    ]
    return {key: {value for other, value in facts if other == key} for key, _ in facts}


def chosen(point: Point, only: Filter) -> bool:
    """Tell if a point passes the filter: it needs one of the values of every key."""
    facts = {key: _plain_number(value) for key, value in point.facts.items()}
    return all(facts.get(key) in values for key, values in only.items())
