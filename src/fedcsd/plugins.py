"""Code that others wrote, in a file or in a module: as what it is imported, and how its versions are told apart."""

import inspect
import sys
from collections.abc import Callable, Iterable
from hashlib import blake2b
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcsd.errors import RunStopped, UserError, one_line
from fedcsd.naming import file_of

DIGEST = "__fedcsd_digest__"


def imported(module: str) -> ModuleType:
    """`package.module`, looked for in the current folder as well."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a file here hides none of Python's
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        advice = ": install it, or start in the folder that holds it" if missing else ""
        raise UserError(f"{module} cannot be imported: {_problem(error)}{advice}") from error


def module_of(path: Path, advice: str = "correct the path") -> ModuleType:
    """The file as a module. What has not changed is not run again.

    Its name is made from its path, so that a random.py or test.py stands in nobody's way. Its folder
    goes to the end of sys.path for the same reason: files beside it can be imported, and hide nothing.
    """
    try:
        source = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"there is no file {path}: {advice}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    digest = blake2b(source, digest_size=8).hexdigest()
    called = _called(path)
    known = sys.modules.get(called)
    if known is not None and vars(known)[DIGEST] == digest:
        return known
    spec = spec_from_file_location(called, path)
    assert spec is not None
    module = module_from_spec(spec)
    setattr(module, DIGEST, digest)
    new = str(path.parent) not in sys.path
    sys.path += [str(path.parent)] * new
    sys.modules[called] = module  # dataclasses look their module up while it is made
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        del sys.modules[called]
        if known is not None:
            sys.modules[called] = known
        if new:
            sys.path.remove(str(path.parent))
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise UserError(f"{path.name} cannot be imported: {_problem(error)}") from error
    return module


def _called(path: Path) -> str:
    """The name of a file as a module."""
    return f"fedcsd_{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def _problem(error: BaseException) -> str:
    """Return an import's error in one line, with the remedy for the commonest one."""
    text = one_line(error)
    return f"{text}: write @dataclass(frozen=True)" if "cannot inherit non-frozen dataclass" in text else text


def check_call(function: Callable[..., Any], given: Iterable[str], named: Iterable[str] = ()) -> None:
    """For a call that failed: refuse a function that does not take these arguments, and say which it takes."""
    plain, name = getattr(function, "__func__", function), getattr(function, "__name__", "it")
    given, named = [*["self"] * inspect.ismethod(function), *given], dict.fromkeys(named)
    try:
        signature = inspect.signature(plain, follow_wrapped=False)  # a decorator takes its own
    except (TypeError, ValueError):
        return  # nothing is known of it
    try:
        signature.bind(*given, **named)
    except TypeError:
        code = getattr(plain, "__code__", None)
        place = f" in {Path(code.co_filename).name}, line {code.co_firstlineno}" if code else ""
        called = ", ".join([*given, *(f"{key}=…" for key in named)])
        own = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        raise TypeError(f"{name} is called as {name}({called}), but it is {name}({own}){place}") from None


def source_of(thing: Callable[..., Any], name: str) -> Path | None:
    """The file that a method or model of this name was loaded from."""
    source = file_of(name) or getattr(sys.modules[thing.__module__], "__file__", None)
    return Path(source) if source else None


def digest_of_source(thing: Callable[..., Any], name: str) -> str:
    """Of that file, to notice when it changes; "" if there is none."""
    if file := file_of(name):
        return str(vars(sys.modules[_called(file)])[DIGEST])
    return digest_of(source_of(thing, name))


def digest_of(path: Path | None) -> str:
    """Of a file's content; "" if it cannot be read."""
    try:
        return blake2b(path.read_bytes(), digest_size=8).hexdigest() if path else ""
    except OSError:
        return ""


def check_unchanged(file: Path | None, digest: str) -> None:
    """For what goes to a process that has to load the file again."""
    if digest_of(file) != digest:
        raise RunStopped(
            f"{file} has changed since the run loaded it, and a worker process would train with other code: "
            "restore it, or start again"
        )
