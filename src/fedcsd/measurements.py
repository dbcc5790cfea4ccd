"""Define the measurements of a run, one row each, for summaries, tables, plots, the report and trackers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Measurement:
    """Describe one measurement: its unit, its direction, and the places that show it."""

    name: str
    title: str
    """name on an axis, without the unit"""
    unit: str = ""
    factor: float = 1.0
    """from the recorded number to the unit"""
    scope: Literal["run", "round", "domain", "client", "class"] = "round"
    """`run` is in the summary only; `domain` is a group of numbers by name; `client` and `class` are lists"""
    better: Literal["", "higher", "lower"] = ""
    """a result has a direction: tables show its deviation and mark the best"""
    chart: Literal["", "accuracy", "own", "domains", "drift", "mask", "target", "method", "cost"] = ""
    """chart of the report that shows it (results/report/charts.py)"""
    short: str = ""
    """name in the switch of that chart"""
    summary: Literal["", "final", "mean", "sum"] = ""
    """number in a run's summary: of the final round, or over all rounds"""
    column: str = ""
    """heading in the table of a comparison"""
    note: str = ""
    """explains that column below the table"""
    digits: int = 2
    panel: bool = False
    """has a panel in curves.png"""
    option: str = ""
    """option that a run needs to record it"""
    log: bool = False
    reference: float | None = None
    """value that a chart marks with a line"""
    derived: Callable[[Mapping[str, Any]], float] | None = None
    """computes it from a record or summary, for what is not recorded itself"""
    own: bool = False
    """measured by a method, which may use its name"""

    @property
    def axis(self) -> str:
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def key(self) -> str:
        """Name in a run's summary: `test_loss` is `final_loss` there, a mean over rounds is `mean_…`."""
        if self.summary == "final":
            return self.name.replace("test_", "final_", 1)
        return f"mean_{self.name}" if self.summary == "mean" else self.name

    def value(self, record: Mapping[str, Any]) -> float:
        """Return the number in a flat record, NaN if there is none."""
        return number(self.derived(record) if self.derived else record.get(self.name))

    def shown(self, record: Mapping[str, Any]) -> float:
        """Return the number in the unit of the axis."""
        return self.factor * self.value(record)

    def of_run(self, summary: Mapping[str, Any]) -> float:
        """Return the number of a whole run in the unit of the axis, NaN if its summary has none."""
        return self.factor * number(self.derived(summary) if self.derived else summary.get(self.key))


def number(value: Any) -> float:
    """Return a number as it is, and NaN for anything else."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _sent(record: Mapping[str, Any]) -> float:
    return (number(record.get("bytes_down")) + number(record.get("bytes_up"))) / 1e6


def _own_accuracy(record: Mapping[str, Any]) -> float:
    """Return the accuracy of each client's own model where there is one, else of the global model."""
    return number(record.get("client_accuracy_personal_mean", record.get("client_accuracy_mean")))


UNIFORM = 1e-7  # the smallest distance from a uniform target that is shown: about the rounding of float32


def _target_distance(record: Mapping[str, Any]) -> float:
    """Return `1 − H(q) / log C`."""
    entropy = number(record.get("target_entropy"))
    return entropy if math.isnan(entropy) else max(UNIFORM, 1 - entropy)


