"""A random number is a function of its use, never of the order in which things happen.

Every draw names its purpose and its place, such as `rng(seed, "batches", round, client)`: the same place
gives the same numbers with one worker or ten, before and after a resume, here or at a site.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from zlib import crc32

import numpy as np
import torch


def _sequence(seed: int, purpose: str, *place: int) -> np.random.SeedSequence:
    return np.random.SeedSequence((seed, crc32(purpose.encode()), *place))


def rng(seed: int, purpose: str, *place: int) -> np.random.Generator:
    """Return a generator of its own for this purpose at this place."""
    return np.random.Generator(np.random.PCG64(_sequence(seed, purpose, *place)))


def torch_seed(seed: int, purpose: str, *place: int) -> int:
    """Return a seed for PyTorch's generators, from which models draw (initial weights, dropout)."""
    return int(_sequence(seed, purpose, *place).generate_state(1, np.uint64)[0] >> 1)


def start(seed: int, *, cuda: bool = False) -> None:
    """Start the process's generators, the GPU's only if `cuda`; torch.manual_seed would look for every device."""
    torch.default_generator.manual_seed(seed)
    if cuda:
        torch.cuda.manual_seed(seed)


def _states(*, cuda: bool) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if cuda else [])]


@contextmanager
def kept(*, cuda: bool) -> Iterator[None]:
    """Restore the process's generators at the end."""
    cpu, *gpu = _states(cuda=cuda)
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        for state in gpu:
            torch.cuda.set_rng_state(state)


def drawn_since(seed: int, *, cuda: bool) -> bool:
    """Tell if anything was drawn from the process's generators since they were started with this seed."""
    now = _states(cuda=cuda)
    with kept(cuda=cuda):
        start(seed, cuda=cuda)
        return not all(map(torch.equal, now, _states(cuda=cuda)))


class Watched:
    """A start of the process's generators that notices draws from them."""

    def __init__(self, *, cuda: bool):
        self.cuda, self._drawn = cuda, False
        self._seed: int | None = None

    def start(self, seed: int) -> None:
        self._drawn, self._seed = self.drawn(), seed
        start(seed, cuda=self.cuda)

    def drawn(self) -> bool:
        """Tell if anything was drawn since the first start."""
        return self._drawn or (self._seed is not None and drawn_since(self._seed, cuda=self.cuda))


class Stream(AbstractContextManager[None]):
    """A context with random numbers of its own, so that work beside training does not change those of training."""

    def __init__(self, seed: int = 0):
        self.inside = torch.Generator().manual_seed(seed).get_state()

    def __enter__(self) -> None:
        self.outside = torch.get_rng_state()
        torch.set_rng_state(self.inside)

    def __exit__(self, *_: object) -> None:
        self.inside = torch.get_rng_state()
        torch.set_rng_state(self.outside)
