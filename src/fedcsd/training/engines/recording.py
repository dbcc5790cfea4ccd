"""Recording of steps as CUDA graphs."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

KINDS = 4  # of steps whose graphs an engine keeps


def recorded(
    step: Callable[[], None], steps: int, pool: Any, cursor: Tensor, *, alone: bool
) -> torch.cuda.CUDAGraph:
    """Record a graph of so many steps.

    Two steps come first, so that libraries choose their algorithms and allocate their workspaces. If
    nothing else runs on the device (`alone`), the second one must not wait for it: such a step cannot be
    recorded, and an attempt leaves PyTorch's generator unusable. Garbage collection is off meanwhile,
    since a graph that is freed would spoil this one.
    """
    for second in (False, True):
        cursor.zero_()
        torch.cuda.current_stream().synchronize()
        with _refuse_waiting() if second and alone else nullcontext():
            step()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for _ in range(steps):
                step()
        except BaseException:
            with suppress(Exception):  # the error that matters is the one that ended the recording
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    return graph


@contextmanager
def _refuse_waiting() -> Iterator[None]:
    """Raise an error for operations that wait for the device, as far as PyTorch notices them."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that it does not notice all
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
