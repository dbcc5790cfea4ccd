"""Runs as the rows of a comparison's table: their numbers, and what a reader should know of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

from fedcsd.config import Settings
from fedcsd.config.settings import used
from fedcsd.config.toml import merge
from fedcsd.errors import Divergence
from fedcsd.experiments.archive import open_run
from fedcsd.experiments.provenance import code_now
from fedcsd.experiments.recorded import RecordedRun
from fedcsd.experiments.running import Run
from fedcsd.results.tables import Row

PERSONAL = "client_accuracy_personal_mean"
BLOWN_UP = 100  # times the loss of guessing, ln(classes)


class Ended(Protocol):
    """A run that has ended, with its weights or without them."""

    @property
    def history(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def diverged(self) -> Divergence | None: ...


@dataclass(frozen=True)
class About:
    """What the runs themselves do not say."""

    classes: int = 10
    untrained: frozenset[str] = frozenset()
    """labels of methods whose global model has a part that only clients train"""
    shared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """by label: options that were given for all methods together and differ from the defaults"""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """those that a reader wants to know"""
    notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """by label: what a reader should know of a method"""
    guess: float = 0.0
    """accuracy of always naming the largest class of the test data, in percent"""


def rows(runs: Mapping[str, Sequence[Run]], about: About | None = None) -> list[Row]:
    first = {run.settings["seed"]: 100 * run.accuracy for run in next(iter(runs.values()))}
    everything = [run for some in runs.values() for run in some]
    own = any(PERSONAL in run.summary or run.settings.get("holdout", 0) > 0 for run in everything)
    return [_row(label, some, first, own, about or About()) for label, some in runs.items()]


def _row(label: str, runs: Sequence[Run], first: Mapping[int, float], own: bool, about: About) -> Row:
    """Costs are of finished runs only: one that diverged early sent less and took less time."""
    accuracies = [100 * run.accuracy for run in runs]
    finished = [run.summary for run in runs if not run.diverged]

    def over_runs(value: Callable[[dict[str, Any]], float]) -> float | None:
        with suppress(KeyError, TypeError):  # a summary that lacks it
            return mean(map(value, finished)) if finished else None
        return None

    def notes(what: Callable[[Run], Sequence[str]]) -> list[str]:
        return [f"seed {run.settings['seed']}: {note}" for run in runs for note in what(run)]

    drifts = [drift for summary in finished if (drift := summary.get("mean_logit_drift")) is not None]
    some = f"drift was measured in {len(drifts)} of its {len(finished)} runs"
    partly = [some] if 0 < len(drifts) < len(finished) else []
    personal = any(PERSONAL in summary for summary in finished)
    key = PERSONAL if personal else "client_accuracy_mean"
    untrained = label in about.untrained
    ends = notes(lambda run: [str(run.diverged)] if run.diverged else [])
    mended, code = notes(lambda run: [str(c) for c in run.changes if c.mends]), notes(other_code)
    blown = notes(lambda run: blown_up(run, about.classes, untrained))
    return Row(
        label,
        accuracies,
        [a - first.get(run.settings["seed"], math.nan) for a, run in zip(accuracies, runs, strict=True)],
        mean(drifts) if drifts else None,
        over_runs(lambda summary: (summary["bytes_up"] + summary["bytes_down"]) / 1e6),
        over_runs(lambda summary: 100 * summary["best_accuracy"]),
        over_runs(lambda summary: summary["seconds"]),
        [math.nan if (a := run.summary.get(key)) is None else 100 * a for run in runs] if own else [],
        personal,
        [run.diverged for run in runs],
        [*about.notes.get(label, ()), *ends, *mended, *code, *blown, *partly],
        bool(mended),
        bool(code),
        bool(blown),
        untrained,
        dict(about.shared.get(label, {})),
        about.guess,
    )


def blown_up(run: Ended, classes: int, untrained: bool = False) -> list[str]:
    """A run whose loss is finite, and yet beyond anything that a model with a meaning could have.

    Of a global model with an untrained part the test loss says nothing; the clients' own loss does.
    """
    if run.diverged or not run.history:  # what was measured may be lost
        return []
    name = "train_loss" if untrained else "test_loss"
    loss = run.history[-1].get(name)
    loss = math.nan if loss is None else float(loss)
    if loss <= BLOWN_UP * math.log(max(classes, 2)) or (untrained and not math.isfinite(loss)):
        return []  # a round in which no client answered has no train loss
    shown = f"{loss:.2g}" if math.isfinite(loss) else "not finite"
    return [f"blew up: the {name.replace('_', ' ')} of its final round is {shown}"]


def other_code(run: Run | RecordedRun) -> list[str]:
    """Which rounds were trained with other code of one's own method or model than there is now, if any were."""
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


def told(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a comparison that a reader wants to know: the important ones, and all that are
    not the default. Of a path only its last part, for the table may be printed."""
    values = {"data": _choice(config["data"])}
    if config["train_size"]:
        values["train_size"] = config["train_size"]
    values["model"] = _choice(config["model"])
    partition = _choice(config["partition"])
    if partition != "dirichlet":
        values["partition"] = partition
    for option in fields(Settings):
        name, value, traits = option.name, config.get(option.name, option.default), option.metadata
        changed = value not in (option.default, "none") and traits["result"] and name != "seed"
        if (traits["stated"] or changed) and used(traits, partition.partition(" ")[0]):
            values.setdefault(name, value)
    return values


def _choice(choice: Any) -> str:
    """A choice by name, with its options."""
    table = {"name": choice} if isinstance(choice, str) else dict(choice)
    options = [f"{key}={_short(value)}" for key, value in table.items() if key != "name"]
    return _short(table["name"]) + (f" ({', '.join(options)})" if options else "")


def _short(value: Any) -> str:
    text = str(value)
    return Path(text).name if Path(text).is_absolute() else text
