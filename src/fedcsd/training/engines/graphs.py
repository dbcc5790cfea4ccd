"""Recorded steps on a GPU: a lane is a CUDA stream with a model, buffers and captured graphs of its own.

A step of a small model is some sixty operations of a few microseconds each; started one by one they
take milliseconds. Here a step (gather the batch, augment, forward, loss, backward, optimizer) is
captured once for each batch size and then replayed as one. What differs from step to step and from
client to client lies in buffers whose place is fixed: a replay reads its batch's place from a counter
on the device, which it moves on, so that nothing is sent and nothing waited for within a round.
"""

import gc
import math
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from fedcsd.errors import note
from fedcsd.models.network import Outputs
from fedcsd.training.engines.eager import Eager, run_live
from fedcsd.training.optimizer import Sgd
from fedcsd.training.task import Batch, Task, Trained, cut, finish, looked_up, tally
from fedcsd.training.workspace import Site

Program = list[tuple[torch.cuda.CUDAGraph, int]]
"""graphs to replay in turn, and how often each"""

AHEAD = 16  # replays that a stream may be ahead of the device
SMALL = 1_000_000  # numbers in a model up to which several steps are recorded as one
RUN = 8  # as many
KINDS = 4  # of steps that a lane keeps
PAYS = 8  # a step that has been taken so often will be recorded


class Launcher:
    """Replays the graphs of all lanes from one thread, a graph of each lane in turn.

    Threads that replay each for itself would spend their time handing the interpreter to one another.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.waiting: list[Replaying] = []
        self.active: list[Replaying] = []
        self.closed = False
        self.dropping = False
        self.error: BaseException | None = None
        self.trying = False  # whether one lane is tried out and all others stand still
        self.refused = False  # what is trained here cannot be recorded, in no lane
        self.thread: threading.Thread | None = None

    def run(self, stream: torch.cuda.Stream, program: Program) -> None:
        """Returns when all of it has been handed to the device. Interrupted, no more of it is."""
        mine = Replaying(stream, program)
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
        with self.condition:
            self.closed = True
            self.condition.notify()

    def drop(self, on: bool) -> None:
        """Leave out all that is not yet with the device, and what comes until this is switched off."""
        with self.condition:
            self.dropping = on
            self.condition.notify()

    def _serve(self) -> None:
        try:
            while self._go_on():
                pass
        except BaseException as error:
            self.error = error
        with self.condition:  # nobody is left waiting
            self.closed = True
            for some in (*self.waiting, *self.active):
                some.ended.set()

    def _go_on(self) -> bool:
        """A graph of each lane; false when there will be no more."""
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
            time.sleep(1e-4)  # all are far ahead: leave the interpreter to others
        return True


class Replaying:
    """One lane's program on its way to the device."""

    def __init__(self, stream: torch.cuda.Stream, program: Program):
        self.stream, self.done, self.ended = stream, False, threading.Event()
        self.cancelled = False
        self.graphs = (graph for graph, times in program for _ in range(times))
        self.count = 0
        self.marks: deque[torch.cuda.Event] = deque()

    def go_on(self) -> bool:
        """One replay, unless the stream is far ahead; false when the last is on its way, or cancelled."""
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


