"""A server sends requests and gets replies; their named values become bytes here, without pickle.

The bytes are safetensors with JSON for numbers, as in checkpoint files. Messages to worker processes have
the same entries (`federation/backends/frames.py`).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedcsd.weights import Layout, Value, Values, Weights

Kind = Literal["train", "query", "personal", "evaluate"]
"""a client trains, answers without training, tests its own model, or tests the global model"""
Notes = dict[str, tuple[float, float]]
"""Measurements as (total, count) by name: both add up over clients, and their quotient is recorded."""


@dataclass(frozen=True)
class Request:
    """A request names a function of the method's client half, and gives its arguments."""

    round: int
    function: str
    values: Values
    kind: Kind = "query"


@dataclass(frozen=True)
class Reply:
    """A client's reply has the values that the function returned, and what was measured."""

    client: int
    samples: int = 0
    """training samples that the client holds"""
    values: Values = field(default_factory=dict)
    notes: Notes = field(default_factory=dict)
    state: Values = field(default_factory=dict)
    """values that the client keeps for its next round"""
    problem: str = ""
    """why its training is unusable"""
    absent: str = ""
    """why the client did not answer"""

    @property
    def weights(self) -> Weights:
        found = self.values.get("weights")
        if not isinstance(found, Weights):
            kind = "there are none" if found is None else f"they are a {type(found).__name__}"
            raise TypeError(
                f"the weights of a reply must be weights, as client.train returns them, or weights.like(flat); {kind}"
            )
        return found

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class Torn(ValueError):
    """Bytes are incomplete or damaged."""


def finite(value: Any) -> Any:
    """Return a JSON value with NaN and infinities, which JSON does not have, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def parsed(text: bytes) -> Any:
    """Parse JSON, with NaN and infinities as null."""
    return json.loads(text, parse_constant=lambda name: None)


def check_kinds(values: Mapping[str, Any], whose: str) -> None:
    """Refuse values that a method cannot send or keep."""
    for name, value in values.items():
        if not isinstance(value, (Weights, Tensor, bool, int, float, np.bool_, np.integer, np.floating)):
            raise TypeError(
                f"{whose}'s {name!r} is a {type(value).__name__}: only weights, tensors and numbers can be sent or kept"
            )


def pack(header: Mapping[str, Any], values: Mapping[str, Value]) -> bytes:
    """Pack any JSON as header, and tensors, weights and numbers by name, into one safetensors blob."""
    whole, entries = described(values)
    storages: set[int] = set()
    tensors = {name: _separate(tensor, storages) for name, tensor in whole.items()}
    body = json.dumps({"header": header, "values": entries})
    return save(tensors, {"fedcsd": body, "crc32": _checksum(body, tensors)})


def described(values: Mapping[str, Value]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Split values into tensors on the CPU and JSON entries that say how to restore each value."""
    tensors: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    written: dict[int, str] = {}
    for name, value in values.items():
        if isinstance(value, (np.bool_, np.integer, np.floating)):
            value = value.item()
        if isinstance(value, (bool, int, float)):
            entries[name] = {"number": value}
            continue
        check_kinds({name: value}, "what is packed")
        tensor = value.flat if isinstance(value, Weights) else value
        # Two names may mean one tensor (the first teacher is the global model): write it once.
        key = written.setdefault(id(tensor), name)
        if key == name:
            tensors[name] = tensor.detach().cpu()
        entries[name] = {"tensor": key}
        if isinstance(value, Weights):
            entries[name] |= {"token": value.token, "recipe": value.recipe}
    return tensors, entries


def restored(entries: Mapping[str, Any], tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, Value]:
    """Restore the values that `described` split."""
    values: dict[str, Value] = {}
    for name, entry in entries.items():
        if "number" in entry:
            values[name] = entry["number"]
            continue
        tensor = tensors[entry["tensor"]]
        recipe = tuple(entry["recipe"]) if entry.get("recipe") else None
        values[name] = Weights(layout, tensor, entry["token"], recipe) if "token" in entry else tensor
    return values


def _separate(tensor: Tensor, storages: set[int]) -> Tensor:
    """Return the tensor in memory of its own: copy a view of something larger or of something written already."""
    tensor = tensor.contiguous()
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages:
        storages.add(storage.data_ptr())
        return tensor
    return tensor.clone()


def unpack(blob: bytes, layout: Layout) -> tuple[dict[str, Any], dict[str, Value]]:
    """Return the header and the values of a packed blob; raise Torn unless its checksum matches."""
    try:
        size = int.from_bytes(blob[:8], "little")
        metadata = json.loads(blob[8 : 8 + size])["__metadata__"]
        tensors = load(blob)
        if metadata["crc32"] != _checksum(metadata["fedcsd"], tensors):
            raise Torn("the checksum does not match")
        body = json.loads(metadata["fedcsd"])
    except (SafetensorError, ValueError, KeyError) as error:
        raise Torn(f"not a complete fedcsd blob: {error}") from error
    return body["header"], restored(body["values"], tensors, layout)


def header_of(path: Path) -> dict[str, Any]:
    """Return the header of a packed file without reading its tensors."""
    try:
        with open(path, "rb") as file:
            size = int.from_bytes(file.read(8), "little")
            start = file.read(min(size, path.stat().st_size))
        header: dict[str, Any] = json.loads(json.loads(start)["__metadata__"]["fedcsd"])["header"]
    except (ValueError, KeyError) as error:
        raise Torn(f"not a complete fedcsd blob: {error}") from error
    return header


def _checksum(body: str, tensors: Mapping[str, Tensor]) -> str:
    total = crc32(body.encode())
    for name in sorted(tensors):
        total = crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, total)
    return f"{total:08x}"
