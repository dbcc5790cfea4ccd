"""Keep the rounds, settings and endings of many runs in one parquet file, without their weights.

A row is a round of a run; a run without rounds has one row. Each row repeats the run's name, config, summary and
divergence as JSON text, so that any reader of parquet files has everything. Path ARCHIVE/NAME names a run.
"""

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedcsd.errors import Divergence, UserError
from fedcsd.experiments.runs.recorded import FORMAT, RecordedRun
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.files import write_whole

FILE = "runs.parquet"
OF_RUN = ("run.name", "run.config", "run.summary", "run.divergence")  # columns that all rows of a run repeat


@dataclass(frozen=True)
class ArchivedRun(RecordedRun):
    """Read one run of an archive."""

    path: Path
    table: pa.Table
    """the rows of this run"""

    @property
    def config(self) -> dict[str, Any]:
        return dict(self._told("run.config"))

    @property
    def summary(self) -> dict[str, Any] | None:
        summary: dict[str, Any] | None = self._told("run.summary")
        return summary

    @property
    def divergence(self) -> Divergence | None:
        told = self._told("run.divergence")
        return Divergence(**told) if told else None

    def history(self) -> list[dict[str, Any]]:
        columns = [name for name in self.table.column_names if name not in OF_RUN]
        readers = {name: _reader(self.table.schema.field(name)) for name in columns}
        return [
            {name: readers[name](value) for name, value in row.items() if value is not None}
            for row in self.table.select(columns).to_pylist()
            if row["round"] is not None
        ]

    def counts(self) -> None:
        """Return None: an archive holds no partition."""

    def _told(self, column: str) -> Any:
        return json.loads(self.table.column(column)[0].as_py())


def write(path: Path, runs: Mapping[str, RecordedRun]) -> None:
    """Write runs by name as one archive."""
    told: dict[str, list[str]] = {name: [] for name in OF_RUN}
    records: list[dict[str, Any]] = []
    for name, run in runs.items():
        rounds = run.history() or [{}]
        end = run.divergence and vars(run.divergence)
        texts = (name, *(json.dumps(value) for value in (run.config, run.summary, end)))
        for column, text in zip(OF_RUN, texts, strict=True):
            told[column] += [text] * len(rounds)
        records += rounds
    fields = [pa.field(name, pa.string()) for name in OF_RUN]
    arrays = [pa.array(values, pa.string()) for values in told.values()]
    for name in dict.fromkeys(["round", *(key for record in records for key in record)]):
        field, array = _column(name, records)
        fields.append(field)
        arrays.append(array)
    schema = pa.schema(fields, metadata={"format": str(FORMAT)})
    table, content = pa.Table.from_arrays(arrays, schema=schema), io.BytesIO()
    pq.write_table(table, content, compression="zstd", compression_level=19)
    write_whole(path, content.getvalue())


def read(path: Path) -> dict[str, ArchivedRun]:
    """Return the runs of an archive by name."""
    try:
        return _read(path, path.stat().st_mtime_ns)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


@lru_cache(maxsize=8)
def _read(path: Path, modified: int) -> dict[str, ArchivedRun]:
    """Read an archive; `modified` only keeps the cache from returning an older file."""
    table = pq.read_table(path)
    if (found := (table.schema.metadata or {}).get(b"format", b"none").decode()) != str(FORMAT):
        raise UserError(f"{path} has format {found}, and this version of fedcsd reads format {FORMAT}")
    names = table.column("run.name").to_pylist()
    starts = [row for row in range(len(names)) if row == 0 or names[row] != names[row - 1]]
    ends = [*starts[1:], len(names)]
    return {
        names[start]: ArchivedRun(path / names[start], table.slice(start, end - start))
        for start, end in zip(starts, ends, strict=True)
    }


def is_run(path: Path) -> bool:
    """Tell if a path is the folder of a run, or ARCHIVE/NAME."""
    return path.parent.is_file() or (path / "config.toml").is_file()


def open_run(path: Path) -> RecordedRun:
    """Return the run at a path, which is a folder or ARCHIVE/NAME."""
    if not path.parent.is_file():
        return RunDirectory.open(path)
    runs = read(path.parent)
    if path.name not in runs:
        raise UserError(f"{path.parent} has no run {path.name}")
    return runs[path.name]


def paths_in(folder: Path) -> list[Path]:
    """Return the paths of the runs in a folder: those of its archive, and those with a folder of their own."""
    archive = folder if folder.is_file() else folder / FILE
    archived = [run.path for run in read(archive).values()] if archive.is_file() else []
    return archived + [config.parent for config in sorted(folder.glob("*/config.toml"))]


def _column(name: str, records: Sequence[Mapping[str, Any]]) -> tuple[pa.Field, pa.Array]:
    """Return a measurement as a column of a plain type, or else as JSON text. Null means that a record lacks it."""
    values = [record[name] for record in records if name in record]
    for kind, fits in KINDS.items():
        if all(map(fits, values)):
            missing_number = math.nan if kind == pa.float64() else None
            cells = [
                None if name not in record else missing_number if record[name] is None else record[name]
                for record in records
            ]
            return pa.field(name, kind), pa.array(cells, kind, from_pandas=False)
    texts = [json.dumps(record[name]) if name in record else None for record in records]
    return pa.field(name, pa.string(), metadata={"json": "1"}), pa.array(texts, pa.string())


def _reader(field: pa.Field) -> Callable[[Any], Any]:
    """Return the function from a cell to the value of a record."""
    if field.type == pa.float64():
        return lambda value: None if math.isnan(value) else value
    if pa.types.is_map(field.type):
        return dict
    return json.loads if field.metadata else lambda value: value


def _is_float(value: Any) -> bool:
    """Tell if a value is a float, or the None that a record has for NaN."""
    return value is None or isinstance(value, float)


def _list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(v is None or type(v) is kind for v in value)


KINDS: dict[pa.DataType, Callable[[Any], bool]] = {
    pa.float64(): _is_float,
    pa.int64(): lambda value: type(value) is int and value.bit_length() < 64,
    pa.list_(pa.float64()): _list_of(float),
    pa.list_(pa.int64()): _list_of(int),
    pa.map_(pa.string(), pa.float64()): lambda value: (
        isinstance(value, dict) and all(isinstance(v, float) for v in value.values())
    ),
}
"""Types of columns, each with the values that it holds without loss."""
