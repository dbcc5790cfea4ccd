"""The round loop: sample a cohort, run the method's round, evaluate, record, checkpoint."""

import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedcsd import seeds
from fedcsd.config import Settings
from fedcsd.data import Dataset
from fedcsd.data.matching import DOMAINS, Alike
from fedcsd.data.partition import Rows
from fedcsd.errors import Diverged, MethodFailed, RunStopped, UserError, one_line
from fedcsd.federation.backends import memory
from fedcsd.federation.backends.protocol import Apart, Backend
from fedcsd.federation.ledger import Ledger, Tally, merge
from fedcsd.federation.states import MemoryStates, States
from fedcsd.messages import Reply, Request, check_kinds, finite
from fedcsd.methods import Method, Server
from fedcsd.methods._own import is_own, note_if_same
from fedcsd.models import Factory
from fedcsd.models.network import Network
from fedcsd.plugins import check_call
from fedcsd.training.client import Observer
from fedcsd.training.workspace import Site
from fedcsd.weights import Value, Values, Weights, moved, nbytes

Record = dict[str, Any]
"""What is known of one round, as one line of metrics.jsonl."""

EACH = 100  # classes or clients up to which every round says how each of them does; beyond, the last one


class Watch:
    """Told what happens in training, for whoever wants to show it; this one shows nothing."""

    def reply(self, function: str, done: int, clients: int) -> None:
        """A client has answered: what was asked, how many have answered, of how many."""

    def round(self, record: Record, rounds: int) -> None:
        """A round is done, recorded and saved; there are `rounds` in all."""

    def diverged(self, round: int) -> None:
        """The run ended in this round, in a comparison that goes on without it."""


@dataclass(frozen=True)
class Experiment:
    """All that a run is made of, checked and ready to start."""

    settings: Settings
    tables: dict[str, dict[str, Any]]
    """names and options of data, model and partition, and the method's name if it has one, for the config"""
    method: Method
    data: Dataset
    parts: list[Rows]
    """the training rows of each client"""
    held: list[Rows]
    """the rows that each client holds out to be tested on; empty without --holdout"""
    factory: Factory
    network: Network
    """a copy of the model in this process: to try it, for its layout, and to save the result"""
    weights: Weights
    """the initial ones"""

    @property
    def features(self) -> int:
        """Size of the model's penultimate features."""
        self.network.eval()
        with torch.no_grad():
            return self.network(self.data.example()).features.shape[1]

    def site(self, observer: Observer | None = None) -> Site:
        parts, held = ([torch.from_numpy(rows) for rows in some] for some in (self.parts, self.held))
        site = Site(self.settings, self.method, self.data, parts, held, self.factory)
        site.observer = observer
        return site


