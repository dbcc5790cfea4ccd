"""Read image data sets in parquet files, as the Hugging Face hub keeps them: a column of images, one of labels."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcsd.data.cache import cached, content_key
from fedcsd.data.dataset import Dataset, check_share, group, tell_gaps
from fedcsd.data.decode import decode
from fedcsd.errors import UserError, unknown

VALID = {"valid", "validation", "val"}
LABELS = ("label", "labels", "fine_label", "character", "class", "target", "y")


def split_files(folder: Path) -> dict[str, list[Path]]:
    """Return the parquet files of a folder by split; one file alone is training data.

    The word test (or validation) in their names, or in those of their folders, decides. Validation files beside
    a test file are left out.
    """
    if folder.is_file():
        return {"train": [folder], "test": []}
    files = sorted(Path(top) / name for top, _, names in os.walk(folder, followlinks=True) for name in names)
    files = [f for f in files if f.suffix == ".parquet"]
    words = {f: _words(f.relative_to(folder)) for f in files}
    valid = [f for f in files if words[f] & VALID]
    test = [f for f in files if "test" in words[f]] or valid
    return {"train": [f for f in files if f not in test and f not in valid], "test": test}


def _words(path: Path) -> set[str]:
    """Return the words in a file's name, or in that of the nearest folder that names a split."""
    names = [path.stem, *reversed(path.parts[:-1])]
    words = [set(re.split(r"[^a-z]+", name.lower())) for name in names]
    return next((some for some in words if some & {"train", "test", *VALID}), words[0])


def parquet(
    path: Path,
    *,
    image: str = "",
    label: str = "",
    client: str = "",
    size: int = 0,
    test: float = 0.2,
    keep_labels: int = 0,
    classes: int = 0,
    title: str = "",
) -> Dataset:
    """Read parquet files with an image and a label column.

    image, label   names of the columns, if they cannot be found
    client         a column with the client of each sample, for `--partition column`
    size           scale all images to size × size
    test           share that is set aside as test data if there is no test file
    classes        number of classes, if the files need not have them all
    """
    check_share(test)
    files = split_files(path)
    if not files["train"]:
        raise UserError(f"{path} holds no .parquet files with training data")
    options: dict[str, Any] = {"image": image, "label": label, "client": client, "size": size}
    options |= {"test": test, "keep_labels": keep_labels, "classes": classes}
    every = [*files["train"], *files["test"]]
    several = {"test_files": len(files["test"])} if len({f.parent for f in every}) > 1 else {}
    key = content_key(every, {**options, **several, "kind": "parquet"})
    title = title or path.stem
    data = cached(title, key, lambda: _decode(files, title, options))
    if not classes and not keep_labels:  # also for data from the cache
        tell_gaps(title, data.y_train.numpy(), data.y_test.numpy(), data.classes)
    return data


def _decode(files: dict[str, list[Path]], title: str, options: Mapping[str, Any]) -> Dataset:
    """Read and decode all files."""
    client, keep_labels = options["client"], options["keep_labels"]
    tables = {split: [_read(path) for path in paths] for split, paths in files.items() if paths}
    image, label = _columns(tables["train"][0], files["train"][0], options["image"], options["label"], client)
    for split, some in tables.items():
        for table, path in zip(some, files[split], strict=True):
            _check_columns(table, path, [name for name in (image, label, client) if name], client)
    x, y, who = {}, {}, {}
    for split, parts in tables.items():
        labels = np.concatenate([_labels(t, label, p) for t, p in zip(parts, files[split], strict=True)])
        kept = np.flatnonzero(labels < keep_labels) if keep_labels else np.arange(len(labels))
        x[split] = _images(parts, files[split], image, kept, options["size"], f"{title} {split}")
        y[split] = torch.from_numpy(labels[kept])
        if client:
            names = [str(v) for t in parts for v in t[client].to_pylist()]
            who[split] = [names[i] for i in kept]
    groups = group(who) if client else None
    arrays = (x["train"], y["train"], x.get("test"), y.get("test"))
    number = options["classes"] or keep_labels or None
    return Dataset.of_arrays(*arrays, name=title, classes=number, groups=groups, test=options["test"])


def _check_columns(table: Any, path: Path, names: Sequence[str], client: str) -> None:
    """Refuse a file that lacks a column of the others, or clients of samples."""
    for name in names:
        if name not in table.column_names:
            raise UserError(f"{path.name} has no column {name!r}, which the other files have")
        if name == client and (missing := table[name].null_count):
            raise UserError(
                f"{path.name}: column {name!r} does not name the client of {missing} samples: fill them in"
            )


def _read(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet as pq

    try:
        return pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"{path} cannot be read as parquet ({reason}): fetch it again") from None


def _columns(table: Any, path: Path, image: str, label: str, client: str) -> tuple[str, str]:
    """Return the names of the image and the label column, as given or found in the file's schema."""
    import pyarrow as pa

    columns = table.column_names
    for name in filter(None, (image, label, client)):
        if name not in columns:
            raise unknown(f"column of {path.name}", name, columns)
    if not image:
        with_bytes = [
            f.name for f in table.schema if pa.types.is_struct(f.type) and "bytes" in [c.name for c in f.type]
        ]
        plain = [
            f.name for f in table.schema if pa.types.is_binary(f.type) or pa.types.is_large_binary(f.type)
        ]
        image = next(iter([*with_bytes, *plain]), "")
    if not label:
        label = next((name for name in LABELS if name in columns), "")
    for name, what in ((image, "image"), (label, "label")):
        if not name:
            raise UserError(
                f"{path} has no {what} column among {', '.join(columns)}: name it with --set data.{what}=…"
            )
    return image, label


def _labels(table: Any, label: str, path: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    import pyarrow as pa

    column = table[label]
    if not pa.types.is_integer(column.type):
        raise UserError(
            f"{path.name}: the label column {label!r} holds {column.type}, not class numbers from 0: "
            "number the classes, or name another column with --set data.label=…"
        )
    if column.null_count:
        raise UserError(f"{path.name}: {column.null_count} labels are missing in column {label!r}")
    numbers: np.ndarray[Any, np.dtype[np.int64]] = column.to_numpy().astype(np.int64)
    return numbers


def _images(
    tables: Sequence[Any], paths: Sequence[Path], image: str, kept: Any, size: int, title: str
) -> torch.Tensor:
    blobs = [_bytes(t[image].combine_chunks(), image, p) for t, p in zip(tables, paths, strict=True)]
    starts = np.cumsum([0, *(len(b) for b in blobs)])

    def where(i: int) -> tuple[int, int]:
        row = int(kept[i])
        file = int(np.searchsorted(starts, row, side="right")) - 1
        return file, row - int(starts[file])

    def read(i: int) -> bytes:
        file, row = where(i)
        blob = blobs[file][row]
        return blob.as_buffer() if blob.is_valid else b""

    def place(i: int) -> str:
        file, row = where(i)
        return f"{paths[file].name}, row {row}"

    return decode(read, len(kept), place, size=size, title=title)


def _bytes(column: Any, name: str, path: Path) -> Any:
    """Return the encoded images of a column: of bytes, or of structs with a field `bytes` as on the hub."""
    import pyarrow as pa

    if pa.types.is_struct(column.type) and "bytes" in [field.name for field in column.type]:
        column = column.field("bytes")
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise UserError(
            f"{path.name}: column {name!r} holds {column.type}, not the bytes of image files (PNG, JPEG, …)"
        )
    return column
