"""Ask clients behind Flower's SuperLink: a request becomes a message to each node, and its answer a reply.

Replies come in the order of dealing, as in every backend, so that sums have the same bits.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from fedcsd.deploy.server.checks import Checks, shown
from fedcsd.deploy.server.remote import Holdings, NodeStates
from fedcsd.deploy.server.roster import Roster
from fedcsd.deploy.server.transport import Arrival, Transport
from fedcsd.deploy.settings import Deployment
from fedcsd.deploy.wire import Malformed, Parcel
from fedcsd.errors import RunStopped, note
from fedcsd.federation.backends.protocol import Backend
from fedcsd.federation.evaluation import Evaluation
from fedcsd.federation.setup import Setup
from fedcsd.messages import Reply, Request
from fedcsd.weights import Values, Weights

POLL, LONGEST = 0.1, 1.0  # seconds between looks for replies, at first and at most
PATIENCE = 60.0  # seconds after which the clients that are waited for are named
TRIES = 3  # questions to a client whose node cannot answer

Read = Callable[[int, Parcel], Any]
"""from a client's parcel to a reply; raises Malformed if it cannot be used"""


class FlowerBackend(Backend):
    """Ask the nodes of a deployment."""

    def __init__(
        self,
        experiment: Setup,
        deployment: Deployment,
        transport: Transport,
        roster: Roster,
        states: NodeStates,
    ):
        self.experiment, self.deployment = experiment, deployment
        self.transport, self.roster, self.states = transport, roster, states
        self.checks = Checks(experiment, deployment)
        self.holdings = Holdings(deployment)
        self.worker = experiment.worker() if len(experiment.data.y_test) else None
        self.overdue: dict[str, int] = {}
        self.refusals: list[str] = []
        self.tally = Counter[str]()
        self.waited = self.busy = 0.0

    def ask(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        message = self.holdings.message(request.values)
        self.checks.kinds(request)  # a mistake in the method itself shows here and not at a node

        def parcel(client: int, everything: bool) -> Parcel:
            version, needed = self.states.wanted(client)
            header = self._header(client, "ask", request.round)
            header |= {"function": request.function, "version": version, "needed": needed}
            always = request.kind == "train" and self.transport.alone
            return message.parcel(header, client, everything=everything, weights=always)

        def read(client: int, parcel: Parcel) -> Reply:
            reply = self.checks.reply(parcel, request, client, len(self.experiment.parts[client]))
            self.holdings.holds(client, request)
            self.tally["lost_states"] += bool(parcel.header.get("lost"))
            return reply

        kind = "train" if request.kind == "train" else "query"
        for client, found in self._answers(Exchange(self, kind, request.round, clients, parcel, read)):
            yield found if isinstance(found, Reply) else Reply(client, absent=found)

    def evaluate(self, round: int, weights: Weights) -> Evaluation:
        """Test a model on the server's test data, or have each site test it on its own."""
        request = Request(round, "evaluate", {"weights": weights}, "evaluate")
        if self.worker is not None:
            replies, tests = self.worker.evaluate_all(request)
            return Evaluation.of_blocks(replies, tests)
        message = self.holdings.message(request.values)

        def parcel(client: int, everything: bool) -> Parcel:
            return message.parcel(self._header(client, "evaluate", round), client, everything=everything)

        def read(client: int, parcel: Parcel) -> tuple[int, float, int]:
            right, loss, test = (parcel.header.get(name, -1) for name in ("right", "loss", "test"))
            most = self.roster.about[self.roster.nodes[client]]["test"]
            numbers = type(right) is int and type(test) is int and type(loss) is float
            if not numbers or not 0 <= right <= test <= most or not 0 <= loss < 1e15:
                raise Malformed("its evaluation is not within reason")
            self.holdings.holds(client, request)
            return right, loss, test

        everyone = range(self.experiment.settings.clients)
        exchange = Exchange(self, "evaluate", round, everyone, parcel, read)
        found = [f for _, f in self._answers(exchange) if isinstance(f, tuple)]
        loss = sum(loss for _, loss, _ in found) / max(sum(test for *_, test in found), 1)
        return Evaluation(loss, counts=[(right, test) for right, _, test in found])

    def counts(self) -> dict[str, Any]:
        """Return the round's bytes, the answers that did not count, and the time outside training and evaluation."""
        counted: dict[str, Any] = {"bytes_down": self.transport.down, "bytes_up": self.transport.up}
        counted |= {name: self.tally[name] for name in ("refused", "late", "missing", "lost_states")}
        counted |= {"refusals": self.refusals, "seconds_outside": max(0.0, self.waited - self.busy)}
        self.transport.down = self.transport.up = 0
        self.tally, self.refusals, self.waited, self.busy = Counter(), [], 0.0, 0.0
        return counted

    def _header(self, client: int, kind: str, round: int) -> dict[str, Any]:
        header = {**self.roster.hello, "kind": kind, "client": client, "round": round}
        return {**header, "deploy": asdict(self.deployment), "alone": self.transport.alone}

    def _answers(self, exchange: "Exchange") -> Iterator[tuple[int, Any]]:
        """Yield the result of each client in order, or the reason why there is none."""
        began = time.monotonic()
        for client in exchange.clients:
            while client not in exchange.done and not exchange.over:
                exchange.step()
            yield client, exchange.done.pop(client, "missing")
        exchange.end()
        self.waited += time.monotonic() - began
        self.busy += exchange.busy


@dataclass
class Exchange:
    """Send one question to a cohort, and wait until it is answered or given up."""

    backend: FlowerBackend
    kind: str
    round: int
    clients: Sequence[int]
    parcel: Callable[[int, bool], Parcel]
    """makes the parcel for a client, with all arrays or those that it lacks"""
    read: Read

    def __post_init__(self) -> None:
        self.waiting, self.open = list(self.clients), set(self.clients)
        self.sent: dict[str, int] = {}
        self.done: dict[int, Any] = {}
        self.tries = Counter[int]()
        self.usable = 0
        self.busy, self.pause = 0.0, POLL  # seconds of the slowest node, and to the next look
        self.say_at = time.monotonic() + PATIENCE
        timeout = self.backend.deployment.round_timeout
        self.deadline = time.monotonic() + timeout if timeout else math.inf

    @property
    def over(self) -> bool:
        wanted = self.backend.deployment.min_clients or len(self.clients)
        return not self.open or (
            time.monotonic() > self.deadline and self.usable >= min(wanted, len(self.clients))
        )

    def step(self) -> None:
        """Send what can be sent and read what has arrived, or wait a little."""
        backend = self.backend
        backend.roster.refresh()
        for client in list(self.waiting):
            self._send(client)
        before = len(self.open)
        for arrival in backend.transport.collect(self.sent):
            self._take(self.sent.pop(arrival.message), arrival)
        for arrival in backend.transport.collect(backend.overdue):
            del backend.overdue[arrival.message]
            backend.tally["late"] += not arrival.gone
        if time.monotonic() > self.say_at:
            self.say_at = math.inf
            names = ", ".join(backend.roster.name(client) for client in sorted(self.open))
            note(f"round {self.round + 1}: waiting for {names}")
        if len(self.open) < before:
            self.pause = POLL
        elif self.open:
            time.sleep(self.pause)
            self.pause = min(LONGEST, 1.2 * self.pause)

    def _send(self, client: int, everything: bool = False) -> None:
        node = self.backend.roster.node(client)
        if node is None:
            self.waiting += [client] * (client not in self.waiting)
            return
        parcel = self.parcel(client, everything)
        if message := self.backend.transport.send(node, parcel, self.kind, str(self.round + 1)):
            self.sent[message] = client
            with suppress(ValueError):
                self.waiting.remove(client)

    def _take(self, client: int, arrival: Arrival) -> None:
        if client not in self.open:
            return
        parcel = arrival.parcel
        if parcel is not None and "lacks" in parcel.header and self._again(client):
            self.backend.holdings.forget(client)
            self._send(client, everything=True)
        elif arrival.gone or (arrival.failed and self._again(client)):
            self.waiting.append(client)  # until its node is there again
        elif parcel is None or "lacks" in parcel.header:
            self._drop(
                client, arrival.wrong or arrival.failed or "it keeps nothing", refuse=bool(arrival.wrong)
            )
        elif "error" in parcel.header:
            self._drop(client, shown(parcel.header["error"]), refuse=False)
        else:
            try:
                self._settle(client, self.read(client, parcel))
                self.usable += 1
                seconds = parcel.header.get("seconds")
                self.busy = max(self.busy, seconds if type(seconds) is float and 0 < seconds < 1e6 else 0.0)
            except Malformed as error:
                self._drop(client, str(error), refuse=True)
            except Exception as error:  # no answer may end the run
                self._drop(client, f"it cannot be read ({type(error).__name__})", refuse=True)

    def _again(self, client: int) -> bool:
        self.tries[client] += 1
        return self.tries[client] < TRIES

    def _settle(self, client: int, found: Any) -> None:
        self.done[client] = found
        self.open.discard(client)

    def _drop(self, client: int, why: str, *, refuse: bool) -> None:
        backend = self.backend
        who = f"client {client} ({backend.roster.name(client)})"
        text = f"{who} {'is refused' if refuse else 'failed'}: {shown(why)}"
        backend.tally["refused" if refuse else "missing"] += 1
        backend.refusals.append(text)
        note(f"round {self.round + 1}, {text}")
        self._settle(client, text)

    def end(self) -> None:
        """Count what has not arrived; raise RunStopped if too few answers can be used."""
        self.backend.tally["missing"] += len(self.open)
        self.backend.overdue |= self.sent
        needed = self.backend.deployment.min_clients or 1
        if self.usable < min(needed, len(self.clients)):
            why = f": {self.backend.refusals[0]}" if self.backend.refusals else ""
            raise RunStopped(
                f"round {self.round + 1}: {self.usable} of {len(self.clients)} answers can be used{why}"
            )
