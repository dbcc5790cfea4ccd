"""Read NumPy archives: `x_train` and `y_train`, with or without test data and clients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedcsd.data.dataset import ARRAYS, Dataset, Groups, check_names, check_share, group
from fedcsd.data.partition import UNREADABLE
from fedcsd.errors import UserError


def npz(path: Path, *, client: str = "client", test: float = 0.2, classes: int = 0) -> Dataset:
    """Read an .npz file with x_train and y_train, and x_test and y_test if test data is given.

    client   an array with the client of each training sample, for `--partition column`;
             with `_test` after its name, of each test sample
    test     share that is set aside as test data if the file has none
    classes  number of classes, if the file need not have them all
    """
    check_share(test)
    try:
        with np.load(path, allow_pickle=False) as file:
            check_names(str(path), file.files)
            if client not in file and client != "client":
                raise UserError(
                    f"{path} has no array {client!r}, which data.client names: it has {', '.join(file.files)}"
                )
            tested = [f"{client}_test"] if "x_test" in file else []
            wanted = [name for name in (*ARRAYS, "classes", client, *tested) if name in file]
            found = {name: _plain(file, name, path) for name in wanted}
    except UNREADABLE:
        raise UserError(
            f"cannot read {path}: it is not an .npz archive of plain arrays, as numpy.savez writes it"
        ) from None
    number = found.get("classes", np.array(0))
    if number.size != 1 or number.dtype.kind not in "iuf":
        raise UserError(f"{path}: classes must be one whole number, how many classes there are")
    arrays = [found.get(name) for name in ARRAYS]
    columns = {name: found[name] for name in (client, f"{client}_test") if name in found}
    return Dataset.of_arrays(
        *arrays,
        name=path.stem,
        classes=classes or int(number.item()) or None,
        groups=_groups(columns, client, found),
        test=test,
    )


def _plain(file: Any, name: str, path: Path) -> np.ndarray:
    try:
        return np.asarray(file[name])
    except ValueError:
        raise UserError(
            f"cannot read {path}: its array {name} is not one of plain numbers or text (but of Python objects, "
            f"perhaps): make it so with {name}.astype(…) before numpy.savez"
        ) from None


def _groups(columns: dict[str, np.ndarray], client: str, found: dict[str, np.ndarray]) -> Groups | None:
    if client not in columns:
        return None
    labels = {client: "y_train", f"{client}_test": "y_test"}
    train, *test = [_names(column, name, len(found[labels[name]])) for name, column in columns.items()]
    return replace(group({"train": train, "test": test[0] if test else []}), array=client)


def _names(column: np.ndarray, name: str, samples: int) -> list[str]:
    """Check the array of clients and return their names, one a sample."""
    if column.ndim != 1:
        raise UserError(f"{name} must be [N], the client of each sample; it is {list(column.shape)}")
    if len(column) != samples:
        raise UserError(f"{name} has {len(column)} entries for {samples} samples")
    if column.dtype.kind == "S":
        column = np.char.decode(column, "utf-8", "replace")
    # NaN and NaT differ from themselves.
    empty = np.flatnonzero((column != column) | (column == "" if column.dtype.kind == "U" else False))
    if len(empty):
        raise UserError(
            f"{name} does not name the client of {len(empty)} samples (the first is sample {empty[0]}): fill them in"
        )
    return [str(v) for v in column]
