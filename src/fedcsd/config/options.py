"""Options are dataclass fields that state their meaning, their range and how the program treats them."""

import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from fedcsd.errors import UserError, no_option, unknown

T = TypeVar("T")
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
LIMITS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def option(
    default: Any,
    meaning: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    panel: str = "",
    result: bool = True,
    on_resume: Literal["fixed", "free", "mends", "moves"] = "fixed",
    deals: bool = False,
    deployed: bool = True,
    label: bool = True,
    stated: bool = False,
    gpu: bool = False,
    partitions: tuple[str, ...] = (),
    in_paper: bool = False,
) -> Any:
    """Return a dataclass field that describes itself.

    A method's option needs a default, a meaning and perhaps a range. The other arguments are for settings.

    Args:
        ge, gt, le, lt: the range of a number
        panel: heading above it in the commands' help; without one it is no command-line option
        result: a different value may give a different result
        on_resume: "fixed" keeps the run's value; "free" may change; "mends" may change so that a run that
            diverged goes on; "moves" states where something is now
        deals: decides which samples there are and which client holds them
        deployed: a deployment takes it; otherwise each machine of a deployment decides it
        label: tells runs apart in labels of charts
        stated: captions of tables have it even at its default
        gpu: needs a GPU for any value but its default
        partitions: the only partitions that use it; empty for all
        in_paper: the paper's tables set it
    """
    traits = {key: value for key, value in locals().items() if key != "default"}
    return field(default=default, metadata=traits)


def names_where(*classes: type, **traits: object) -> tuple[str, ...]:
    """Return the names of the options that have these traits, in order; a tuple stands for any of its values."""
    return tuple(
        f.name
        for cls in classes
        for f in fields(cls)
        if all(
            f.metadata[key] in (want if isinstance(want, tuple) else (want,)) for key, want in traits.items()
        )
    )


def default_of(option: "Field[Any]") -> Any:
    """Return the default of an option; MISSING if it has none."""
    return option.default if option.default_factory is MISSING else option.default_factory()


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Make a dataclass of options from plain values, checked."""
    return cls(**checked(cls, values, where))


def checked(cls: type, values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return values of options as their types; raise a UserError for a wrong name, type or range."""
    known, hints = {f.name: f.metadata for f in fields(cls)}, get_type_hints(cls)
    for name in values:
        if name not in known:
            raise no_option(name, where or "the settings", known)
    prefix = f"{where}." if where else ""
    return {n: checked_value(prefix + n, v, hints[n], known[n]) for n, v in values.items()}


def checked_value(name: str, value: Any, kind: Any, limits: Mapping[str, Any]) -> Any:
    """Return a value as its type, or raise a UserError that names what is allowed."""
    value = native(value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise unknown(f"value of {name}", value, map(str, get_args(kind)))
        return value
    if kind not in KINDS:
        return value  # the method that has such an option checks it
    if kind is float and type(value) is int:
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
        raise UserError(f"{name} must be {KINDS[kind]}, not {value!r}")
    if kind in (int, float):
        if not math.isfinite(value):
            raise UserError(f"{name} must be a finite number, not {value}")
        bounds = {key: limits[key] for key in LIMITS if limits.get(key) is not None}
        if not all(getattr(operator, key)(value, limit) for key, limit in bounds.items()):
            wanted = " and ".join(f"{LIMITS[key]} {limit}" for key, limit in bounds.items())
            raise UserError(f"{name} must be {wanted}, not {value}")
    return value


def native(value: Any) -> Any:
    """Return a NumPy number as a Python number, which files can hold, and any other value unchanged."""
    numeric = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
    return value.item() if numeric else value


def describe(cls: type) -> list[tuple[str, str, str]]:
    """Return (name, default, meaning) of every option."""
    hints, rows = get_type_hints(cls), []
    for f in fields(cls):
        kind, default = hints[f.name], default_of(f)
        choices = f" ({', '.join(map(str, get_args(kind)))})" if get_origin(kind) is Literal else ""
        shown = "" if default is MISSING else toml_text(default)
        rows.append((f.name, shown, f.metadata.get("meaning", "") + choices))
    return rows


def toml_text(value: Any) -> str:
    """Return a value as it is typed in a file of settings."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def plain(options: Any) -> dict[str, Any]:
    """Return a dataclass of options as plain values without None, which TOML cannot hold."""
    return {key: value for key, value in asdict(options).items() if value is not None}


def call_with(
    function: Callable[..., T], options: Mapping[str, Any], where: str, *arguments: Any, **fixed: Any
) -> T:
    """Call a function; pass `options` as keyword-only parameters and check each for name and type."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in fixed]
    for name in options:
        if name not in known:
            raise no_option(name, f"this {where}", known)
    hints = get_type_hints(function)
    values = {n: checked_value(f"{where}.{n}", v, hints[n], {}) for n, v in options.items()}
    return function(*arguments, **values, **fixed)
