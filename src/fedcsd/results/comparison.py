"""The tables and the picture of a comparison, from its runs or from its folder."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedcsd.config.options import default_of, toml_text
from fedcsd.errors import UserError
from fedcsd.experiments.choices import Choice, method_from
from fedcsd.experiments.comparison import ComparedRuns, OnStart, compared
from fedcsd.experiments.experiment import config_of
from fedcsd.experiments.running import Run
from fedcsd.experiments.runs.recorded import FORMAT
from fedcsd.experiments.summary import notable
from fedcsd.files import write_whole
from fedcsd.measurements import MEASUREMENTS, Measurement
from fedcsd.results.rows import About, Row, rows
from fedcsd.results.tables import NOTHING, Cell, Number, Table, known, spread, unbroken

REASONS = {
    "mended": "settings were changed after a divergence",
    "other_code": "rounds, some or all, were trained with other code of the method or model than there is now",
    "blew_up": "loss blew up",
}
"""of a †, by the field of a row"""


@dataclass(frozen=True)
class Comparison:
    """A comparison has a row for each method, and all runs."""

    rows: list[Row]
    runs: dict[str, list[Run]]
    """by label, a run a seed"""
    seeds: list[int]
    path: Path | None
    picture: Path | None
    settings: dict[str, Any]
    """that all runs have in common: the important ones, and those that are not the default"""

    def __repr__(self) -> str:
        place = f", in {self.path}" if self.path else ""
        return f"<Comparison: {', '.join(self.runs)}, seeds {', '.join(map(str, self.seeds))}{place}>"

    def markdown(self) -> str:
        return markdown(self.rows, self.seeds, self.settings)

    def latex(self) -> str:
        return latex(self.rows, self.seeds, self.settings)

    def csv(self) -> str:
        return csv_text(self.rows)


def compare(
    methods: str | Mapping[str, Choice] | Sequence[Choice],
    seeds: Sequence[int] | None = None,
    *,
    data: Any = "digits",
    model: Any = "auto",
    out: str | Path | None = None,
    overwrite: bool = False,
    on_start: OnStart | None = None,
    **settings: Any,
) -> Comparison:
    """Run every method with every seed on the same settings.

    A run that diverges is a result: it is recorded, not trained again, and the comparison goes on.
    `resume` on its folder with another lr or on_divergence mends it; the next call takes its result.
    All other arguments are as for `fedcsd.run`.

    Args:
        methods: names as in `--methods`, or methods by label: `{"mine": MyMethod(), "fedavg": "fedavg"}`
        seeds: training seeds; the default is one, `seed` (0)
        out: a folder; finished runs found there are taken as they are and unfinished ones are resumed, so that
            the same call goes on where it was cut off, and a call with more rounds takes all runs further
        on_start: called with (label, seed, rounds, runs that come after it); returns the callbacks of that run
    """
    given: dict[str, Any] = {"data": data, "model": model, "out": out, "overwrite": overwrite}
    with compared(methods, seeds, **given, on_start=on_start, **settings) as trained:
        about, runs, folder = _about(trained), trained.runs, trained.path
        picture = folder / "curves.png" if folder else None
        comparison = Comparison(rows(runs, about), runs, trained.seeds, folder, picture, dict(about.settings))
        if folder:
            _write_tables(comparison, folder)
    return comparison


def _about(trained: ComparedRuns) -> About:
    """Return the facts on the methods that the notes below the table need."""
    untrained, shared, notes = set[str](), {}, dict[str, list[str]]()
    experiment = trained.experiment
    for label, choice in trained.choices.items():
        method = method_from(choice)
        local = method.local(experiment.network.layout)
        if local is not None and local.any():
            untrained.add(label)
        elif local is not None:
            notes[label] = ["the same as fedavg: of this model nothing stays with the clients"]
        defaults = {option.name: default_of(option) for option in fields(method)}
        new = trained.shared.get(label, {})
        shared[label] = {key: value for key, value in new.items() if value != defaults[key]}
    labels = experiment.data.y_test
    guess = 100 * int(labels.bincount().max()) / len(labels)
    settings = notable(config_of(experiment))
    return About(experiment.data.classes, frozenset(untrained), shared, settings, notes, guess)


def _write_tables(comparison: Comparison, folder: Path) -> None:
    """Write the table as Markdown, CSV and LaTeX, the numbers as JSON, and the curves as a picture."""
    from fedcsd.results.curves import plot_curves

    histories = {label: [run.history for run in runs] for label, runs in comparison.runs.items()}
    rounds = max(run.settings["rounds"] for runs in comparison.runs.values() for run in runs)
    plot_curves(histories, folder / "curves.png", rounds=rounds)
    parts = {"format": FORMAT, "settings": comparison.settings, "seeds": comparison.seeds}
    content = json.dumps({**parts, "rows": [row.to_json() for row in comparison.rows]}, indent=2) + "\n"
    texts = {"md": comparison.markdown(), "csv": comparison.csv(), "tex": comparison.latex(), "json": content}
    for suffix, text in texts.items():
        write_whole(folder / f"comparison.{suffix}", text.encode())


def load_rows(path: Path) -> tuple[list[Row], list[int], dict[str, Any]]:
    """Return the rows, seeds and settings of a comparison that was written."""
    file = path / "comparison.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if (found := content.get("format")) != FORMAT:
            raise UserError(
                f"{file} has format {found or 0}, not {FORMAT}: the same comparison again writes it anew"
            )
        return [Row.from_json(row) for row in content["rows"]], content["seeds"], content["settings"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{file} is damaged: the same comparison again writes it anew") from None


def columns(rows: Sequence[Row], time: bool = False) -> list[Measurement]:
    """Return the measurements that have a column: those that any row has."""
    with_column = [row for row in MEASUREMENTS.values() if row.column and (time or row.unit != "s")]
    return [m for m in with_column if m.name == "test_accuracy" or any(row.values(m.name) for row in rows)]


def heading(measurement: Measurement) -> str:
    unit = "" if measurement.unit in ("", "s") else f" ({measurement.unit})"
    return measurement.column + unit


def table(rows: Sequence[Row], *, time: bool = False, first: str = "") -> Table:
    """Return the table of a comparison; `first` is a heading for the differences to the first method."""
    head = ["method"]
    lines: list[list[Cell]] = [[row.label] for row in rows]
    for measurement in columns(rows, time):
        head.append(heading(measurement))
        for line, row, best in zip(lines, rows, best_of(rows, measurement.name), strict=True):
            line.append(_cell(row, measurement, best))
        if measurement.name == "test_accuracy" and len(rows) > 1:
            head.append(first or f"vs {rows[0].label}")
            for line, row in zip(lines, rows, strict=True):
                line.append("" if row is rows[0] else row.difference_cell())
    return Table(head, lines)


def _cell(row: Row, measurement: Measurement, best: bool) -> Cell:
    if measurement.name == "test_accuracy":
        return row.accuracy_cell(best)
    values = known(row.values(measurement.name))
    if not values:
        return [NOTHING]
    if measurement.unit == "s":
        return [Number(duration(mean(values)))]
    digits = measurement.digits
    return [
        Number(spread(values, digits=digits) if measurement.better else f"{mean(values):.{digits}f}", best)
    ]


def duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(minutes)} min {int(rest)} s"


def best_of(rows: Sequence[Row], name: str = "test_accuracy") -> list[bool]:
    """Tell which rows have the best value, as it is shown; none where a measurement has no direction.

    A mean that leaves out diverged runs, or has a run in it that is not what its row says, is not compared.
    """
    measurement = MEASUREMENTS[name]
    sign, digits = -1 if measurement.better == "lower" else 1, measurement.digits
    comparable = [bool(measurement.better) and row.comparable(name) for row in rows]
    shown = [
        round(sign * mean(row.values(name)), digits) if ok else -math.inf
        for row, ok in zip(rows, comparable, strict=True)
    ]
    several = sum(bool(row.values(name)) for row in rows) > 1
    return [several and ok and value == max(shown) for ok, value in zip(comparable, shown, strict=True)]


def seeds_text(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def legend(rows: Sequence[Row], seeds: Sequence[int], settings: Mapping[str, Any] | None = None) -> list[str]:
    """Return the lines below the table: what the columns are, and the settings and seeds."""
    over = "mean ± standard deviation over " * (len(seeds) > 1) + seeds_text(seeds)
    over += "; differences paired by seed" * (len(seeds) > 1 and len(rows) > 1)
    lines = [f"accuracy of the final round, {over}"]
    if any(row.own for row in rows):
        lines += _own_captions(rows)
    if explained := [f"{m.column}: {m.note}" for m in columns(rows) if m.note]:
        lines.append("; ".join(explained))
    said = " or ".join(text for name, text in REASONS.items() if any(getattr(row, name) for row in rows))
    if said:
        lines.append(f"†: with runs whose {said}; never counted as the best")
    return [*lines, f"settings: {in_words(settings)}; {seeds_text(seeds)}"] if settings else lines


def _own_captions(rows: Sequence[Row]) -> list[str]:
    where = "on each client's own test data, mean over clients"
    if not any(row.personal for row in rows):
        return [f"own data: the global model {where}"]
    lines = [
        f"own data: each client's own model where the method has one, else the global model, {where}",
        "personalised methods, which give each client a model of its own, are to be compared by own data",
    ]
    if labels := [row.label for row in rows if row.untrained]:
        part = "a global model in which the part that stays with the clients is untrained"
        lines.append(f"accuracy of {' and '.join(labels)}: of {part}")
    return lines


def in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {toml_text(value)}" for key, value in settings.items())


def remarks(rows: Sequence[Row], mark: str = "") -> list[str]:
    """Return notes on single methods and runs, a line each; `mark` stands before those on marked rows."""
    given: dict[str, list[str]] = {}
    for row in rows:
        if row.shared:
            given.setdefault(_assigned(row.shared), []).append(row.label)
    notes = [f"with {options} for {', '.join(labels)}" for options, labels in given.items()]
    if guessing := [row.label for row in rows if row.guessing]:
        notes.append(
            f"no better than guessing ({rows[0].guess:.1f} %): {', '.join(guessing)}; more rounds, another "
            "learning rate or another model may help"
        )
    return notes + [f"{mark * row.marked}{row.label}, {note}" for row in rows for note in row.notes]


def _assigned(options: Mapping[str, Any]) -> str:
    return ", ".join(f"method.{key}={value}" for key, value in options.items())


def markdown(rows: Sequence[Row], seeds: Sequence[int], settings: Mapping[str, Any]) -> str:
    """Return the table as Markdown, with the lines below it as a list."""
    below = [*legend(rows, seeds, settings), *remarks(rows, "† ")]
    return "\n".join([*table(rows).markdown(), "", *(f"- {unbroken(line)}" for line in below)]) + "\n"


def latex(rows: Sequence[Row], seeds: Sequence[int], settings: Mapping[str, Any]) -> str:
    """Return a tabular to \\input into a document that uses booktabs."""
    comments = [r"needs \usepackage{booktabs}", *legend(rows, seeds, settings), *remarks(rows)]
    return "\n".join([*(f"% {unbroken(line)}" for line in comments), *table(rows).latex()]) + "\n"


def csv_text(rows: Sequence[Row]) -> str:
    """Return a line for each method; a cell without a number is empty."""
    return Table.of([_csv_line(row) for row in rows]).csv()


def _csv_line(row: Row) -> dict[str, Any]:
    line: dict[str, Any] = {"method": row.label, "seeds": len(row.accuracies)}
    line["diverged"] = sum(end is not None for end in row.diverged)
    for measurement in (m for m in MEASUREMENTS.values() if m.column):
        values = row.values(measurement.name)
        if measurement.better:
            line |= _mean_and_deviation(measurement.column.lower().replace(" ", "_"), values)
        else:
            line[measurement.name] = round(mean(known(values)), 6) if known(values) else ""
        if measurement.name == "test_accuracy":
            line |= _mean_and_deviation("difference", row.differences)
            line["difference_seeds"] = len(known(row.differences))
        if measurement.name == "own_accuracy":
            line["own_data_model"] = ("personal" if row.personal else "global") if row.own else ""
    notes = [*([f"with {_assigned(row.shared)}"] if row.shared else []), *row.notes]
    return {**line, "marked": "yes" if row.marked else "", "notes": "; ".join(notes)}


def _mean_and_deviation(name: str, values: Sequence[float]) -> dict[str, Any]:
    some = known(values)
    deviation = round(stdev(some), 6) if len(some) > 1 else ""
    return {f"{name}_mean": round(mean(some), 6) if some else "", f"{name}_std": deviation}