def initial_network(settings: Settings, data: Dataset, factory: Factory) -> Network:
    """The model with its initial weights, a function of the seed alone."""
    cuda = settings.device == "cuda"
    with seeds.kept(cuda=cuda and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        seeds.start(seeds.torch_seed(settings.seed, "weights"), cuda=cuda)
        return Network(factory(), data.example(), settings.classifier)


def cohort(settings: Settings, round: int) -> list[int]:
    """The clients that take part in a round (counted from 0): a function of seed and round."""
    size = max(1, round_half_up(settings.participation * settings.clients))
    chosen = seeds.rng(settings.seed, "cohort", round).permutation(settings.clients)[:size]
    return sorted(int(k) for k in chosen)


def round_half_up(x: float) -> int:
    return int(x + 0.5)


def failing(settings: Settings, round: int) -> set[int]:
    """The clients that would fail in a round if they were drawn: a function of seed and round."""
    if not settings.dropout:
        return set()
    chances = seeds.rng(settings.seed, "dropout", round).random(settings.clients)
    return {int(k) for k in np.flatnonzero(chances < settings.dropout)}


def spread(name: str, accuracies: Sequence[float]) -> Record:
    """Mean, worst decile and standard deviation over clients."""
    if not accuracies:
        return {}
    worst = sorted(accuracies)[: max(1, len(accuracies) // 10)]
    return {
        f"{name}_mean": float(np.mean(accuracies)),
        f"{name}_worst_decile": float(np.mean(worst)),
        f"{name}_std": float(np.std(accuracies)),
    }


def known(accuracies: Sequence[float]) -> list[float]:
    return [a for a in accuracies if not math.isnan(a)]


def _means(correct: NDArray[np.bool_], kinds: NDArray[np.int64], number: int) -> list[float]:
    """The share of right answers for each kind, 0 to number − 1; NaN for a kind that none is of."""
    right, all_ = np.bincount(kinds, correct, number), np.bincount(kinds, minlength=number)
    return [r / n if n else math.nan for r, n in zip(right.tolist(), all_.tolist(), strict=True)]


class Federation:
    """A federation in training: the server's memory, the clients' memories and the next round."""

    def __init__(
        self,
        experiment: Experiment,
        backend: Backend,
        watch: Watch | None = None,
        states: States | None = None,
    ):
        self.experiment, self.backend, self.settings = experiment, backend, experiment.settings
        self.server = Server(
            experiment.weights.to(backend.server_device),
            experiment.data.classes,
            experiment.features,
            self.settings.clients,
        )
        alike = Alike(experiment.data, len(experiment.parts))
        rows, shares = zip(*(alike.rows(k, rows) for k, rows in enumerate(experiment.parts)), strict=True)
        self.own_tests = (np.concatenate(rows), np.concatenate(shares))
        """test rows like each client's own, client after client, and what each counts for"""
        self.own_sizes = np.array([len(some) for some in rows])
        self.states = MemoryStates() if states is None else states
        self.ledger = Ledger(self.settings.clients)
        self.watch = watch or Watch()
        self.round = 0  # rounds done
        self.record: Record = {}  # of the last one
        self._method_s("start", server=self.server)

    def _method_s(self, part: str, **arguments: Any) -> None:
        """Run a part of the method's server half; a mistake in it is told with its place."""
        function = getattr(self.experiment.method, part)
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

    def step(self) -> Record:
        """One round. If it fails or is interrupted, the federation is as it was before."""
        before = self._memory()
        try:
            record = self._step()
            self.round, self.record = self.round + 1, record
        except BaseException:
            self._restore(before)
            raise
        return record

    def _step(self) -> Record:
        began, before = time.perf_counter(), self.server.weights
        drawn, fail = self.drawn(), failing(self.settings, self.round)
        # Largest client first keeps the lanes evenly busy; it is also the order of all sums.
        clients = sorted(drawn, key=lambda k: (-len(self.experiment.parts[k]), k))
        tally = Tally(failed={k for k in clients if k in fail})
        self.ledger.begin()
        if len(tally.failed) < len(clients):
            cuda = self.backend.server_device.type == "cuda"
            with seeds.kept(cuda=cuda):
                seeds.start(seeds.torch_seed(self.settings.seed, "server", self.round), cuda=cuda)
                try:
                    self._method_s("round", server=self.server, ask=self._asker(clients, tally))
                finally:
                    tally.close()
            if tally.open:
                raise MethodFailed(f"the method did not read all replies of ask(self.{tally.open}, …)")
        if not self.server.weights.flat.isfinite().all():
            raise self._divergence(
                "the global model is no longer finite", "see what the method's round() does"
            )
        trained = time.perf_counter()
        measured = self._evaluate()
        took_part = [k for k in clients if k not in tally.left_out and k not in tally.failed]
        for client in took_part:
            self.ledger.took_part(self.round, client)
        if not self.round and took_part:
            note_if_same(self.experiment.method, before, self.server.weights)
        local = [
            total / count
            for some in tally.notes
            for total, count in [some.pop("held_accuracy_local", (0, 0))]
            if count
        ]
        counted: Record = {
            **spread("client_accuracy_local", local),
            "clients": len(took_part),
            "failed": len(tally.failed),
            "diverged": len(tally.left_out),
            "bytes_down": tally.bytes_down,
            "bytes_up": tally.bytes_up,
            "seconds": time.perf_counter() - began,
            "seconds_evaluating": time.perf_counter() - trained,
            **getattr(self.backend, "counts", dict)(),  # what was really sent, where that can be seen
        }
        return {"round": self.round + 1, **measured, **merge(tally.notes), **counted}

    def drawn(self) -> Sequence[int]:
        """The clients of the next round."""
        return cohort(self.settings, self.round)

    def _evaluate(self) -> Record:
        """The global model on the test data, on each domain of it, and on what clients hold out."""
        data, held = self.experiment.data, self.experiment.held
        if not len(data.y_test):  # there is none here: the clients test the model on their own
            return cast(Apart, self.backend).evaluate_apart(self.round, self.server.weights)
        replies = self.backend.evaluate(self.round, self.server.weights)
        correct = torch.cat([reply["correct"] for reply in replies]).numpy()
        test, local = correct[: len(data.y_test)], correct[len(data.y_test) :]
        seen = np.cumsum([reply.samples for reply in replies])
        losses = [
            reply.notes["loss"][0] for reply, end in zip(replies, seen, strict=True) if end <= len(test)
        ]
        record: Record = {"test_accuracy": float(test.mean()), "test_loss": sum(losses) / len(test)}
        if data.groups is not None and data.groups.test is not None and len(data.groups.names) <= DOMAINS:
            domains = data.groups.test.numpy()
            each = {
                name: float(test[domains == d].mean())
                for d, name in enumerate(data.groups.names)
                if (domains == d).any()
            }
            record |= {"domain_accuracy": each, "domain_mean": sum(each.values()) / len(each)}
        labels = data.y_test.numpy()
        record |= self._of_each("class_accuracies", _means(test, labels, data.classes))
        if held:
            sizes = np.array([len(h) for h in held])
            own = _means(local, np.repeat(np.arange(len(held)), sizes), len(held))
        else:
            own = self._own_accuracies(test)
        personal = self._personal()
        record |= spread("client_accuracy", known(own)) | self._of_each("client_accuracies", own)
        record |= spread("client_accuracy_personal", known(personal))
        return record | self._of_each("client_accuracies_personal", personal)

    def _of_each(self, name: str, accuracies: Sequence[float]) -> Record:
        """Accuracies of all classes or clients, NaN where nothing could be tested."""
        last = self.round + 1 == self.settings.rounds
        wanted = known(accuracies) and (last or len(accuracies) <= EACH)
        return {name: [round(a, 5) for a in accuracies]} if wanted else {}

    def _own_accuracies(self, correct: NDArray[np.bool_]) -> list[float]:
        """Of the global model on each client's like of the test images; NaN if there are none."""
        rows, shares = self.own_tests
        full = self.own_sizes > 0
        accuracies = np.full(len(full), math.nan)
        if full.any():
            starts = (np.cumsum(self.own_sizes) - self.own_sizes)[full]
            accuracies[full] = np.add.reduceat(correct[rows] * shares, starts)
        return accuracies.tolist()

    def _personal(self) -> list[float]:
        """Accuracy of each client's own model on its own data, for methods that make such models; NaN
        where a client has nothing to be tested on."""
        method, everyone = self.experiment.method, range(self.settings.clients)
        if type(method).personal is Method.personal:
            return []
        request = Request(self.round, "test_personal", {"weights": self.server.weights})
        replies = self.backend.ask(request, everyone, self.states)
        found = {reply.client: float(reply["accuracy"]) for reply in replies if not reply.absent}
        return [found.get(client, math.nan) for client in everyone]

    def _asker(self, clients: Sequence[int], tally: Tally) -> Callable[..., Iterator[Reply]]:
        """The `ask` of one round."""
        method = self.experiment.method

        def ask(function: Callable[..., Values], /, **values: Value) -> Iterator[Reply]:
            name = getattr(function, "__name__", "")
            if getattr(function, "__self__", None) is not method or not hasattr(method, name):
                raise MethodFailed("ask takes a function of the method itself, such as ask(self.train, …)")
            if tally.open:
                raise MethodFailed(
                    f"read all replies of ask(self.{tally.open}, …) before asking again: list(ask(…))"
                )
            check_kinds(values, "a request")
            tally.open = name
            reached = [
                k for k in clients if k not in tally.left_out and (k not in tally.failed or not tally.asked)
            ]
            tally.bytes_down += self.ledger.send(self.round, reached, values)
            tally.asked = True
            # A client that fails has been sent the first request and answers none.
            present = [k for k in reached if k not in tally.failed]
            return self._replies(Request(self.round, name, values), present, tally)

        return ask

    def _replies(self, request: Request, clients: Sequence[int], tally: Tally) -> Iterator[Reply]:
        """The usable replies, one by one; what they measure and cost is tallied as they pass."""
        tally.reading = self.backend.ask(request, clients, self.states)
        for done, reply in enumerate(tally.reading, 1):
            self.watch.reply(request.function, done, len(clients))
            if reply.absent:
                tally.failed.add(reply.client)
                continue
            if reply.problem:
                self._diverged(reply)
                tally.left_out[reply.client] = reply.problem
                continue
            tally.notes.append(dict(reply.notes))
            if reply.state or reply.client in self.states:
                self.states.put(reply.client, reply.state, self.round + 1)
            tally.bytes_up += sum(nbytes(v) for v in reply.values.values())
            yield replace(reply, state={})  # a method that lists its replies does not hold the states too
        tally.open = ""

    def _diverged(self, reply: Reply) -> None:
        if self.settings.on_divergence == "stop":
            own = "see whether the method's own loss gives NaN, or " * is_own(type(self.experiment.method))
            raise self._divergence(reply.problem, f"{own}leave such clients out (--on-divergence skip)")

    def _divergence(self, problem: str, instead: str) -> Diverged:
        lower = f"lower the learning rate (--lr, now {self.settings.lr:g})"
        return Diverged(problem, self.round + 1, f"{lower} or {instead}")

    def _memory(self) -> tuple[Any, ...]:
        ledger = self.ledger
        kept = (
            dict(self.server.values),
            self.states.snapshot(),
            ledger.last_round.copy(),
            set(ledger.current),
        )
        return *kept, self.round, self.record

    def _restore(self, memory: tuple[Any, ...]) -> None:
        values, states, self.ledger.last_round, self.ledger.current, self.round, self.record = memory
        self.states.restore(states)
        self.server.values.clear()
        self.server.values.update(values)

    def save(self) -> tuple[dict[str, Any], dict[str, Value]]:
        """Everything that outlives a round, as a header and named values."""
        values: dict[str, Value] = {f"server.{name}": value for name, value in self.server.values.items()}
        header = {"round": self.round, "record": finite(self.record), "ledger": self.ledger.to_json()}
        # What a GPU's speed decided in the first round holds for the rest of the run, resumed or not.
        header["engine"] = getattr(self.backend, "chosen", "")
        clients, kept = self.states.save(self.round)
        return header | clients, values | {f"client.{name}": value for name, value in kept.items()}

    def load(self, header: dict[str, Any], values: dict[str, Value]) -> None:
        self.round, self.record = header["round"], header["record"]
        self.ledger.from_json(header["ledger"])
        if header.get("engine") and hasattr(self.backend, "chosen"):
            self.backend.chosen = header["engine"]
        self.server.values.clear()
        parts: dict[str, dict[str, Value]] = {"server": {}, "client": {}}
        for name, value in values.items():
            kind, _, rest = name.partition(".")
            parts[kind][rest] = value
        self.server.values.update(moved(parts["server"], self.backend.server_device))
        self.states.load(header, parts["client"])
