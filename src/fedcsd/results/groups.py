"""Runs at the paths that somebody names, grouped by label: runs that differ in their seed only are together."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from fedcsd.config.options import toml_text
from fedcsd.config.settings import applied
from fedcsd.errors import UserError, note
from fedcsd.experiments.comparison_folder import run_name
from fedcsd.experiments.runs.archive import is_run, open_run, paths_in
from fedcsd.experiments.runs.recorded import RecordedRun
from fedcsd.methods import methods
from fedcsd.plugins import free, short, spec_of
from fedcsd.results.rows import other_code

MOST = 32  # lines that can be told apart: colours by dashes
VERSIONS = {"device": "device", "method": "code", "model": "model code", "data": "data"}
"""facts that set runs of the same settings and seed apart: name in config.toml, and name in a label"""


def found(paths: Sequence[Path]) -> list[RecordedRun]:
    """Return the runs at these paths; a folder of runs, such as a comparison's, stands for all of them."""
    runs = [open_run(folder) for path in paths for folder in folders(path)]
    tell_skipped(paths)
    return list({run.path.resolve(): run for run in runs}.values())


def tell_skipped(paths: Sequence[Path]) -> None:
    """Note which folders of runs lie among the runs of a folder: they are read only if they are named."""
    given = {path.resolve() for path in paths}
    deeper = {
        c.parent.parent for path in paths if path not in folders(path) for c in path.glob("*/*/config.toml")
    }
    left = sorted(str(f) for f in deeper if f.resolve() not in given and not is_run(f))
    if left:
        note(f"without the runs in {_listed(left)}: name such a folder as well to have them")


def folders(path: Path) -> list[Path]:
    """Return the folders of the runs that a path stands for; the path itself if there is none in it.

    A comparison's are in its own order, so that a method has the same colour in all its pictures.
    """
    inside = [] if is_run(path) else paths_in(path)
    order: dict[str, int] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        rows = json.loads((path / "comparison.json").read_text(encoding="utf-8"))["rows"]
        order = {run_name(row["label"], 0).removesuffix("0"): place for place, row in enumerate(rows)}
    found = sorted(inside, key=lambda folder: order.get(folder.name.rstrip("0123456789"), len(order)))
    return found or [path]


def by_label(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Group runs by label; a seed that is there twice counts once."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        groups.setdefault(repr(sorted(applied(run.settings, result=True, label=True).items())), []).append(
            run
        )
    labelled: dict[str, list[RecordedRun]] = {}
    left: list[str] = []
    labels = labels_of([some[0].settings for some in groups.values()])
    for label, some in zip(labels, groups.values(), strict=True):
        for version, alike in _versions(some).items():
            labelled[free(f"{label}{version}", labelled)] = _once(alike, left)
    if left:
        note(f"left out, for they have the settings and seed of another run: {_listed(left)}")
    return labelled


def few_by_label(runs: Sequence[RecordedRun]) -> dict[str, list[RecordedRun]]:
    """Group runs for a picture: refuse too many lines, and note runs of other code."""
    groups = by_label(runs)
    if len(groups) > MOST:
        raise UserError(
            f"these runs have {len(groups)} different settings, more than {MOST} lines: name fewer"
        )
    for label, some in groups.items():
        for run in some:
            for text in other_code(run):
                note(f"{label}, seed {run.settings['seed']}: {text}")
    return groups


def _versions(runs: Sequence[RecordedRun]) -> dict[str, Sequence[RecordedRun]]:
    """Split runs of the same settings where one seed is there with other code, data or device."""
    facts = [(run.settings.get("device", ""), run.config["facts"]) for run in runs]
    known = [{"device": device, **fact["code"], "data": fact["data"]} for device, fact in facts]
    told = [{name: str(one.get(key, "")) for key, name in VERSIONS.items()} for one in known]
    made = {(run.settings.get("seed"), repr(one)) for run, one in zip(runs, told, strict=True)}
    if len(made) == len({seed for seed, _ in made}):
        return {"": runs}
    differ = [name for name in told[0] if any(one[name] != told[0][name] for one in told)]
    found: dict[str, Sequence[RecordedRun]] = {}
    for run, one in zip(runs, told, strict=True):
        version = "".join(f", {name}={one[name][:8]}" for name in differ)
        found[version] = [*found.get(version, ()), run]
    return found


def _once(runs: Sequence[RecordedRun], left: list[str]) -> list[RecordedRun]:
    """Keep one run a seed, the one with the most measurements; `left` gets the others."""
    seeds: dict[Any, list[RecordedRun]] = {}
    for run in runs:
        seeds.setdefault(run.settings.get("seed"), []).append(run)
    kept = [max(some, key=_richness) if len(some) > 1 else some[0] for some in seeds.values()]
    for one, some in zip(kept, seeds.values(), strict=True):
        left += [f"{run.path} (as {one.path})" for run in some if run is not one]
    return kept


def _richness(run: RecordedRun) -> tuple[bool, int]:
    return not any(change.mends for change in run.changes), sum(len(record) for record in run.history())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def labels_of(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a label for each: the method as one names it, and the settings in which they differ."""
    tables = [s["method"] for s in settings]
    differ = _differing([applied(s, result=True, label=True) for s in settings])
    keys = {key for some in differ for key in some}
    ends = [key.rpartition(".")[2] for key in keys]
    names = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}
    labels = [
        ", ".join([method_label(table, tables), *(f"{names[key]}={_brief(v)}" for key, v in some.items())])
        for table, some in zip(tables, differ, strict=True)
    ]
    homes = [spec_of(table["name"]).home for table in tables]
    taken = set(zip(labels, homes, strict=True))  # two files may have a class of the same name
    return [
        f"{Path(home).stem}.{label}" if home and sum(label == other for other, _ in taken) > 1 else label
        for label, home in zip(labels, homes, strict=True)
    ]


def _differing(every: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each its data if that differs, and the settings that differ among runs of that data."""
    told = [{k: v for k, v in s.items() if k.partition(".")[0] != "method"} for s in every]
    same = [[other for other in told if other.get("data") == one.get("data")] for one in told]
    return [
        {k: v for k, v in one.items() if any(o.get(k) != v for o in (told if k == "data" else alike))}
        for one, alike in zip(told, same, strict=True)
    ]


def _brief(value: Any) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else toml_text(value)


def method_label(table: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the name with all that is not the default, by preset if there is one: `fedcsd:uniform`.

    A method that cannot be loaded any more has the options in which the same method's other tables differ.
    """
    name, options = table["name"], {key: value for key, value in table.items() if key != "name"}
    presets: dict[str, Mapping[str, Any]] = {}
    try:
        made = methods.load(name)
    except UserError:
        same = [other for other in others if other["name"] == name]
        changed = {k: v for k, v in options.items() if any(other.get(k) != v for other in same)}
    else:
        defaults, presets = {f.name: _default(f) for f in fields(made)}, made.presets
        changed = {key: value for key, value in options.items() if value != defaults.get(key)}
    fitting = [(preset, sets) for preset, sets in presets.items() if sets.items() <= options.items()]
    preset, sets = max(fitting, key=lambda some: len(some[1].keys() & changed), default=("", {}))
    rest = [f"{key}={toml_text(value)}" for key, value in changed.items() if key not in sets]
    return ":".join((short(name), *[preset] * bool(sets.keys() & changed), *rest))


def _default(option: Field[Any]) -> Any:
    """Return a default as config.toml has it, which has lists only."""
    value = option.default if option.default_factory is MISSING else option.default_factory()
    return list(value) if isinstance(value, tuple) else value
