"""Convert headers and arrays to Flower records and back, without pickle and without trust in what arrives.

This module needs neither torch nor the rest of fedcsd: Flower starts a process for each message, which has
to be quick.
"""

import json
import math
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict

HEADER, ARRAYS, METRICS = "fedcsd", "arrays", "metrics"
MAIN = "v.weights"  # the array that Flower's mods for clipping and noise read and change
KINDS = {"float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}
CLIPPING_NORM = "clipping_norm"  # flwr.supercore.differential_privacy.KEY_CLIPPING_NORM


class Malformed(ValueError):
    """A message cannot be used, for the reason in its text."""


@dataclass
class Parcel:
    """Hold the content of a message: a header of plain JSON, and arrays by name."""

    header: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)


def content_of(parcel: Parcel, *, alone: bool = False, clipping_norm: float = 0.0) -> "RecordDict":
    """Pack a parcel into Flower records: one of arrays, one of settings.

    With `alone` the weights are the only Flower array and all others are bytes among the settings:
    Flower's mods treat every array as weights.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    arrays = {name: Array(array) for name, array in parcel.arrays.items() if not alone or name == MAIN}
    config: dict[str, Any] = {"header": json.dumps(parcel.header)}
    config |= {f"npy.{n}": Array(a).data for n, a in parcel.arrays.items() if n not in arrays}
    if clipping_norm:
        config[CLIPPING_NORM] = clipping_norm
    records: dict[str, Any] = {HEADER: ConfigRecord(config)}
    if arrays:
        records[ARRAYS] = ArrayRecord(arrays)
    if alone:
        records[METRICS] = MetricRecord({"samples": int(parcel.header.get("samples", 0))})
    return RecordDict(records)


def parcel_of(content: "RecordDict") -> Parcel:
    """Return the parcel that `content_of` packed; raise Malformed for anything else."""
    try:
        config = content.config_records[HEADER]
        header = json.loads(str(config["header"]))
        blobs: dict[str, Any] = {
            name: array.data for name, array in content.array_records.get(ARRAYS, {}).items()
        }
        blobs |= {key[4:]: value for key, value in config.items() if key.startswith("npy.")}
    except (KeyError, ValueError, AttributeError, RecursionError) as error:
        raise Malformed(f"not a message of fedcsd ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise Malformed("not a message of fedcsd (header)")
    return Parcel(header, {name: unpacked(blob, name) for name, blob in blobs.items()})


def unpacked(blob: Any, name: str) -> NDArray[Any]:
    """Decode an array of numpy.save; check its size before allocating memory."""
    if not isinstance(blob, bytes):
        raise Malformed(f"{name[:40]!r} is not an array")
    stream = BytesIO(blob)
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = read[version](stream)
    except Exception:
        raise Malformed(f"{name[:40]!r} is not an array in NumPy's format") from None
    if dtype.name not in KINDS or not dtype.isnative:
        raise Malformed(f"{name[:40]!r} holds {str(dtype)[:40]}, not numbers")
    if math.prod(shape) * dtype.itemsize != len(blob) - stream.tell():
        raise Malformed(f"{name[:40]!r} is cut off or has bytes too many")
    flat = np.frombuffer(blob, dtype, offset=stream.tell()).copy()
    return flat.reshape(shape, order="F" if fortran else "C")


def size_of(message: "Message") -> int:
    """Return the bytes of a message as Flower sends it, without the overhead of the connection."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    return sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
