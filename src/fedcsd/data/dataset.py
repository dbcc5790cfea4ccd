"""Hold a data set in memory as it was given, and turn it into a model's input batch by batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcsd import seeds
from fedcsd.errors import UserError, note

Array = np.ndarray[Any, Any]
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
FAR = 30  # standardised input rarely has larger values


@dataclass(frozen=True)
class Groups:
    """The group that each sample is from: a writer, a hospital, a domain."""

    names: list[str]
    train: Tensor
    """[N] index into names"""
    test: Tensor | None = None
    """[M], if it is known"""
    array: str = ""
    """its name in a user's .npz file"""


def numbered(values: Sequence[str]) -> tuple[list[str], Array]:
    """Return the different names in alphabetical order, and the index of each value among them."""
    names, numbers = np.unique(np.asarray(values), return_inverse=True)
    return [str(n) for n in names], numbers.astype(np.int64)


def group(split: dict[str, list[str]]) -> Groups:
    """Return the groups of training samples, and of test samples if they are given, from their names."""
    names, numbers = numbered([*split["train"], *split.get("test", [])])
    train, test = np.split(numbers, [len(split["train"])])
    return Groups(names, torch.from_numpy(train), torch.from_numpy(test) if len(test) else None)


@dataclass(frozen=True)
class Dataset:
    """Hold training and test data. uint8 images stay uint8 and are standardised per channel for each batch.

    Floating-point data is used as it is.
    """

    name: str
    x_train: Tensor
    """[N, C, H, W] images, or [N, D] tables"""
    y_train: Tensor
    """[N] labels, 0 to classes − 1"""
    x_test: Tensor
    y_test: Tensor
    classes: int
    scale: Tensor | None = None
    """per channel, [C, 1, 1]; an image is `x · scale + shift`"""
    shift: Tensor | None = None
    groups: Groups | None = None
    augment: str = "none"
    """the augmentation that `auto` stands for"""
    model: str = "auto"
    """the network that `auto` stands for"""
    partition: str = "dirichlet"
    """the partition that `auto` stands for"""
    key: str = ""
    """tells the data apart where it came from a file"""

    @classmethod
    def of_arrays(
        cls,
        x_train: Any,
        y_train: Any,
        x_test: Any = None,
        y_test: Any = None,
        *,
        name: str = "arrays",
        classes: int | None = None,
        largest: int = 255,
        groups: Groups | None = None,
        test: float = 0.2,
        key: str = "",
    ) -> "Dataset":
        """Check arrays and make a data set of them.

        uint8 images are standardised per channel with the training data's mean and deviation.

        Args:
            x_train, y_train: images [N, H, W], [N, C, H, W], [N, H, W, C] or tables [N, D], and labels [N]
            x_test, y_test: the same for test data; without them a seeded share `test` of the rest is set aside
            classes: number of classes if some may be lacking, else each class keeps a sample to train on
            largest: largest possible value of uint8 images
            key: digest of the files that the data comes from
        """
        x_train, y_train = _images(x_train, "x_train"), _labels(y_train, "y_train")
        _check_length(name, x_train, y_train, "train")
        if x_test is None and y_test is None:
            here, there = _set_aside(name, y_train, test, every_class=classes is None)
            if groups:
                groups = replace(groups, train=groups.train[here], test=groups.train[there])
            x_train, y_train, x_test, y_test = x_train[here], y_train[here], x_train[there], y_train[there]
        else:
            x_test, y_test = _images(x_test, "x_test"), _labels(y_test, "y_test")
        _check_length(name, x_test, y_test, "test")
        _check_alike(name, x_train, x_test)
        found, least = int(max(y_train.max(), y_test.max())) + 1, int(min(y_train.min(), y_test.min()))
        given = classes is not None
        if not given:
            _check_numbering(name, least, found, len(np.unique(np.concatenate([y_train, y_test]))))
        classes = classes or found
        if found > classes or least < 0:
            raise UserError(f"{name}: labels must lie in 0..{classes - 1}; found {least}..{found - 1}")
        lacking = sorted(set(np.unique(y_test).tolist()) - set(np.unique(y_train).tolist()))
        if lacking and not given:
            raise UserError(f"{name}: the test data has class {lacking[0]}, which the training data lacks")
        if classes < 2:
            raise UserError(f"{name}: all labels are 0; classification needs at least two classes")
        if not given:
            tell_gaps(name, y_train, y_test, classes)
        _tell_range(name, x_train)
        scale, shift = _standardise(x_train, largest) if x_train.dtype == np.uint8 else (None, None)
        a, b, c, d = (torch.from_numpy(np.ascontiguousarray(x)) for x in (x_train, y_train, x_test, y_test))
        return cls(name, a, b, c, d, classes, scale, shift, groups, key=key)

    @classmethod
    def stored(cls, tensors: dict[str, Tensor], facts: dict[str, Any], *, name: str, key: str) -> "Dataset":
        """Return a data set from the result of `store`, without reading memory-mapped tensors."""
        names, train = facts.get("groups"), tensors.get("groups_train")
        groups = Groups(names, train, tensors.get("groups_test")) if names and train is not None else None
        a, b, c, d = (tensors[name] for name in ARRAYS)
        data = cls(name, a, b, c, d, facts["classes"], groups=groups, key=key)
        return data.normalised(facts["mean"], facts["std"])

    def store(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and facts for the cache, from which `stored` makes the data set."""
        tensors = {name: getattr(self, name) for name in ARRAYS}
        facts: dict[str, Any] = {"classes": self.classes, **self.normalisation}
        if self.groups:
            tensors["groups_train"] = self.groups.train
            tensors |= {"groups_test": self.groups.test} if self.groups.test is not None else {}
            facts["groups"] = self.groups.names
        return {n: t.contiguous() for n, t in tensors.items()}, facts

    def normalised(self, mean: Sequence[float], std: Sequence[float]) -> "Dataset":
        """Return the same images, standardised with a given mean and deviation of pixels from 0 to 1."""
        m, s = (torch.tensor(v, dtype=torch.float64).reshape(-1, 1, 1) for v in (mean, std))
        return replace(self, scale=(1 / (255 * s)).float(), shift=(-m / s).float())

    @property
    def normalisation(self) -> dict[str, list[float]]:
        """Return the mean and deviation for `normalised`; nothing for data that is used as it is."""
        if self.scale is None or self.shift is None:
            return {}
        std = 1 / (255 * self.scale.double())
        return {"mean": (-self.shift * std).flatten().tolist(), "std": std.flatten().tolist()}

    def smaller(self, size: int, random: np.random.Generator) -> "Dataset":
        """Return a data set with a random part of the training data."""
        if size > len(self.y_train):
            raise UserError(
                f"--train-size {size} is more than the {len(self.y_train)} training samples of {self.name}"
            )
        rows = torch.from_numpy(np.sort(random.permutation(len(self.y_train))[:size]))
        groups = replace(self.groups, train=self.groups.train[rows]) if self.groups else None
        key = f"{self.key}-{size}-{int(rows.sum())}" if self.key else ""
        return replace(self, x_train=self.x_train[rows], y_train=self.y_train[rows], groups=groups, key=key)

    def to(self, device: torch.device) -> "Dataset":
        """Return the same data on a device."""
        names = (*ARRAYS, "scale", "shift")
        there = {name: t.to(device) for name in names if (t := getattr(self, name)) is not None}
        return replace(self, **there)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one image: (channels, height, width)."""
        return tuple(self.x_train.shape[1:])

    def images(self, x: Tensor) -> Tensor:
        """Turn rows of `x_train` or `x_test`, augmented or not, into a model's input."""
        if self.scale is None or self.shift is None:
            return x
        return torch.addcmul(self.shift, x.float(), self.scale)

    @cached_property
    def table(self) -> Tensor | None:
        """Return the input for each of the 256 values, by channel [C, 256]; None for data that is used as it is."""
        if self.scale is None or self.shift is None:
            return None
        values = torch.arange(256, device=self.scale.device).float()
        return torch.addcmul(self.shift.reshape(-1, 1), values, self.scale.reshape(-1, 1)).contiguous()

    def example(self) -> Tensor:
        """Return two images, to try a model on."""
        return self.images(self.x_train[:1]).repeat(2, *[1] * (self.x_train.ndim - 1))

    def fingerprint(self) -> str:
        """Return a digest of the data; a run only resumes with the same."""
        if self.key:
            return self.key
        digest = blake2b(digest_size=16)
        for tensor in (self.x_train, self.y_train, self.x_test, self.y_test):
            digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.numpy().data)
        return digest.hexdigest()


