"""The backend for this machine's cores has lanes, each a worker process with one thread.

A lane trains one client at a time and takes the next one when it is done, so unequal clients need no
padding. The data set lies in memory once: lanes are forked from the process that loaded it. A lane's
result does not depend on which lane it is, so neither does the run's.
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
from fedcsd.federation.backends.protocol import Backend, one_thread
from fedcsd.federation.evaluation import Evaluation
from fedcsd.messages import Reply, Request
from fedcsd.training.worker import Worker
from fedcsd.weights import Layout, Values, Weights

DEATHS = 3  # a client that ends its worker this often ends the run
HELD_BYTES = 1 << 30  # memory that replies may take while they wait for their turn
AHEAD = 4  # items that must be left for each lane if one is given to a lane that is still busy
FITS = 1 << 15  # bytes of a message that a pipe takes even if nobody reads


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _no_fork() -> str:
    """Return why lanes cannot be forked from this process; "" if they can."""
    if sys.platform != "linux":
        return "this is not Linux"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "this process has used a GPU"  # whose threads a forked process does not have
    return ""


class Lane:
    """A worker process, the pipe to it, and the memory that a forked one shares.

    The memory has two halves, so that a second item can lie there while the lane works on the first.
    The lane answers items in the order in which it was given them.
    """

    def __init__(self, context: BaseContext, worker: Worker, layout: Layout):
        self.pipe, theirs = context.Pipe()
        forked = context.get_start_method() == "fork"
        halves = [frames.Shared(frames.room(layout)) if forked else None for _ in range(2)]
        self.process = context.Process(  # type: ignore[attr-defined]
            target=serve, args=(theirs, self.pipe, worker, halves), daemon=True
        )
        try:
            self.process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UserError(
                f"worker processes cannot be forked here, for {_no_fork()}, and {error}: define it at the top of a "
                "module, or train in a Python process of its own"
            ) from None
        theirs.close()
        self.request = 0  # the last one of which the lane was given an item, and with the first its values
        self.items: deque[tuple[int, int]] = deque()
        """request and item of what the lane works on, and of what comes next"""
        self.given, self.taken = itertools.cycle(halves), itertools.cycle(halves)
        self.later: bytes | None = None

    def give(self, request: int, item: int, header: dict[str, Any], values: Values) -> None:
        """Send an item, or keep a large one until a busy lane has answered: two processes that write to
        each other and do not read would wait for ever."""
        message = frames.write(header, values, next(self.given))
        busy = bool(self.items)
        self.items.append((request, item))
        if busy and len(message) > FITS:
            self.later = message
        else:
            self.pipe.send_bytes(message)

    def take(self) -> tuple[int, frames.Shared | None]:
        """Return the request that the answer just read is for, and the memory that holds its numbers."""
        if self.later is not None:
            message, self.later = self.later, None
            with suppress(OSError):  # the lane has died, which shows when it should answer
                self.pipe.send_bytes(message)
        return self.items.popleft()[0], next(self.taken)

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def serve(
    pipe: Connection, theirs: Connection, worker: Worker, halves: Sequence[frames.Shared | None]
) -> None:
    """Answer items until the other end is gone; runs in the worker process."""
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    gc.freeze()  # a collection that looks through the forked memory would copy all of its pages
    follow_parent()
    layout = worker.workspace.model.layout
    request = Request(0, "", {})
    with suppress(EOFError, OSError):
        for shared in itertools.cycle(halves):
            header, values, _ = frames.read(pipe.recv_bytes(), layout, shared)
            parts = parted(values)
            if "function" in header:
                request = Request(header["round"], header["function"], parts["v"], header["kind"])
            pipe.send_bytes(_answer(worker, request, header["item"], parts["s"], shared))


def parted(values: Values) -> dict[str, dict[str, Any]]:
    """Separate named values ("v") from a client's state ("s"), which travel together."""
    parts: dict[str, dict[str, Any]] = {"v": {}, "s": {}}
    for name, value in values.items():
        parts[name[0]][name[2:]] = value
    return parts


def joined(values: Values, state: Values) -> dict[str, Any]:
    """Join named values and a client's state."""
    return {f"v.{name}": v for name, v in values.items()} | {f"s.{name}": v for name, v in state.items()}


def _answer(
    worker: Worker, request: Request, item: int, state: Values, shared: frames.Shared | None
) -> bytes:
    try:
        evaluate = request.kind == "evaluate"
        reply = worker.evaluate(request, item) if evaluate else worker.answer(request, item, state)
        header = {"item": item, "samples": reply.samples, "notes": reply.notes, "problem": reply.problem}
        return frames.write(header, joined(reply.values, reply.state), shared)
    except Exception as error:
        header = {"item": item, "error": one_line(error), "traceback": traceback.format_exc()}
        return frames.write(header, {}, None)


