"""The round loop: sample a cohort, run the method's round, evaluate, record, checkpoint."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedcsd import seeds
from fedcsd.backends import Backend
from fedcsd.config import Settings
from fedcsd.data import Dataset
from fedcsd.data.partition import Rows
from fedcsd.errors import Diverged
from fedcsd.exchange import Ledger, Notes, Reply, Request, merge
from fedcsd.methods import Method, Server
from fedcsd.models import Factory
from fedcsd.models.network import Network
from fedcsd.packing import finite
from fedcsd.training import Site
from fedcsd.weights import Value, Values, Weights, nbytes, reserve_tokens

Record = dict[str, Any]
"""What is known of one round, as one line of metrics.jsonl."""


class Watch:
    """Told what happens in training, for whoever wants to show it; this one shows nothing."""

    def reply(self, function: str, done: int, clients: int) -> None:
        """A client has answered: what was asked, how many have answered, of how many."""

    def round(self, record: Record, rounds: int) -> None:
        """A round is done, recorded and saved; there are `rounds` in all."""


@dataclass(frozen=True)
class Experiment:
    """All that a run is made of, checked and ready to start."""

    settings: Settings
    method: Method
    data: Dataset
    parts: list[Rows]
    factory: Factory
    network: Network
    """a copy of the model in this process: to try it, for its layout, and to save the result"""
    weights: Weights
    """the initial ones"""

    def site(self) -> Site:
        return Site(
            self.settings, self.method, self.data, [torch.from_numpy(p) for p in self.parts], self.factory
        )


def initial_network(settings: Settings, data: Dataset, factory: Factory) -> Network:
    """The model with its initial weights, a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.torch_seed(settings.seed, "weights"))
        return Network(factory(), data.example())


def cohort(settings: Settings, round: int) -> list[int]:
    """The clients that take part in a round (counted from 0): a function of seed and round."""
    size = max(1, round_half_up(settings.participation * settings.clients))
    chosen = seeds.rng(settings.seed, "cohort", round).permutation(settings.clients)[:size]
    return sorted(int(k) for k in chosen)


def round_half_up(x: float) -> int:
    return int(x + 0.5)


@dataclass
class Tally:
    """What a round's exchanges cost and measured."""

    bytes_down: int = 0
    bytes_up: int = 0
    notes: list[Notes] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)


class Federation:
    """A federation in training: the server's memory, the clients' memories and the next round."""

    def __init__(self, experiment: Experiment, backend: Backend, watch: Watch | None = None):
        self.experiment, self.backend, self.settings = experiment, backend, experiment.settings
        self.server = Server(experiment.weights, experiment.data.classes)
        self.states: dict[int, Values] = {}
        self.ledger = Ledger(self.settings.clients)
        self.watch = watch or Watch()
        self.round = 0  # rounds done
        self.record: Record = {}  # of the last one
        experiment.method.start(self.server)

    def step(self) -> Record:
        """One round. If it fails or is interrupted, the federation is as it was before."""
        began, before = time.perf_counter(), self._memory()
        tally = Tally()
        # Largest client first keeps the lanes evenly busy; it is also the order of all sums.
        clients = sorted(cohort(self.settings, self.round), key=lambda k: (-len(self.experiment.parts[k]), k))
        try:
            self.ledger.begin()
            self.experiment.method.round(self.server, self._asker(clients, tally))
            trained = time.perf_counter()
            accuracy, loss = self.backend.evaluate(self.round, self.server.weights)
        except BaseException:
            self._restore(before)
            raise
        for client in clients:
            if client not in tally.left_out:
                self.ledger.took_part(self.round, client)
        record = {
            "round": self.round + 1,
            "test_accuracy": accuracy,
            "test_loss": loss,
            **merge(tally.notes),
            "clients": len(clients) - len(tally.left_out),
            "diverged": len(tally.left_out),
            "bytes_down": tally.bytes_down,
            "bytes_up": tally.bytes_up,
            "seconds": time.perf_counter() - began,
            "seconds_evaluating": time.perf_counter() - trained,
        }
        self.round, self.record = self.round + 1, record
        return record

    def _asker(self, clients: Sequence[int], tally: Tally) -> Callable[..., Iterator[Reply]]:
        """The `ask` of one round."""

        def ask(function: Callable[..., Values], /, **values: Value) -> Iterator[Reply]:
            present = [k for k in clients if k not in tally.left_out]
            tally.bytes_down += self.ledger.send(self.round, present, values)
            request = Request(self.round, function.__name__, values)
            for done, reply in enumerate(self.backend.ask(request, present, self.states), 1):
                self.watch.reply(function.__name__, done, len(present))
                tally.notes.append(reply.notes if not reply.problem else {})
                if reply.problem:
                    self._diverged(reply)
                    tally.left_out[reply.client] = reply.problem
                    continue
                if reply.state:
                    self.states[reply.client] = reply.state
                tally.bytes_up += sum(nbytes(v) for v in reply.values.values())
                yield reply

        return ask

    def _diverged(self, reply: Reply) -> None:
        if self.settings.on_divergence == "stop":
            raise Diverged(
                f"round {self.round + 1}, {reply.problem}: lower the learning rate (--lr, now {self.settings.lr:g}) "
                "or leave such clients out (--on-divergence skip)"
            )

    def _memory(self) -> tuple[Any, ...]:
        ledger = self.ledger
        return dict(self.server.values), dict(self.states), ledger.last_round.copy(), set(ledger.current)

    def _restore(self, memory: tuple[Any, ...]) -> None:
        values, self.states, self.ledger.last_round, self.ledger.current = memory
        self.server.values.clear()
        self.server.values.update(values)

    def save(self) -> tuple[dict[str, Any], dict[str, Value]]:
        """Everything that outlives a round, as a header and named values."""
        values: dict[str, Value] = {f"server.{name}": value for name, value in self.server.values.items()}
        for client, state in self.states.items():
            values |= {f"client.{client}.{name}": value for name, value in state.items()}
        return {"round": self.round, "record": finite(self.record), "ledger": self.ledger.to_json()}, values

    def load(self, header: dict[str, Any], values: dict[str, Value]) -> None:
        self.round, self.record = header["round"], header["record"]
        self.ledger.from_json(header["ledger"])
        self.server.values.clear()
        self.states = {}
        for name, value in values.items():
            kind, _, rest = name.partition(".")
            if kind == "server":
                self.server.values[rest] = value
            else:
                client, _, key = rest.partition(".")
                self.states[int(client)] = {**self.states.get(int(client), {}), key: value}
        reserve_tokens(max(v.token for v in values.values() if isinstance(v, Weights)))
