"""Find methods that users wrote: in a file, in a module, or installed with an entry point."""

import copyreg
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, get_origin, get_type_hints

from fedcsd.errors import UserError, note, unknown
from fedcsd.methods.base import Method
from fedcsd.plugins import check_unchanged, digest_of_source, imported, module_of, source_of, spec_of

GROUP = "fedcsd.methods"


def find(name: str, built_in: Iterable[str]) -> type[Method]:
    """Return the method of a name that is not built in."""
    spec = spec_of(name)
    if spec.home:
        method = from_file(spec.file, spec.name) if spec.file else from_module(spec.home, spec.name)
        _note_near_names(method)
        return method
    known = installed()
    if name in known:
        return from_entry(name, known[name])
    if "," in name:
        raise UserError(f"{name!r} is more than one method: fedcsd compare --methods {name}")
    if spec.name and Path(f"{name}.py").is_file():
        raise UserError(f"unknown method {name!r}: did you mean the file, {name}.py?")
    error = str(unknown("method", name, [*built_in, *known]))
    own = "; or give your own as my_method.py:Class or package.module:Class"
    raise UserError(error if error.endswith("?") else error + own)


def installed() -> dict[str, list[metadata.EntryPoint]]:
    """Return the entry points of installed packages by the name of the method; nothing is imported."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=GROUP):
        same = found.setdefault(entry.name, [])
        if entry.value not in [e.value for e in same]:  # a package may be seen twice on sys.path
            same.append(entry)
    return dict(sorted(found.items()))


def from_entry(name: str, entries: list[metadata.EntryPoint]) -> type[Method]:
    """Return the method that a package was installed with."""
    values = [entry.value for entry in entries]
    if spec_of(name).full != name or spec_of(name).home or name == "all" or set(name) & set(", /"):
        raise UserError(f"a method cannot be called {name!r}: write {values[0]} in its place")
    if len(values) > 1:
        raise UserError(
            f"several installed packages have a method {name!r}: write {' or '.join(values)} in its place"
        )
    module, _, own = values[0].replace(" ", "").partition(":")
    return from_module(module, own)


def from_module(module: str, name: str) -> type[Method]:
    """Return the class in `package.module`, which may lie in the current folder."""
    return _registered(class_of(imported(module), name, module), module)


def from_file(path: Path, name: str) -> type[Method]:
    """Return the class in a file."""
    module = module_of(path, "`fedcsd new-method` writes one to start from")
    return _registered(class_of(module, name, path.name), str(path))


def _registered(method: type[Method], home: str) -> type[Method]:
    """Have a spawned worker process load the method from its file or module, and refuse one that changed."""
    digest = digest_of_source(method, home)
    if digest:
        copyreg.pickle(method, partial(_reduced, home, digest))
    return method


def _reduced(home: str, digest: str, method: Method) -> tuple[Callable[..., Method], tuple[Any, ...]]:
    check_unchanged(source_of(type(method), home), digest)
    values = {f.name: getattr(method, f.name) for f in fields(method) if f.init}
    return _loaded, (home, type(method).__name__, values)


def _loaded(home: str, name: str, values: dict[str, Any]) -> Method:
    made = from_file(Path(home), name) if home.endswith(".py") else from_module(home, name)
    return made(**values)


def methods_in(module: ModuleType) -> dict[str, type[Method]]:
    """Return the methods that a module defines itself, by name."""
    return {
        n: c
        for n, c in vars(module).items()
        if isinstance(c, type) and issubclass(c, Method) and c.__module__ == module.__name__
    }


def choosable(module: ModuleType) -> dict[str, type[Method]]:
    """Return a module's methods that are public and not abstract, by name."""
    own = methods_in(module).items()
    return {n: c for n, c in own if not n.startswith("_") and not inspect.isabstract(c)}


def class_of(module: ModuleType, name: str, where: str) -> type[Method]:
    """Return the method of this name in a module, or its only one, and check that it can be made by name."""
    own = methods_in(module)
    if name:
        made = vars(module).get(name)
        if made is None:
            raise _no_class(where, name, own)
        if not isinstance(made, type) or not issubclass(made, Method):
            raise UserError(f"{where}:{name} is no method: it must be a class derived from fedcsd.Method")
    else:
        choice = choosable(module) or own
        if not choice:
            raise _no_class(where, name, own)
        if len(choice) > 1:
            names = " or ".join(f"{where}:{n}" for n in choice)
            raise UserError(f"{where} has several methods: say which, {names}")
        made = next(iter(choice.values()))
    _check_class(made)
    return made


def _no_class(where: str, name: str, own: dict[str, type[Method]]) -> UserError:
    if not own:
        return UserError(
            f"{where} has no method: it needs a class derived from fedcsd.Method (`fedcsd new-method` writes one)"
        )
    for n, c in own.items():
        if name in c.presets:
            return UserError(f"{name} is a preset of {n}: write {where}:{n}:{name}")
    return unknown(f"class of {where}", name, own)


def _check_class(method: type[Method]) -> None:
    """Refuse a class that cannot be made from options, with the line that would put it right."""
    name, options = method.__name__, method.__dataclass_fields__
    if inspect.isabstract(method):
        lacks = " and ".join(sorted(method.__abstractmethods__))
        raise UserError(f"{name} has no {lacks}(): define it, or derive {name} from fedcsd.FedAvg")
    try:
        hints = get_type_hints(method)
    except Exception as error:
        raise UserError(f"{name}: the type of an option is not known: {error}") from None
    for option, kind in hints.items():
        if option not in options and ClassVar not in (kind, get_origin(kind)):
            raise UserError(
                f"{option} is no option of {name} yet: write @dataclass(frozen=True) above its class"
            )
    for option, parameter in inspect.signature(method).parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic:
            raise UserError(
                f"option {option} of {name} needs a default, such as {option}: float = option(0.1, 'its meaning')"
            )
    if "name" in options:
        raise UserError(f"an option of {name} cannot be called name: that is the method's own")
    if isinstance(method.trains, str):
        raise UserError(f"{name}.trains must be a tuple of names, such as ({method.trains!r},)")
    if not isinstance(method.presets, dict) or not all(isinstance(p, dict) for p in method.presets.values()):
        raise UserError(f"{name}.presets must be a dict of dicts, such as {{'strong': {{'mu': 0.1}}}}")
    for preset, settings in method.presets.items():
        for option in settings.keys() - options.keys():
            raise UserError(f"{name}.presets: {preset!r} sets {option!r}, which is no option of {name}")


def is_own(method: type[Method]) -> bool:
    """Tell whether a user wrote the method; the others are in this package."""
    return not method.__module__.startswith("fedcsd.")


def _note_near_names(method: type[Method]) -> None:
    """Note each function that nearly has the name of one to override, and that its file never calls."""
    classes = [c for c in method.__mro__ if issubclass(c, Method)]
    functions = {c: {n for n in vars(c) if inspect.isfunction(vars(c)[n]) and n[0] != "_"} for c in classes}
    own = set[str]().union(*(vars(c) for c in classes if is_own(c)))
    ours = set[str]().union(*(functions[c] for c in classes if not is_own(c)))
    for c in filter(is_own, classes):
        for name in sorted(functions[c] - ours):
            near = get_close_matches(name.lower(), ours - own, n=1, cutoff=0.8)
            if near and not re.search(rf"\.{name}\b", inspect.getsource(sys.modules[c.__module__])):
                note(f"{c.__name__}.{name}() overrides nothing: did you mean {near[0]}()?")
