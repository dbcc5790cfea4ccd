"""Files and assignments of settings, and the one place where layers of settings are merged."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedcsd.config.options import native
from fedcsd.config.settings import COMPONENTS
from fedcsd.errors import UserError
from fedcsd.plugins import located, spec_of

FACTS = ("versions", "host", "facts", "deploy")
"""Tables of a run's config.toml that describe it and are not settings of training."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the settings in a file without the tables that describe a finished run."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"there is no file {path}") from None
    except IsADirectoryError:
        instead = f": give {path / 'config.toml'}" if (path / "config.toml").is_file() else ""
        raise UserError(f"{path} is a folder, not a file of settings{instead}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is no file of settings; if it is data, give it as --data {path}") from None
    except (tomllib.TOMLDecodeError, OSError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return {key: value for key, value in values.items() if key not in FACTS}


def parse_assignments(assignments: Iterable[str], what: str = "--set") -> dict[str, Any]:
    """Return `["rounds=50", "method.mu=0.01"]` as nested values; a value that is not TOML is text."""
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise UserError(
                f"{what} takes KEY=VALUE, such as rounds=50 or method.mu=0.01, not {assignment!r}"
            )
        *parents, last = key.strip().split(".")
        if not parents and last in COMPONENTS:
            parents, last = [last], "name"
        table = values
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise UserError(f"{what} sets {parent} both to a value and to a table")
        table[last] = toml_value(text)
    return values


def toml_value(text: str) -> Any:
    """Return a text as its TOML value, or as it is if it is not TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers of settings; later layers win.

    `method = "name"` is short for a table with that name. Another name of a component drops the options
    of the one before. Presets stay names (see `method_table`); experiments/ looks them up.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            if key not in COMPONENTS:
                merged[key] = native(value)
                continue
            table, before = component_table(key, value), merged.get(key, {})
            same = table.get("name") in (None, before.get("name")) or "name" not in before
            kept = {k: v for k, v in before.items() if k not in table or k == "name"} if same else {}
            merged[key] = {**kept, **table}  # later entries stand last: they win over a preset before them
    return merged


def component_table(component: str, value: Any) -> dict[str, Any]:
    """Return a component, given as a name or a table, as a table."""
    if not isinstance(value, (str, Mapping)):
        raise UserError(f"{component} must be a name or a table, not {value!r}")
    table = {"name": value} if isinstance(value, str) else {k: native(v) for k, v in value.items()}
    if isinstance(name := table.get("name"), str):
        if component == "method":
            named = method_table(name)
            table = {**named, **{k: v for k, v in table.items() if k != "name"}}
        elif component == "model":
            table["name"] = located(name)
    return table


def method_table(text: str) -> dict[str, Any]:
    """Return `"fedcsd:m1:mu=0.01"` as {"name": "fedcsd", ":m1": True, "mu": 0.01}; a colon marks a preset."""
    spec = spec_of(text)
    table: dict[str, Any] = {"name": spec.full}
    for part in spec.parts:
        key, equals, value = part.partition("=")
        key = key.strip() if equals else f":{part}"
        if key in ("", "name"):
            raise UserError(f"{text}: options are written OPTION=VALUE, such as mu=0.01, not {part!r}")
        table.pop(key, None)
        table[key] = toml_value(value) if equals else True
    return table
