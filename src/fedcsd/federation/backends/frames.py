"""Messages between the main process and a lane have a JSON header and raw numbers for tensors.

The numbers lie in memory that both processes share, if there is some: a pipe takes 64 KiB at a time, and
each time the reader must be woken. A message in such a memory is answered before the next one is written
there, and each side copies what it reads, so one memory serves both ways.
"""

import json
import mmap
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedcsd.messages import described, restored
from fedcsd.weights import Layout, Value

ALIGNED = 64
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Shared:
    """Memory that a forked process shares with this one. Pages that nobody writes take no room."""

    def __init__(self, size: int):
        self.size, self.memory = size, mmap.mmap(-1, size)


def room(layout: Layout) -> int:
    """Return bytes enough for the values that most methods send of one client: a few times its weights."""
    return (1 << 20) + 8 * 4 * layout.size


def write(header: Mapping[str, Any], values: Mapping[str, Value], shared: Shared | None) -> bytes:
    """Return the message to send. Its tensors are written to the shared memory; into the message if that
    is missing or too small."""
    tensors, entries = described(values)
    places, size = {}, 0
    for name, tensor in tensors.items():
        places[name] = (str(tensor.dtype), list(tensor.shape), size)
        size += -(-tensor.nbytes // ALIGNED) * ALIGNED
    inside = shared is None or size > shared.size
    body = {"header": header, "values": entries, "tensors": places, "inside": inside}
    head = json.dumps(body).encode()
    memory: Any = bytearray(size) if shared is None or inside else shared.memory
    for name, tensor in tensors.items():
        if tensor.numel():
            _view(memory, *places[name]).copy_(tensor.reshape(-1))
    return len(head).to_bytes(8, "little") + head + (bytes(memory) if inside else b"")


def read(
    message: bytes, layout: Layout, shared: Shared | None
) -> tuple[dict[str, Any], dict[str, Value], int]:
    """Return the header, the values, and the bytes that their tensors take."""
    end = 8 + int.from_bytes(message[:8], "little")
    body = json.loads(message[8:end])
    memory: Any = bytearray(message[end:]) if body["inside"] or shared is None else shared.memory
    tensors = {name: _view(memory, *place).clone().view(place[1]) for name, place in body["tensors"].items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    return body["header"], restored(body["values"], tensors, layout), size


def _view(memory: Any, dtype: str, shape: Sequence[int], offset: int) -> Tensor:
    """Return a tensor's numbers in the memory, flat."""
    count = prod(shape)
    if not count:
        return torch.empty(0, dtype=DTYPES[dtype])
    return torch.frombuffer(memory, dtype=DTYPES[dtype], count=count, offset=offset)
