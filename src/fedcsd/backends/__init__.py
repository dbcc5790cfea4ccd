"""Where clients run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from fedcsd.exchange import Reply, Request
from fedcsd.weights import Values, Weights


class Backend(Protocol):
    """Carries a method's requests to clients and their replies back."""

    def ask(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        """The reply of each client, in the order of `clients`, which is also the order of dealing."""
        ...

    def evaluate(self, round: int, weights: Weights) -> list[Reply]:
        """The replies of `Site.evaluate`, block by block."""
        ...

    def close(self) -> None: ...
