"""A run goes on only with the data, the model and the method that it began with, wherever they are now."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedcsd import provenance
from fedcsd.config import layered
from fedcsd.errors import UserError, note
from fedcsd.experiments import absolute, config_of, prepare, sources_of
from fedcsd.federation import Experiment
from fedcsd.naming import complete, file_of, located, parse
from fedcsd.runs import RunDirectory, write_whole, writing_to

MOVABLE = ("method", "model", "data", "data_dir")
"""settings that say where something is"""


def facts_of(experiment: Experiment) -> dict[str, Any]:
    """What a run's data, model and code were when it began."""
    facts = {
        "data": experiment.data.fingerprint(),
        "model": experiment.network.layout.fingerprint(),
        "package": provenance.package(),
    }
    return {**facts, **sources_of(experiment)}


def changed_code(experiment: Experiment, directory: RunDirectory) -> dict[str, Any]:
    """The new facts if a file of one's own or this package is not what it was; the user is told."""
    facts, here = directory.config["facts"], facts_of(experiment)
    settings = layered(directory.settings)
    names = {
        "method": settings["method"]["name"],
        "model_code": settings["model"]["name"],
        "package": "fedcsd itself",
    }
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
    """Whether files of one's own and the data are where the run left them; if not, how to say where they are."""
    settings, again = layered(directory.settings), f"fedcsd resume {shlex.quote(str(directory.path))}"
    data = Path(settings["data"]["name"])
    for what in ("method", "model"):
        name = settings[what]["name"]
        file = file_of(name)
        if what not in given and file and not file.exists():
            say = f"{again} --{what} FOLDER/{Path(name).name}"
            raise UserError(f"{file}, the {what} of {directory.path}, is not there: {say} tells where it is")
    if "data" not in given and data.is_absolute() and not data.exists():
        raise UserError(
            f"{data}, the data of {directory.path}, is not there: {again} --data PATH tells where it is"
        )


def _check_moved(path: Path, what: str, before: str, now: str) -> None:
    """A method or model may be in another place, but must be of the same name."""
    own = ":" in before
    name = before.rpartition(":")[2]
    if not own or ":" not in now or now.rpartition(":")[2] != name:
        does = (
            f"--{what} tells where the file of {name} is, and nothing else; start a new run"
            if own
            else f"it has no file that --{what} could tell the place of; leave --{what} out, or start a new run"
        )
        raise UserError(f"{path} was started with {before}: {does}")


def move(directory: RunDirectory, places: Mapping[str, str | Path]) -> None:
    """Note where files of one's own, the data or the folder of published data are now, if they are the same."""
    settings = layered(directory.settings)
    tables: dict[str, Any] = {}
    for key, place in places.items():
        if key == "data_dir":
            tables[key] = absolute(str(place))
        elif key == "data":
            tables[key] = {**settings[key], "name": absolute(str(place))}
        else:
            before = settings[key]["name"]
            spec = complete(parse(str(place))) if key == "method" else None
            now = ":".join((spec.full, *spec.parts)) if spec else located(str(place))
            _check_moved(directory.path, key, before, now)
            tables[key] = {**settings[key], "name": now}
    try:
        experiment = prepare({**settings, **tables}, parts=directory.partition())
    except UserError as error:
        if "data" not in tables or not Path(tables["data"]["name"]).exists():
            raise
        other = f"{tables['data']['name']} cannot be the data that {directory.path} was started with"
        raise UserError(f"{other}: {error}") from None
    _check_facts(experiment, directory)
    with writing_to(directory.path, advice=""):
        write_whole(directory.path / "config.toml", tomli_w.dumps({**directory.config, **tables}).encode())
