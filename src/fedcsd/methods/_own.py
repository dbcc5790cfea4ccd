"""Methods that others wrote: in a file, in a module, or installed with an entry point."""

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

import torch

from fedcsd.errors import UserError, note, unknown
from fedcsd.methods.base import Method
from fedcsd.plugins import check_unchanged, digest_of_source, imported, module_of, source_of, spec_of
from fedcsd.weights import Weights

GROUP = "fedcsd.methods"


def find(name: str, built_in: Iterable[str]) -> type[Method]:
    """The method of a name that is not built in."""
    spec = spec_of(name)
    if spec.file:
        return _looked_over(from_file(spec.file, spec.name))
    if spec.home:
        return _looked_over(from_module(spec.home, spec.name))
    known = installed()
    if name in known:
        return from_entry(name, known[name])
    if "," in name:
        raise UserError(f"{name!r} is more than one method: fedcsd compare --methods {name}")
    if spec.name and Path(f"{name}.py").is_file():
        raise UserError(f"unknown method {name!r}: did you mean the file, {name}.py?")
    error = unknown("method", name, [*built_in, *known])
    own = (
        "" if str(error).endswith("?") else "; or give your own as my_method.py:Class or package.module:Class"
    )
    raise UserError(f"{error}{own}")


def installed() -> dict[str, list[metadata.EntryPoint]]:
    """The entry points of installed packages, by the name of the method; nothing is imported."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=GROUP):
        same = found.setdefault(entry.name, [])
        if entry.value not in [e.value for e in same]:  # a package may be seen twice on sys.path
            same.append(entry)
    return dict(sorted(found.items()))


def from_entry(name: str, entries: list[metadata.EntryPoint]) -> type[Method]:
    """The method that a package was installed with."""
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
    """The class in `package.module`, looked for in the current folder as well."""
    return _found_again(class_of(imported(module), name, module), module)


def from_file(path: Path, name: str) -> type[Method]:
    """The class in a file."""
    module = module_of(path, "`fedcsd new-method` writes one to start from")
    return _found_again(class_of(module, name, path.name), str(path))


def _found_again(method: type[Method], home: str) -> type[Method]:
    """The method; worker processes that do not share our memory find it by its file or module, if it is the same."""
    digest = digest_of_source(method, home)
    if digest:
        copyreg.pickle(method, partial(_reduced, home, digest))
    return method


def _reduced(home: str, digest: str, method: Method) -> tuple[Callable[..., Method], tuple[Any, ...]]:
    check_unchanged(source_of(type(method), home), digest)
    values = {f.name: getattr(method, f.name) for f in fields(method) if f.init}
    return _again, (home, type(method).__name__, values)


def _again(home: str, name: str, values: dict[str, Any]) -> Method:
    made = from_file(Path(home), name) if home.endswith(".py") else from_module(home, name)
    return made(**values)


def methods_in(module: ModuleType) -> dict[str, type[Method]]:
    """The methods that a module defines itself, by name."""
    return {
        n: c
        for n, c in vars(module).items()
        if isinstance(c, type) and issubclass(c, Method) and c.__module__ == module.__name__
    }


def choosable(module: ModuleType) -> dict[str, type[Method]]:
    """Those of them that are meant to be used: public, and not abstract."""
    own = methods_in(module).items()
    return {n: c for n, c in own if not n.startswith("_") and not inspect.isabstract(c)}


def class_of(module: ModuleType, name: str, where: str) -> type[Method]:
    """The method of this name in a module, or its only one; checked for what every method must have."""
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
            raise _no_method(where)
        if len(choice) > 1:
            names = " or ".join(f"{where}:{n}" for n in choice)
            raise UserError(f"{where} has several methods: say which, {names}")
        made = next(iter(choice.values()))
    _check(made)
    return made


def _no_class(where: str, name: str, own: dict[str, type[Method]]) -> UserError:
    if not own:
        return _no_method(where)
    for n, c in own.items():
        if name in c.presets:
            return UserError(f"{name} is a preset of {n}: write {where}:{n}:{name}")
    return unknown(f"class of {where}", name, own)


def _no_method(where: str) -> UserError:
    return UserError(
        f"{where} has no method: it needs a class derived from fedcsd.Method (`fedcsd new-method` writes one)"
    )


def _check(method: type[Method]) -> None:
    """What a class must have to be made by its name."""
    name = method.__name__
    if inspect.isabstract(method):
        lacks = " and ".join(sorted(method.__abstractmethods__))
        raise UserError(f"{name} has no {lacks}(): define it, or derive {name} from fedcsd.FedAvg")
    try:
        hints = get_type_hints(method)
    except Exception as error:
        raise UserError(f"{name}: the type of an option is not known: {error}") from None
    for option, kind in hints.items():
        if (
            option not in method.__dataclass_fields__
            and get_origin(kind) is not ClassVar
            and kind is not ClassVar
        ):
            raise UserError(
                f"{option} is no option of {name} yet: write @dataclass(frozen=True) above its class"
            )
    for option, parameter in inspect.signature(method).parameters.items():
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise UserError(
                f"option {option} of {name} needs a default, such as {option}: float = option(0.1, 'its meaning')"
            )
    if not isinstance(method.presets, dict) or not all(isinstance(p, dict) for p in method.presets.values()):
        raise UserError(f"{name}.presets must be a dict of dicts, such as {{'strong': {{'mu': 0.1}}}}")
    for preset, settings in method.presets.items():
        for option in settings:
            if option not in method.__dataclass_fields__:
                raise UserError(f"{name}.presets: {preset!r} sets {option!r}, which is no option of {name}")
    if "name" in method.__dataclass_fields__:
        raise UserError(f"an option of {name} cannot be called name: that is the method's own")


def is_own(method: type[Method]) -> bool:
    """Whether a method is somebody's own, and not one of this package."""
    return not method.__module__.startswith("fedcsd.")


def note_if_same(method: Method, before: Weights, after: Weights) -> None:
    """To be called after a first round: a method of one's own may have forgotten to set the new model. One that is
    personalised may mean to have none."""
    kind = type(method)
    if not is_own(kind) or method.personalised:
        return
    if torch.equal(before.flat, after.flat.to(before.flat)):
        note(
            f"{kind.__name__}.round() left the global model as it was: set server.weights to new weights, "
            "such as weighted_mean(replies)"
        )


def _looked_over(method: type[Method]) -> type[Method]:
    """The method; functions that seem to be meant for another name are noted."""
    classes = [c for c in method.__mro__ if issubclass(c, Method)]
    own = {n for c in classes if is_own(c) for n in vars(c)}
    ours = {n for c in classes if not is_own(c) for n, f in vars(c).items() if inspect.isfunction(f)}
    open_ = {n.lower(): n for n in ours - own if not n.startswith("_")}
    for c in filter(is_own, classes):
        for name, function in vars(c).items():
            if not inspect.isfunction(function) or name.startswith("_") or name in ours:
                continue
            near = get_close_matches(name.lower(), open_, n=1, cutoff=0.8)
            if near and not _mentioned(name, c):
                note(f"{c.__name__}.{name}() overrides nothing: did you mean {open_[near[0]]}()?")
    return method


def _mentioned(name: str, where: type) -> bool:
    """Whether something is called `.name` in the file of a class."""
    try:
        return bool(re.search(rf"\.{name}\b", inspect.getsource(sys.modules[where.__module__])))
    except (OSError, TypeError, KeyError):
        return True  # there is no file to look in
