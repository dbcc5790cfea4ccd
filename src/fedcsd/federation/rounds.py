"""The round loop draws a cohort, runs the method's round, evaluates the new model and records it."""

import math
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from fedcsd import seeds
from fedcsd.errors import Diverged, MethodFailed, RunStopped, UserError, note, one_line
from fedcsd.federation.backends import memory
from fedcsd.federation.backends.protocol import Backend
from fedcsd.federation.callbacks import Callbacks
from fedcsd.federation.cohort import Participants, cohort, failing
from fedcsd.federation.evaluation import Record, TestData, listed, spread
from fedcsd.federation.ledger import Ledger
from fedcsd.federation.requests import Requests
from fedcsd.federation.setup import Setup
from fedcsd.federation.states import MemoryStates, States
from fedcsd.messages import Reply, Request, finite
from fedcsd.methods import Server
from fedcsd.methods._own import is_own
from fedcsd.plugins import check_call
from fedcsd.weights import Value, Weights, moved


class Federation:
    """A federation in training holds the server's values and the clients' states, and trains the next round."""

    def __init__(
        self,
        setup: Setup,
        backend: Backend,
        callbacks: Callbacks | None = None,
        states: States | None = None,
    ):
        self.setup, self.settings, self.method = setup, setup.settings, setup.method
        self.backend, self.callbacks = backend, callbacks or Callbacks()
        self.states = MemoryStates() if states is None else states
        self.ledger = Ledger(self.settings.clients)
        self.tests = TestData(setup.data, setup.parts, setup.held)
        weights = setup.weights.to(backend.server_device)
        self.server = Server(weights, setup.data.classes, setup.features, self.settings.clients)
        self.round = 0  # rounds done
        self.record: Record = {}  # of the last one
        self._run_method("start", server=self.server)

    def step(self) -> Record:
        """Train one round. A round that fails or is interrupted leaves the federation as it was."""
        before = self._snapshot()
        try:
            record = self._step()
            self.round, self.record = self.round + 1, record
        except BaseException:
            self._restore(before)
            raise
        return record

    def drawn(self) -> Sequence[int]:
        """Return the clients of the next round."""
        return cohort(self.settings, self.round)

    def _step(self) -> Record:
        began, before = time.perf_counter(), self.server.weights
        sizes = [len(rows) for rows in self.setup.parts]
        participants = Participants(self.drawn(), failing(self.settings, self.round), sizes)
        requests = self._train(participants)
        trained = time.perf_counter()
        evaluated = self._evaluate()
        present = participants.present
        self.ledger.took_part(self.round, present)
        if not self.round and present:
            self._note_if_unchanged(before)
        counted: Record = {
            "clients": len(present),
            "failed": len(participants.failed),
            "diverged": len(participants.diverged),
            "bytes_down": requests.bytes_down,
            "bytes_up": requests.bytes_up,
            "seconds": time.perf_counter() - began,
            "seconds_evaluating": time.perf_counter() - trained,
            **self.backend.counts(),
        }
        return {"round": self.round + 1, **evaluated, **requests.record(), **counted}

    def _train(self, participants: Participants) -> Requests:
        """Run the method's round with these clients."""
        self.ledger.begin()
        carriers = (self.backend, self.states, self.ledger, self.callbacks)
        requests = Requests(self.round, self.method, participants, *carriers, self._on_divergence)
        if participants.present:
            cuda = self.backend.server_device.type == "cuda"
            with seeds.kept(cuda=cuda):
                seeds.start(seeds.torch_seed(self.settings.seed, "server", self.round), cuda=cuda)
                try:
                    self._run_method("round", server=self.server, ask=requests.ask)
                finally:
                    requests.close()
            requests.check_read()
        if not self.server.weights.flat.isfinite().all():
            raise self._divergence(
                "the global model is no longer finite", "see what the method's round() does"
            )
        return requests

    def _evaluate(self) -> Record:
        """Evaluate the global model, and each client's own model if the method makes such models."""
        last = self.round + 1 == self.settings.rounds
        found = self.backend.evaluate(self.round, self.server.weights)
        personal = self._personal()
        record = self.tests.record(found, last=last) | spread("client_accuracy_personal", personal)
        return record | listed("client_accuracies_personal", personal, last=last)

    def _personal(self) -> list[float]:
        """Test each client's own model on its own data; NaN for a client that has nothing to be tested on."""
        if not self.method.personalised:
            return []
        request = Request(self.round, "test_personal", {"weights": self.server.weights}, "personal")
        everyone = range(self.settings.clients)
        replies = self.backend.ask(request, everyone, self.states)
        found = {reply.client: float(reply["accuracy"]) for reply in replies if not reply.absent}
        return [found.get(client, math.nan) for client in everyone]

    def _run_method(self, part: str, **arguments: Any) -> None:
        """Run a part of the method's server half; an error of it names its place in the method's file."""
        function = getattr(self.method, part)
        try:
            try:
                function(*arguments.values())
            except TypeError:
                check_call(function, arguments)
                raise
        except (RunStopped, UserError):
            raise
        except torch.OutOfMemoryError as error:
            raise RunStopped(
                f"the GPU's memory is full in the method's {part}(): {memory.advice()}"
            ) from error
        except Exception as error:
            failed = MethodFailed(f"the method's {part}() failed: {one_line(error)}")
            failed.add_note(traceback.format_exc())
            raise failed from error

    def _note_if_unchanged(self, before: Weights) -> None:
        """Note after the first round that a user's method has perhaps forgotten to set the new model."""
        kind, after = type(self.method), self.server.weights
        if (
            is_own(kind)
            and not self.method.personalised
            and torch.equal(before.flat, after.flat.to(before.flat))
        ):
            note(
                f"{kind.__name__}.round() left the global model as it was: set server.weights to new weights, "
                "such as weighted_mean(replies)"
            )

    def _on_divergence(self, reply: Reply) -> None:
        if self.settings.on_divergence == "stop":
            own = "see whether the method's own loss gives NaN, or " * is_own(type(self.method))
            raise self._divergence(reply.problem, f"{own}leave such clients out (--on-divergence skip)")

    def _divergence(self, problem: str, instead: str) -> Diverged:
        lower = f"lower the learning rate (--lr, now {self.settings.lr:g})"
        return Diverged(problem, self.round + 1, f"{lower} or {instead}")

    def _snapshot(self) -> tuple[Any, ...]:
        ledger = (self.ledger.last_round.copy(), set(self.ledger.current))
        return dict(self.server.values), self.states.snapshot(), *ledger, self.round, self.record

    def _restore(self, snapshot: tuple[Any, ...]) -> None:
        values, states, self.ledger.last_round, self.ledger.current, self.round, self.record = snapshot
        self.states.restore(states)
        self.server.values.clear()
        self.server.values.update(values)

    def save(self) -> tuple[dict[str, Any], dict[str, Value]]:
        """Return all that a checkpoint holds, as a header and named values."""
        header = {"round": self.round, "record": finite(self.record), "ledger": self.ledger.to_json()}
        clients, states = self.states.save(self.round)
        values: dict[str, Value] = {f"server.{name}": value for name, value in self.server.values.items()}
        return {**header, **clients}, values | {f"client.{name}": value for name, value in states.items()}

    def load(self, header: dict[str, Any], values: dict[str, Value]) -> None:
        """Go on from a checkpoint."""
        self.round, self.record = header["round"], header["record"]
        self.ledger.from_json(header["ledger"])
        parts: dict[str, dict[str, Value]] = {"server": {}, "client": {}}
        for name, value in values.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = value
        self.server.values.clear()
        self.server.values.update(moved(parts["server"], self.backend.server_device))
        self.states.load(header, parts["client"])
