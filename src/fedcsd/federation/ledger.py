"""The ledger of bytes: what each client holds already, and what a round's requests cost."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from fedcsd.messages import Notes, Reply
from fedcsd.weights import Value, Values, Weights, nbytes


def merge(notes: Iterable[Notes]) -> dict[str, float]:
    """Each measurement's mean over all it was counted on."""
    sums: dict[str, tuple[float, float]] = {}
    for some in notes:
        for name, (total, count) in some.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)
    return {name: total / count for name, (total, count) in sums.items() if count}


@dataclass
class Tally:
    """What a round's exchanges cost and measured."""

    bytes_down: int = 0
    bytes_up: int = 0
    notes: list[Notes] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    left_out: dict[int, str] = field(default_factory=dict)
    asked: bool = False
    open: str = ""
    """the request whose replies are being read"""
    reading: Iterator[Reply] | None = None

    def close(self) -> None:
        """Nobody reads on: let the backend know now, and not when the last traceback is forgotten."""
        if isinstance(self.reading, Generator):
            self.reading.close()


class Ledger:
    """Knows what each client holds already, and so which bytes a message to it must carry.

    Within a round a value goes to a client once. A client that took part in the last round still
    holds what it was sent then; weights with a recipe (the moving-average teacher) it makes itself.
    """

    def __init__(self, clients: int):
        self.last_round = np.full(clients, -1, dtype=np.int64)
        self.previous: set[int] = set()
        self.current: set[int] = set()
        self._sent: list[Value] = []

    def begin(self) -> None:
        """A new round: what was sent in the last one becomes what its cohort holds."""
        self.previous, self.current, self._sent = self.current, set(), []

    def missing(self, values: Values) -> tuple[list[str], list[str]]:
        """Names of the values that every client must be sent now, and of those that only clients
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
        """Bytes that this request costs over these clients; notes that they hold its values now."""
        everyone, returning = self.missing(values)
        # The same weights under two names travel once.
        different = {getattr(values[name], "token", id(values[name])): values[name] for name in everyone}
        base = sum(nbytes(v) for v in different.values())
        extra = sum(nbytes(values[name]) for name in returning)
        total = sum(base + (0 if self.last_round[k] == round - 1 else extra) for k in clients)
        self._sent += [v for v in values.values() if isinstance(v, (Weights, Tensor))]
        self.current |= {v.token for v in values.values() if isinstance(v, Weights)}
        return total

    def took_part(self, round: int, client: int) -> None:
        self.last_round[client] = round

    def to_json(self) -> dict[str, Any]:
        return {"last_round": self.last_round.tolist(), "current": sorted(self.current)}

    def from_json(self, saved: Mapping[str, Any]) -> None:
        self.last_round = np.array(saved["last_round"], dtype=np.int64)
        self.current = set(saved["current"])
