"""Wrap a method to observe its clients' training."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from fedcsd import seeds
from fedcsd.messages import Reply
from fedcsd.methods import Ask, Method, Server
from fedcsd.training import Client
from fedcsd.weights import Layout, Value, Values, Weights

Observer = Callable[[Client, Weights, Weights], Mapping[str, Tensor]]
"""Called after an epoch with the client, the weights that training started from and the present ones."""

PREFIX = "observed "  # of what travels beside a reply's own values


@dataclass(frozen=True)
class Observed(Method):
    """A method whose clients are observed after each epoch of training the round's model.

    `seen` gets each reply and what was observed at its client, by name [epochs, ...]; the method sees
    neither. An observation draws from random generators of its own and changes no result.
    """

    method: Method
    seen: Callable[[Reply, Mapping[str, Tensor]], object]
    observer: Observer | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "trains", self.method.trains)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "seen": None}  # worker processes do not call it

    def __getattr__(self, name: str) -> Any:
        """Return the client function of this name, observed."""
        if name.startswith("_"):
            raise AttributeError(name)
        function = getattr(self.method, name)

        def observed(self: Observed, client: Client, **values: Any) -> Values:
            return self._observe(function, client, values)

        observed.__name__ = name
        return MethodType(observed, self)

    def _observe(self, function: Callable[..., Values], client: Client, values: Values) -> Values:
        found: list[Mapping[str, Tensor]] = []

        def after_epoch(start: Weights, now: Weights) -> None:
            if self.observer is not None:
                with seeds.Stream():
                    found.append(self.observer(client, start, now))

        inner = replace(client, method=self.method, after_epoch=after_epoch if self.observer else None)
        reply = function(inner, **values)
        client.state = inner.state
        names = found[0] if found else {}
        return {**reply, **{PREFIX + name: torch.stack([each[name] for each in found]) for name in names}}

    def start(self, server: Server) -> None:
        self.method.start(server)

    def local(self, layout: Layout) -> Tensor | None:
        return self.method.local(layout)

    def round(self, server: Server, ask: Ask) -> None:
        def asking(function: Callable[..., Values], /, **values: Value) -> Iterator[Reply]:
            return self._read(ask(getattr(self, function.__name__), **values))

        self.method.round(server, asking)

    def _read(self, replies: Iterator[Reply]) -> Iterator[Reply]:
        for reply in replies:
            observed = {
                name.removeprefix(PREFIX): value
                for name, value in reply.values.items()
                if name.startswith(PREFIX) and isinstance(value, Tensor)
            }
            own = {name: value for name, value in reply.values.items() if not name.startswith(PREFIX)}
            reply = replace(reply, values=own)
            self.seen(reply, observed)
            yield reply
