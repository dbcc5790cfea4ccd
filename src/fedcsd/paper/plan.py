"""Which runs a table or figure needs, where each lies, and how far it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fedcsd.config import Settings
from fedcsd.config.options import build, plain
from fedcsd.config.settings import COMPONENTS, settings_where
from fedcsd.config.toml import merge
from fedcsd.errors import Divergence, UserError, unknown
from fedcsd.experiments import archive
from fedcsd.experiments.archive import open_run
from fedcsd.experiments.choices import make_method
from fedcsd.experiments.comparison import Trial
from fedcsd.experiments.run_folder import RunDirectory
from fedcsd.experiments.running import Job
from fedcsd.methods import methods
from fedcsd.paper.exhibits import EXHIBITS, Exhibit, Point
from fedcsd.paper.scales import Choices


@dataclass(frozen=True)
class Planned:
    """One run: a point of the paper with a seed, and the folder that its settings name."""

    point: Point
    seed: int
    values: Mapping[str, Any]
    path: Path
    seconds: float
    """it takes, roughly"""

    @property
    def label(self) -> str:
        return f"{self.point.label(_data(self.values))} seed {self.seed}"

    @property
    def _training(self) -> Trial:
        return Trial(self.label, self.seed, dict(self.values), {}, self.path, overwrite=False)

    @property
    def ended(self) -> bool:
        """Whether there is nothing to train: finished, diverged, or in an archive."""
        return self.path.parent.is_file() or any(
            (self.path / name).exists() for name in ("summary.json", "diverged.json")
        )

    @property
    def left(self) -> float:
        """Seconds that training what it lacks takes, roughly, whoever does it."""
        if self.ended:
            return 0.0
        try:
            done = (self.path / "metrics.jsonl").read_bytes().count(b"\n")
        except OSError:
            return self.seconds
        return self.seconds * max(0.0, 1 - done / int(self.values["rounds"]))

    def job(self) -> Job | None:
        """What is to be trained; None if it is finished."""
        return self._training.job()

    @property
    def state(self) -> str:
        """How far it is, in words."""
        if not self.ended and not self._training.exists:
            return "to do"
        if outcome := Outcome.of(self):
            return f"diverged in round {outcome.diverged.round}" if outcome.diverged else "done"
        run = RunDirectory.open(self.path)
        return f"{run.checkpoints.rounds_saved} of {run.settings['rounds']} rounds"


@dataclass(frozen=True)
class Outcome:
    """A run that has ended, without its weights."""

    path: Path
    settings: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    diverged: Divergence | None
    mended: tuple[str, ...]
    where: Mapping[str, Any]
    """the machine it was begun on, and the versions there"""

    @classmethod
    def of(cls, run: Planned) -> "Outcome | None":
        """None while the run has not ended; what is damaged is refused."""
        if not run.ended:
            return None
        there = open_run(run.path)
        again = f"restore it, or remove {run.path} to train that run again"
        try:
            summary, diverged = there.summary, there.divergence
            history = there.history()
        except UserError as error:
            raise UserError(f"{error}, or remove {run.path} to train that run again") from None
        rounds = diverged.round - 1 if diverged else int((summary or {}).get("rounds", 0))
        if [record.get("round") for record in history] != [*range(1, rounds + 1)]:
            raise UserError(
                f"{run.path / 'metrics.jsonl'} is damaged, rounds 1 to {rounds} should be in it: {again}"
            )
        config = there.config
        package = config["facts"]["code"]["package"]
        versions = {**config.get("versions", {}), "package": package}
        where = {"host": config.get("host", {}), "versions": versions}
        return cls(
            run.path,
            there.settings,
            history,
            diverged,
            tuple(str(c) for c in there.changes if c.mends),
            where,
        )


def plan(exhibit: Exhibit, choices: Choices, out: Path) -> dict[tuple[Point, int], Planned]:
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
            found[point, seed] = Planned(point, seed, values, path, choices.seconds(point))
    return found


def _data(values: Mapping[str, Any]) -> str:
    return Path(values["data"]["name"]).stem


def _run_name(point: Point, seed: int, values: Mapping[str, Any]) -> str:
    skew = f"beta{point.beta:g}" if point.beta is not None else f"pool{point.pool:g}"
    return f"{point.facts['method'].replace(':', '-')}-{_data(values)}-{skew}-seed{seed}-{digest(values)}"


def digest(values: Mapping[str, Any]) -> str:
    """Tells settings apart that make another result. Defaults are left out, so that an option spelled
    out and one left alone are the same, and so that a new setting of a later version changes nothing."""
    text = json.dumps(matters(values), sort_keys=True)
    return blake2b(text.encode(), digest_size=6).hexdigest()


def matters(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make a result what it is and are not the default."""
    values = merge(COMPONENTS, values)
    settings = build(Settings, {key: value for key, value in values.items() if key not in COMPONENTS})
    usual, relevant = Settings(), settings_where(result=True)
    found: dict[str, Any] = {
        key: value
        for key, value in plain(settings).items()
        if key in relevant and value != getattr(usual, key)
    }
    found |= {key: values[key] for key in ("data", "model", "partition")}
    return {**found, "method": _method(json.dumps(values["method"], sort_keys=True))}


@cache
def _method(table: str) -> dict[str, Any]:
    options = json.loads(table)
    method = make_method(options)
    usual = plain(methods.load(options["name"])())
    return {
        "name": options["name"],
        **{key: value for key, value in plain(method).items() if usual[key] != value},
    }


Filter = Mapping[str, frozenset[str]]


def parse_only(text: str) -> Filter:
    """`method=fedcsd,beta=0.5,beta=5` as the values that are wanted of each; different keys go together."""
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
    known: dict[str, set[str]] = {}
    for exhibit in EXHIBITS.values():
        for point in exhibit.points:
            for key, value in point.facts.items():
                known.setdefault(key, set()).add(value)
    return known


def chosen(point: Point, only: Filter) -> bool:
    facts = {key: _plain_number(value) for key, value in point.facts.items()}
    return all(facts.get(key) in values for key, values in only.items())
