"""Clients that share a GPU: in lanes, each on a CUDA stream of its own, or in a group, stacked."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedcsd.federation.backends import memory
from fedcsd.messages import Reply, Request
from fedcsd.training.client import Engine
from fedcsd.training.engines.graphs import Graphs, Launcher
from fedcsd.training.engines.stacked import Stacked
from fedcsd.training.engines.turns import Turn, take_turns
from fedcsd.training.task import Task, Trained
from fedcsd.training.workspace import Site
from fedcsd.weights import Values, Weights, copied, moved, nbytes

MANY = 10  # lanes for a model whose training takes little memory
HEAVY = 2 << 30  # bytes of a lane from which on a few fill the device
FILLED = 5  # lanes that do
HELD = 32  # replies that may wait for their turn
WIDEST = 128  # clients stacked as one
SERVER = 0.25  # of the device's memory that waiting replies may take, and that clients' states may

State = Callable[[int], Values]
Replies = Generator[Reply | BaseException, None, None]


class Runner(Protocol):
    def run(self, request: Request, clients: Sequence[int], state: State) -> Replies: ...
    def close(self) -> None: ...


def device_of_server(site: Site) -> torch.device:
    """Where the server's values are: with the clients, if the replies that may wait have room there."""
    if site.device.type == "cuda":
        size = site.network("student").flat.nbytes
        # of all the device's memory, whoever shares it: sums there and here differ in their last bits
        if HELD * size > SERVER * torch.cuda.mem_get_info()[1]:
            return torch.device("cpu")
    return site.device


def delivered(reply: Reply, server_device: torch.device, clients: int) -> Reply:
    """A reply as the server gets it. What the client is to remember stays on the device if such states
    of so many clients, those of this round and of the last, have room there."""
    values = moved(reply.values, server_device)
    state = copied(reply.state, "cpu" if _too_much(reply.state, clients) else server_device)
    if server_device.type == "cuda":
        # They were made on a lane's stream, and are used and freed on the server's.
        for value in [*values.values(), *state.values()]:
            tensor = value.flat if isinstance(value, Weights) else value
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.default_stream())
    return replace(reply, values=values, state=state)


def _too_much(state: Values, clients: int) -> bool:
    size = 2 * clients * sum(nbytes(value) for value in state.values())
    return torch.cuda.is_available() and size > SERVER * memory.total()


class Counted:
    """An engine that remembers whether it was asked to train."""

    def __init__(self, engine: Engine):
        self.engine, self.used = engine, False

    def train(self, task: Task) -> Trained:
        self.used = True
        return self.engine.train(task)


class Lane:
    """A stream, with models and recorded steps of its own."""

    def __init__(self, site: Site, launcher: Launcher, server_device: torch.device):
        self.site, self.server_device = site, server_device
        self.engine = Graphs(site, launcher)
        self.stream = self.engine.stream
        # one thread for good: what CUDA's libraries keep for a thread and a stream is not made twice
        self.thread = ThreadPoolExecutor(1)

    def answer(self, request: Request, client: int, state: Values, engine: Engine | None = None) -> Reply:
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(torch.cuda.default_stream())
            reply = self.site.answer(request, client, state, engine or self.engine)
            reply = delivered(reply, self.server_device, len(self.site.parts))
            self.stream.synchronize()
        return reply


class Dealt:
    """Clients dealt to lanes, and their replies as they come. A lane that is done takes over from the
    one with most left; none runs far ahead of the reader, so that few replies lie in memory."""

    def __init__(self, clients: Sequence[int], lists: dict[int, deque[int]]):
        self.lists, self.head = lists, clients[0] if clients else -1
        self.replies: dict[int, Reply | BaseException] = {}
        self.stopped, self.active = False, len(lists)
        self.condition = threading.Condition()

    def next(self, lane: int) -> int | None:
        """The lane's next client; None if there is nothing left."""
        with self.condition:
            while not self.stopped and any(self.lists.values()):
                if len(self.replies) < HELD:
                    return (self.lists[lane] or max(self.lists.values(), key=len)).popleft()
                for some in self.lists.values():  # the reader waits for this one, whoever was to train it
                    if some and some[0] == self.head:
                        return some.popleft()
                self.condition.wait()
            self.active -= 1
        return None

    def give_up(self, lane: int, client: int) -> bool:
        """Leave a client, and all that is left, to the other lanes; false if there is no other."""
        with self.condition:
            if self.active == 1:
                return False
            self.active -= 1
            self.lists[lane].appendleft(client)
            self.condition.notify_all()
            return True

    def put(self, client: int, reply: Reply | BaseException) -> None:
        with self.condition:
            self.replies[client] = reply
            self.condition.notify_all()

    def wait_for(self, client: int) -> Reply | BaseException:
        with self.condition:
            self.head = client
            self.condition.notify_all()
            while client not in self.replies:
                self.condition.wait()
            return self.replies.pop(client)

    def stop(self) -> None:
        with self.condition:
            self.stopped = True
            self.condition.notify_all()


