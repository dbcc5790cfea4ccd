"""Several methods on the same federation, over several seeds, side by side."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fedcsd.config import layered, parse_assignments
from fedcsd.errors import RunStopped, UserError
from fedcsd.experiments import config_of, make_method, prepare
from fedcsd.federation import Watch
from fedcsd.jobs import Job, Run, begin, load_run, split_objects, take_up, train
from fedcsd.methods import Method, methods
from fedcsd.runs import RunDirectory, write_whole

# Settings that do not change a result.
IRRELEVANT = ("workers", "checkpoint_every", "client_state", "data_dir")


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
        entries[label] = {"name": name, **parse_assignments(options, f"{name}: in --methods")}
        make_method(entries[label])  # refuse a wrong name or option before any work
    if not entries:
        raise UserError("--methods needs at least one method, such as fedavg,fedcsd")
    return entries


Choice = Method | type[Method] | str | Mapping[str, Any]


def choices_of(
    chosen: str | Mapping[str, Choice] | Sequence[Choice], shared: Mapping[str, Any]
) -> dict[str, Any]:
    """The methods to compare, by label: tables, or objects from Python.

    `shared` are options that a [method] table or --set method.… gives: they hold for every method of
    that name, or without a name for every method that has them.
    """
    if isinstance(chosen, str):
        entries: dict[str, Any] = dict(parse_methods(chosen))
    elif isinstance(chosen, Mapping):
        entries = dict(chosen)
    else:
        entries = {
            c if isinstance(c, str) else type(c).__name__ if isinstance(c, Method) else str(c): c
            for c in chosen
        }
    tables = {
        k: v
        for k, v in ((k, {"name": v} if isinstance(v, str) else v) for k, v in entries.items())
        if isinstance(v, Mapping)
    }
    options = {key: value for key, value in shared.items() if key != "name"}
    for key in options:
        having = [k for k, t in tables.items() if key in methods.load(t["name"]).__dataclass_fields__]
        if not having:
            raise UserError(f"none of the compared methods has an option {key!r}, which method.{key} sets")
        for label in having:
            if shared.get("name") in (None, tables[label]["name"]):
                tables[label] = {key: options[key], **tables[label]}
    return {**entries, **tables}


def compare(
    methods: str | Mapping[str, Choice] | Sequence[Choice],
    seeds: Sequence[int] = (0,),
    *,
    data: Any = "digits",
    model: Any = "auto",
    out: str | Path | None = None,
    overwrite: bool = False,
    on_start: Callable[[str, int, int, int], Watch] | None = None,
    **settings: Any,
) -> Comparison:
    """Run every method with every seed on the same settings.

    methods   names as in `--methods`, or methods by label: {"mine": MyMethod(), "fedavg": "fedavg"}
    out       with a folder, finished runs found there are taken as they are and unfinished ones are
              resumed, so that calling again goes on where it was cut off
    on_start  called with (label, seed, rounds, runs that come after it), gives what watches that run

    The rest is as for `fedcsd.run`.
    """
    if not seeds or len(set(seeds)) != len(seeds):
        raise UserError("--seeds needs different whole numbers, such as 0,1,2")
    shared = settings.pop("method", {})
    entries = choices_of(methods, {"name": shared} if isinstance(shared, str) else shared)
    folder = Path(out).expanduser() if out is not None else None
    plan = []
    for label, choice in entries.items():
        for seed in seeds:
            values, given = split_objects(method=choice, data=data, model=model)
            path = folder / run_name(label, seed) if folder else None
            plan.append(Cell(label, seed, layered(settings, values, {"seed": seed}), given, path, overwrite))
    _check(plan)
    for name in ("comparison.md", "comparison.json", "curves.png") if folder else ():
        (folder / name).unlink(missing_ok=True)  # type: ignore[operator]
    runs = _train_all(plan, on_start)
    comparison = Comparison(rows(runs), runs, list(seeds), folder, folder / "curves.png" if folder else None)
    if folder:
        _write(comparison, folder)
    return comparison


@dataclass(frozen=True)
class Cell:
    """One method with one seed."""

    label: str
    seed: int
    values: dict[str, Any]
    given: dict[str, Any]
    path: Path | None
    overwrite: bool

    @property
    def exists(self) -> bool:
        return self.path is not None and not self.overwrite and (self.path / "config.toml").exists()

    @property
    def finished(self) -> bool:
        return self.exists and RunDirectory.open(self.path).summary is not None  # type: ignore[arg-type]

    def job(self) -> Job | None:
        """What is to be trained; None if it is finished."""
        if not self.exists:
            return begin(self.values, given=self.given, out=self.path, overwrite=self.overwrite)
        assert self.path is not None
        changes = {key: self.values.get(key) for key in ("workers", "client_state")}
        return take_up(self.path, given=self.given, changes=changes)


def _train_all(
    plan: Sequence[Cell], on_start: Callable[[str, int, int, int], Watch] | None
) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {cell.label: [] for cell in plan}
    left = sum(not cell.finished for cell in plan)
    try:
        for cell in plan:
            job = None if cell.finished else cell.job()
            if job is None:
                assert cell.path is not None
                runs[cell.label].append(load_run(cell.path))
                continue
            left -= 1
            watch = on_start(cell.label, cell.seed, job.rounds, left) if on_start else None
            runs[cell.label].append(train(job, watch))
    except (KeyboardInterrupt, RunStopped) as error:
        if cell.path:
            what = str(error).partition("; go on with:")[0]
            error.args = (
                f"{cell.label}, seed {cell.seed}: {what}; the same command again (without --overwrite) goes on from there",
            )
        raise
    return runs


def run_name(label: str, seed: int) -> str:
    return f"{label.replace(':', '-').replace('/', '_')}-seed{seed}"


def _check(plan: Sequence[Cell]) -> None:
    """Refuse what cannot work before the first run starts."""
    for number, cell in enumerate(plan):
        if not cell.exists and number:
            continue
        experiment = prepare(cell.values, **cell.given)
        if not cell.exists:
            continue
        assert cell.path is not None
        there, here = RunDirectory.open(cell.path).settings, config_of(experiment)
        different = [
            f"{k} is {there.get(k)!r} there and {v!r} here"
            for k, v in here.items()
            if k not in IRRELEVANT and there.get(k) != v
        ]
        if different:
            raise UserError(
                f"{cell.path} holds a run with other settings ({different[0]}): choose another --out, or --overwrite"
            )


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
