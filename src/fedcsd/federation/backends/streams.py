"""Train clients of a GPU at the same time, in lanes with a CUDA stream each."""

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from fedcsd import seeds
from fedcsd.federation.backends import memory
from fedcsd.messages import Reply, Request
from fedcsd.training.engines.graphs import Graphs
from fedcsd.training.engines.launcher import Launcher
from fedcsd.training.task import Engine, Task, Trained
from fedcsd.training.worker import Worker
from fedcsd.weights import Values

MANY = 10  # lanes for a model whose training takes little memory
HEAVY = 2 << 30  # bytes of a lane from which on a few fill the device
FILLED = 5  # lanes of that size


State = Callable[[int], Values]
Replies = Generator[Reply | BaseException, None, None]


def leave_generators(seed: int) -> None:
    """Do not start the process's generators: several lanes would draw from them at once."""


class Alone:
    """An engine for a client that trains while nothing else runs on the device."""

    def __init__(self, engine: Graphs):
        self.engine = engine

    def train(self, task: Task) -> Trained:
        return self.engine.train(task, alone=True)


class StreamLane:
    """A CUDA stream, with models and recorded steps of its own."""

    def __init__(self, worker: Worker, launcher: Launcher, server_device: torch.device):
        self.worker, self.server_device = worker, server_device
        self.engine = Graphs(max(map(len, worker.workspace.parts)), launcher)
        self.stream = self.engine.stream
        # One thread for good: CUDA's libraries make what they keep for a thread and a stream only once.
        self.thread = ThreadPoolExecutor(1)

    def answer(
        self,
        request: Request,
        client: int,
        state: Values,
        start_generators: Callable[[int], object] = leave_generators,
        engine: Engine | None = None,
    ) -> Reply:
        """Run a client function on this lane's stream; called in the lane's thread."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(torch.cuda.default_stream())
            reply = self.worker.answer(
                request, client, state, engine=engine or self.engine, start_generators=start_generators
            )
            reply = memory.delivered(reply, self.server_device, len(self.worker.workspace.parts))
            self.stream.synchronize()
        return reply


class Dealt:
    """The dealer of clients to lanes, which collects their replies.

    A lane that is done takes over from the one with most clients left. No lane runs far ahead of the
    reader, so that few replies lie in memory.
    """

    def __init__(self, clients: Sequence[int], lists: dict[int, deque[int]]):
        self.lists, self.head = lists, clients[0] if clients else -1
        self.replies: dict[int, Reply | BaseException] = {}
        self.stopped, self.active = False, len(lists)
        self.condition = threading.Condition()

    def next(self, lane: int) -> int | None:
        """Return the lane's next client; None if there is none left."""
        with self.condition:
            while not self.stopped and any(self.lists.values()):
                if len(self.replies) < memory.WAITING:
                    return (self.lists[lane] or max(self.lists.values(), key=len)).popleft()
                for some in self.lists.values():  # the reader waits for this client, in any lane's list
                    if some and some[0] == self.head:
                        return some.popleft()
                self.condition.wait()
            self.active -= 1
        return None

    def give_up(self, lane: int, client: int) -> bool:
        """Leave a client and all that are left to the other lanes; return False if there is no other."""
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

    def __init__(self, worker: Worker, workers: int, server_device: torch.device):
        self.workers, self.worker, self.server_device = workers, worker, server_device
        self.parts = worker.workspace.parts
        self.launcher = Launcher()
        self.lanes = [StreamLane(worker, self.launcher, server_device)]
        self.condition = threading.Condition()
        self.random: set[str] = set()
        """functions that draw random numbers: only one client at a time may do so"""
        self.tried: set[str] = set()
        self.needed = 0  # bytes of a lane

    def run(self, request: Request, clients: Sequence[int], state: State) -> Replies:
        """Ask clients, several at a time unless the function draws random numbers."""
        if clients:
            self._try(request, clients[0], state(clients[0]))
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
        except BaseException:  # an interrupt, or the reader stopped
            self.launcher.drop(True)  # the clients' remaining steps
            raise
        finally:
            dealt.stop()
            try:
                wait(working)
            finally:
                self.launcher.drop(False)

    def _try(self, request: Request, client: int, state: Values) -> None:
        """Ask one client alone: find out if the function draws, and the memory of a lane if it trains."""
        if request.function in self.tried:
            return
        self.tried.add(request.function)
        lane, generators = self.lanes[0], seeds.Watched(cuda=True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        try:
            with seeds.kept(cuda=True):
                lane.thread.submit(
                    lane.answer, request, client, state, generators.start, Alone(lane.engine)
                ).result()
                drew = generators.drawn()
        except torch.OutOfMemoryError:
            self.tried.remove(request.function)  # another process may free memory until the next round
            return
        except Exception:
            return  # the same error comes again in the round itself
        if drew:
            self.random.add(request.function)
        if request.kind == "train":
            self.needed = torch.cuda.memory_reserved() - before
            self._grow()

    def _grow(self) -> None:
        """Add lanes as far as they are of use and fit into the memory."""
        wanted = min(self.workers or (MANY if self.needed < HEAVY else FILLED), len(self.parts))
        room = int(0.8 * memory.free() // max(1, self.needed))
        while len(self.lanes) < min(wanted, 1 + room):
            self.lanes.append(StreamLane(self.worker.another(), self.launcher, self.server_device))

    def shrink(self) -> None:
        """Free the memory of all lanes but one."""
        for lane in self.lanes[1:]:
            lane.thread.shutdown(wait=False)
        del self.lanes[1:]
        torch.cuda.empty_cache()

    def _in_turn(self, request: Request, clients: Sequence[int], state: State) -> Replies:
        """Ask one client after another; each has the process's generators to itself."""
        lane = self.lanes[0]

        def alone(client: int) -> Reply:
            with seeds.kept(cuda=True):
                start = self.worker.start_generators
                return lane.thread.submit(lane.answer, request, client, state(client), start).result()

        for client in clients:
            try:
                reply: Reply | BaseException = alone(client)
            except torch.OutOfMemoryError as error:
                reply = self._last_try(lane, error, lambda: alone(client))  # noqa: B023
            except Exception as error:
                reply = error
            yield reply

    def _lists(self, clients: Sequence[int]) -> dict[int, deque[int]]:
        """Deal the clients: the next longest to the lane with the least to do.

        In every round of all clients a client so comes to the lane that has recorded its last, smaller
        batch. A lane without clients is left out: it would take over another lane's client and record
        what that one has recorded.
        """
        lists = {number: deque[int]() for number in range(min(len(self.lanes), len(clients)))}
        load = dict.fromkeys(lists, 0)
        for client in clients:
            least = min(load, key=lambda number: (load[number], number))
            lists[least].append(client)
            load[least] += len(self.parts[client])
        return lists

    def _work(self, lane: StreamLane, number: int, request: Request, dealt: Dealt, state: State) -> None:
        """Answer a lane's share of a request, in the lane's thread."""
        while (client := dealt.next(number)) is not None:
            try:
                reply: Reply | BaseException = lane.answer(request, client, state(client))
            except torch.OutOfMemoryError as error:
                if dealt.give_up(number, client):
                    self._remove(lane)
                    return
                reply = self._last_try(lane, error, lambda: lane.answer(request, client, state(client)))
            except BaseException as error:
                reply = error
            dealt.put(client, reply)

    def _remove(self, lane: StreamLane) -> None:
        """Go on without a lane for which there is no memory; others take its clients."""
        with self.condition:
            self.lanes.remove(lane)
        lane.engine.kinds.clear()
        torch.cuda.empty_cache()

    def _last_try(
        self, lane: StreamLane, error: BaseException, answer: Callable[[], Reply]
    ) -> Reply | BaseException:
        """Try again with the memory of all other lanes, if there are others."""
        with self.condition:
            alone, self.lanes = len(self.lanes) == 1, [lane]
        if alone:
            return error
        torch.cuda.empty_cache()
        try:
            return answer()
        except BaseException as again:
            return again

    def close(self) -> None:
        self.launcher.close()
        for lane in self.lanes:
            lane.thread.shutdown(wait=False)
