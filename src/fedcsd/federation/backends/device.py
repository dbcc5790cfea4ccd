"""Clients on one GPU, in this process: one after another, in lanes, or stacked.

The data lies on the device once; requests are moved there, replies to where the server is. How the clients
share the device is the engine's matter (see fedcsd.training.task): `eager` takes one client after another,
`graphs` has lanes, each a CUDA stream with recorded steps, and `stacked` trains many clients as one.
`auto` trains the first cohort with each of the last two and keeps the faster.
"""

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import torch

from fedcsd.errors import MethodFailed, RunStopped, UserError, one_line
from fedcsd.federation.backends import memory
from fedcsd.federation.backends.protocol import Backend
from fedcsd.federation.backends.streams import Group, Lanes, Replies, Runner, delivered, device_of_server
from fedcsd.federation.evaluation import Evaluation
from fedcsd.messages import Reply, Request
from fedcsd.training.engines.stacked import NotStackable
from fedcsd.training.workspace import Site
from fedcsd.weights import Values, Weights, copied, moved

SMALL = 4_000_000  # numbers in a model up to which stacking is worth a try
FEW = 4  # clients for which it is not


class DeviceBackend(Backend):
    """Carries requests to the clients on this device by one engine or another."""

    def __init__(self, site: Site, engine: str = "eager", workers: int = 0):
        self.site, self.engine = site, engine
        site.alone = False  # the server draws in this process too
        self.server_device = device_of_server(site)
        self.lanes = Lanes(site, workers, self.server_device) if engine in ("auto", "graphs") else None
        self.group = Group(site, self.server_device) if engine in ("auto", "stacked") else None
        self.chosen = "" if engine == "auto" else engine
        """the engine that trains"""

    def ask(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        there = replace(request, values=moved(request.values, self.site.device))
        self.site.begin(request.round, clients, request.values)
        if self.lanes is not None and clients:
            self.lanes.try_out(there, clients[0], self._state(states, clients[0]))
            if not self.chosen and request.function in self.lanes.training:
                self._choose(there, clients, states)
        with closing(self._run(there, clients, states)) as replies:
            for client, reply in zip(clients, replies, strict=True):
                if isinstance(reply, BaseException):
                    raise self._failure(client, reply)
                yield reply

    def evaluate(self, round: int, weights: Weights) -> Evaluation:
        request = Request(round, "evaluate", {"weights": weights.to(self.site.device)}, "evaluate")
        try:
            return self._evaluated(request)
        except torch.OutOfMemoryError:  # another process may have grown
            if self.lanes is not None:
                self.lanes.shrink()
        try:
            return self._evaluated(request)
        except torch.OutOfMemoryError:
            raise RunStopped(f"the GPU's memory does not hold an evaluation: {memory.advice()}") from None

    def _evaluated(self, request: Request) -> Evaluation:
        replies = [self.site.evaluate(request, block) for block in range(len(self.site.blocks))]
        return Evaluation.of_blocks(replies, len(self.site.data.y_test))

    def close(self) -> None:
        for runner in (self.lanes, self.group):
            if runner is not None:
                runner.close()

    def _state(self, states: Mapping[int, Values], client: int) -> Values:
        return copied(states.get(client, {}), self.site.device)  # a method may change it in place

    def _run(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Replies:
        def state(client: int) -> Values:
            return self._state(states, client)

        if self.group is not None and self.chosen == "stacked":
            return self._stacked(self.group, request, clients, state)
        if self.lanes is not None:
            return self.lanes.run(request, clients, state)
        return self._in_turn(request, clients, states)

    def _stacked(
        self, group: Group, request: Request, clients: Sequence[int], state: Callable[[int], Values]
    ) -> Replies:
        """All in a group, and in lanes from where that does not go: a method may do in its second round what
        it did not do in its first."""
        for done, reply in enumerate(group.run(request, clients, state)):
            if isinstance(reply, NotStackable) and self.lanes is not None:
                self.chosen = "graphs"
                self.lanes.grow()
                yield from self.lanes.run(request, clients[done:], state)
                return
            yield reply

    def _in_turn(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Replies:
        for client in clients:
            try:
                with self.site.by_itself():
                    found = self.site.answer(request, client, self._state(states, client))
                reply: Reply | BaseException = delivered(found, self.server_device, len(self.site.parts))
            except Exception as error:
                reply = error
            yield reply

    def _failure(self, client: int, error: BaseException) -> BaseException:
        if isinstance(error, NotStackable):
            return UserError(f"--engine stacked does not go here: {error}. Use --engine graphs")
        if not isinstance(error, Exception) or isinstance(error, (RunStopped, UserError)):
            return error
        if isinstance(error, torch.OutOfMemoryError):
            return RunStopped(f"the GPU's memory does not hold one client's training: {memory.advice()}")
        failed = MethodFailed(f"client {client} failed: {one_line(error)}")
        failed.add_note("".join(traceback.format_exception(error)))
        failed.__cause__ = error
        return failed

    def _choose(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> None:
        """Train this cohort with lanes and stacked, and keep what is faster."""
        assert self.lanes is not None
        assert self.group is not None
        self.chosen = "graphs"
        size = self.site.network("student").layout.size
        if len(clients) <= FEW or size > SMALL or request.function in self.lanes.random:
            return
        if self.group.engine.reason_against:
            return

        def state(client: int) -> Values:
            return self._state(states, client)

        if not agree(self.site, request, clients, state):
            return
        stacked = _timed(self.group, request, clients, state)
        if stacked < _timed(self.lanes, request, clients, state):
            self.chosen = "stacked"
            self.lanes.shrink()


def _timed(runner: Runner, request: Request, clients: Sequence[int], state: Callable[[int], Values]) -> float:
    """Seconds for these clients once all is recorded, the least of two; endless if one of them fails."""
    took = math.inf
    for number in range(3):
        began = time.perf_counter()
        replies = list(runner.run(request, clients, state))
        if any(isinstance(reply, BaseException) for reply in replies):
            return math.inf
        if number:
            took = min(took, time.perf_counter() - began)
    return took


def agree(site: Site, request: Request, clients: Sequence[int], state: Callable[[int], Values]) -> bool:
    """Whether clients trained as one move their weights as each does alone: tried on a few batches, the
    last of them smaller, in which rounding has no time to grow."""
    short, few = site.short(batches=2.5), [clients[0], *clients[-2:]]
    group = Group(short, site.device)
    try:
        together = list(group.run(request, few, state))
    finally:
        group.close()
    near = 1e-3 if site.settings.precision == "fp32" else 0.1
    for client, one in zip(few, together, strict=True):
        if isinstance(one, BaseException):
            return False
        other = short.answer(request, client, state(client))
        if one.problem or other.problem:
            continue
        for name, weights in other.values.items():
            start = request.values.get(name)
            if isinstance(weights, Weights) and isinstance(start, Weights):
                way = (weights.flat - start.flat).norm()
                if not (one[name].flat - weights.flat).norm() <= near * way + 1e-6:
                    return False
    return True