def from_python(data: Any) -> Dataset:
    """Return a data set from objects: a Dataset, arrays by name or in order, or two torch data sets."""
    if isinstance(data, Dataset):
        return data
    if isinstance(data, dict):
        check_names("the data", data)
        return Dataset.of_arrays(*(data.get(name) for name in ARRAYS))
    several = data if isinstance(data, (tuple, list)) else ()
    if len(several) == 4 or (len(several) == 2 and all(hasattr(d, "__array__") for d in several)):
        return Dataset.of_arrays(*several)
    if len(several) == 2 and all(map(_is_dataset, several)):
        return Dataset.of_arrays(*_columns(several[0]), *_columns(several[1]))
    inside = ", ".join(type(d).__name__ for d in several[:8])
    raise UserError(
        f"data must be a name, a path, the two or four arrays ({', '.join(ARRAYS)}), or a training and a test torch Dataset; "
        f"not a {type(data).__name__}{inside and f' of {inside}'}"
    )


def _is_dataset(data: Any) -> bool:
    """Tell if samples can be taken one by one; an array or (x, y) is no data set."""
    return hasattr(data, "__getitem__") and not hasattr(data, "__array__") and not isinstance(data, tuple)


def _columns(dataset: Any) -> tuple[Array, Array]:
    """Return a torch Dataset of (image, label) as two arrays."""
    pairs = [dataset[i] for i in range(len(dataset))]
    try:
        return np.stack([np.asarray(x) for x, _ in pairs]), np.asarray([int(y) for _, y in pairs])
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the torch Dataset must give (image, label) with images of one shape: {error}"
        ) from None


