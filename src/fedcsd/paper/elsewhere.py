"""Runs of a table that are there with other settings than those asked for, and how to ask for them."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcsd.config import Settings, plain, toml_text
from fedcsd.errors import UserError
from fedcsd.paper.exhibits import Exhibit
from fedcsd.paper.plan import Planned, matters, plan
from fedcsd.paper.scales import SCALES, Choices
from fedcsd.runs import RunDirectory

Flat = Mapping[str, Any]
"""Settings that matter, options of tables as `data.size`."""
SAME = ("data", "data.train_pool", "partition", "method", "beta", "track_drift", "holdout", "classifier")
"""What a table sets itself: a run that has it otherwise is none of the table's."""


def elsewhere(exhibit: Exhibit, choices: Choices, folder: Path, given: bool) -> str:
    """What to ask for in place of these settings, of which no run is in the folder; empty if none is near.

    What stands in for data that is not there is no matter, unless it was `given`.
    """
    there = [found for config in sorted(folder.glob("*/config.toml")) if (found := _trained(config.parent))]
    near = []
    instead = [choices.stand_ins, *[{}] * (not given)]
    for others in (replace(choices, scale=scale, stand_ins=some) for scale in SCALES for some in instead):
        for run in plan(exhibit, others, folder).values():
            asked = _flat(run.values)
            differ = [some for found in there if (some := _different(asked, found)) is not None]
            near += [(len(some) + (others.scale != choices.scale), others, run, some) for some in differ]
    if not near:
        return ""
    _, others, run, some = min(near, key=lambda one: one[0])
    add, leave_out = _advice(others, run, some)
    if others.scale != choices.scale:
        add.insert(0, f"--scale {others.scale}")
    texts = {"add": add, "leave out": leave_out}
    advice = ", ".join(f"{what} {' '.join(flags)}" for what, flags in texts.items() if flags)
    return f"runs of {exhibit.name} are there with other settings: {advice}" if advice else ""


def _trained(path: Path) -> Flat:
    """The settings of a run that has ended; none if it is not to be read."""
    with suppress(UserError):
        run = RunDirectory.open(path)
        if run.summary or run.divergence:
            return _flat(run.began)
    return {}


def _flat(values: Mapping[str, Any]) -> Flat:
    found: dict[str, Any] = {}
    for key, value in matters(values).items():
        if key == "method" or not isinstance(value, Mapping):
            found[key] = value
        else:
            found |= {key if k == "name" else f"{key}.{k}": v for k, v in value.items()}
    return found


def _different(asked: Flat, found: Flat) -> Flat | None:
    """The settings that a run has otherwise, as it has them; None if it is a run of something else."""
    usual = plain(Settings())
    made = {"augment"} - asked.keys()  # chosen for the data, as the run has it
    made |= {"clients"} if asked["partition"] == "column" else set()
    keys = [k for k in {**asked, **found} if k not in made and asked.get(k) != found.get(k)]
    return None if any(key in SAME for key in keys) else {key: found.get(key, usual.get(key)) for key in keys}


def _advice(choices: Choices, run: Planned, found: Flat) -> tuple[list[str], list[str]]:
    """The options to add and those to leave out."""
    usual = {**plain(Settings()), **_flat(replace(choices, overrides={}).values(run.point, run.seed))}
    add, leave_out = [], []
    for key, value in found.items():
        flag = "--set " + key if "." in key else "--" + ("seeds" if key == "seed" else key.replace("_", "-"))
        if key != "seed" and value == usual.get(key):
            leave_out.append(flag)
        else:
            add.append(f"{flag}{'=' if '.' in key else ' '}{toml_text(value)}")
    return add, leave_out
