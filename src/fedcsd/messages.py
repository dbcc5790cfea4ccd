"""Requests, replies, and values as bytes: safetensors for tensors, JSON for numbers, never pickle.

Checkpoint files have this form; messages to worker processes have the same entries (`backends.frames`).
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
"""What a request asks of a client: to train, to answer without training, or to test its own or the global model."""


@dataclass(frozen=True)
class Request:
    """One request to a cohort: a function of the method's client half, and its arguments."""

    round: int
    function: str
    values: Values
    kind: Kind = "query"


Notes = dict[str, tuple[float, float]]
"""Measurements as (total, count) by name: over clients both add up, and their quotient is reported."""


@dataclass(frozen=True)
class Reply:
    """One client's answer: `samples` it holds, the values it returns, what it measured.

    `state` is what the client keeps for its next round; `problem` says why its training is unusable,
    `absent` why there is no answer of it at all.
    """

    client: int
    samples: int = 0
    values: Values = field(default_factory=dict)
    notes: Notes = field(default_factory=dict)
    state: Values = field(default_factory=dict)
    problem: str = ""
    absent: str = ""

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
    """Bytes that are incomplete or damaged."""


def finite(value: Any) -> Any:
    """The same JSON value with NaN and infinities, which JSON does not have, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def parsed(text: bytes) -> Any:
    """The value that JSON stands for, with NaN and infinities as null."""
    return json.loads(text, parse_constant=lambda name: None)


def check_kinds(values: Mapping[str, Any], whose: str) -> None:
    """Refuse what a method would send or keep and cannot."""
    for name, value in values.items():
        if not isinstance(value, (Weights, Tensor, bool, int, float, np.bool_, np.integer, np.floating)):
            raise TypeError(
                f"{whose}'s {name!r} is a {type(value).__name__}: only weights, tensors and numbers can be sent or kept"
            )


def pack(header: Mapping[str, Any], values: Mapping[str, Value], *, checksum: bool = False) -> bytes:
    """One safetensors blob: `header` is any JSON, `values` tensors, weights and numbers by name."""
    described_tensors, entries = described(values)
    storages: set[int] = set()
    tensors = {name: _own(tensor, storages) for name, tensor in described_tensors.items()}
    body = json.dumps({"header": header, "values": entries})
    return save(tensors, {"fedcsd": body} | ({"crc32": _checksum(body, tensors)} if checksum else {}))


def described(values: Mapping[str, Value]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Values as tensors on the CPU, by name, and what else there is to know of each, as JSON."""
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
    """The values that `described` took apart."""
    values: dict[str, Value] = {}
    for name, entry in entries.items():
        if "number" in entry:
            values[name] = entry["number"]
            continue
        tensor = tensors[entry["tensor"]]
        recipe = tuple(entry["recipe"]) if entry.get("recipe") else None
        values[name] = Weights(layout, tensor, entry["token"], recipe) if "token" in entry else tensor
    return values


def _own(tensor: Tensor, storages: set[int]) -> Tensor:
    """The tensor with its numbers to itself; a view of something larger, or of something that is written
    already, is copied."""
    tensor = tensor.contiguous()
    storage = tensor.untyped_storage()
    if storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages:
        storages.add(storage.data_ptr())
        return tensor
    return tensor.clone()


def unpack(blob: bytes, layout: Layout) -> tuple[dict[str, Any], dict[str, Value]]:
    """The header and the values of a packed blob; its checksum is compared if it has one."""
    try:
        size = int.from_bytes(blob[:8], "little")
        metadata = json.loads(blob[8 : 8 + size])["__metadata__"]
        tensors = load(blob)
        if "crc32" in metadata and metadata["crc32"] != _checksum(metadata["fedcsd"], tensors):
            raise Torn("the checksum does not match")
        body = json.loads(metadata["fedcsd"])
    except (SafetensorError, ValueError, KeyError) as error:
        raise Torn(f"not a complete fedcsd blob: {error}") from error
    return body["header"], restored(body["values"], tensors, layout)


def header_of(path: Path) -> dict[str, Any]:
    """The header of a packed file, without reading its tensors."""
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
