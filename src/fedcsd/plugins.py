"""Name, load and tell apart the methods and models that users write.

A method is named `NAME[:PRESET][:OPTION=VALUE]…` on the command line, in files and in Python. NAME is a built-in
or installed method, `path/to/file.py:Class` or `package.module:Class`; a file with one class needs no class name.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from fedcsd.errors import RunStopped, UserError, one_line

DIGEST = "__fedcsd_digest__"
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
# A path has no colon, or else no equals sign before its .py, so that fedcsd:mask=x.py names no file.
FILE = re.compile(r"([^:]*\.py|[^=]*?\.py)(?=:|$)")


@dataclass(frozen=True)
class Spec:
    """A method's name has a home, a class and parts."""

    home: str
    """the absolute path of its file, or its module; empty for a built-in or installed method"""
    name: str
    """the method's name, or its class in `home`; empty if no class is named"""
    parts: tuple[str, ...]
    """presets and options as text"""

    @property
    def full(self) -> str:
        """Return the name without presets and options, as config.toml holds it."""
        return ":".join(filter(None, (self.home, self.name)))

    @property
    def label(self) -> str:
        """Return the name in tables and charts, without the path of the file."""
        return ":".join((self.name or Path(self.home).stem, *self.parts))

    @property
    def file(self) -> Path | None:
        return Path(self.home) if self.home.endswith(".py") else None


def spec_of(text: str) -> Spec:
    """Split a method's name; nothing is imported."""
    file = FILE.match(text)
    name = file[0] if file else text.partition(":")[0]
    rest = text[len(name) + 1 :]
    parts = rest.split(":") if rest else []
    if not file and not MODULE.fullmatch(name):
        return Spec("", name, tuple(parts))
    own = parts.pop(0) if parts and "=" not in parts[0] else ""
    return Spec(str(file_of(text) or name), own, tuple(parts))


def file_of(name: str) -> Path | None:
    """Return the absolute path of the file in a name `path/to/file.py:factory`, or None."""
    file = FILE.match(name)
    return Path(file[0]).expanduser().resolve() if file else None


def located(name: str) -> str:
    """Return a model's name with the path of its file made absolute."""
    file = FILE.match(name)
    return f"{file_of(name)}{name[file.end() :]}" if file else name


def short(name: str) -> str:
    """Return a method's name for people and paths: `MyMethod` for `/home/me/my_method.py:MyMethod`."""
    return spec_of(name).label


def free(label: str, taken: Iterable[str]) -> str:
    """Return the label, with a number if it is taken."""
    taken, number, found = set(taken), 2, label
    while found in taken:
        found, number = f"{label}-{number}", number + 1
    return found


def imported(module: str) -> ModuleType:
    """Import `package.module`; the current folder is searched last."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # last: a file here hides none of Python's
    try:
        return import_module(module)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        advice = ": install it, or start in the folder that holds it" if missing else ""
        raise UserError(f"{module} cannot be imported: {_problem(error)}{advice}") from error


def module_of(path: Path, advice: str = "correct the path") -> ModuleType:
    """Run a file as a module, or return the module it is already if the file has not changed.

    The module's name is made from the path, so that a random.py or test.py hides no other module. The file's
    folder goes to the end of sys.path for the same reason.
    """
    try:
        source = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"there is no file {path}: {advice}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    digest, name = blake2b(source, digest_size=8).hexdigest(), _module_name(path)
    known = sys.modules.get(name)
    if known is not None and vars(known)[DIGEST] == digest:
        return known
    spec = spec_from_file_location(name, path)
    assert spec is not None
    module = module_from_spec(spec)
    setattr(module, DIGEST, digest)
    new = str(path.parent) not in sys.path
    sys.path += [str(path.parent)] * new
    sys.modules[name] = module  # dataclasses look their module up while it is made
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        del sys.modules[name]
        if known is not None:
            sys.modules[name] = known
        if new:
            sys.path.remove(str(path.parent))
        if not isinstance(error, (Exception, SystemExit)):
            raise
        raise UserError(f"{path.name} cannot be imported: {_problem(error)}") from error
    return module


def _module_name(path: Path) -> str:
    return f"fedcsd_{path.stem}_{blake2b(str(path).encode(), digest_size=4).hexdigest()}"


def _problem(error: BaseException) -> str:
    """Return an import's error in one line, with advice on the most frequent one."""
    text = one_line(error)
    return f"{text}: write @dataclass(frozen=True)" if "cannot inherit non-frozen dataclass" in text else text


def check_call(function: Callable[..., Any], given: Iterable[str], named: Iterable[str] = ()) -> None:
    """After a call failed, raise a TypeError that names the parameters if they do not fit these arguments."""
    plain, name = getattr(function, "__func__", function), getattr(function, "__name__", "it")
    given, named = [*["self"] * inspect.ismethod(function), *given], dict.fromkeys(named)
    try:
        signature = inspect.signature(plain, follow_wrapped=False)  # a decorator takes its own
    except (TypeError, ValueError):
        return  # it has no signature
    try:
        signature.bind(*given, **named)
    except TypeError:
        code = getattr(plain, "__code__", None)
        place = f" in {Path(code.co_filename).name}, line {code.co_firstlineno}" if code else ""
        called = ", ".join([*given, *(f"{key}=…" for key in named)])
        own = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
        raise TypeError(f"{name} is called as {name}({called}), but it is {name}({own}){place}") from None


def source_of(thing: Callable[..., Any], name: str) -> Path | None:
    """Return the file that a method or model of this name was loaded from."""
    source = file_of(name) or getattr(sys.modules[thing.__module__], "__file__", None)
    return Path(source) if source else None


def digest_of_source(thing: Callable[..., Any], name: str) -> str:
    """Return the digest of that file as it was loaded, or of its module's file; empty if there is none."""
    if file := file_of(name):
        return str(vars(sys.modules[_module_name(file)])[DIGEST])
    return digest_of(source_of(thing, name))


def digest_of(path: Path | None) -> str:
    """Return the digest of a file's content; empty if it cannot be read."""
    try:
        return blake2b(path.read_bytes(), digest_size=8).hexdigest() if path else ""
    except OSError:
        return ""


def check_unchanged(file: Path | None, digest: str) -> None:
    """Raise RunStopped if a file has changed, for a worker process would load it again."""
    if digest_of(file) != digest:
        raise RunStopped(
            f"{file} has changed since the run loaded it, and a worker process would train with other code: "
            "restore it, or start again"
        )
