"""The runs of a method as one row of a comparison, with notes on single runs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from fedcsd.config.toml import merge
from fedcsd.errors import Divergence
from fedcsd.experiments.running import Run
from fedcsd.experiments.runs.archive import open_run
from fedcsd.experiments.runs.provenance import code_now
from fedcsd.experiments.runs.recorded import RecordedRun
from fedcsd.measurements import MEASUREMENTS
from fedcsd.messages import finite
from fedcsd.results.tables import NOTHING, Cell, Mark, Number, known, plain, spread

PERSONAL, LOCAL = "client_accuracy_personal_mean", "client_accuracy_local_mean"
GUESSING = 0.1  # share of what guessing gets right (or wrong, if that is less) that counts as no learning
BLOWN_UP = 100  # times the loss of guessing, ln(classes)


@dataclass(frozen=True)
class Row:
    """One method's results over the seeds; lists have one entry a seed."""

    label: str
    accuracies: list[float]
    """final test accuracy of each seed, in percent; NaN for a run that diverged"""
    differences: list[float]
    """the same less the first method's, seed by seed; NaN where one of the two diverged"""
    measured: dict[str, list[float]] = field(default_factory=dict)
    """other measurements with a column, in their units; NaN for a run that diverged"""
    own: list[float] = field(default_factory=list)
    """accuracy on the clients' own test data in percent, mean over clients; empty if nothing was measured"""
    personal: bool = False
    """`own` is of each client's own model, not of the global one"""
    diverged: list[Divergence | None] = field(default_factory=list)
    """None for a run that is finished"""
    notes: list[str] = field(default_factory=list)
    """on single runs"""
    mended: bool = False
    """a run had its settings changed after a divergence"""
    other_code: bool = False
    """a run was trained, wholly or partly, with other code than the method's own file has now"""
    blew_up: bool = False
    """a run ended with a loss that is finite and meaningless"""
    untrained: bool = False
    """clients train a part of the global model for themselves only, as in FedPer"""
    shared: dict[str, Any] = field(default_factory=dict)
    """options that were given for all methods together (--set method.…) and change this one"""
    guess: float = 0.0
    """accuracy of always naming the largest class of the test data, in percent; 0 if that is not known"""

    @property
    def accuracy(self) -> str:
        return "".join(map(plain, self.accuracy_cell()))

    @property
    def difference(self) -> str:
        return "".join(map(plain, self.difference_cell()))

    @property
    def marked(self) -> bool:
        """Tell whether a run is not what its row says."""
        return self.mended or self.other_code or self.blew_up

    @property
    def guessing(self) -> bool:
        """Tell whether the global models learned nothing, as far as their accuracy shows."""
        values = [] if self.personal or self.untrained else known(self.accuracies)
        margin = GUESSING * min(self.guess, 100 - self.guess)
        return bool(values) and self.guess > 0 and mean(values) <= self.guess + margin

    def values(self, name: str) -> list[float]:
        """Return a measurement seed by seed, in its unit."""
        own = {"test_accuracy": self.accuracies, "own_accuracy": self.own}
        return own[name] if name in own else self.measured.get(name, [])

    def comparable(self, name: str) -> bool:
        """Tell whether every seed has this measurement and was trained as asked."""
        values = self.values(name)
        return not self.marked and not self.guessing and bool(values) and all(map(math.isfinite, values))

    def accuracy_cell(self, best: bool = False) -> Cell:
        values, ends = known(self.accuracies), [end.round for end in self.diverged if end]
        if not values:
            first, last = min(ends, default=0), max(ends, default=0)
            return [f"diverged (round {first})" if first == last else f"diverged (rounds {first} to {last})"]
        some = f" ({len(ends)} of {len(self.accuracies)} diverged)" * bool(ends)
        return [Number(spread(values), best), *[Mark("†")] * self.marked, some]

    def difference_cell(self) -> Cell:
        """Return the paired difference, and over how many seeds it is if the accuracy has more."""
        pairs = known(self.differences)
        if not pairs:
            return [NOTHING]
        fewer = len(pairs) < len(known(self.accuracies))
        return [Number(spread(pairs, "+")), f" ({len(pairs)} of {len(self.differences)} seeds)" * fewer]

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = finite(asdict(self))
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Row":
        def numbers(values: Sequence[float | None]) -> list[float]:
            return [math.nan if value is None else value for value in values]

        lists = {name: numbers(content[name]) for name in ("accuracies", "differences", "own")}
        measured = {name: numbers(values) for name, values in content["measured"].items()}
        ends = [end and Divergence(**end) for end in content["diverged"]]
        return cls(**{**content, **lists, "measured": measured, "diverged": ends})