def follow_parent() -> None:
    """End this process with its parent from here on, even if the parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class LocalBackend(Backend):
    """Deals clients to lanes and yields their replies in order."""

    def __init__(self, worker: Worker, layout: Layout, workers: int = 0, start_method: str = ""):
        self.context = multiprocessing.get_context(start_method or ("spawn" if _no_fork() else "fork"))
        self.worker, self.layout = worker, layout
        self.requests = itertools.count(1)
        self.round = -1
        self.homes: dict[int, Lane] = {}
        """the lane that each client of this round was given to, which remembers its teacher's outputs"""
        self.lanes = [Lane(self.context, worker, layout) for _ in range(workers or cores())]
        self.alone = ExitStack()
        self.alone.enter_context(one_thread())

    def ask(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        if request.round != self.round:
            self.round, self.homes = request.round, {}
        return self._deal(request, clients, states, dict(self.homes))

    def evaluate(self, round: int, weights: Weights) -> Evaluation:
        request = Request(round, "evaluate", {"weights": weights}, "evaluate")
        replies = self._deal(request, range(len(self.worker.workspace.blocks)), {}, {})
        return Evaluation.of_blocks(replies, len(self.worker.workspace.data.y_test))

    def close(self) -> None:
        for lane in self.lanes:
            lane.stop()
        self.alone.close()

    def _deal(
        self, request: Request, items: Sequence[int], states: Mapping[int, Values], homes: Mapping[int, Lane]
    ) -> Iterator[Reply]:
        """Give each free lane its next item; yield the replies in the order of `items`."""
        number = next(self.requests)
        waiting, deaths = deque(items), Counter[int]()
        ready: dict[int, tuple[Reply, int]] = {}
        for head in items:
            while head not in ready:
                full = sum(size for _, size in ready.values()) > HELD_BYTES
                for lane in self._free(waiting, full):
                    if not waiting or (full and head not in waiting):
                        break
                    item = head if full else _next_item(lane, waiting, homes)
                    waiting.remove(item)
                    if request.kind != "evaluate":
                        self.homes[item] = lane
                    if not self._send(lane, number, request, item, states.get(item, {})):
                        self._replace(lane, number, deaths, waiting)
                for lane, answer in self._collect():
                    if answer is None:
                        self._replace(lane, number, deaths, waiting)
                        continue
                    asked, shared = lane.take()
                    if asked == number:  # else it is left over from a request given up
                        reply, size = self._reply(answer, shared)
                        ready[reply.client] = reply, size
            yield ready.pop(head)[0]

    def _free(self, waiting: deque[int], full: bool) -> Iterator[Lane]:
        """Yield idle lanes, then lanes that can be given their next item while they work; the last items
        go to the lanes that are done first."""
        yield from [lane for lane in self.lanes if not lane.items]
        for lane in [] if full else [lane for lane in self.lanes if len(lane.items) == 1]:
            if len(waiting) > AHEAD * len(self.lanes):
                yield lane

    def _send(self, lane: Lane, number: int, request: Request, item: int, state: Values) -> bool:
        """Give a lane an item, and with the first item of a request the request; false if it has died."""
        header: dict[str, Any] = {"item": item}
        values: Values = {}
        if lane.request != number:
            header |= {"round": request.round, "function": request.function, "kind": request.kind}
            values = request.values
        lane.request = number
        try:
            lane.give(number, item, header, joined(values, state))
        except OSError:
            return False
        return True

    def _collect(self) -> Iterator[tuple[Lane, bytes | None]]:
        """Yield answers that have arrived; None for a lane that died."""
        busy = {lane.pipe: lane for lane in self.lanes if lane.items}
        for pipe in wait(list(busy)) if busy else []:  # all may have died while they were given work
            assert isinstance(pipe, Connection)
            try:
                yield busy[pipe], pipe.recv_bytes()
            except (EOFError, OSError):
                yield busy[pipe], None

    def _reply(self, answer: bytes, shared: frames.Shared | None) -> tuple[Reply, int]:
        """Read a reply; return it and the bytes it takes."""
        header, values, size = frames.read(answer, self.layout, shared)
        item = header["item"]
        if "error" in header:
            error = MethodFailed(f"client {item} failed: {header['error']}")
            error.add_note(header["traceback"])
            raise error
        parts = parted(values)
        notes = {name: (total, count) for name, (total, count) in header["notes"].items()}
        return Reply(item, header["samples"], parts["v"], notes, parts["s"], header["problem"]), size

    def _replace(self, lane: Lane, number: int, deaths: Counter[int], waiting: deque[int]) -> None:
        """Replace a lane that died and put its items back; the one it worked on at most a few times."""
        lane.process.join(timeout=5)
        code = lane.process.exitcode
        lane.stop()
        items = [item for asked, item in lane.items if asked == number]
        if lane.items and lane.items[0][0] == number:
            deaths[items[0]] += 1
            if deaths[items[0]] >= DEATHS:
                killed = code == -signal.SIGKILL
                why = "killed, perhaps because memory is full" if killed else f"exit status {code}"
                raise RunStopped(
                    f"the worker process for client {items[0]} died {DEATHS} times ({why}): try fewer --workers or a smaller --batch-size"
                )
        waiting.extendleft(reversed(items))
        self.lanes[self.lanes.index(lane)] = Lane(self.context, self.worker, self.layout)


def _next_item(lane: Lane, waiting: Sequence[int], homes: Mapping[int, Lane]) -> int:
    """Choose a client whose home is this lane, or else one that has none, or else the next one."""
    if not homes:
        return waiting[0]
    own = (item for item in waiting if homes.get(item) is lane)
    free = (item for item in waiting if item not in homes)
    return next(itertools.chain(own, free, waiting))
