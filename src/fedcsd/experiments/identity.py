"""A run goes on only with the data, the model and the method that it began with, wherever they are now."""

import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from fedcsd.config.toml import merge
from fedcsd.errors import UserError, note
from fedcsd.experiments import provenance
from fedcsd.experiments.archive import open_run
from fedcsd.experiments.choices import FROM_PYTHON
from fedcsd.experiments.experiment import Experiment, absolute, config_of, load_data, prepare, settings_of
from fedcsd.experiments.run_folder import RunDirectory
from fedcsd.files import write_whole, writing
from fedcsd.methods import methods
from fedcsd.models import find
from fedcsd.plugins import digest_of, digest_of_source, file_of, source_of, spec_of

CODE = {"method": "method", "model": "model_code"}
"""what may be of one's own, and the fact that tells versions of its code apart"""


def facts_of(experiment: Experiment) -> dict[str, Any]:
    """What a run's data, model and code were when it began."""
    facts = {
        "data": experiment.data.fingerprint(),
        "model": experiment.network.layout.fingerprint(),
        "package": provenance.package(),
    }
    return {**facts, **_sources_of(experiment)}


def _sources_of(experiment: Experiment) -> dict[str, str]:
    """Tells versions of somebody's own method and model apart; what is built in or given from Python has none."""
    name = experiment.tables.get("method", {}).get("name", "")
    own = name and name not in methods.names
    found = {
        "method": digest_of_source(type(experiment.method), name) if own else "",
        "model_code": getattr(experiment.factory, "digest", ""),
    }
    return {what: code for what, code in found.items() if code}


def code_now(what: str, name: str) -> str:
    """The digest that the file of a method or model of one's own has now; "" if it cannot be read."""
    file = file_of(name)
    with suppress(UserError):  # its package may be gone
        file = file or source_of(methods.load(name) if what == "method" else find(name), name)
    return digest_of(file)


def changed_code(experiment: Experiment, directory: RunDirectory) -> dict[str, Any]:
    """The new facts if a file of one's own or this package is not what it was; the user is told."""
    facts, here = directory.config["facts"], facts_of(experiment)
    settings = merge(directory.settings)
    names = {fact: settings[what]["name"] for what, fact in CODE.items()} | {"package": "fedcsd itself"}
    now = {fact: here.get(fact, FROM_PYTHON) for fact in names if fact in facts}
    changed = {fact: code for fact, code in now.items() if code != facts[fact]}
    for fact, code in changed.items():
        since = f"the code of {names[fact]} has changed since {directory.path} was started"
        with_new = "from here on it is trained with the new code"
        if code == FROM_PYTHON:  # which a method never is: its name would be another
            since = f"{directory.path} was started with {names[fact]}"
            with_new = f"from here on its model is what is {FROM_PYTHON}"
        note(f"{since}: {with_new}")
    return changed


def tell_old(runs: Iterable[Path]) -> None:
    """Say which of these runs were trained, wholly or in part, with other code of this package than it has now."""
    total, old = 0, []
    for path in sorted(runs):
        facts, total = open_run(path).config.get("facts", {}), total + 1
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
    here = facts_of(experiment)
    for what in ("data", "model"):
        _check_fact(what, here[what], directory)


def _check_fact(what: str, here: str, directory: RunDirectory) -> None:
    if directory.config["facts"][what] != here:
        raise UserError(
            f"the {what} is not the {what} that {directory.path} was started with: restore it, or start a new run"
        )


def check_there(
    directory: RunDirectory, given: Mapping[str, Any], places: Mapping[str, Any] | None = None
) -> None:
    """Whether files of one's own and the data are where the run left them; if not, how to say where they are.

    What is `given` from Python is not looked for, nor what there is a new place of."""
    settings, lost, places = merge(directory.settings), [], places or {}
    told = [f"--{key.replace('_', '-')} {shlex.quote(str(place))}" for key, place in places.items()]
    for what in ("method", "model", "data"):
        name = settings[what]["name"]
        place = Path(name) if what == "data" else file_of(name)
        if what not in {*given, *places} and place and place.is_absolute() and not place.exists():
            lost.append(f"{place}, the {what} of {directory.path},")
            told.append(f"--{what} " + ("PATH" if what == "data" else f"FOLDER/{Path(name).name}"))
    if lost:
        are, they = ("are", "they are") if len(lost) > 1 else ("is", "it is")
        again = f"fedcsd resume {shlex.quote(str(directory.path))} {' '.join(told)}"
        raise UserError(f"{' and '.join(lost)} {are} not there: {again} tells where {they}")


def _moved(path: Path, what: str, before: str, place: str) -> str:
    """The name of a method or model that may be in another place now, but must be the same; its class or function
    may be left out."""
    spec, name = spec_of(place), before.rpartition(":")[2]
    if spec.home and not spec.name:
        spec = replace(spec, name=name)
    now = ":".join((spec.full, *spec.parts))
    if now == before or (":" in before and ":" in now and now.rpartition(":")[2] == name):
        return now
    does = (
        f"--{what} tells where the file of {name} is, and nothing else; start a new run"
        if ":" in before
        else f"it has no file that --{what} could tell the place of; leave --{what} out, or start a new run"
    )
    raise UserError(f"{path} was started with {before}: {does}")


def move(directory: RunDirectory, places: Mapping[str, str | Path], given: Mapping[str, Any]) -> None:
    """Note where files of one's own, the data or the folder of published data are now, if they are the same.

    `given` are the objects from Python that the run goes on with."""
    settings = merge(directory.settings)
    tables: dict[str, Any] = {}
    for key, place in places.items():
        if key == "data_dir":
            tables[key] = absolute(str(place))
        elif key == "data":
            tables[key] = {**settings[key], "name": absolute(str(place))}
        else:
            now = _moved(directory.path, key, settings[key]["name"], str(place))
            tables[key] = {**settings[key], "name": now}
    tables = {key: table for key, table in tables.items() if table != settings.get(key)}
    if not tables:
        return
    check_there(directory, given, {key: places[key] for key in tables})
    values = {**settings, **tables}
    if "data" in tables:
        _check_data(directory, values)
    _check_facts(prepare(values, parts=directory.partition(), **given), directory)
    with writing(directory.path):
        write_whole(directory.path / "config.toml", tomli_w.dumps({**directory.config, **tables}).encode())


def _check_data(directory: RunDirectory, values: Mapping[str, Any]) -> None:
    """Refuse other data before a model is made for it."""
    settings, name = settings_of(values), values["data"]["name"]
    try:
        found = load_data(values["data"], None, settings).fingerprint()
    except UserError as error:
        if not Path(name).exists():
            raise
        raise UserError(
            f"{name} cannot be the data that {directory.path} was started with: {error}"
        ) from None
    _check_fact("data", found, directory)
