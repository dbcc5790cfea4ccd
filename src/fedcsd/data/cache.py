"""Keep decoded data on disk: one memory-mapped safetensors file a data set, named by a digest of its sources."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedcsd.data.dataset import Dataset
from fedcsd.files import cache_folder, check_writable, write_whole, writing

WRITABLE = "set FEDCSD_CACHE to a folder that can be written"
VERSION = 1  # of the decoding; another number makes every cached file anew


def content_key(files: Iterable[Path], options: Mapping[str, Any]) -> str:
    """Return a digest of these files and the options of their decoding.

    Digests of files are kept by path, size and time of change, so that a second start does not read the files.
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
            write_whole(memory, json.dumps(fresh).encode())
    return digest.hexdigest()


def _hash(path: Path) -> str:
    digest = blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def cached(name: str, key: str, make: Callable[[], Dataset]) -> Dataset:
    """Return the data set that `make` decodes, from the cache if it is there.

    Two runs that start together may both decode; each writes the whole file, and both are right.
    """
    path = cache_folder() / f"{name}-{key}.safetensors"
    with suppress(OSError, SafetensorError, KeyError, ValueError):
        return Dataset.stored(*_read(path), name=name, key=key)
    check_writable(path.parent, WRITABLE)  # before the decoding, which can take minutes
    _remove_abandoned(path.parent)
    tensors, facts = make().store()

    def save(temporary: Path) -> None:
        try:
            save_file(tensors, temporary, {"facts": json.dumps(facts)})
        except SafetensorError as error:  # a full disk, for example
            raise OSError(str(error)) from error

    with writing(path.parent, WRITABLE):
        write_whole(path, save)
    return Dataset.stored(*_read(path), name=name, key=key)


def _remove_abandoned(folder: Path) -> None:
    """Remove temporary files that killed processes left."""
    for left in folder.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > 3600:
                left.unlink()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