class Lanes:
    """Deals clients to lanes, each the next client when it is free."""

    def __init__(self, site: Site, workers: int, server_device: torch.device):
        self.workers = workers
        self.launcher = Launcher()
        self.site = site
        self.server_device = server_device
        self.lanes = [Lane(site, self.launcher, server_device)]
        self.condition = threading.Condition()
        self.training: set[str] = set()
        """functions of the method that train"""
        self.random: set[str] = set()
        """functions that draw random numbers: only one client at a time may do so"""
        self.tried: set[str] = set()
        self.needed = 0  # bytes of a lane

    def try_out(self, request: Request, client: int, state: Values) -> None:
        """One client alone: does this function train, does it draw, how much memory does a lane take?"""
        if request.function in self.tried:
            return
        self.tried.add(request.function)
        lane, engine, site = self.lanes[0], Counted(self.lanes[0].engine), self.lanes[0].site
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        self.launcher.trying, site.drew, site.seeded = True, False, None
        try:
            with site.by_itself():
                lane.thread.submit(lane.answer, request, client, state, engine).result()
                site.notice()
        except torch.OutOfMemoryError:
            self.tried.remove(request.function)  # others hold the memory now, and perhaps not next time
            return
        except Exception:
            return  # it will fail again, and be told then
        finally:
            self.launcher.trying, drew, site.drew = False, site.drew, None
        if drew:
            self.random.add(request.function)
        if engine.used:
            self.training.add(request.function)
            self.needed = torch.cuda.memory_reserved() - before
            self.grow()

    def grow(self) -> None:
        """As many lanes as are of use and have room."""
        wanted = min(self.workers or (MANY if self.needed < HEAVY else FILLED), len(self.site.parts))
        room = int(0.8 * memory.free() // max(1, self.needed))
        while len(self.lanes) < min(wanted, 1 + room):
            self.lanes.append(Lane(self.site.another(), self.launcher, self.server_device))

    def shrink(self) -> None:
        """Give the memory of all lanes but one back."""
        for lane in self.lanes[1:]:
            lane.thread.shutdown(wait=False)
        del self.lanes[1:]
        torch.cuda.empty_cache()

    def run(self, request: Request, clients: Sequence[int], state: State) -> Replies:
        if request.function in self.random:
            yield from self._in_turn(request, clients, state)
            return
        dealt = Dealt(clients, self._lists(clients))
        torch.cuda.default_stream().synchronize()
        working: list[Future[None]] = []
        try:
            for n in dealt.lists:
                working += [self.lanes[n].thread.submit(self._work, self.lanes[n], n, request, dealt, state)]
            for client in clients:
                yield dealt.wait_for(client)
        except BaseException:  # Ctrl-C, or nobody reads on
            self.launcher.drop(True)  # the steps that clients have before them
            raise
        finally:
            dealt.stop()
            try:
                wait(working)
            finally:
                self.launcher.drop(False)

    def _in_turn(self, request: Request, clients: Sequence[int], state: State) -> Replies:
        """One client after another, each with the process's generators to itself."""
        for client in clients:
            lane = self.lanes[0]
            try:
                with lane.site.by_itself():
                    reply: Reply | BaseException = lane.thread.submit(
                        lane.answer, request, client, state(client)
                    ).result()
            except torch.OutOfMemoryError as error:
                with lane.site.by_itself():
                    reply = self._last_try(lane, request, client, state, error)
            except Exception as error:
                reply = error
            yield reply

    def _lists(self, clients: Sequence[int]) -> dict[int, deque[int]]:
        """Each lane's clients: the next longest to the lane with the least to do, so that in every round
        of all clients a client comes to the lane that has recorded its last, smaller batch. A lane without
        a client would take one from another, and record what that one has recorded."""
        lists = {number: deque[int]() for number in range(min(len(self.lanes), len(clients)))}
        load = dict.fromkeys(lists, 0)
        for client in clients:
            least = min(load, key=lambda number: (load[number], number))
            lists[least].append(client)
            load[least] += len(self.site.parts[client])
        return lists

    def _work(self, lane: Lane, number: int, request: Request, dealt: Dealt, state: State) -> None:
        """A lane's share of a request, in a thread of its own."""
        while (client := dealt.next(number)) is not None:
            try:
                reply: Reply | BaseException = lane.answer(request, client, state(client))
            except torch.OutOfMemoryError as error:
                if dealt.give_up(number, client):
                    self._without(lane)
                    return
                reply = self._last_try(lane, request, client, state, error)
            except BaseException as error:
                reply = error
            dealt.put(client, reply)

    def _without(self, lane: Lane) -> None:
        """From here on without a lane for which there is no memory; others take its clients."""
        with self.condition:
            self.lanes.remove(lane)
        lane.engine.kinds.clear()
        torch.cuda.empty_cache()

    def _last_try(
        self, lane: Lane, request: Request, client: int, state: State, error: BaseException
    ) -> Reply | BaseException:
        """The only lane left has no memory either: it may have that of all others."""
        with self.condition:
            alone, self.lanes = len(self.lanes) == 1, [lane]
        if alone:
            return error
        torch.cuda.empty_cache()
        try:
            return lane.answer(request, client, state(client))
        except BaseException as again:
            return again

    def close(self) -> None:
        self.launcher.close()
        for lane in self.lanes:
            lane.thread.shutdown(wait=False)


class Group:
    """Runs clients in threads of their own, one at a time, up to their training, which is one for all."""

    def __init__(self, site: Site, server_device: torch.device):
        launcher = Launcher() if site.device.type == "cuda" else None
        self.launcher, self.server_device = launcher, server_device
        self.site = site
        self.engine = Stacked(site, min(WIDEST, len(site.parts)), launcher)
        self.turns: list[Turn] = []
        self.quick: set[str] = set()
        """functions of the method that do not train, as far as one knows"""

    def run(self, request: Request, clients: Sequence[int], state: State) -> Replies:
        for start in range(0, len(clients), self.engine.width):
            some = clients[start : start + self.engine.width]
            yield from self._together(request, some, state)

    def _together(
        self, request: Request, clients: Sequence[int], state: State
    ) -> list[Reply | BaseException]:
        def answers(client: int) -> Callable[[Engine], Reply]:
            def answer(engine: Engine) -> Reply:
                with self._stream():
                    return self.site.answer(request, client, state(client), engine)

            return answer

        self.turns += [Turn() for _ in range(len(clients) - len(self.turns))]
        if self.site.device.type == "cuda":
            self.engine.stream.wait_stream(torch.cuda.default_stream())
        with self._stream(), self.site.by_itself():
            replies = self._answered(request.function, [answers(client) for client in clients])
            number = len(self.site.parts)
            replies = [
                delivered(r, self.server_device, number) if isinstance(r, Reply) else r for r in replies
            ]
        if self.site.device.type == "cuda":
            torch.cuda.default_stream().wait_stream(self.engine.stream)
        return replies

    def _answered(self, function: str, answers: Sequence[Callable[[Engine], Reply]]) -> list[Any]:
        """In turns, or if the function has not trained so far, one after another without them."""
        turns = self.turns[: len(answers)]
        if function not in self.quick:
            for turn in turns:
                turn.trained = False
            try:
                replies = take_turns(self.engine, turns, answers)
            except BaseException:  # they stand somewhere in this round
                self._forget_turns()
                raise
            if not any(turn.trained for turn in turns):
                self.quick.add(function)
            return replies
        replies = []
        for answer in answers:
            try:
                replies.append(answer(self.site.engine))
            except BaseException as error:
                replies.append(error)
        return replies

    def _stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.engine.stream) if self.site.device.type == "cuda" else nullcontext()

    def _forget_turns(self) -> None:
        for turn in self.turns:
            turn.close()
        self.turns = []

    def close(self) -> None:
        self._forget_turns()
        if self.launcher is not None:
            self.launcher.close()
