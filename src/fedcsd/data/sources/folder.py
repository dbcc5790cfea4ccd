"""Read image folders: class/image, or domain/class/image where each domain can be a client."""

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcsd import seeds
from fedcsd.data.cache import cached, content_key
from fedcsd.data.dataset import Dataset, Groups, check_share, numbered
from fedcsd.data.decode import decode
from fedcsd.errors import UserError, note

SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")


def image_folder(
    path: Path, *, size: int = 0, test: float = 0.2, train_pool: float = 0, classes: str = ""
) -> Dataset:
    """Read a folder of images, class/image or domain/class/image.

    size        scale all images to size × size
    test        share of each domain, rounded up, that is test data; not used with train/ and test/ folders
    train_pool  training images of each domain: 0 for all that are not test data, a share of the domain
                if below 1, else a number
    classes     names of all classes in order, A,B,…, if the folder need not have them all
    """
    check_share(test)
    files, places = _found(path)
    files, parts = by_split(path, files, places)
    known, labels = _labelled(path, [p[-2] for p in parts], classes)
    domains, groups = numbered([p[0] if len(p) == 3 else path.name for p in parts])
    empty = _without_images(path, places, known)
    if len(known) < 2:
        raise UserError(
            f"{path} holds one class only ({known[0]}){empty and f' and {empty}'}: classification needs at least "
            "two folders of images"
        )
    if empty:
        note(f"{path}: {empty} that can be read: left out")
    options = {"size": size, "test": test, "pool": train_pool, "paths": ["/".join(p[:-1]) for p in parts]}
    options |= {"classes": classes} if classes else {}
    key = content_key(files, {**options, "kind": "folder"})
    train, held, named = split(groups, domains, test, train_pool)
    y = torch.from_numpy(labels)
    lacking = sorted(set(y[held].tolist()) - set(y[train].tolist()))
    if lacking and len(domains) > 1 and not named and not classes:
        raise UserError(f"{path}: the test data has class {known[lacking[0]]}, which the training data lacks")
    by = Groups(domains, torch.from_numpy(groups)[train], torch.from_numpy(groups)[held]) if named else None

    def make() -> Dataset:
        rows = torch.cat([train, held]).tolist()
        x = decode(
            lambda i: files[rows[i]].read_bytes(),
            len(rows),
            lambda i: str(files[rows[i]]),
            size=size,
            title=path.name,
        )
        arrays = (x[: len(train)], y[train], x[len(train) :], y[held])
        return Dataset.of_arrays(*arrays, name=path.name, classes=len(known), groups=by)

    return cached(path.name, key, make)


def _found(path: Path) -> tuple[list[Path], list[tuple[str, ...]]]:
    """Return all images, and their places: (class, image) or (domain, class, image)."""
    files = sorted(images_below(path))
    if not files:
        raise UserError(f"{path} holds no images: it should be class/image.png or domain/class/image.png")
    parts = [f.relative_to(path).parts for f in files]
    depths = {len(p) for p in parts}
    if len(depths) != 1 or not depths <= {2, 3}:
        odd = next(p for p in parts if len(p) not in (2, 3) or len(p) != len(parts[0]))
        raise UserError(
            f"{path}: {'/'.join(odd)} does not fit; all images must be class/image or all domain/class/image"
        )
    return files, parts


def _labelled(path: Path, folders: list[str], classes: str) -> tuple[list[str], Any]:
    """Return all classes, by name or as given, and the number of each image's class."""
    if not classes:
        known, numbers = numbered(folders)
        kinds = {SPLITS[name.lower()]: name for name in known if name.lower() in SPLITS}
        if "test" in kinds or {"train", "val"} <= set(kinds):  # a train alone may be one of the railway
            raise UserError(
                f"{path} has a folder {kinds.get('test') or kinds['val']} in the place of a class: expected are "
                "train/class/image and test/class/image; if it is a class, give all with --set data.classes=A,B,…"
            )
        return known, numbers
    known = [name.strip() for name in classes.split(",")]
    if strange := sorted(set(folders) - set(known)):
        raise UserError(f"{path} has a folder {strange[0]}, which is none of the classes {', '.join(known)}")
    return known, np.array([known.index(name) for name in folders], dtype=np.int64)


