"""Call compiled kernels: when PyTorch must compute instead, addresses of tensors, working memory."""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transformed() -> bool:
    """Tell if vmap, grad or another transform of torch.func is at work."""
    return torch._C._are_functorch_transforms_active()


def needs_pytorch(device: str = "cpu") -> bool:
    """Tell if PyTorch's operators are needed: for torch.compile, autocast or forward-mode derivatives."""
    return (
        torch.compiler.is_compiling() or torch.is_autocast_enabled(device) or forward_ad._current_level >= 0
    )


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return the addresses of tensors; None stays None, and an empty tensor has 0."""
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def stacked(info: Any, in_dims: Any, tensors: Any) -> list[Tensor]:
    """Return tensors under vmap with the stack first; one that is the same for all is repeated."""
    return [
        t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        for t, dim in zip(tensors, in_dims, strict=False)
    ]


class Memory(threading.local):
    """Keep the working memory of a thread, which grows with the needs."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.uint8, device="cpu")

    def at(self, size: int) -> int:
        """Return the address of this many bytes."""
        if self.tensor.numel() < size:
            self.tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self.tensor.data_ptr()


memory = Memory()