@dataclass(frozen=True)
class About:
    """Facts for a comparison's table that the runs do not have."""

    classes: int = 10
    untrained: frozenset[str] = frozenset()
    """labels of methods whose global model has a part that only clients train"""
    shared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """by label: options that were given for all methods together and differ from the defaults"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """those that a reader wants to know"""
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """by label: notes on a method"""
    guess: float = 0.0
    """accuracy of always naming the largest class of the test data, in percent"""


def rows(runs: Mapping[str, Sequence[Run]], about: About | None = None) -> list[Row]:
    """Return a row for each method, compared with the first one."""
    first = {run.settings["seed"]: 100 * run.accuracy for run in next(iter(runs.values()))}
    everything = [run for some in runs.values() for run in some]
    own = any(PERSONAL in run.summary or run.settings.get("holdout", 0) > 0 for run in everything)
    return [_row(label, some, first, own, about or About()) for label, some in runs.items()]


def _row(label: str, runs: Sequence[Run], first: Mapping[int, float], own: bool, about: About) -> Row:
    """Return the row of a method; costs are of finished runs only, for a diverged one sent and took less."""
    accuracies = [100 * run.accuracy for run in runs]

    def notes(what: Callable[[Run], Sequence[str]]) -> list[str]:
        return [f"seed {run.settings['seed']}: {note}" for run in runs for note in what(run)]

    measured = {}
    for row in MEASUREMENTS.values():
        values = [math.nan if run.diverged else row.of_run(run.summary) for run in runs]
        if row.column and row.name not in ("test_accuracy", "own_accuracy") and known(values):
            measured[row.name] = values
    finished, untrained = sum(not run.diverged for run in runs), label in about.untrained
    partly = [
        f"{MEASUREMENTS[name].column} was measured in {len(known(values))} of its {finished} runs"
        for name, values in measured.items()
        if MEASUREMENTS[name].option and len(known(values)) < finished
    ]
    ends = notes(lambda run: [str(run.diverged)] if run.diverged else [])
    mended, code = notes(lambda run: [str(c) for c in run.changes if c.mends]), notes(other_code)
    blown = notes(lambda run: blown_up(run, about.classes, untrained))
    return Row(
        label=label,
        accuracies=accuracies,
        differences=[
            a - first.get(r.settings["seed"], math.nan) for a, r in zip(accuracies, runs, strict=True)
        ],
        measured=measured,
        own=[MEASUREMENTS["own_accuracy"].of_run(run.summary) for run in runs] if own else [],
        personal=any(PERSONAL in run.summary for run in runs),
        diverged=[run.diverged for run in runs],
        notes=[*about.notes.get(label, ()), *ends, *mended, *code, *blown, *partly],
        mended=bool(mended),
        other_code=bool(code),
        blew_up=bool(blown),
        untrained=untrained,
        shared=dict(about.shared.get(label, {})),
        guess=about.guess,
    )


def blown_up(run: Run, classes: int, untrained: bool = False) -> list[str]:
    """Return a note on a run whose final loss is beyond anything that a model with a meaning could have.

    The test loss of a global model with an untrained part says nothing; the clients' own loss does.
    """
    if run.diverged or not run.history:  # what was measured may be lost
        return []
    row = MEASUREMENTS["train_loss" if untrained else "test_loss"]
    loss = row.value(run.history[-1])
    if loss <= BLOWN_UP * math.log(max(classes, 2)) or (untrained and not math.isfinite(loss)):
        return []  # a round in which no client answered has no train loss
    shown = f"{loss:.2g}" if math.isfinite(loss) else "not finite"
    return [f"blew up: the {row.title} of its final round is {shown}"]


def other_code(run: Run | RecordedRun) -> list[str]:
    """Return notes on rounds that were trained with other code of one's own method or model than there is now."""
    if run.path is None:
        return []
    names, directory = merge(run.settings), open_run(run.path)
    used = {what: code for what in ("method", "model") if (code := directory.code(what))}
    return [note for what, code in used.items() for note in _other(run.path, what, names[what]["name"], code)]


def _other(path: Path, what: str, name: str, used: Sequence[tuple[int, str]]) -> list[str]:
    now = code_now(what, name) or used[-1][1]  # without the file, only a change in mid-run can be seen
    ends = [begin for begin, _ in used[1:]]
    other = [
        _rounds(begin + 1, end) for (begin, code), end in zip(used, [*ends, None], strict=True) if code != now
    ]
    if not other:
        return []
    which = f"{' and '.join(other)} " if len(used) > 1 else ""
    home = Path(name.rpartition(":")[0] or name).name
    return [
        f"{which}trained with other code than {home} has now; to train only this run again, "
        f"remove its folder {path.name} and give the same command"
    ]


def _rounds(first: int, last: int | None) -> str:
    if last is None:
        return f"rounds {first} on"
    return f"rounds {first} to {last}" if last > first else f"round {first}"
