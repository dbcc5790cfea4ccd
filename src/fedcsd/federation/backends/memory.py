"""Share a GPU's memory: the part that this process may take, and the values that stay in it."""

from dataclasses import replace

import torch
from torch import Tensor

from fedcsd.messages import Reply
from fedcsd.weights import Values, Weights, moved, nbytes

MARGIN = 0.95  # of the memory that processes share: CUDA itself takes some in each
SERVER = 0.25  # of the device's memory that waiting replies may take, and that clients' states may
WAITING = 32  # replies that may wait for the server

_share = 1.0


def share(processes: int) -> None:
    """Let this process take as much of its GPU as each of so many may."""
    global _share
    _share = 1.0 if processes == 1 else MARGIN / processes
    torch.cuda.set_per_process_memory_fraction(_share)


def total() -> int:
    """Return the bytes that this process may hold in all."""
    return int(_share * torch.cuda.mem_get_info()[1])


def free() -> int:
    """Return the bytes that this process may still take."""
    return min(torch.cuda.mem_get_info()[0], total() - torch.cuda.memory_reserved())


def advice() -> str:
    """Return what a user can do if the memory is full."""
    left, whole = torch.cuda.mem_get_info()
    others = whole - left - torch.cuda.memory_reserved()
    if others > whole / 4:
        return f"other processes hold {others / 1e9:.0f} of its {whole / 1e9:.0f} GB: train fewer runs at once (--jobs)"
    return "train fewer runs at once (--jobs)" if _share < 1 else "lower --batch-size"


def server_device(device: torch.device, model: int) -> torch.device:
    """Return the device of the server's values: the clients', if waiting replies of so many bytes fit there."""
    # The limit is a share of the whole device: sums on the CPU and on a GPU differ in their last bits.
    if device.type == "cuda" and WAITING * model > SERVER * torch.cuda.mem_get_info()[1]:
        return torch.device("cpu")
    return device


def delivered(reply: Reply, server_device: torch.device, clients: int) -> Reply:
    """Return a reply as the server gets it.

    Clients' states stay on the device if those of two rounds fit there.
    """
    values = moved(reply.values, server_device)
    state = moved(reply.state, "cpu" if _too_much(reply.state, clients) else server_device, copy=True)
    if server_device.type == "cuda":
        # They are made on a lane's stream, and used and freed on the server's.
        for value in [*values.values(), *state.values()]:
            tensor = value.flat if isinstance(value, Weights) else value
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.default_stream())
    return replace(reply, values=values, state=state)


def _too_much(state: Values, clients: int) -> bool:
    size = 2 * clients * sum(nbytes(value) for value in state.values())
    return torch.cuda.is_available() and size > SERVER * total()