def check_names(what: str, there: Iterable[str]) -> None:
    """Refuse names of arrays without x_train and y_train, or with one of x_test and y_test."""
    names = [str(name) for name in there]
    needed = ARRAYS if {"x_test", "y_test"} & set(names) else ARRAYS[:2]
    if missing := [name for name in needed if name not in names]:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise UserError(
            f"{what} lacks {', '.join(missing)}: it has {', '.join(names[:8]) or 'no arrays'}{more}; it needs "
            "x_train and y_train, and x_test and y_test if test data is not to be set aside from them"
        )


def check_share(test: float) -> None:
    """Refuse a share of test data that is not between 0 and 1."""
    if not 0 < test < 1:
        raise UserError(f"data.test must be between 0 and 1, not {test:g}")


def _set_aside(name: str, y: Array, test: float, *, every_class: bool) -> tuple[Array, Array]:
    """Return rows to train on, of every class if asked for, and a seeded share of all to test on."""
    check_share(test)
    order, cut = seeds.rng(0, "test split").permutation(len(y)), ceil(test * len(y))
    here, there = order[cut:], order[:cut]
    if every_class:
        classes, first = np.unique(y[there], return_index=True)
        back = first[~np.isin(classes, y[here])]
        here, there = np.append(here, there[back]), np.delete(there, back)
    if not len(here) or not len(there):
        what = "train" if len(there) else "test"
        raise UserError(
            f"{name}: of {len(y)} samples none is left to {what} on with data.test {test:g}: "
            "give more of them, test data beside them, or another data.test"
        )
    return np.sort(here), np.sort(there)


def _check_length(name: str, x: Array, y: Array, part: str) -> None:
    if len(x) != len(y) or not len(x):
        raise UserError(
            f"{name}: x_{part} has {len(x)} samples and y_{part} {len(y)}; "
            "both must have the same number, at least 1"
        )