def _without_images(path: Path, places: list[tuple[str, ...]], known: list[str]) -> str:
    """Return a sentence about the folders of classes or domains that hold no image, or "" without any.

    Classes that have images elsewhere, or were given, are left out.
    """
    having = {p[:depth] for p in places for depth in range(1, len(p))}
    around = [(), *(h for h in having if len(h) < len(places[0]) - 1)]
    below = [(*a, f.name) for a in around for f in path.joinpath(*a).iterdir() if f.is_dir()]
    empty = sorted(
        "/".join(b) for b in set(below) - having if not b[-1].startswith(".") and b[-1] not in known
    )
    if len(empty) == 1:
        return f"the folder {empty[0]} holds no image"
    more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
    return f"the folders {', '.join(empty[:3])}{more} hold no image" if empty else ""


def by_split(
    path: Path, files: list[Path], parts: list[tuple[str, ...]]
) -> tuple[list[Path], list[tuple[str, ...]]]:
    """Return files, and their places with a split's folder renamed to train, test or val.

    A validation folder beside a test folder is left out. Unclear folders are refused, since as domains they would
    mix training and test data.
    """
    tops = sorted({p[0] for p in parts if len(p) == 3})
    kinds = [SPLITS.get(top.lower(), "") for top in tops]
    words = {SPLITS.get(word) for top in tops for word in re.split(r"[^a-z]+", top.lower())}
    if len(tops) < 2 or not (any(kinds) or ("train" in words and words & {"test", "val"})):
        return files, parts
    if not all(kinds) or "train" not in kinds or len(set(kinds)) == 1:
        raise UserError(
            f"{path}: cannot tell training from test data among the folders {', '.join(tops[:8])}: expected are "
            "train and test, and at most a validation folder beside them; domains must have other names"
        )
    kind = dict(zip(tops, kinds, strict=True))
    if "test" in kinds and (left := [top for top in tops if kind[top] == "val"]):
        note(f"{path}: {', '.join(left)} is left out, since there is a test folder")
        kept = [i for i, p in enumerate(parts) if kind[p[0]] != "val"]
        files, parts = [files[i] for i in kept], [parts[i] for i in kept]
    return files, [(kind[p[0]], *p[1:]) for p in parts]


def images_below(path: Path) -> Iterator[Path]:
    """Yield image files in all folders below, linked ones too, hidden ones not."""
    for top, folders, names in os.walk(path, followlinks=True):
        folders[:] = [f for f in folders if not f.startswith(".")]
        yield from (
            Path(top) / n for n in names if not n.startswith(".") and Path(n).suffix.lower() in SUFFIXES
        )


def split(
    groups: Any, domains: list[str], test: float, pool: float
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return training rows, test rows, and if the domains are groups.

    Folders called train and test or val decide, else a seeded share of each domain.
    """
    g = torch.from_numpy(groups)
    if domains in (["test", "train"], ["train", "val"]):
        train = torch.nonzero(g == domains.index("train"))[:, 0]
        return train, torch.nonzero(g != domains.index("train"))[:, 0], False
    train_rows, test_rows = [], []
    for d, name in enumerate(domains):
        rows = torch.nonzero(g == d)[:, 0]
        rows = rows[torch.from_numpy(seeds.rng(0, "test split", d).permutation(len(rows)))]
        cut = ceil(test * len(rows))
        count = len(rows) - cut if not pool else int(pool * len(rows)) if pool < 1 else int(pool)
        if not 0 < count <= len(rows) - cut:
            raise UserError(
                f"{name} has {len(rows)} images, {cut} of them for testing: data.train_pool cannot be {pool:g}"
            )
        test_rows.append(rows[:cut])
        train_rows.append(rows[cut : cut + count])
    return torch.cat(train_rows), torch.cat(test_rows), len(domains) > 1


def office_folder(folder: Path | None) -> Path:
    """Return the folder with the four domains: FOLDER/office_caltech_10, or FOLDER itself."""
    where = folder / "office_caltech_10" if folder and (folder / "office_caltech_10").is_dir() else folder
    if where is None or not (where / "amazon").is_dir():
        raise UserError(
            f"office_caltech_10 is read from a folder{f', but {where} lacks amazon/' if where else ''}: "
            "give one with amazon, caltech, dslr and webcam as --data-dir"
        )
    return where


def office_caltech_10(folder: Path | None, *, train_pool: float = 0, size: int = 256) -> Dataset:
    """Load Office-Caltech-10: 2,533 images of ten classes from four domains, which are four clients."""
    data = image_folder(office_folder(folder), size=size, train_pool=train_pool)
    return replace(
        data.normalised((0.0,) * 3, (1.0,) * 3),
        name="office_caltech_10",
        augment="office",
        model="alexnet",
        partition="column",
    )
