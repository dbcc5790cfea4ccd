"""Where clients run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from fedcsd.messages import Reply, Request
from fedcsd.weights import Values, Weights


class Backend(Protocol):
    """Carries a method's requests to clients and their replies back."""

    server_device: torch.device
    """where the server's values are, and those of the replies"""

    def ask(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        """The reply of each client, in the order of `clients`, which is also the order of dealing."""
        ...

    def evaluate(self, round: int, weights: Weights) -> list[Reply]:
        """The replies of `Site.evaluate`, block by block."""
        ...

    def close(self) -> None: ...


class Apart(Backend, Protocol):
    """A backend for where the server has no test data."""

    def evaluate_apart(self, round: int, weights: Weights) -> dict[str, Any]:
        """What the clients measured of a model on their own test data, as part of the round's record."""
        ...


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps PyTorch in the server's process to one thread. The lanes have the cores; its threads would wait for
    one another behind them, and spin for milliseconds after each operation in case there is another. And
    sums do not depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