def _check_alike(name: str, x_train: Array, x_test: Array) -> None:
    train, test = (f"{'×'.join(map(str, x.shape[1:]))} {x.dtype}" for x in (x_train, x_test))
    if train != test:
        raise UserError(f"{name}: x_train {train} and x_test {test} must have the same shape and type")


def _images(given: Any, name: str) -> Array:
    x: Array = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if x.ndim == 3:
        x = x[:, None]  # grey images
    elif x.ndim == 4 and x.shape[1] not in (1, 3) and (x.shape[3] in (1, 3) or x.shape[3] == 4 < x.shape[1]):
        x = np.moveaxis(x, 3, 1)  # channels last
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
    if y.dtype == bool:
        y = y.astype(np.int64)
    must = f"{name} must be [N] whole numbers from 0, the classes"
    if y.dtype.kind in "US" or (y.dtype.kind == "O" and any(isinstance(v, str) for v in y.flat)):
        raise UserError(
            f"{must}; it holds text: number the labels of training and test data together with "
            "numpy.unique(y, return_inverse=True)[1]"
        )
    if y.ndim != 1 or y.dtype.kind not in "iuf":
        raise UserError(f"{must}; it is {y.dtype} of shape {list(y.shape)}")
    broken = np.flatnonzero(~np.isfinite(y) | (y != np.round(y)))
    if len(broken):
        raise UserError(
            f"{must}; {len(broken)} of its numbers are not whole (the first is {y[broken[0]]:g}, of sample "
            f"{broken[0]}): 2.0 is accepted, 2.5 is not"
        )
    return y.astype(np.int64)


def _check_numbering(name: str, least: int, found: int, different: int) -> None:
    """Refuse labels that count from 1, or that are ids: they train badly."""
    if least == 1:
        raise UserError(f"{name}: labels must count from 0; they go from 1 to {found - 1}: subtract 1")
    if found > 10 * different + 1000:
        raise UserError(
            f"{name}: there are {different} classes but labels up to {found - 1}: number the classes from 0"
        )


def tell_gaps(name: str, y_train: Array, y_test: Array, classes: int) -> None:
    """Tell the user the number of classes without samples: labels that skip numbers may be a mistake."""
    lacking = classes - len(np.unique(np.concatenate([y_train, y_test])))
    if lacking:
        have = "has" if lacking == 1 else "have"
        note(
            f"{name}: {lacking} of the {classes} classes {have} no samples: labels should count from 0 without gaps"
        )


def _tell_range(name: str, x: Array) -> None:
    """Tell the user of large floating-point training data: often bytes that were cast."""
    least, most = (float(x.min()), float(x.max())) if x.dtype.kind == "f" and x.size else (0.0, 0.0)
    if max(-least, most) > FAR:
        cure = "give bytes (uint8), which are scaled and standardised, or divide by 255"
        if least < 0 or most > 255:
            cure = "standardise them to mean 0 and deviation 1"
        note(
            f"{name}: the floating-point numbers of x_train reach {most if most > -least else least:g} and are "
            f"used as they are, which may train badly: {cure}"
        )


def _standardise(x: Array, largest: int) -> tuple[Tensor, Tensor]:
    """Return scale and shift that give each channel of the training data mean 0 and deviation 1."""
    counts = np.zeros((x.shape[1] if x.ndim == 4 else 1, 256))
    # Counts of the 256 values are exact and need no larger copy of the data.
    for some in np.array_split(x, -(-x.size // (1 << 24))):
        for c in range(len(counts)):
            counts[c] += np.bincount((some[:, c] if x.ndim == 4 else some).reshape(-1), minlength=256)
    values = np.arange(256) / largest
    mean = (counts @ values) / counts.sum(1)
    deviation = np.sqrt(np.maximum(counts @ values**2 / counts.sum(1) - mean**2, 1e-12))
    shape = (-1, 1, 1) if x.ndim == 4 else (-1,)
    scale, shift = 1 / (largest * deviation), -mean / deviation
    return torch.from_numpy(scale).float().reshape(shape), torch.from_numpy(shift).float().reshape(shape)
