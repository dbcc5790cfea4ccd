"""Clients on this machine's cores: lanes, each a worker process with one thread.

A lane trains one client at a time and takes the next when it is done, so unequal clients need no
padding. The data set lies in memory once: lanes are forked from the process that loaded it. What a
lane computes does not depend on which lane it is, so neither does the result.
"""

import gc
import itertools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.multiprocessing  # lets tensors go to spawned processes in shared memory

from fedcsd.backends import frames, in_short
from fedcsd.errors import MethodFailed, RunStopped, UserError
from fedcsd.exchange import Reply, Request
from fedcsd.site import Site
from fedcsd.weights import Layout, Values, Weights

DEATHS = 3  # a client that ends its worker this often ends the run
HELD_BYTES = 1 << 30  # replies that wait for their turn may take this much memory


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps PyTorch in this process to one thread while lanes have the cores: what it does between
    replies is small, and several threads would wait for each other behind the lanes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _why_not() -> str:
    """Why lanes are not forked from this process; empty if they can be."""
    if sys.platform != "linux":
        return "this is not Linux"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "this process has used a GPU"  # whose threads a forked process does not have
    return ""


class Lane:
    """A worker process, the pipe to it, and memory that it shares if it is forked."""

    def __init__(self, context: BaseContext, site: Site, layout: Layout):
        self.pipe, theirs = context.Pipe()
        forked = context.get_start_method() == "fork"
        self.shared = frames.Shared(frames.room(layout)) if forked else None
        self.process = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(theirs, self.pipe, site, self.shared), daemon=True
        )
        try:
            self.process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"worker processes cannot be forked here, for {_why_not()}, and {error}: define it at the top of a "
                "module, or train in a Python process of its own"
            ) from None
        theirs.close()
        self.request = 0  # the request whose values the lane has
        self.item: int | None = None  # what it works on

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def serve(pipe: Connection, theirs: Connection, site: Site, shared: frames.Shared | None) -> None:
    """A lane's life: answer until the other end is gone. Runs in the worker process."""
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    gc.freeze()  # a collection that looks through what was forked would copy all of its pages
    threading.Thread(target=_follow_parent, daemon=True).start()
    layout = site.network("student").layout
    request = Request(0, "", {})
    with suppress(EOFError, OSError):
        while True:
            header, values, _ = frames.read(pipe.recv_bytes(), layout, shared)
            parts = parted(values)
            if "function" in header:
                request = Request(header["round"], header["function"], parts["v"])
            pipe.send_bytes(_answer(site, request, header["item"], parts["s"], shared))


def parted(values: Values) -> dict[str, dict[str, Any]]:
    """Named values ("v") and a client's state ("s"), which travel together."""
    parts: dict[str, dict[str, Any]] = {"v": {}, "s": {}}
    for name, value in values.items():
        parts[name[0]][name[2:]] = value
    return parts


def joined(values: Values, state: Values) -> dict[str, Any]:
    return {f"v.{name}": value for name, value in values.items()} | {
        f"s.{name}": value for name, value in state.items()
    }


def _answer(site: Site, request: Request, item: int, state: Values, shared: frames.Shared | None) -> bytes:
    try:
        reply = (
            site.evaluate(request, item)
            if request.function == "evaluate"
            else site.answer(request, item, state)
        )
        header = {"item": item, "samples": reply.samples, "notes": reply.notes, "problem": reply.problem}
        return frames.write(header, joined(reply.values, reply.state), shared)
    except Exception as error:
        header = {"item": item, "error": in_short(error), "traceback": traceback.format_exc()}
        return frames.write(header, {}, None)


