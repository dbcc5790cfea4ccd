"""Runs of a table that are there with other settings than those asked for, and how to ask for them."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcsd.config import Settings, by_name, plain, toml_text
from fedcsd.errors import UserError
from fedcsd.experiments.run_folder import RunDirectory
from fedcsd.paper.exhibits import FEMNIST, Exhibit
from fedcsd.paper.plan import Planned, matters, plan
from fedcsd.paper.scales import SCALES, Choices

Flat = Mapping[str, Any]
"""Settings that matter, options of tables as `data.size`."""
OFFERED = 3  # other settings, the nearest
SAME = ("data", "data.train_pool", "partition", "method", "beta", "track_drift", "holdout", "classifier")
"""What a table sets itself: a run that has it otherwise is none of the table's."""


def elsewhere(exhibit: Exhibit, choices: Choices, folder: Path, given: bool) -> str:
    """What to ask for in place of these settings, of which no run is in the folder; empty if none is near.

    What stands in for data that is not there is no matter, unless it was `given`.
    """
    there = [found for config in sorted(folder.glob("*/config.toml")) if (found := _trained(config.parent))]
    near: dict[int, tuple[int, tuple[str, ...]]] = {}  # of each run that is there, the least to change
    instead = [choices.stand_ins] if given else [{}, {FEMNIST: "mnist"}, choices.stand_ins]
    for others in (replace(choices, scale=scale, stand_ins=some) for scale in SCALES for some in instead):
        for run in plan(exhibit, others, folder).values():
            asked = _flat(run.values)
            for number, found in enumerate(there):
                if (some := _different(asked, found)) is not None:
                    change = len(some) + (others.scale != choices.scale)
                    if number not in near or change < near[number][0]:
                        near[number] = (change, _advice(others, run, some, choices.scale))
    counts = sorted(Counter(near.values()).items(), key=lambda one: (one[0][0], -one[1]))
    texts = [
        f"{', '.join(advice)} ({runs} run{'s' * (runs > 1)})"
        for (_, advice), runs in counts[:OFFERED]
        if advice
    ]
    return f"runs of {exhibit.name} are there with other settings: {'; or '.join(texts)}" if texts else ""


def _trained(path: Path) -> Flat:
    """The settings of a run that has ended; none if it is not to be read."""
    with suppress(UserError):
        run = RunDirectory.open(path)
        if run.summary or run.divergence:
            return _flat(run.began)
    return {}


def _flat(values: Mapping[str, Any]) -> Flat:
    found = matters(values)
    method = found.pop("method")
    return {**by_name(found), "method": method}


def _different(asked: Flat, found: Flat) -> Flat | None:
    """The settings that a run has otherwise, as it has them; None if it is a run of something else."""
    usual = plain(Settings())
    made = {"augment"} - asked.keys()  # chosen for the data, as the run has it
    made |= {"clients"} if asked["partition"] == "column" else set()
    keys = [k for k in {**asked, **found} if k not in made and asked.get(k) != found.get(k)]
    return None if any(key in SAME for key in keys) else {key: found.get(key, usual.get(key)) for key in keys}


def _advice(choices: Choices, run: Planned, found: Flat, scale: str) -> tuple[str, ...]:
    """The options to add and those to leave out, in words."""
    usual = {**plain(Settings()), **_flat(replace(choices, overrides={}).values(run.point, run.seed))}
    add, leave_out = [f"--scale {choices.scale}"] * (choices.scale != scale), []
    for key, value in found.items():
        flag = "--set " + key if "." in key else "--" + ("seeds" if key == "seed" else key.replace("_", "-"))
        if key != "seed" and value == usual.get(key):
            leave_out.append(flag)
        else:
            add.append(f"{flag}{'=' if '.' in key else ' '}{toml_text(value)}")
    texts = {"add": add, "leave out": leave_out}
    return tuple(f"{what} {' '.join(flags)}" for what, flags in texts.items() if flags)
