"""The clients of a round are drawn here; some fail, and the others take part to its end."""

from collections.abc import Iterable, Sequence

import numpy as np

from fedcsd import seeds
from fedcsd.config import Settings


def cohort(settings: Settings, round: int) -> list[int]:
    """Draw the clients of a round (counted from 0), a function of seed and round."""
    size = max(1, int(settings.participation * settings.clients + 0.5))
    drawn = seeds.rng(settings.seed, "cohort", round).permutation(settings.clients)[:size]
    return sorted(int(client) for client in drawn)


def failing(settings: Settings, round: int) -> set[int]:
    """Draw the clients that fail in a round if they are in its cohort, a function of seed and round."""
    if not settings.dropout:
        return set()
    chances = seeds.rng(settings.seed, "dropout", round).random(settings.clients)
    return {int(client) for client in np.flatnonzero(chances < settings.dropout)}


class Participants:
    """The cohort of a round has the order of dealing and of all sums; clients leave it as they fail."""

    def __init__(self, drawn: Iterable[int], failing: Iterable[int], sizes: Sequence[int]):
        # The largest client first keeps the lanes evenly busy.
        self.clients = sorted(drawn, key=lambda client: (-sizes[client], client))
        self.failed = set(failing).intersection(self.clients)
        """clients that do not answer"""
        self.diverged: set[int] = set()
        """clients whose training is unusable and left out"""

    @property
    def present(self) -> list[int]:
        """Return the clients that answer."""
        return [k for k in self.clients if k not in self.failed and k not in self.diverged]
