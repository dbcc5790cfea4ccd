"""Decoded data on disk: one safetensors file per data set, memory-mapped, keyed by what it was made from."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedcsd.data.dataset import Dataset
from fedcsd.errors import UserError

VERSION = 1  # of the decoding: a change of it makes every cached file anew


def cache_folder() -> Path:
    """`FEDCSD_CACHE`, or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("FEDCSD_CACHE") or Path(base) / "fedcsd")


def content_key(files: Iterable[Path], options: Mapping[str, Any]) -> str:
    """A name for these bytes decoded with these options.

    Hashing is remembered by path, size and time of change, so that a second start need not read the files.
    """
    memory = cache_folder() / "hashes.json"
    known: dict[str, str] = {}
    with suppress(OSError, ValueError, AttributeError):
        known = dict(json.loads(memory.read_text()).items())
    fresh = dict(known)
    digest = blake2b(json.dumps([VERSION, dict(options)], sort_keys=True).encode(), digest_size=16)
    for path in files:
        stat = path.stat()
        place = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if place not in fresh:
            fresh[place] = _hash(path)
        digest.update(f"{path.name}:{fresh[place]}\n".encode())
    if fresh != known:
        with suppress(OSError):
            replace_file(memory, lambda temporary: temporary.write_text(json.dumps(fresh)))
    return digest.hexdigest()


def _hash(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cached(name: str, key: str, make: Callable[[], Dataset]) -> Dataset:
    """The data set that `make` decodes, from the cache if it is there.

    Two runs that start together may both decode; the file appears whole, by renaming, and both are right.
    """
    path = cache_folder() / f"{name}-{key}.safetensors"
    with suppress(OSError, SafetensorError, KeyError, ValueError):
        return Dataset.stored(*_read(path), name=name, key=key)
    with _writing(path.parent):  # decoding can take minutes: say before it that nothing can be kept
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
    tensors, facts = make().store()
    with _writing(path.parent):
        replace_file(path, lambda temporary: save_file(tensors, temporary, {"facts": json.dumps(facts)}))
    return Dataset.stored(*_read(path), name=name, key=key)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"cannot write the decoded data to {folder}: {getattr(error, 'strerror', None) or error}: "
            "set FEDCSD_CACHE to a folder that can be written"
        ) from None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that appears whole or not at all; clear away what dead processes left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > 3600:
                left.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
