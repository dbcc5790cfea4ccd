"""A backend connects a federation with the place where its clients run."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from fedcsd.federation.evaluation import Evaluation, Record
from fedcsd.messages import Reply, Request
from fedcsd.weights import Values, Weights


class Backend(ABC):
    """Carries requests to clients and their replies back."""

    server_device = torch.device("cpu")
    """device of the server's values and of the values in replies"""
    engine = ""
    """name of the engine that trains; empty where there is no choice"""

    @abstractmethod
    def ask(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        """Yield the reply of each client, in the order of `clients`, which is also the order of dealing."""

    @abstractmethod
    def evaluate(self, round: int, weights: Weights) -> Evaluation:
        """Test a model on all test data."""

    def counts(self) -> Record:
        """Return measurements of the round's traffic, where the backend sees the real messages.

        They go over those of the federation; the next call counts anew.
        """
        return {}

    def close(self) -> None:  # noqa: B027  (a backend may hold nothing)
        """Give back processes and memory."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep PyTorch in the server's process to one thread.

    The lanes have the cores: more threads would wait behind them, and spin for milliseconds after each
    operation. Sums do not depend on the number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
