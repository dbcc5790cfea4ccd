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
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.multiprocessing  # lets tensors go to spawned processes in shared memory

from fedcsd.errors import MethodFailed, RunStopped, UserError, one_line
from fedcsd.federation.backends import frames
from fedcsd.federation.backends.protocol import one_thread
from fedcsd.messages import Reply, Request
from fedcsd.training.workspace import Site
from fedcsd.weights import Layout, Values, Weights

DEATHS = 3  # a client that ends its worker this often ends the run
HELD_BYTES = 1 << 30  # replies that wait for their turn may take this much memory
AHEAD = 4  # items that must be left for each lane if one is given to a lane that is still busy
FITS = 1 << 15  # bytes of a message that a pipe takes whether or not somebody reads


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _why_not() -> str:
    """Why lanes are not forked from this process; empty if they can be."""
    if sys.platform != "linux":
        return "this is not Linux"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "this process has used a GPU"  # whose threads a forked process does not have
    return ""


class Lane:
    """A worker process, the pipe to it, and memory that it shares if it is forked: in two halves, so that a
    second item can lie there while it works on the first. What it is given it answers in that order."""

    def __init__(self, context: BaseContext, site: Site, layout: Layout):
        self.pipe, theirs = context.Pipe()
        forked = context.get_start_method() == "fork"
        self.shared = [frames.Shared(frames.room(layout)) if forked else None for _ in range(2)]
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
        self.request = 0  # the last of which it was given an item, and with the first the values
        self.items: deque[tuple[int, int]] = deque()
        """request and item of what it works on, and of what comes then"""
        self.given, self.taken = itertools.cycle(self.shared), itertools.cycle(self.shared)
        self.later: bytes | None = None

    def give(self, request: int, item: int, header: dict[str, Any], values: Values) -> None:
        """Send an item, at once or, if it is large and the lane still busy, when it has answered: two that
        write to each other and do not read would wait for ever."""
        message = frames.write(header, values, next(self.given))
        busy = bool(self.items)
        self.items.append((request, item))
        if busy and len(message) > FITS:
            self.later = message
        else:
            self.pipe.send_bytes(message)

    def take(self) -> tuple[int, frames.Shared | None]:
        """To be called with each answer: the request it is for, and the memory where its numbers are."""
        if self.later is not None:
            message, self.later = self.later, None
            with suppress(OSError):  # it has died: one will see when it should answer
                self.pipe.send_bytes(message)
        return self.items.popleft()[0], next(self.taken)

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def serve(pipe: Connection, theirs: Connection, site: Site, halves: Sequence[frames.Shared | None]) -> None:
    """A lane's life: answer until the other end is gone. Runs in the worker process."""
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    gc.freeze()  # a collection that looks through what was forked would copy all of its pages
    follow_parent()
    layout = site.network("student").layout
    request = Request(0, "", {})
    with suppress(EOFError, OSError):
        for shared in itertools.cycle(halves):
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
        header = {"item": item, "error": one_line(error), "traceback": traceback.format_exc()}
        return frames.write(header, {}, None)


def follow_parent() -> None:
    """From here on, end with the main process, even when it is killed while this one is training."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


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
        self.alone = ExitStack()
        self.alone.enter_context(one_thread())

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
        self.alone.close()

    def _deal(self, request: Request, items: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        """Give each free lane the next item; yield the replies in the order of `items`."""
        number = next(self.requests)
        waiting, deaths = deque(items), Counter[int]()
        ready: dict[int, tuple[Reply, int]] = {}
        for head in items:
            while head not in ready:
                full = sum(size for _, size in ready.values()) > HELD_BYTES
                for lane in self._free(waiting, full):
                    if not waiting or (full and head not in waiting):
                        break
                    item = head if full else self._choose(lane, waiting, request.function)
                    waiting.remove(item)
                    if not self._send(lane, number, request, item, states.get(item, {})):
                        self._bury(lane, number, deaths, waiting)
                for lane, answer in self._collect():
                    if answer is None:
                        self._bury(lane, number, deaths, waiting)
                        continue
                    asked, shared = lane.take()
                    if asked == number:  # else it is left over from a request given up
                        reply, size = self._reply(answer, shared)
                        ready[reply.client] = reply, size
            yield ready.pop(head)[0]

    def _free(self, waiting: deque[int], full: bool) -> Iterator[Lane]:
        """Lanes that have nothing to do, and then those that can be given what comes next: a lane need not
        wait for its next item then. The last items go to whoever is done first."""
        yield from [lane for lane in self.lanes if not lane.items]
        for lane in [] if full else [lane for lane in self.lanes if len(lane.items) == 1]:
            if len(waiting) > AHEAD * len(self.lanes):
                yield lane

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
        lane.request = number
        try:
            lane.give(number, item, header, joined(values, state))
        except OSError:
            return False
        return True

    def _collect(self) -> Iterator[tuple[Lane, bytes | None]]:
        """Answers that have arrived; None for a lane that died."""
        busy = {lane.pipe: lane for lane in self.lanes if lane.items}
        for pipe in wait(list(busy)) if busy else []:  # all may have died while they were given work
            assert isinstance(pipe, Connection)
            try:
                yield busy[pipe], pipe.recv_bytes()
            except (EOFError, OSError):
                yield busy[pipe], None

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
        """Replace a lane that died and put its clients back; the one it worked on at most a few times."""
        lane.process.join(timeout=5)
        code = lane.process.exitcode
        lane.stop()
        items = [item for asked, item in lane.items if asked == number]
        if lane.items and lane.items[0][0] == number:
            deaths[items[0]] += 1
            if deaths[items[0]] >= DEATHS:
                why = (
                    "killed, perhaps for want of memory" if code == -signal.SIGKILL else f"exit status {code}"
                )
                raise RunStopped(
                    f"the worker process for client {items[0]} died {DEATHS} times ({why}): try fewer --workers or a smaller --batch-size"
                )
        waiting.extendleft(reversed(items))
        self.lanes[self.lanes.index(lane)] = Lane(self.context, self.site, self.layout)
