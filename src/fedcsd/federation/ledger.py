"""The ledger knows which values a client holds already, and counts the bytes of the others."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedcsd.weights import Value, Values, Weights, nbytes


class Ledger:
    """Counts the bytes that a federation's requests must carry.

    Within a round a value goes to a client once. A client that took part in the last round still
    holds the values of that round; it makes weights with a recipe (the moving-average teacher) itself.
    """

    def __init__(self, clients: int):
        self.last_round = np.full(clients, -1, dtype=np.int64)
        self.previous: set[int] = set()
        self.current: set[int] = set()
        self._sent: list[Value] = []

    def begin(self) -> None:
        """Begin a round: the values sent in the last one become those that its cohort holds."""
        self.previous, self.current, self._sent = self.current, set(), []

    def missing(self, values: Values) -> tuple[list[str], list[str]]:
        """Return the names of the values that every client must be sent, and of those that only clients
        that sat out the last round must be sent."""
        tokens = self.current | {v.token for v in values.values() if isinstance(v, Weights)}
        everyone, returning = [], []
        for name, value in values.items():
            if any(value is sent for sent in self._sent) or (
                isinstance(value, Weights) and value.token in self.current
            ):
                continue
            recipe = value.recipe if isinstance(value, Weights) else None
            if recipe and recipe[0] in self.previous and recipe[1] in tokens:
                returning.append(name)
            else:
                everyone.append(name)
        return everyone, returning

    def send(self, round: int, clients: Iterable[int], values: Values) -> int:
        """Note that these clients hold these values from now on; return the bytes that sending them costs."""
        everyone, returning = self.missing(values)
        # The same weights under two names travel once.
        first = [values[name] for name in everyone]
        different = {v.token if isinstance(v, Weights) else id(v): v for v in first}
        base = sum(nbytes(v) for v in different.values())
        extra = sum(nbytes(values[name]) for name in returning)
        total = sum(base + (0 if self.last_round[k] == round - 1 else extra) for k in clients)
        self._sent += [v for v in values.values() if isinstance(v, (Weights, Tensor))]
        self.current |= {v.token for v in values.values() if isinstance(v, Weights)}
        return total

    def took_part(self, round: int, clients: Iterable[int]) -> None:
        """Note the clients that took part in a round to its end."""
        self.last_round[list(clients)] = round

    def to_json(self) -> dict[str, Any]:
        return {"last_round": self.last_round.tolist(), "current": sorted(self.current)}

    def from_json(self, saved: Mapping[str, Any]) -> None:
        self.last_round = np.array(saved["last_round"], dtype=np.int64)
        self.current = set(saved["current"])
