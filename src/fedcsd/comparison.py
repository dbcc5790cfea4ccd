"""Several methods on the same federation, over several seeds, side by side."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedcsd.config import layered, parse_assignments
from fedcsd.errors import UserError
from fedcsd.experiments import (
    Job,
    Run,
    begin,
    config_of,
    load_run,
    make_method,
    prepare,
    take_up,
    train,
)
from fedcsd.federation import Watch
from fedcsd.runs import RunDirectory, write_whole

IRRELEVANT = ("workers", "checkpoint_every", "data_dir")  # settings that do not change a result


@dataclass(frozen=True)
class Row:
    """One method's results over the seeds."""

    label: str
    accuracies: list[float]
    """final test accuracy of each seed, in percent"""
    differences: list[float]
    """the same less the first method's, seed by seed"""
    drift: float | None
    """mean logit drift over rounds and seeds, where it was tracked"""
    megabytes: float
    """sent in a run, both ways together"""
    best: float
    """mean over seeds of the best round's accuracy; not the result"""

    @property
    def accuracy(self) -> str:
        return spread(self.accuracies)

    @property
    def difference(self) -> str:
        return spread(self.differences, sign="+")


def spread(values: Sequence[float], sign: str = "") -> str:
    """Mean ± standard deviation over seeds; one seed has no deviation."""
    text = f"{mean(values):{sign}.2f}"
    return f"{text} ± {stdev(values):.2f}" if len(values) > 1 else text


@dataclass(frozen=True)
class Comparison:
    rows: list[Row]
    runs: dict[str, list[Run]]
    """by label, a run a seed"""
    seeds: list[int]
    path: Path | None
    picture: Path | None

    def markdown(self) -> str:
        head, cells = table(self.rows)
        lines = [head, ["---"] * len(head), *cells]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the comparison, as text; the drift only where it was tracked."""
    tracked = any(row.drift is not None for row in rows)
    head = ["method", "accuracy (%)", f"vs {rows[0].label}"]
    head += ["logit drift"] * tracked + ["sent (MB)", "best (%)"]
    cells = []
    for row in rows:
        cell = [row.label, row.accuracy, "" if row is rows[0] else row.difference]
        cell += ["" if row.drift is None else f"{row.drift:.3f}"] * tracked
        cells.append([*cell, f"{row.megabytes:.2f}", f"{row.best:.2f}"])
    return head, cells


def load_rows(path: Path) -> tuple[list[Row], list[int]]:
    """The rows and seeds of a comparison that was written."""
    content = json.loads((path / "comparison.json").read_text(encoding="utf-8"))
    return [Row(**row) for row in content["rows"]], content["seeds"]


def parse_methods(text: str) -> dict[str, dict[str, Any]]:
    """`"fedavg,fedcsd:mu=0.01:mask=none"` as the method table of each label."""
    entries: dict[str, dict[str, Any]] = {}
    for label in filter(None, (part.strip() for part in text.split(","))):
        name, *options = label.split(":")
        if label in entries:
            raise UserError(f"--methods names {label} twice")
        entries[label] = {"name": name, **parse_assignments(options)}
        make_method(dict(entries[label]))  # refuse a wrong name or option before any work
    if not entries:
        raise UserError("--methods needs at least one method, such as fedavg,fedcsd")
    return entries


def compare(
    methods: str | Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int] = (0,),
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    on_start: Callable[[str, int, int], Watch] | None = None,
    **settings: Any,
) -> Comparison:
    """Run every method with every seed on the same settings.

    With `out`, finished runs found there are taken as they are and unfinished ones are resumed, so
    that calling again goes on where it was cut off. `on_start(label, seed, rounds)` gives
    what watches that run.
    """
    entries = parse_methods(methods) if isinstance(methods, str) else {k: dict(v) for k, v in methods.items()}
    if not seeds or len(set(seeds)) != len(seeds):
        raise UserError("--seeds needs different whole numbers, such as 0,1,2")
    folder = Path(out) if out is not None else None
    values = {key: value for key, value in settings.items() if key not in ("method", "seed")}
    plan = [
        (label, seed, layered(values, {"method": table, "seed": seed}))
        for label, table in entries.items()
        for seed in seeds
    ]
    _check(plan, folder, overwrite)
    runs: dict[str, list[Run]] = {label: [] for label in entries}
    for label, seed, wanted in plan:
        path = folder / run_name(label, seed) if folder else None
        job = _job(wanted, path, overwrite)
        watch = on_start(label, seed, job.rounds) if on_start and job else None
        assert job or path
        runs[label].append(train(job, watch) if job else load_run(path))  # type: ignore[arg-type]
    comparison = Comparison(rows(runs), runs, list(seeds), folder, folder / "curves.png" if folder else None)
    if folder:
        _write(comparison, folder)
    return comparison


def run_name(label: str, seed: int) -> str:
    return f"{label.replace(':', '-').replace('/', '_')}-seed{seed}"


def _check(plan: Sequence[tuple[str, int, dict[str, Any]]], folder: Path | None, overwrite: bool) -> None:
    """Refuse what cannot work before the first run starts."""
    for label, seed, wanted in plan:
        path = folder / run_name(label, seed) if folder else None
        if path is None or overwrite or not (path / "config.toml").exists():
            continue
        there = RunDirectory.open(path).settings
        here = config_of(prepare(wanted))
        different = [
            f"{k} is {there.get(k)!r} there and {v!r} here"
            for k, v in here.items()
            if k not in IRRELEVANT and there.get(k) != v
        ]
        if different:
            raise UserError(
                f"{path} holds a run with other settings ({different[0]}): choose another --out, or --overwrite"
            )
    prepare(plan[0][2])


def _job(wanted: dict[str, Any], path: Path | None, overwrite: bool) -> Job | None:
    """What is to be trained for one cell of the comparison; None if it is finished."""
    if path is None or overwrite or not (path / "config.toml").exists():
        return begin(wanted, out=path, overwrite=overwrite)
    return take_up(path, changes={"workers": wanted.get("workers")})


def rows(runs: Mapping[str, Sequence[Run]]) -> list[Row]:
    first = [100 * run.accuracy for run in next(iter(runs.values()))]
    found = []
    for label, some in runs.items():
        accuracies = [100 * run.accuracy for run in some]
        drifts = [run.summary["mean_logit_drift"] for run in some if "mean_logit_drift" in run.summary]
        found.append(
            Row(
                label,
                accuracies,
                [a - b for a, b in zip(accuracies, first, strict=True)],
                mean(drifts) if drifts else None,
                mean((run.summary["bytes_up"] + run.summary["bytes_down"]) / 1e6 for run in some),
                mean(100 * run.summary["best_accuracy"] for run in some),
            )
        )
    return found


def _write(comparison: Comparison, folder: Path) -> None:
    """The table as Markdown, the numbers as JSON, the curves as a picture."""
    from fedcsd.analysis.curves import plot_curves

    assert comparison.picture is not None
    plot_curves(
        {label: [run.history for run in runs] for label, runs in comparison.runs.items()}, comparison.picture
    )
    write_whole(folder / "comparison.md", comparison.markdown().encode())
    content = {"seeds": comparison.seeds, "rows": [vars(row) for row in comparison.rows]}
    write_whole(folder / "comparison.json", (json.dumps(content, indent=2) + "\n").encode())
