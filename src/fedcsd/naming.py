"""How a method is named: `NAME[:PRESET][:OPTION=VALUE]…`, the same on the command line, in files and in Python.

NAME is a built-in or installed method, `path/to/file.py:Class` or `package.module:Class`; the class may
be left out where there is only one. Text only: nothing here imports torch before a class is needed.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcsd.errors import UserError, nearest

MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
# A path has no colon, or else no equals sign before its .py, so that fedcsd:mask=x.py names no file.
FILE = re.compile(r"([^:]*\.py|[^=]*?\.py)(?=:|$)")


@dataclass(frozen=True)
class Spec:
    """A method as it was named."""

    home: str
    """the file, as an absolute path, or the module; "" for a method that has a name of its own"""
    name: str
    """the method's name, or its class in that home ("" if that was left out)"""
    parts: tuple[str, ...]
    """presets and options, as they were typed"""

    @property
    def full(self) -> str:
        """The name without presets and options, as config.toml holds it."""
        return ":".join(filter(None, (self.home, self.name)))

    @property
    def label(self) -> str:
        """What the method is called in tables and pictures: without the way to its file."""
        return ":".join((self.name or Path(self.home).stem, *self.parts))

    @property
    def file(self) -> Path | None:
        return Path(self.home) if self.home.endswith(".py") else None


def parse(text: str) -> Spec:
    """The parts of a method's name; nothing is looked up."""
    file = FILE.match(text)
    name = file[0] if file else text.partition(":")[0]
    rest = text[len(name) + 1 :]
    parts = rest.split(":") if rest else []
    if not file and not MODULE.fullmatch(name):
        return Spec("", name, tuple(parts))
    home = str(file_of(text) or name)
    own = parts.pop(0) if parts and "=" not in parts[0] else ""
    return Spec(home, own, tuple(parts))


def file_of(name: str) -> Path | None:
    """The file of a method's or model's name, `path/to/file.py:factory`, as seen from everywhere."""
    file = FILE.match(name)
    return Path(file[0]).expanduser().resolve() if file else None


def located(model: str) -> str:
    """A model's name with the path of its file, if it has one, as seen from everywhere."""
    file = FILE.match(model)
    return f"{file_of(model)}{model[file.end() :]}" if file else model


def short(name: str) -> str:
    """A method's name for people and for paths: `MyMethod` for `/home/me/my_method.py:MyMethod`."""
    return parse(name).label


def method_table(text: str) -> dict[str, Any]:
    """`"fedcsd:m1:mu=0.01"` as the table {"name": "fedcsd", "teacher": "global", "mu": 0.01}.

    What stands later goes over what stands earlier.
    """
    spec = complete(parse(text))
    table: dict[str, Any] = {"name": spec.full}
    for part in spec.parts:
        key, equals, value = part.partition("=")
        if equals and key.strip() in ("", "name"):
            raise UserError(f"{text}: options are written OPTION=VALUE, such as mu=0.01, not {part!r}")
        table |= {key.strip(): toml_value(value)} if equals else preset(spec, part)
    return table


def complete(spec: Spec) -> Spec:
    """With the class of a file or module that was named without one."""
    if not spec.home or spec.name:
        return spec
    from fedcsd.methods import methods  # imports torch, which most names do without

    return Spec(spec.home, methods.load(spec.home).__name__, spec.parts)


def preset(spec: Spec, name: str) -> Mapping[str, Any]:
    """What a preset of a method sets."""
    from fedcsd.methods import methods  # imports torch, which most names do without

    method = methods.load(spec.full)
    presets, called = method.presets, spec.name
    if name in presets:
        return dict(presets[name])
    if name in method.__dataclass_fields__:
        raise UserError(f"{name} is an option of {called}: give it a value, {called}:{name}=…")
    if not presets:
        raise UserError(
            f"{called} has no presets, but {name!r} is given; options are written {called}:OPTION=VALUE"
        )
    near = nearest(name, presets)
    raise UserError(
        f"unknown preset {name!r} of {called}: {f'did you mean {near}? ' if near else ''}choose from {', '.join(presets)}"
    )


def toml_value(text: str) -> Any:
    """A value as TOML has it; what is not TOML is taken as text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def labelled(texts: Iterable[str]) -> dict[str, str]:
    """Methods as they were named, by label: short, and different for different methods."""
    specs: dict[str, Spec] = {}
    for text in texts:
        if text in specs:
            raise UserError(f"--methods names {text} twice")
        specs[text] = complete(parse(text))
    called = [spec.label for spec in specs.values()]
    found: dict[str, str] = {}
    for text, spec in specs.items():
        label = spec.label
        if spec.home and called.count(label) > 1:  # two files may have a class of the same name
            label = f"{Path(spec.home).stem}.{label}"
        found[free(label, found)] = text
    return found


def free(label: str, taken: Iterable[str]) -> str:
    """The label, numbered if it is taken."""
    taken, number = set(taken), 2
    if label not in taken:
        return label
    while f"{label}-{number}" in taken:
        number += 1
    return f"{label}-{number}"
