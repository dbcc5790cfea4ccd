"""`fedcsd.compare`: trained runs as a table and curves."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedcsd.config.options import default_of
from fedcsd.experiments.choices import Choice, method_from
from fedcsd.experiments.comparison import ComparedRuns, OnStart, compared
from fedcsd.experiments.experiment import config_of
from fedcsd.experiments.running import Run
from fedcsd.files import write_whole
from fedcsd.results.rows import About, rows, told
from fedcsd.results.tables import Row, csv_text, latex, markdown


@dataclass(frozen=True)
class Comparison:
    """A finished comparison: its runs and its table."""

    rows: list[Row]
    runs: dict[str, list[Run]]
    """by label, one run a seed"""
    seeds: list[int]
    path: Path | None
    picture: Path | None
    settings: dict[str, Any]
    """settings that all runs have in common: the important ones, and those that differ from their defaults"""

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
    with compared(
        methods, seeds, data=data, model=model, out=out, overwrite=overwrite, on_start=on_start, **settings
    ) as trained:
        about = _about(trained)
        picture = trained.path / "curves.png" if trained.path else None
        comparison = Comparison(
            rows(trained.runs, about),
            trained.runs,
            trained.seeds,
            trained.path,
            picture,
            dict(about.settings),
        )
        if trained.path:
            _write_tables(comparison, trained.path)
    return comparison


def _about(trained: ComparedRuns) -> About:
    """Return what the notes below the table need to know of the methods."""
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
    settings = told(config_of(experiment))
    return About(experiment.data.classes, frozenset(untrained), shared, settings, notes, guess)


def _write_tables(comparison: Comparison, folder: Path) -> None:
    """Write the table as Markdown, CSV and LaTeX, the numbers as JSON, and the curves as a picture."""
    from fedcsd.results.curves import plot_curves

    histories = {label: [run.history for run in runs] for label, runs in comparison.runs.items()}
    rounds = max(run.settings["rounds"] for runs in comparison.runs.values() for run in runs)
    plot_curves(histories, folder / "curves.png", rounds=rounds)
    content = {
        "settings": comparison.settings,
        "seeds": comparison.seeds,
        "rows": [row.to_json() for row in comparison.rows],
    }
    for suffix, text in (
        ("md", comparison.markdown()),
        ("csv", comparison.csv()),
        ("tex", comparison.latex()),
        ("json", json.dumps(content, indent=2) + "\n"),
    ):
        write_whole(folder / f"comparison.{suffix}", text.encode())
