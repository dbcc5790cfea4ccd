"""A backend that runs clients on one GPU, in this process.

The data lies on the device once; requests are moved there, replies to the server's device. The engine
says how the clients share the device: `eager` takes one client after another, `graphs` has lanes, each a
CUDA stream with recorded steps, and `stacked` trains many clients as one. `auto` takes one of the last
two by the sizes of the federation, and lanes wherever clients cannot be stacked.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

import torch
from torch.nn.modules.dropout import _DropoutNd

from fedcsd import seeds
from fedcsd.errors import MethodFailed, RunStopped, UserError, one_line
from fedcsd.federation.backends import memory
from fedcsd.federation.backends.group import Group
from fedcsd.federation.backends.protocol import Backend
from fedcsd.federation.backends.streams import Lanes, Replies, State
from fedcsd.federation.evaluation import Evaluation
from fedcsd.messages import Reply, Request
from fedcsd.models.network import Network
from fedcsd.training.engines.stack import NotStackable
from fedcsd.training.worker import Worker
from fedcsd.weights import Values, Weights, moved

SMALL = 4_000_000  # numbers in a model up to which stacking is faster than lanes
FEW = 4  # clients of a round for which it is not


def engine_for(clients: float, network: Network) -> str:
    """Return the faster engine for so many clients in a round; benchmarks/engines.py measures this rule."""
    random = any(isinstance(module, _DropoutNd) for module in network.module.modules())
    stackable = not network.norms and not random and network.layout.size <= SMALL
    return "stacked" if stackable and clients > FEW else "graphs"


class DeviceBackend(Backend):
    """Carries requests to the clients on this device by one engine or another."""

    def __init__(self, worker: Worker, engine: str = "eager", workers: int = 0):
        self.worker, self.workspace, network = worker, worker.workspace, worker.workspace.model
        settings, auto = self.workspace.settings, engine == "auto"
        self.server_device = memory.server_device(self.workspace.device, network.flat.nbytes)
        if auto:
            engine = engine_for(settings.participation * settings.clients, network)
        self.engine = engine
        """the engine that trained last"""
        self.group = Group(worker, self.server_device) if engine == "stacked" else None
        self.lanes = Lanes(worker, workers, self.server_device) if auto or engine == "graphs" else None

    def ask(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        there = replace(request, values=moved(request.values, self.workspace.device))
        self.workspace.begin(request.round, clients, request.values)

        def state(client: int) -> Values:
            # A method may change it in place.
            return moved(states.get(client, {}), self.workspace.device, copy=True)

        with closing(self._run(there, clients, state)) as replies:
            for client, reply in zip(clients, replies, strict=True):
                if isinstance(reply, BaseException):
                    raise self._failure(client, reply)
                yield reply

    def _run(self, request: Request, clients: Sequence[int], state: State) -> Replies:
        if self.group is not None:
            return self._stacked(self.group, request, clients, state)
        if self.lanes is not None:
            return self.lanes.run(request, clients, state)
        return self._in_turn(request, clients, state)

    def _stacked(self, group: Group, request: Request, clients: Sequence[int], state: State) -> Replies:
        """Ask clients in a group; those that cannot be stacked and all after them in lanes, if there are any."""
        for done, reply in enumerate(group.run(request, clients, state)):
            if isinstance(reply, NotStackable) and self.lanes is not None:
                self.engine = "graphs"
                yield from self.lanes.run(request, clients[done:], state)
                return
            yield reply

    def _in_turn(self, request: Request, clients: Sequence[int], state: State) -> Replies:
        for client in clients:
            try:
                with seeds.kept(cuda=self.workspace.device.type == "cuda"):  # the server draws here too
                    found = self.worker.answer(request, client, state(client))
                reply: Reply | BaseException = memory.delivered(
                    found, self.server_device, len(self.workspace.parts)
                )
            except Exception as error:
                reply = error
            yield reply

    def evaluate(self, round: int, weights: Weights) -> Evaluation:
        request = Request(round, "evaluate", {"weights": weights.to(self.workspace.device)}, "evaluate")
        try:
            return Evaluation.of_blocks(*self.worker.evaluate_all(request))
        except torch.OutOfMemoryError:  # another process may take more than before
            if self.lanes is not None:
                self.lanes.shrink()
        try:
            return Evaluation.of_blocks(*self.worker.evaluate_all(request))
        except torch.OutOfMemoryError:
            raise RunStopped(f"the GPU's memory does not hold an evaluation: {memory.advice()}") from None

    def close(self) -> None:
        for runner in (self.lanes, self.group):
            if runner is not None:
                runner.close()

    def _failure(self, client: int, error: BaseException) -> BaseException:
        if isinstance(error, NotStackable):
            return UserError(f"--engine stacked cannot train these clients: {error}. Use --engine graphs")
        if not isinstance(error, Exception) or isinstance(error, (RunStopped, UserError)):
            return error
        if isinstance(error, torch.OutOfMemoryError):
            return RunStopped(f"the GPU's memory does not hold one client's training: {memory.advice()}")
        failed = MethodFailed(f"client {client} failed: {one_line(error)}")
        failed.add_note("".join(traceback.format_exception(error)))
        failed.__cause__ = error
        return failed
