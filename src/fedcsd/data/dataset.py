"""A data set in memory: images as they were given, turned into numbers for a model batch by batch."""

import zipfile
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcsd.errors import UserError, unknown
from fedcsd.registry import Registry

sources = Registry("data set", "fedcsd.data.sources")

Array = np.ndarray[Any, Any]
ARRAYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Dataset:
    """Training and test data. uint8 images stay uint8 and are scaled and shifted per channel when
    used; floating-point data is used as it is given."""

    name: str
    x_train: Tensor
    """[N, C, H, W] images, or [N, D] tables"""
    y_train: Tensor
    """[N] labels, 0 to classes − 1"""
    x_test: Tensor
    y_test: Tensor
    classes: int
    scale: Tensor | None
    """per channel, [C, 1, 1]; an image is `x · scale + shift`"""
    shift: Tensor | None

    @classmethod
    def of_arrays(
        cls,
        x_train: Any,
        y_train: Any,
        x_test: Any,
        y_test: Any,
        *,
        name: str = "arrays",
        classes: int | None = None,
        largest: int = 255,
    ) -> "Dataset":
        """A data set from arrays, checked. uint8 images are standardised per channel with the
        training data's mean and deviation; `largest` is their largest possible value."""
        x_train, x_test = (_images(x, n) for x, n in ((x_train, "x_train"), (x_test, "x_test")))
        y_train, y_test = (_labels(y, n) for y, n in ((y_train, "y_train"), (y_test, "y_test")))
        for x, y, part in ((x_train, y_train, "train"), (x_test, y_test, "test")):
            if len(x) != len(y) or not len(x):
                raise UserError(
                    f"{name}: x_{part} has {len(x)} samples and y_{part} {len(y)}; both must have the same number, at least 1"
                )
        if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
            raise UserError(
                f"{name}: x_train {_kind(x_train)} and x_test {_kind(x_test)} must have the same shape and type"
            )
        found = int(max(y_train.max(), y_test.max())) + 1
        classes = classes or found
        if found > classes or min(y_train.min(), y_test.min()) < 0:
            raise UserError(
                f"{name}: labels must lie in 0..{classes - 1}; found {min(y_train.min(), y_test.min())}..{found - 1}"
            )
        if classes < 2:
            raise UserError(f"{name}: all labels are 0; classification needs at least two classes")
        scale, shift = _standardise(x_train, largest) if x_train.dtype == np.uint8 else (None, None)
        a, b, c, d = (torch.from_numpy(np.ascontiguousarray(x)) for x in (x_train, y_train, x_test, y_test))
        return cls(name, a, b, c, d, classes, scale, shift)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image: (channels, height, width)."""
        return tuple(self.x_train.shape[1:])

    def images(self, x: Tensor) -> Tensor:
        """Rows of `x_train` or `x_test` as a model sees them in evaluation."""
        if self.scale is None or self.shift is None:
            return x
        return torch.addcmul(self.shift, x.float(), self.scale)

    def train_images(self, rows: Tensor) -> Tensor:
        """Training images as local training sees them."""
        return self.images(self.x_train.index_select(0, rows))

    def example(self) -> Tensor:
        """Two images, to try a model on."""
        return self.images(self.x_train[:1]).repeat(2, *[1] * (self.x_train.ndim - 1))

    def fingerprint(self) -> str:
        """Tells data apart: a run is only resumed with the data it began with."""
        digest = blake2b(digest_size=16)
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.numpy().data)
        return digest.hexdigest()


def load(data: Any) -> Dataset:
    """A data set by name, from an .npz file, or from arrays (a mapping or a tuple of four)."""
    if isinstance(data, Dataset):
        return data
    if isinstance(data, Path) or (isinstance(data, str) and (data.endswith(".npz") or "/" in data)):
        return load_npz(Path(data))
    if isinstance(data, str):
        if data not in sources.names:
            raise UserError(f"{unknown('data set', data, sources.names)} Or give the path of an .npz file")
        dataset: Dataset = sources.load(data)()
        return dataset
    if isinstance(data, dict):
        if missing := [name for name in ARRAYS if name not in data]:
            raise UserError(f"the data lacks {', '.join(missing)}: give {', '.join(ARRAYS)}")
        return Dataset.of_arrays(*(data[name] for name in ARRAYS))
    if isinstance(data, (tuple, list)) and len(data) == 4:
        return Dataset.of_arrays(*data)
    raise UserError(
        f"data must be a name, an .npz file, or the four arrays {', '.join(ARRAYS)}; not a {type(data).__name__}"
    )


def load_npz(path: Path) -> Dataset:
    """`x_train, y_train, x_test, y_test` of an .npz file, with `classes` where it is given."""
    if not path.exists():
        raise UserError(f"there is no file {path}")
    if path.suffix != ".npz":
        raise UserError(
            f"{path} is not an .npz file: save one with numpy.savez({', '.join(f'{a}=…' for a in ARRAYS)})"
        )
    try:
        with np.load(path, allow_pickle=False) as file:
            if missing := [name for name in ARRAYS if name not in file]:
                raise UserError(f"{path} lacks {', '.join(missing)}: it needs {', '.join(ARRAYS)}")
            arrays = [file[name] for name in ARRAYS]
            classes = int(file["classes"]) if "classes" in file else None
    except (zipfile.BadZipFile, ValueError, EOFError, OSError) as error:
        raise UserError(f"cannot read {path}: {str(error).splitlines()[0]}") from None
    return Dataset.of_arrays(*arrays, name=path.name, classes=classes)


def _images(given: Any, name: str) -> Array:
    x: Array = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if x.ndim == 3:
        x = x[:, None]  # grey images without a channel
    elif x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = np.moveaxis(x, 3, 1)  # channels last, as image files have it
    if x.ndim not in (2, 4):
        raise UserError(
            f"{name} must be [N, H, W], [N, C, H, W], [N, H, W, C] or [N, D]; it is {list(x.shape)}"
        )
    if x.dtype == np.uint8:
        return x
    if np.issubdtype(x.dtype, np.integer) and x.size and x.min() >= 0 and x.max() <= 255:
        return x.astype(np.uint8)
    if not np.issubdtype(x.dtype, np.floating):
        raise UserError(
            f"{name} must hold whole numbers from 0 to 255 or floating-point numbers, not {x.dtype}"
        )
    x = x.astype(np.float32)
    if not np.isfinite(x).all():
        bad = np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))
        raise UserError(
            f"{name} has NaN or infinite values in {len(bad)} samples (the first is sample {bad[0]}): remove or fill them"
        )
    return x


def _labels(given: Any, name: str) -> Array:
    y: Array = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or not (
        np.issubdtype(y.dtype, np.integer) or np.array_equal(y, np.round(y) if y.dtype.kind == "f" else [])
    ):
        raise UserError(
            f"{name} must be [N] whole numbers from 0, the classes; it is {y.dtype} of shape {list(y.shape)}"
        )
    return y.astype(np.int64)


def _kind(x: Array) -> str:
    return f"{'×'.join(map(str, x.shape[1:]))} {x.dtype}"


def _standardise(x: Array, largest: int) -> tuple[Tensor, Tensor]:
    """Scale and shift that give each channel of the training data mean 0 and deviation 1."""
    channels = [x[:, c] for c in range(x.shape[1])] if x.ndim == 4 else [x]
    # From counts of the 256 values: exact, and without a floating-point copy of the data.
    counts = np.array([np.bincount(c.reshape(-1), minlength=256) for c in channels], dtype=np.float64)
    values = np.arange(256) / largest
    mean = (counts @ values) / counts.sum(1)
    deviation = np.sqrt(np.maximum(counts @ values**2 / counts.sum(1) - mean**2, 1e-12))
    shape = (-1, 1, 1) if x.ndim == 4 else (-1,)
    scale, shift = 1 / (largest * deviation), -mean / deviation
    return torch.from_numpy(scale).float().reshape(shape), torch.from_numpy(shift).float().reshape(shape)
