"""A run goes on only with the data, the model and the method that it began with, wherever they are now."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedcsd import provenance
from fedcsd.config import layered
from fedcsd.errors import UserError, note
from fedcsd.experiments import absolute, config_of, prepare, source_of
from fedcsd.federation import Experiment
from fedcsd.naming import complete, parse
from fedcsd.runs import RunDirectory, write_whole, writing_to

MOVABLE = ("method", "data", "data_dir")
"""settings that say where something is"""


def facts_of(experiment: Experiment) -> dict[str, Any]:
    """What a run's data, model and code were when it began."""
    facts = {
        "data": experiment.data.fingerprint(),
        "model": experiment.network.layout.fingerprint(),
        "package": provenance.package(),
    }
    source = source_of(experiment)
    return {**facts, "method": source} if source else facts


def changed_code(experiment: Experiment, directory: RunDirectory) -> dict[str, Any]:
    """The new facts if a method's own file or this package is not what it was; the user is told."""
    facts, here = directory.config["facts"], facts_of(experiment)
    names = {"method": directory.settings["method"]["name"], "package": "fedcsd itself"}
    now = {what: here.get(what, "") for what in names if what in facts}
    changed = {what: code for what, code in now.items() if code != facts[what]}
    for what in changed:
        note(
            f"the code of {names[what]} has changed since {directory.path} was started: "
            "from here on it is trained with the new code"
        )
    return changed


def tell_old(runs: Iterable[Path]) -> None:
    """Say which of these runs were trained, wholly or in part, with other code of this package than it has now."""
    total, old = 0, []
    for path in sorted(runs):
        facts, total = RunDirectory.open(path).config.get("facts", {}), total + 1
        changed = any(" code of the package " in change for change in facts.get("changes", []))
        if changed or facts.get("package") not in (None, provenance.package()):
            old.append(path)
    if old:
        named = ", ".join(map(str, old[:3])) + (f" and {len(old) - 3} more" if len(old) > 3 else "")
        note(
            f"trained with other code of fedcsd than this: {len(old)} of the {total} runs that are there "
            f"({named}); to train a run again, remove its folder"
        )


def check_same(experiment: Experiment, directory: RunDirectory) -> None:
    """Refuse other data, another model, and a method of another name or with other options."""
    _check_facts(experiment, directory)
    config = config_of(experiment)
    if config["method"] != directory.settings["method"]:
        raise UserError(
            f"{directory.path} was started with {directory.settings['method']}, not {config['method']}: start a new run"
        )


def _check_facts(experiment: Experiment, directory: RunDirectory) -> None:
    facts, here = directory.config["facts"], facts_of(experiment)
    for what in ("data", "model"):
        if facts[what] != here[what]:
            raise UserError(
                f"the {what} is not the {what} that {directory.path} was started with: restore it, or start a new run"
            )


def check_there(directory: RunDirectory, given: Mapping[str, Any]) -> None:
    """Whether the method's file and the data are where the run left them; if not, how to say where they are."""
    settings, again = directory.settings, f"fedcsd resume {shlex.quote(str(directory.path))}"
    method, data = (
        parse(settings["method"]["name"]),
        Path(layered({"data": settings["data"]})["data"]["name"]),
    )
    if "method" not in given and method.file and not method.file.exists():
        say = f"{again} --method FOLDER/{method.file.name}:{method.name}"
        raise UserError(
            f"{method.file}, the method of {directory.path}, is not there: {say} tells where it is"
        )
    if "data" not in given and data.is_absolute() and not data.exists():
        raise UserError(
            f"{data}, the data of {directory.path}, is not there: {again} --data PATH tells where it is"
        )


def move(directory: RunDirectory, places: Mapping[str, str | Path]) -> None:
    """Note where the method's file, the data or the folder of published data is now, if it is the same."""
    settings = layered(directory.settings)
    tables: dict[str, Any] = {}
    for key, place in places.items():
        if key == "data_dir":
            tables[key] = absolute(str(place))
        elif key == "data":
            tables[key] = {**settings[key], "name": absolute(str(place))}
        else:
            now, before = complete(parse(str(place))), parse(settings["method"]["name"])
            if not (before.home and now.home) or (now.name, now.parts) != (before.name, ()):
                own = (
                    f"tells where the file of {before.label} is, and nothing else"
                    if before.home
                    else "says nothing, for that has no file"
                )
                raise UserError(
                    f"{directory.path} was started with {settings['method']['name']}: --method {own}; start a new run"
                )
            tables[key] = {**settings["method"], "name": now.full}
    _check_facts(prepare({**settings, **tables}, parts=directory.partition()), directory)
    with writing_to(directory.path, advice=""):
        write_whole(directory.path / "config.toml", tomli_w.dumps({**directory.config, **tables}).encode())
