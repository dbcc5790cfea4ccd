"""Read data sets by name or path. Each name stands for a function that returns a Dataset; partitions do not belong here."""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fedcsd.config.options import call_with
from fedcsd.data.dataset import Dataset
from fedcsd.errors import UserError, unknown

SOURCES = {
    "digits": "digits:digits",
    "cifar10": "hub:cifar10",
    "cifar100": "hub:cifar100",
    "mnist": "hub:mnist",
    "fashion_mnist": "hub:fashion_mnist",
    "femnist": "hub:femnist",
    "office_caltech_10": "folder:office_caltech_10",
}


def source(name: str) -> Callable[..., Dataset]:
    """Return the function of a name."""
    if name not in SOURCES:
        raise UserError(
            f"{unknown('data set', name, SOURCES)}; or give a path: an .npz file, a folder of images, parquet files"
        )
    module, _, function = SOURCES[name].partition(":")
    found: Callable[..., Dataset] = getattr(import_module(f"{__name__}.{module}"), function)
    return found


def load_source(name: str, options: Mapping[str, Any], folder: Path | None) -> Dataset:
    """Load a data set by name, by path, or from the hub as hub:owner/name."""
    if name.startswith("hub:"):
        from fedcsd.data.sources.hub import download
        from fedcsd.data.sources.parquet import parquet

        where = download(name[4:], instead="--data")
        return call_with(parquet, options, "data", where, title=name.rpartition("/")[2])
    path = Path(name)
    if "/" in name or path.suffix.lower() in (".npz", ".parquet") or (name not in SOURCES and path.exists()):
        return load_path(path, options)
    return call_with(source(name), options, "data", folder)


def load_path(path: Path, options: Mapping[str, Any]) -> Dataset:
    """Load a data set from a file or folder; its kind follows from its content."""
    if not path.exists():
        raise UserError(f"there is no file or folder {path}")
    if path.suffix.lower() == ".npz":
        from fedcsd.data.sources.npz import npz

        return call_with(npz, options, "data", path)
    if path.suffix.lower() == ".parquet" or (path.is_dir() and any(path.rglob("*.parquet"))):
        from fedcsd.data.sources.parquet import parquet

        return call_with(parquet, options, "data", path)
    if path.is_dir():
        from fedcsd.data.sources.folder import image_folder

        return call_with(image_folder, options, "data", path)
    raise UserError(
        f"{path} is not an .npz file, a .parquet file or a folder: see docs/data.md for what can be read"
    )
