"""A round sends requests to its cohort, reads the replies, and adds up bytes and measurements."""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace

from fedcsd.errors import MethodFailed
from fedcsd.federation.backends.protocol import Backend
from fedcsd.federation.callbacks import Callbacks
from fedcsd.federation.cohort import Participants
from fedcsd.federation.evaluation import Record, spread
from fedcsd.federation.ledger import Ledger
from fedcsd.federation.states import States
from fedcsd.messages import Kind, Notes, Reply, Request, check_kinds
from fedcsd.methods import Method
from fedcsd.weights import Value, Values, nbytes


@dataclass
class Requests:
    """Carries a round's requests from the method to the backend; the method calls `ask`."""

    round: int
    method: Method
    participants: Participants
    backend: Backend
    states: States
    ledger: Ledger
    callbacks: Callbacks
    on_divergence: Callable[[Reply], object]
    """called with a reply whose training is unusable"""
    bytes_down: int = 0
    bytes_up: int = 0
    notes: list[Notes] = field(default_factory=list)
    _first: bool = True
    _open: str = ""
    """the function whose replies are being read"""
    _reading: Iterator[Reply] | None = None

    def ask(self, function: Callable[..., Values], /, **values: Value) -> Iterator[Reply]:
        """Send a request to the cohort and yield the usable replies, in the order of dealing."""
        name = getattr(function, "__name__", "")
        if getattr(function, "__self__", None) is not self.method or not hasattr(self.method, name):
            raise MethodFailed("ask takes a function of the method itself, such as ask(self.train, …)")
        if self._open:
            raise MethodFailed(
                f"read all replies of ask(self.{self._open}, …) before asking again: list(ask(…))"
            )
        check_kinds(values, "a request")
        self._open, present = name, self.participants.present
        # A client that fails is sent the first request of the round, and does not answer.
        reached = self.participants.clients if self._first else present
        self.bytes_down += self.ledger.send(self.round, reached, values)
        self._first = False
        kind: Kind = "train" if name in self.method.trains else "query"
        return self._replies(Request(self.round, name, values, kind), present)

    def _replies(self, request: Request, clients: list[int]) -> Iterator[Reply]:
        self._reading = self.backend.ask(request, clients, self.states)
        for done, reply in enumerate(self._reading, 1):
            self.callbacks.reply(request.function, done, len(clients))
            if reply.absent:
                self.participants.failed.add(reply.client)
                continue
            if reply.problem:
                self.on_divergence(reply)
                self.participants.diverged.add(reply.client)
                continue
            self.notes.append(dict(reply.notes))
            if reply.state or reply.client in self.states:
                self.states.put(reply.client, reply.state, self.round + 1)
            self.bytes_up += sum(nbytes(v) for v in reply.values.values())
            yield replace(reply, state={})  # a method that lists its replies does not hold the states too
        self._open = ""

    def check_read(self) -> None:
        """Refuse a method's round that left replies unread."""
        if self._open:
            raise MethodFailed(f"the method did not read all replies of ask(self.{self._open}, …)")

    def close(self) -> None:
        """Stop reading, so that the backend learns it now and not when the last traceback is forgotten."""
        if isinstance(self._reading, Generator):
            self._reading.close()

    def record(self) -> Record:
        """Return the means of the clients' measurements, and accuracies of local models on held-out data."""
        local = [notes.pop("held_accuracy_local", (0.0, 0.0)) for notes in self.notes]
        accuracies = [total / count for total, count in local if count]
        return {**means_of_notes(self.notes), **spread("client_accuracy_local", accuracies)}


def means_of_notes(notes: Iterable[Notes]) -> dict[str, float]:
    """Return each measurement's mean over all that it was counted on."""
    sums: dict[str, tuple[float, float]] = {}
    for some in notes:
        for name, (total, count) in some.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)
    return {name: total / count for name, (total, count) in sums.items() if count}
