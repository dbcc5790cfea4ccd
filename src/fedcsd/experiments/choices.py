"""Make methods from names with presets and options, from tables, classes and objects."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fedcsd.config import Settings
from fedcsd.config.options import build, checked, default_of, native, plain, toml_text
from fedcsd.config.settings import COMPONENTS
from fedcsd.config.toml import component_table, merge
from fedcsd.errors import UserError, nearest, no_option
from fedcsd.methods import Method, methods
from fedcsd.plugins import Spec, free, short, spec_of

FROM_PYTHON = "given from Python"
Choice = Method | type[Method] | str | Mapping[str, Any]


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings over the defaults, with the method's class and presets looked up."""
    values = merge(COMPONENTS, values)
    return {**values, "method": resolved_method(values["method"])}


def resolved_method(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's table with its class named and its presets replaced by what they set."""
    name = str(table["name"])
    found: dict[str, Any] = {"name": _with_class(spec_of(name)).full}
    for key, value in table.items():
        if key != "name":
            found |= _preset(found["name"], key[1:]) if key.startswith(":") else {key: value}
    return found


def _with_class(spec: Spec) -> Spec:
    """Return a name with the class of its file or module, if it names none."""
    if not spec.home or spec.name:
        return spec
    return replace(spec, name=methods.load(spec.home).__name__)


def _preset(full: str, name: str) -> Mapping[str, Any]:
    method, called = methods.load(full), spec_of(full).name
    presets: Mapping[str, Mapping[str, Any]] = method.presets
    if name in presets:
        return presets[name]
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


def taken_apart(component: str, table: Mapping[str, Any], given: Any = None) -> tuple[Any, dict[str, Any]]:
    """Return the given object, or the name in a table, and the options beside the name."""
    options = dict(table)
    name = options.pop("name")
    if given is None and FROM_PYTHON in str(name):
        raise UserError(
            f"the {component} of this run was {FROM_PYTHON}: use fedcsd.resume(path, {component}=…) there"
        )
    return (name if given is None else given), options


def make_method(table: Mapping[str, Any]) -> Method:
    """Make a method from its table: its name, presets and options."""
    name, options = taken_apart("method", resolved_method(table))
    made: type[Method] = methods.load(name)
    name = short(name)
    known = [option.name for option in fields(made)]
    for key in options:
        if key in Settings.__dataclass_fields__ and key not in known:
            raise UserError(
                f"{key} is a setting, not an option of {name}: put it above [method], or use --set {key}=…"
            )
        if key not in known:
            raise no_option(key, name, known)
    try:
        method = build(made, options, where="method")
    except UserError:
        raise
    except Exception as error:  # the class may check its options in __post_init__
        raise UserError(
            f"{name} cannot be made with these options: {type(error).__name__}: {error}"
        ) from error
    return _with_checked_options(method)


def method_from(choice: Any) -> Method:
    """Make the method that a table, a class or an object stands for."""
    if isinstance(choice, Mapping):
        return make_method(choice)
    method = choice() if isinstance(choice, type) and issubclass(choice, Method) else choice
    if not isinstance(method, Method):
        raise UserError(f"method must be a name or a Method such as fedcsd.FedCSD(mu=0.01), not {method!r}")
    if "name" in plain(method):
        raise UserError("an option of a method cannot be called name: that is the method's own")
    return _with_checked_options(method)


def _with_checked_options(method: Method) -> Method:
    """Check all options, defaults too, so that the run can be resumed; NumPy's numbers become Python's."""
    values = plain(method)
    checked(type(method), values, where="method")
    foreign = {key: native(value) for key, value in values.items() if native(value) is not value}
    return replace(method, **foreign) if foreign else method


def _with_all(chosen: Sequence[Any]) -> list[Any]:
    """Replace `all` by the built-in methods that are not named beside it, FedAvg first."""
    rest = sorted(
        set(methods.names) - {c for c in chosen if isinstance(c, str)}, key=lambda n: (n != "fedavg", n)
    )
    return [
        c for choice in chosen for c in (rest if isinstance(choice, str) and choice == "all" else [choice])
    ]


def choices_of(
    chosen: str | Mapping[str, Choice] | Sequence[Choice], shared: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the methods to compare by label: tables, or objects from Python.

    `shared` are options that a [method] table or --set method.… gives. They hold for every method of that
    name; without a name they hold for every method that has them.
    """
    if isinstance(chosen, str):
        chosen = [part.strip() for part in chosen.split(",") if part.strip()]
    if not isinstance(chosen, Iterable):
        raise UserError(f"methods must be names or a list of methods, such as fedavg,fedcsd, not {chosen!r}")
    entries = dict(chosen) if isinstance(chosen, Mapping) else _by_label(list(chosen))
    if not entries:
        raise UserError("compare needs at least one method, such as fedavg,fedcsd")
    tables = {
        label: resolved_method({"name": COMPONENTS["method"], **component_table("method", choice)})
        for label, choice in entries.items()
        if isinstance(choice, (str, Mapping))
    }
    shared = component_table("method", shared)
    shared = resolved_method(shared) if "name" in shared else shared
    for key in [key for key in shared if key != "name"]:
        having = [k for k, t in tables.items() if key in methods.load(t["name"]).__dataclass_fields__]
        if not having:
            raise UserError(f"none of the compared methods has an option {key!r}, which method.{key} sets")
        for label in having:
            if shared.get("name") in (None, tables[label]["name"]):
                tables[label] = {key: shared[key], **tables[label]}
    for choice in tables.values():
        make_method(choice)  # refuse a wrong option before any work
    return {**entries, **tables}


def _by_label(chosen: Sequence[Any]) -> dict[str, Any]:
    """Give each name, table and object of a list a short label of its own, in the order given."""
    chosen = _with_all(chosen)
    labels = [_label(choice) for choice in chosen]
    entries: dict[str, Any] = {}
    for choice, label in zip(chosen, labels, strict=True):
        home = spec_of(choice).home if isinstance(choice, str) else ""
        if isinstance(choice, str) and chosen.count(choice) > 1:
            raise UserError(f"--methods names {choice} twice")
        if home and labels.count(label) > 1:  # two files may have a class of the same name
            label = f"{Path(home).stem}.{label}"
        entries[free(label, entries)] = choice
    return entries


def _label(choice: Any) -> str:
    """Return a name without its path, or a class with the options that differ from their defaults."""
    if isinstance(choice, str):
        return _with_class(spec_of(choice)).label
    if isinstance(choice, Mapping):
        return ":".join(
            [short(str(choice.get("name"))), *(f"{k}={v}" for k, v in choice.items() if k != "name")]
        )
    if isinstance(choice, type):
        return choice.__name__
    options = fields(choice) if isinstance(choice, Method) else ()
    values = {o: native(getattr(choice, o.name)) for o in options if o.init}
    changed = [f"{o.name}={toml_text(value)}" for o, value in values.items() if value != default_of(o)]
    return ":".join([type(choice).__name__, *changed])
