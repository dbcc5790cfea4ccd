"""Clients that share a GPU: in lanes, each on a CUDA stream of its own, or in a group, stacked."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from fedcsd.engines import Task, Trained
from fedcsd.engines.graphs import Graphs, Launcher
from fedcsd.engines.stacked import Meeting, Stacked
from fedcsd.exchange import Reply, Request
from fedcsd.training import Engine, Site
from fedcsd.weights import Values, Weights

MANY = 10  # lanes for a model whose training takes little memory
HEAVY = 2 << 30  # bytes of a lane from which on a few fill the device
FILLED = 5  # lanes that do
HELD = 32  # replies that may wait for their turn
WIDEST = 128  # clients stacked as one

State = Callable[[int], Values]


class Runner(Protocol):
    def run(
        self, request: Request, clients: Sequence[int], state: State
    ) -> Iterator[Reply | BaseException]: ...
    def close(self) -> None: ...


def to_cpu(replies: Sequence[Reply]) -> list[Reply]:
    """Replies with their tensors on the CPU; the copies are under way together and waited for once."""
    waits = False

    def here(tensor: Tensor) -> Tensor:
        nonlocal waits
        if tensor.device.type != "cuda":
            return tensor
        waits = True
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copied.copy_(tensor, non_blocking=True)

    def all_here(values: Values) -> Values:
        return {
            name: replace(v, flat=here(v.flat))
            if isinstance(v, Weights)
            else here(v)
            if isinstance(v, Tensor)
            else v
            for name, v in values.items()
        }

    moved_ones = [replace(r, values=all_here(r.values), state=all_here(r.state)) for r in replies]
    if waits:
        torch.cuda.current_stream().synchronize()
    return moved_ones


class Counted:
    """An engine that remembers whether it was asked to train."""

    def __init__(self, engine: Engine):
        self.engine, self.used = engine, False

    def train(self, task: Task) -> Trained:
        self.used = True
        return self.engine.train(task)


class Lane:
    """A stream, with models and recorded steps of its own."""

    def __init__(self, site: Site, launcher: Launcher):
        self.site = site
        self.engine = Graphs(site, launcher)
        self.stream = self.engine.stream

    def answer(self, request: Request, client: int, state: Values, engine: Engine | None = None) -> Reply:
        with torch.cuda.stream(self.stream):
            self.stream.wait_stream(torch.cuda.default_stream())
            reply = to_cpu([self.site.answer(request, client, state, engine or self.engine)])[0]
            self.stream.synchronize()
        return reply


def _has_drawn(seed: int) -> bool:
    """Whether the global generators, on the CPU or the GPU, are no longer as this seed left them."""
    now = [torch.get_rng_state(), torch.cuda.get_rng_state()]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = [torch.get_rng_state(), torch.cuda.get_rng_state()]
    return not all(torch.equal(a, b) for a, b in zip(now, fresh, strict=True))


class Lanes:
    """Deals clients to lanes, each the next client when it is free."""

    def __init__(self, site: Site, workers: int):
        self.workers = workers
        self.launcher = Launcher()
        self.site = site
        self.lanes = [Lane(site, self.launcher)]
        self.free = list(self.lanes)
        self.condition = threading.Condition()
        self.pool: ThreadPoolExecutor | None = None
        self.training: set[str] = set()
        """functions of the method that train"""
        self.random: set[str] = set()
        """functions that draw random numbers: only one client at a time may do so"""
        self.tried: set[str] = set()

    def try_out(self, request: Request, client: int, state: Values) -> None:
        """One client alone: does this function train, does it draw, how much memory does a lane take?"""
        if request.function in self.tried:
            return
        self.tried.add(request.function)
        lane, engine = self.lanes[0], Counted(self.lanes[0].engine)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        try:
            lane.answer(request, client, state, engine)
        except Exception:
            return  # it will fail again, and be told then
        if _has_drawn(lane.site.seeded):
            self.random.add(request.function)
        if engine.used:
            self.training.add(request.function)
            self._plan(torch.cuda.memory_reserved() - before)

    def _plan(self, needed: int) -> None:
        """As many lanes as are of use and have room."""
        wanted = self.workers or (MANY if needed < HEAVY else FILLED)
        room = int(0.8 * torch.cuda.mem_get_info()[0] // max(1, needed))
        while len(self.lanes) < min(wanted, 1 + room):
            self.lanes.append(Lane(self.site.another(), self.launcher))
            self.free.append(self.lanes[-1])

    def shrink(self) -> None:
        """Give the memory of all lanes but one back."""
        self.lanes, self.free = self.lanes[:1], self.lanes[:1]
        torch.cuda.empty_cache()

    def run(self, request: Request, clients: Sequence[int], state: State) -> Iterator[Reply | BaseException]:
        alone = request.function in self.random or len(self.lanes) == 1
        if self.pool is None:
            self.pool = ThreadPoolExecutor(max(1, len(self.lanes)), "lane")
        torch.cuda.default_stream().synchronize()
        waiting, running = deque(clients), deque[Future[Reply]]()
        while waiting or running:
            while waiting and len(running) < (1 if alone else HELD):
                client = waiting.popleft()
                running.append(self.pool.submit(self._answer, request, client, state(client), alone))
            try:
                yield running.popleft().result()
            except Exception as error:
                yield error

    def _answer(self, request: Request, client: int, state: Values, alone: bool) -> Reply:
        while True:
            lane = self._take(request, client, alone)
            try:
                reply = lane.answer(request, client, state)
            except torch.OutOfMemoryError:
                if not self._retire(lane):
                    raise
                continue
            except BaseException:
                self._give(lane)
                raise
            self._give(lane)
            return reply

    def _take(self, request: Request, client: int, alone: bool) -> Lane:
        """A free lane: one that knows the client's last batch if there is one."""
        rest = len(self.site.parts[client]) % self.site.settings.batch_size
        with self.condition:
            while not self.free or (alone and self.lanes[0] not in self.free):
                self.condition.wait()
            lane = next((some for some in self.free if rest in some.engine.sizes()), self.free[0])
            lane = self.lanes[0] if alone else lane
            self.free.remove(lane)
            return lane

    def _give(self, lane: Lane) -> None:
        with self.condition:
            self.free.append(lane)
            self.condition.notify()

    def _retire(self, lane: Lane) -> bool:
        """Do without a lane for which there is no memory; false if it is the last."""
        with self.condition:
            if len(self.lanes) == 1:
                self.free.append(lane)
                return False
            self.lanes.remove(lane)
        lane.engine.kinds.clear()
        torch.cuda.empty_cache()
        return True

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
        self.launcher.close()