def _follow_parent() -> None:
    """End with the main process, even when it is killed while this one is training."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class LocalBackend:
    """Deals clients to lanes and gives their replies back in order."""

    server_device = torch.device("cpu")

    def __init__(self, site: Site, layout: Layout, workers: int = 0, start_method: str = ""):
        method = start_method or ("spawn" if _why_not() else "fork")
        self.context = multiprocessing.get_context(method)
        self.site, self.layout = site, layout
        self.requests = itertools.count(1)
        self.homes: dict[int, Lane] = {}
        self.round = -1
        self.remembered = False  # whether lanes know something of this request's clients
        self.lanes = [Lane(self.context, site, layout) for _ in range(workers or cores())]

    def ask(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        if request.round != self.round:
            self.round, self.homes = request.round, {}
        self.remembered = bool(self.homes)
        return self._deal(request, clients, states)

    def evaluate(self, round: int, weights: Weights) -> list[Reply]:
        request = Request(round, "evaluate", {"weights": weights})
        return list(self._deal(request, range(len(self.site.blocks)), {}))

    def close(self) -> None:
        for lane in self.lanes:
            lane.stop()

    def _deal(self, request: Request, items: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        """Give each free lane the next item; yield the replies in the order of `items`."""
        number = next(self.requests)
        with one_thread():
            yield from self._replies(number, request, items, states)

    def _replies(
        self, number: int, request: Request, items: Sequence[int], states: Mapping[int, Values]
    ) -> Iterator[Reply]:
        waiting, deaths = deque(items), Counter[int]()
        ready: dict[int, tuple[Reply, int]] = {}
        for head in items:
            while head not in ready:
                full = sum(size for _, size in ready.values()) > HELD_BYTES
                for lane in self.lanes:
                    if lane.item is None and waiting and (not full or head in waiting):
                        item = head if full else self._choose(lane, waiting, request.function)
                        waiting.remove(item)
                        if not self._send(lane, number, request, item, states.get(item, {})):
                            self._bury(lane, number, deaths, waiting)
                for lane, answer in self._collect():
                    if answer is None:
                        self._bury(lane, number, deaths, waiting)
                    elif lane.request == number:  # else it is left over from a request given up
                        reply, size = self._reply(answer, lane.shared)
                        ready[reply.client] = reply, size
            yield ready.pop(head)[0]

    def _choose(self, lane: Lane, waiting: deque[int], function: str) -> int:
        """The next item for a lane; a client goes back to the lane that knows its teacher's outputs."""
        if function == "evaluate":
            return waiting[0]
        if not self.remembered:
            self.homes[waiting[0]] = lane
            return waiting[0]
        own = (item for item in waiting if self.homes.get(item) is lane)
        free = (item for item in waiting if item not in self.homes)
        item = next(own, None)
        item = next(free, waiting[0]) if item is None else item
        self.homes[item] = lane
        return item

    def _send(self, lane: Lane, number: int, request: Request, item: int, state: Values) -> bool:
        """Give a lane an item, and with the first of a request the request."""
        header: dict[str, Any] = {"item": item}
        values: Values = {}
        if lane.request != number:
            header |= {"round": request.round, "function": request.function}
            values = request.values
        lane.request, lane.item = number, item
        try:
            lane.pipe.send_bytes(frames.write(header, joined(values, state), lane.shared))
        except OSError:
            return False
        return True

    def _collect(self) -> Iterator[tuple[Lane, bytes | None]]:
        """Answers that have arrived; None for a lane that died."""
        busy = {lane.pipe: lane for lane in self.lanes if lane.item is not None}
        for pipe in wait(list(busy)) if busy else []:  # all may have died while they were given work
            assert isinstance(pipe, Connection)
            lane = busy[pipe]
            try:
                answer = pipe.recv_bytes()
            except (EOFError, OSError):
                yield lane, None
                continue
            lane.item = None
            yield lane, answer

    def _reply(self, answer: bytes, shared: frames.Shared | None) -> tuple[Reply, int]:
        """A reply, and the bytes it takes."""
        header, values, size = frames.read(answer, self.layout, shared)
        if "error" in header:
            error = MethodFailed(f"client {header['item']} failed: {header['error']}")
            error.add_note(header["traceback"])
            raise error
        parts = parted(values)
        notes = {name: (total, count) for name, (total, count) in header["notes"].items()}
        return Reply(
            header["item"], header["samples"], parts["v"], notes, parts["s"], header["problem"]
        ), size

    def _bury(self, lane: Lane, number: int, deaths: Counter[int], waiting: deque[int]) -> None:
        """Replace a lane that died and put its client back, at most a few times."""
        lane.process.join(timeout=5)
        code, item = lane.process.exitcode, lane.item
        lane.stop()
        if lane.request == number and item is not None:
            deaths[item] += 1
            if deaths[item] >= DEATHS:
                why = (
                    "killed, perhaps for want of memory" if code == -signal.SIGKILL else f"exit status {code}"
                )
                raise RunStopped(
                    f"the worker process for client {item} died {DEATHS} times ({why}): try fewer --workers or a smaller --batch-size"
                )
            waiting.appendleft(item)
        self.lanes[self.lanes.index(lane)] = Lane(self.context, self.site, self.layout)