M, DRIFT, PERCENT = Measurement, "--track-drift", ("%", 100.0)
_ROWS = (
    M("round", "round"),
    M("rounds", "rounds", scope="run"),
    M("test_accuracy", "test accuracy", *PERCENT, better="higher", chart="accuracy", summary="final",
      column="accuracy", panel=True),
    M("test_loss", "test loss", better="lower", chart="accuracy", summary="final"),
    M("train_loss", "train loss", better="lower", chart="accuracy"),
    M("mean_of_last_ten_accuracy", "mean of the last ten rounds", *PERCENT, scope="run"),
    M("own_accuracy", "accuracy on clients' own data", *PERCENT, better="higher", column="own data",
      panel=True, derived=_own_accuracy),
    M("client_accuracy_mean", "global model on own data", *PERCENT, better="higher", chart="own", short="mean",
      summary="final"),
    M("client_accuracy_worst_decile", "global model, worst tenth of clients", *PERCENT, better="higher", chart="own",
      short="worst tenth", summary="final"),
    M("client_accuracy_personal_mean", "own models on own data", *PERCENT, better="higher", chart="own",
      short="own models", summary="final"),
    M("client_accuracy_personal_worst_decile", "own models, worst tenth of clients", *PERCENT, better="higher",
      chart="own", short="own models, worst tenth", summary="final"),
    M("client_accuracy_personal_std", "own models, standard deviation over clients", *PERCENT),
    M("client_accuracy_local_mean", "local models on own data", *PERCENT, better="higher", chart="own",
      short="local models"),
    M("client_accuracy_local_worst_decile", "local models, worst tenth of clients", *PERCENT, better="higher"),
    M("client_accuracy_local_std", "local models, standard deviation over clients", *PERCENT),
    M("client_accuracy_std", "standard deviation over clients", *PERCENT, chart="own", short="spread"),
    M("held_accuracy_local", "local models on held-out data", *PERCENT, better="higher"),
    M("domain_mean", "mean over domains", *PERCENT, better="higher", chart="domains", short="mean"),
    M("domain_accuracy", "accuracy on domain", *PERCENT, scope="domain", better="higher", chart="domains"),
    M("class_accuracies", "accuracy of each class", *PERCENT, scope="class", better="higher"),
    M("client_accuracies", "global model on each client's own data", *PERCENT, scope="client", better="higher"),
    M("client_accuracies_personal", "own models on each client's own data", *PERCENT, scope="client", better="higher"),
    M("logit_drift", "logit drift (KL, global ‖ local)", chart="drift", short="logits", summary="mean",
      column="logit drift", note="KL(global ‖ local) after local training, mean over all rounds", digits=3, panel=True, option=DRIFT),
    M("feature_drift", "feature drift", chart="drift", short="features", summary="mean", option=DRIFT),
    M("local_accuracy", "local models' test accuracy", *PERCENT, better="higher", chart="drift",
      short="local accuracy", summary="mean", panel=True, option=DRIFT),
    M("local_train_accuracy", "local models on training data", *PERCENT, better="higher", chart="drift",
      short="local, train data", option=DRIFT),
    M("train_accuracy", "global model on training data", *PERCENT, better="higher", chart="drift",
      short="global, train data", option=DRIFT),
    M("mask_rate", "soft labels kept", *PERCENT, chart="mask", short="kept", own=True),
    M("wrong_filtered", "wrong soft labels filtered", *PERCENT, chart="mask", short="wrong filtered", own=True),
    M("right_lost", "right soft labels lost", *PERCENT, chart="mask", short="right lost", own=True),
    M("teacher_accuracy", "teacher's accuracy", *PERCENT, better="higher", chart="mask", short="teacher", own=True),
    M("target_entropy", "target's entropy / log C", chart="target", short="entropy", reference=1.0, own=True),
    M("target_distance", "1 − target's entropy / log C", chart="target", short="distance", log=True,
      derived=_target_distance),
    M("megabytes", "sent, both ways", "MB", column="sent", note="both ways, all rounds", derived=_sent),
    M("best_accuracy", "best round's accuracy", *PERCENT, scope="run", column="best"),
    M("best_round", "best round", scope="run"),
    M("seconds", "time of a round", "s", chart="cost", short="seconds", summary="sum", column="time"),
    M("seconds_evaluating", "time of evaluation", "s", chart="cost", short="evaluation"),
    M("seconds_outside", "time without training", "s"),
    M("bytes_down", "sent to clients", "MB", 1e-6, chart="cost", short="to clients", summary="sum"),
    M("bytes_up", "sent by clients", "MB", 1e-6, chart="cost", short="from clients", summary="sum"),
    M("clients", "that answered", "clients"),
    M("failed", "failed", "clients", chart="cost"),
    M("diverged", "left out", "clients", chart="cost", short="left out", summary="sum"),
    M("refused", "refused", "clients", summary="sum"),
    M("late", "late", "clients", summary="sum"),
    M("missing", "missing", "clients", summary="sum"),
    M("lost_states", "lost their state", "clients", summary="sum"),
    M("refusals", "reasons of refusals", scope="client"),
)  # fmt: skip
MEASUREMENTS = {row.name: row for row in _ROWS}
"""by name; a new measurement is one more row"""


def measurement(name: str) -> Measurement:
    """Return the row of a measurement; `domain_accuracy.amazon` is one of a group, others are a method's own."""
    if name in MEASUREMENTS:
        return MEASUREMENTS[name]
    group, dot, part = name.partition(".")
    if dot and group in MEASUREMENTS:
        row = MEASUREMENTS[group]
        title = f"{row.title} {part}"
        return Measurement(name, title, row.unit, row.factor, better=row.better, chart=row.chart, short=part)
    unit: tuple[str, float] = PERCENT if "accuracy" in name else ("", 1.0)
    return Measurement(name, name.replace("_", " "), *unit, chart="method", own=True)


def of_chart(chart: str) -> list[Measurement]:
    """Return the measurements of a chart of the report, in its order."""
    return [row for row in MEASUREMENTS.values() if row.chart == chart]


def check_own_measurement(name: str) -> None:
    """Refuse a method's measurement under a name that a run's records use."""
    if name in MEASUREMENTS and not MEASUREMENTS[name].own:
        raise ValueError(f"the method measures {name}, which is the run's own: give it another name")
