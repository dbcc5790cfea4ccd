"""NumPy archives: `x_train, y_train, x_test, y_test`, and what else is known of the samples."""

import zipfile
from pathlib import Path

import numpy as np

from fedcsd.data.dataset import ARRAYS, Dataset, Groups, group
from fedcsd.errors import UserError


def npz(path: Path, *, client: str = "client", classes: int = 0) -> Dataset:
    """An .npz file with x_train, y_train, x_test, y_test.

    client   an array with the client of each training sample, for `--partition column`, if there is one;
             with `_test` behind its name, of each test sample
    classes  how many there are, where the file need not have them all
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if missing := [name for name in ARRAYS if name not in file]:
                raise UserError(f"{path} lacks {', '.join(missing)}: it needs {', '.join(ARRAYS)}")
            arrays = [file[name] for name in ARRAYS]
            number = int(file["classes"]) if "classes" in file else None
            columns = {name: file[name] for name in (client, f"{client}_test") if name in file}
    except (zipfile.BadZipFile, ValueError, TypeError, EOFError, OSError):
        raise UserError(
            f"cannot read {path}: it is not an .npz archive of plain arrays, as numpy.savez writes it"
        ) from None
    return Dataset.of_arrays(
        *arrays, name=path.stem, classes=classes or number, groups=_groups(columns, client, arrays)
    )


def _groups(columns: dict[str, np.ndarray], client: str, arrays: list[np.ndarray]) -> Groups | None:
    if client not in columns:
        return None
    for name, y in ((client, arrays[1]), (f"{client}_test", arrays[3])):
        if name in columns and len(columns[name]) != len(y):
            raise UserError(f"{name} has {len(columns[name])} entries for {len(y)} samples")
    split = {
        "train": [str(v) for v in columns[client]],
        "test": [str(v) for v in columns.get(f"{client}_test", [])],
    }
    return group(split)