class Steps:
    """The steps of one kind of task on one lane: buffers that stay where they are, and graphs by batch size."""

    def __init__(self, site: Site, task: Task):
        settings, device = site.settings, site.device
        self.site, self.loss, self.change = site, task.loss, task.change
        self.network = site.network("student")
        self.sgd = Sgd(self.network.parameters, self.network.gradient, settings)
        most = max(len(rows) for rows in site.parts)
        self.order = torch.zeros(settings.epochs * most, dtype=torch.int64, device=device)
        self.rows = torch.zeros_like(self.order)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(len(self.order), 4, device=device) if site.augmentation.active else None
        self.given = {name: torch.empty_like(tensor) for name, tensor in task.given.items()}
        self.known = {
            name: Outputs(*(out.new_zeros(most, out.shape[1]) for out in table))
            for name, table in task.known.items()
        }
        self.task = task
        networks = [self.network, *task.live.values()] if settings.compile else []
        self.compiled = [(network, torch.compile(network.module)) for network in networks]
        self.sums: dict[str, Tensor] = {}
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """by batch size and number of steps"""
        self.taken: Counter[int] = Counter()  # steps of a last batch that were not recorded, by size
        self.places = torch.arange(settings.batch_size + 1, device=device)

    def load(self, task: Task, order: Tensor) -> None:
        """Put a client's numbers into the buffers."""
        self.task = task
        positions = order.to(self.site.device, non_blocking=True)
        self.order[: len(positions)] = positions
        self.rows[: len(positions)] = task.client.rows[positions]
        if self.numbers is not None:
            epochs = order.view(self.site.settings.epochs, -1)
            drawn = [task.numbers(epoch) for epoch in range(len(epochs))]
            start = 0
            for part, numbers in zip(epochs, drawn, strict=True):
                assert numbers is not None
                self.numbers[start : start + len(part)] = numbers[part.to(numbers.device)]
                start += len(part)
        for name, tensor in task.given.items():
            self.given[name].copy_(tensor)
        for name, table in task.known.items():
            for buffer, outputs in zip(self.known[name], table, strict=True):
                buffer[: len(outputs)] = outputs
        self.restart()

    def restart(self) -> None:
        self.site.seed(self.task.seed)
        self.network.load(self.task.weights)
        self.sgd.start()
        self.cursor.zero_()
        for total in self.sums.values():
            total.zero_()

    def step(self, size: int) -> None:
        """One step on the next `size` samples. Nothing here depends on the client but what is in buffers."""
        network, settings = self.network, self.site.settings
        places = self.cursor + self.places[:size]
        self.cursor += size
        rows = self.rows[places]
        images = self.site.images(rows, None if self.numbers is None else self.numbers[places])
        network.train(single=size == 1)
        network.refresh()
        for one, compiled in self.compiled:
            # for the one size that most batches have: another would compile anew
            one.forward = compiled if size == settings.batch_size else one.module
        frozen = looked_up(self.known, self.order[places]) if self.known else run_live(self.task, images)
        batch = Batch(*network(images), self.site.data.y_train[rows], frozen, self.given)
        network.differentiate(tally(self.sums, batch, self.loss(batch)))
        self.sgd.step(self.change, self.given)
        for one in (network, *self.task.live.values()):
            one.hold_buffers(keep=True)  # a replay finds them where they are now

    def capture(self, size: int, steps: int, pool: Any, *, alone: bool) -> None:
        def one() -> None:
            self.step(size)

        self.cursor.zero_()
        self.graphs[size, steps] = recorded(one, steps, pool, self.cursor, alone=alone)
        self.restart()

    def program(self, samples: int, batch: int) -> list[tuple[tuple[int, int], int]]:
        """Which graphs make an epoch of so many samples, and how often each is replayed."""
        whole, rest = cut(samples, batch, self.network)
        run = RUN if self.network.layout.size <= SMALL else 1
        parts = (
            [((batch, run), whole // run), ((batch, 1), whole % run)] if run > 1 else [((batch, 1), whole)]
        )
        return [(graph, times) for graph, times in [*parts, ((rest, 1), int(rest > 0))] if times]


@contextmanager
def must_not_wait() -> Iterator[None]:
    """An error for what waits for the device, as far as PyTorch notices."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it does not notice everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def recorded(
    step: Callable[[], None], steps: int, pool: Any, cursor: Tensor, *, alone: bool
) -> torch.cuda.CUDAGraph:
    """A graph of so many steps. They are first taken twice, so that libraries have chosen their ways
    and made their workspaces. If nothing else runs on the device, the second of them must not wait for
    it: what waits cannot be recorded, and trying leaves PyTorch's generator unusable. Collecting
    garbage meanwhile could free another graph, which would spoil this one."""
    for second in (False, True):
        cursor.zero_()
        torch.cuda.current_stream().synchronize()
        with must_not_wait() if second and alone else nullcontext():
            step()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for _ in range(steps):
                step()
        except BaseException:
            with suppress(Exception):  # the error that matters is the one that ended the recording
                graph.capture_end()
            raise
        graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    return graph


class Graphs:
    """Trains one client at a time on a stream of its own, by replaying captured steps."""

    recording = threading.Lock()
    """one lane records at a time; the others go on"""

    def __init__(self, site: Site, launcher: Launcher):
        self.site, self.launcher = site, launcher
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.kinds: dict[Hashable, Steps] = {}
        self.eager = Eager()

    def sizes(self) -> set[int]:
        """Batch sizes whose steps this lane has recorded."""
        return {size for steps in self.kinds.values() for size, _ in steps.graphs}

    def train(self, task: Task) -> Trained:
        if self.launcher.refused:
            return self.eager.train(task)
        settings, key = task.client.settings, task.key()
        whole, rest = cut(task.samples, settings.batch_size, self.site.network("student"))
        if key is None:
            note(
                f"the loss or gradient of {type(task.client.site.method).__name__} is another function for every client, "
                "so that the GPU cannot record it once: give tensors as given=, not in a closure"
            )
            if whole * settings.epochs < PAYS:
                return self.eager.train(task)
        steps = self._steps(key, task)
        order = task.order().reshape(-1)
        steps.load(task, order)
        try:
            program = self._recorded(steps, task.samples)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refuse(error)
            return self.eager.train(task)
        recorded_rest = (rest, 1) in steps.graphs or not rest
        if recorded_rest and not task.observed:
            self.launcher.run(self.stream, program * settings.epochs)
        else:
            for _ in range(settings.epochs):
                self.launcher.run(self.stream, program)
                if not recorded_rest:
                    steps.step(rest)
                task.after_epoch(steps.network)
        totals, diverged = finish(steps.network.flat, steps.sums)
        if not math.isfinite(totals["train_loss"]):
            diverged = "the loss is no longer finite in local training"
        return Trained(steps.network.weights(), settings.epochs * (whole + bool(rest)), totals, diverged)

    def _steps(self, key: Hashable | None, task: Task) -> Steps:
        """The steps of this kind. Only the last few kinds are kept: a method may make a new one every round."""
        steps = self.kinds.pop(key, None) or Steps(self.site, task)
        if key is not None:
            self.kinds[key] = steps
        if len(self.kinds) > KINDS:
            with Graphs.recording:  # what is freed while a lane records would spoil that
                del self.kinds[next(iter(self.kinds))]
        return steps

    def _recorded(self, steps: Steps, samples: int) -> Program:
        """The graphs of an epoch, recorded where they are not yet. A last, smaller batch comes once in an
        epoch: it is only recorded when it has come often."""
        settings = self.site.settings
        _, rest = cut(samples, settings.batch_size, steps.network)
        steps.taken[rest] += settings.epochs
        program: Program = []
        for graph, times in steps.program(samples, settings.batch_size):
            if graph not in steps.graphs:
                if graph[0] == rest and steps.taken[rest] <= PAYS:
                    continue
                with Graphs.recording:
                    steps.capture(*graph, self.pool, alone=self.launcher.trying)
            program.append((steps.graphs[graph], times))
        return program

    def _refuse(self, error: Exception) -> None:
        """What cannot be recorded is trained step by step."""
        self.launcher.refused = True
        torch.cuda.synchronize()
        why = (str(error) or type(error).__name__).splitlines()[0][:200]
        note(f"this training cannot be recorded on the GPU and runs step by step, which is slower: {why}")
