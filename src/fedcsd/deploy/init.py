"""Write a Flower app, with instructions for the people who run it (`fedcsd deploy init`)."""

import re
import shutil
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import tomli_w

from fedcsd.deploy.app import MODULES, PACKAGE, write_app
from fedcsd.errors import UserError
from fedcsd.files import writing
from fedcsd.plugins import file_of

PAGES = {
    "README.md": "README.md",
    "JOIN.md": "JOIN.md",
    "nginx.conf": "nginx.conf",
    "fedcsd-superlink.service": "systemd/fedcsd-superlink.service",
    "fedcsd-supernode.service": "systemd/fedcsd-supernode.service",
}
SIMULATION = {"SIMULATION.md": "README.md"}
INNER = 8000  # port of the SuperLink on the server itself


def found(chosen: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, str], set[Path]]:
    """Return the names of method and model in the app, and the user's files that the app takes to the sites.

    A file that does not exist, or that could not be imported at a site, is refused.
    """
    from fedcsd.experiments.choices import make_method
    from fedcsd.models import find

    make_method(chosen["method"])
    if chosen["model"]["name"] != "auto":
        find(chosen["model"]["name"])
    named, own = {key: chosen[key]["name"] for key in ("method", "model")}, set()
    for key, name in named.items():
        if file := file_of(name):
            if file.stem in MODULES:
                raise UserError(f"the app has a file {file.name} of its own: rename yours")
            if not re.fullmatch(r"[A-Za-z_]\w*", file.stem):
                raise UserError(f"{file.name} cannot be imported by its name: rename it, such as my_{key}.py")
            named[key] = f"{PACKAGE}.{file.stem}:{name.rpartition(':')[2]}"
            own.add(file)
    if len({file.name for file in own}) < len(own):
        raise UserError(f"method and model are in two files called {min(own).name}: rename one of them")
    return named, own


def write_folder(
    folder: Path,
    host: str,
    port: int,
    sites: int,
    config: Mapping[str, Any],
    data_options: str,
    own: Iterable[Path] = (),
) -> None:
    """Write the app, its pages and its units into a new folder; without a host it is for a simulation.

    `own` are files of a method or model that are copied into the app.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already and is not empty: choose another folder")
    mode = "sites" if host else "partition"
    settings = {"mode": mode, "clients": sites, "out": "runs/federation", "data_options": data_options}
    with writing(folder):
        write_app(folder, {**settings, **config})
        for file in own:
            shutil.copy(file, folder / PACKAGE / file.name)
        check = f"--options '{data_options}'" if data_options else ""
        facts = {"host": host, "port": port, "inner": INNER, "sites": sites, "check": check}
        facts["classes"] = _classes(data_options)
        for page, target in (PAGES if host else SIMULATION).items():
            text = files("fedcsd").joinpath(f"templates/deploy/{page}").read_text(encoding="utf-8")
            path = folder / target
            path.parent.mkdir(exist_ok=True)
            path.write_text(Template(text).substitute(facts).replace(" \n", "\n"), encoding="utf-8")
        authority = str(folder.resolve() / "certificates/ca.crt")
        name, connection = "simulation", {"address": ":local:"}
        if host:
            name = "federation"
            connection = {"address": f"127.0.0.1:{INNER}", "root-certificates": authority}
        connections = {"superlink": {"default": name, name: connection}}
        (folder / "flower-config.toml").write_text(tomli_w.dumps(connections), encoding="utf-8")
        (folder / ".gitignore").write_text("certificates/\nruns/\n*.key\n*.db*\nnginx*\n!nginx.conf\n")


def _classes(data_options: str) -> str:
    """Return the sentence for the sites about the numbers of classes."""
    given = dict(option.partition("=")[::2] for option in data_options.split())
    if names := given.get("classes", "").strip("'\""):
        if names.isdigit():
            return f"There are {names} classes, numbered from 0 in the same order at every site. You need not have them all."
        return f"The classes are {names.replace(',', ', ')}. You need not have them all; other folders are refused."
    return "Every site must number or name its classes in the same way."
