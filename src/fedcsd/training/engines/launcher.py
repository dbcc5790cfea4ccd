"""The thread that replays the recorded graphs of all lanes."""

import threading
import time
from collections import deque

import torch

Program = list[tuple[torch.cuda.CUDAGraph, int]]
"""graphs to replay in turn, and the number of replays of each"""

AHEAD = 16  # replays that a stream may be ahead of the device


class Launcher:
    """A thread that replays the graphs of all lanes, a graph of each lane in turn.

    A thread for each lane would spend its time waiting for Python's global lock.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.waiting: list[Replay] = []
        self.active: list[Replay] = []
        self.closed = False
        self.dropping = False
        self.refused = False
        """steps cannot be recorded here, in no lane"""
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def run(self, stream: torch.cuda.Stream, program: Program) -> None:
        """Replay a program on a stream; return when all of it has been handed to the device.

        An interrupt cancels the rest of the program.
        """
        mine = Replay(stream, program)
        with self.condition:
            if self.thread is None:
                self.thread = threading.Thread(target=self._serve, daemon=True)
                self.thread.start()
            if not self.closed and not self.dropping:
                self.waiting.append(mine)
                self.condition.notify()
            else:
                mine.ended.set()
        try:
            mine.ended.wait()
        except BaseException:
            mine.cancelled = True
            mine.ended.wait()
            raise
        if not mine.done:
            raise RuntimeError(
                f"training on the GPU was stopped: {self.error or 'it was closed'}"
            ) from self.error

    def close(self) -> None:
        """End the thread and all replays."""
        with self.condition:
            self.closed = True
            self.condition.notify()

    def drop(self, on: bool) -> None:
        """Cancel all replays that are not yet with the device, and new ones until this is switched off."""
        with self.condition:
            self.dropping = on
            self.condition.notify()

    def _serve(self) -> None:
        try:
            while self._replay_each():
                pass
        except BaseException as error:
            self.error = error
        with self.condition:  # nobody is left waiting
            self.closed = True
            for some in (*self.waiting, *self.active):
                some.ended.set()

    def _replay_each(self) -> bool:
        """Replay a graph of each lane; return False after close()."""
        with self.condition:
            while not self.waiting and not self.active and not self.closed:
                self.condition.wait()
            if self.closed:
                return False
            self.active += self.waiting
            self.waiting = []
            for some in self.active:
                some.cancelled |= self.dropping
        before = sum(some.count for some in self.active)
        self.active = [some for some in self.active if some.go_on()]
        if self.active and sum(some.count for some in self.active) == before:
            time.sleep(1e-4)  # all streams are far ahead: leave the interpreter to other threads
        return True


class Replay:
    """A program that is on its way to the device."""

    def __init__(self, stream: torch.cuda.Stream, program: Program):
        self.stream, self.done, self.ended = stream, False, threading.Event()
        self.cancelled = False
        self.graphs = (graph for graph, times in program for _ in range(times))
        self.count = 0
        self.marks: deque[torch.cuda.Event] = deque()

    def go_on(self) -> bool:
        """Replay one graph unless the stream is far ahead; return False after the last or if cancelled."""
        if self.cancelled:
            self.ended.set()
            return False
        if len(self.marks) == AHEAD:
            if not self.marks[0].query():  # type: ignore[no-untyped-call]
                return True
            self.marks.popleft()
        graph = next(self.graphs, None)
        if graph is None:
            self.done = True
            self.ended.set()
            return False
        torch.cuda.set_stream(self.stream)
        graph.replay()
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record()
        self.marks.append(mark)
        self.count += 1
        return True
