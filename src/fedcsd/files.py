"""Files that are written whole or not at all, and the folder for what can be made again."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile

from fedcsd.errors import UserError


def write_whole(path: Path, content: bytes | Callable[[Path], object]) -> None:
    """Write a file that is complete or absent, also after a power cut.

    Args:
        path: the file; its folder is created if it does not exist
        content: the bytes, or a function that writes them to the path it is given
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content)
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def flush(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, advice: str = "", error: type[Exception] = UserError) -> Iterator[None]:
    """Report a path that cannot be written in one line, with advice such as "choose another --out"."""
    try:
        yield
    except OSError as problem:
        parts = (f"cannot write to {path}", str(problem.strerror or problem), advice)
        raise error(": ".join(filter(None, parts))) from problem


def names_in(folder: Path) -> set[str]:
    """Return the names in the folder that --out gives; none if the folder does not exist."""
    with writing(folder, "choose another --out"):
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file: choose another --out")
        return {p.name for p in folder.iterdir()} if folder.is_dir() else set()


def check_writable(folder: Path, advice: str = "choose another -o") -> None:
    """Refuse a folder that cannot be written, before the work is done. Nothing is left there."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with writing(folder, advice):
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def cache_folder() -> Path:
    """Return `FEDCSD_CACHE`, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FEDCSD_CACHE") or Path(base) / "fedcsd")