class Group:
    """Runs clients in threads of their own, one at a time, up to their training, which is one for all."""

    def __init__(self, site: Site):
        launcher = Launcher() if site.device.type == "cuda" else None
        self.launcher = launcher
        self.site = site
        self.engine = Stacked(site, min(WIDEST, len(site.parts)), launcher)

    def run(self, request: Request, clients: Sequence[int], state: State) -> Iterator[Reply | BaseException]:
        for start in range(0, len(clients), self.engine.width):
            some = clients[start : start + self.engine.width]
            yield from self._together(request, some, state)

    def _together(
        self, request: Request, clients: Sequence[int], state: State
    ) -> list[Reply | BaseException]:
        meeting = Meeting(self.engine, len(clients))
        replies: list[Reply | BaseException] = [RuntimeError("no answer")] * len(clients)

        def answer(place: int, client: int, kept: Values) -> None:
            # One at a time: whoever waits for the others in the meeting lets the next one in.
            with meeting.condition, self._stream():
                try:
                    replies[place] = self.site.answer(request, client, kept, meeting)
                except BaseException as error:
                    replies[place] = error
                meeting.done()

        threads = [
            threading.Thread(target=answer, args=(place, client, state(client)), daemon=True)
            for place, client in enumerate(clients)
        ]
        if self.site.device.type == "cuda":
            self.engine.stream.wait_stream(torch.cuda.default_stream())
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with self._stream():
            here = iter(to_cpu([reply for reply in replies if isinstance(reply, Reply)]))
            return [next(here) if isinstance(reply, Reply) else reply for reply in replies]

    def _stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.engine.stream) if self.site.device.type == "cuda" else nullcontext()

    def close(self) -> None:
        if self.launcher is not None:
            self.launcher.close()
