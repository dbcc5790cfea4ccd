"""A GPU's memory, of which other processes may hold a part."""

import torch

MARGIN = 0.95  # of the memory that is dealt out: CUDA itself takes some in every process

_share = 1.0


def share(processes: int) -> None:
    """Let this process take as much of its GPU as each of so many may."""
    global _share
    _share = 1.0 if processes == 1 else MARGIN / processes
    torch.cuda.set_per_process_memory_fraction(_share)


def total() -> int:
    """Bytes that this process may hold in all."""
    return int(_share * torch.cuda.mem_get_info()[1])


def free() -> int:
    """Bytes that this process may still take."""
    return min(torch.cuda.mem_get_info()[0], total() - torch.cuda.memory_reserved())


def advice() -> str:
    """What to do about a memory that is full."""
    left, whole = torch.cuda.mem_get_info()
    others = whole - left - torch.cuda.memory_reserved()
    if others > whole / 4:
        return f"other processes hold {others / 1e9:.0f} of its {whole / 1e9:.0f} GB: train fewer runs at once (--jobs)"
    return "train fewer runs at once (--jobs)" if _share < 1 else "lower --batch-size"
