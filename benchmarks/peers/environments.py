"""Make an environment for each contender with venv and pip, once, from requirements.toml."""

import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.toml"
CHECKOUT = HERE.parent.parent
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet", "install")


class NotInstalled(Exception):
    """An environment cannot be made; the message is one line."""


def wanted(name: str) -> dict[str, Any]:
    """Return the packages of an environment: `torch`, then `install` and `no_deps`."""
    table = tomllib.loads(REQUIREMENTS.read_text(encoding="utf-8"))
    return {"torch": table["torch"], **table["contenders"][name]}


def python_of(name: str, venvs: Path) -> Path:
    """The interpreter of a contender's environment, which is made if it is not there as it should be."""
    wishes, folder = wanted(name), venvs / name
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    key = hashlib.sha256(json.dumps([wishes, str(CHECKOUT), sys.version]).encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == key and python.exists():
        return python
    _command([sys.executable, "-m", "venv", "--clear", str(folder)])
    # torch first, and held there: no peer may put another build in its place.
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(wishes["torch"]) + "\n", encoding="utf-8")
    _command([str(python), *PIP, *wishes["torch"]])
    held = [str(python), *PIP, "--constraint", str(constraints)]
    if wishes.get("no_deps"):
        _command([*held, "--no-deps", *wishes["no_deps"]])
    if wishes.get("install"):
        _command([*held, *wishes["install"]])
    if wishes.get("checkout"):
        _command([*held, "--constraint", str(CHECKOUT / "constraints.txt"), "--editable", str(CHECKOUT)])
    stamp.write_text(key, encoding="utf-8")
    return python


def versions(python: Path) -> dict[str, str]:
    """Everything that is installed in an environment."""
    listing = subprocess.run(
        [str(python), "-m", "pip", "--disable-pip-version-check", "list", "--format", "json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return {package["name"]: package["version"] for package in json.loads(listing.stdout)}


def _command(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "WARNING" not in line and line.strip()]
        raise NotInstalled(lines[-1].strip() if lines else f"pip ended with status {done.returncode}")
