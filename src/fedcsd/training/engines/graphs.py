"""Recorded steps on a GPU: an engine has a CUDA stream, a model, buffers and recorded graphs of its own.

A step of a small model is some sixty operations of a few microseconds each; started one by one they
take milliseconds. Here a step (gather the batch, augment, forward, loss, backward, optimizer) is
recorded once for each batch size and then replayed. All that differs between steps and clients lies in
buffers whose place is fixed. A replay reads the batch's place from a counter on the device and advances
it, so that nothing is sent or waited for within an epoch.
"""

import math
import threading
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from fedcsd.errors import note
from fedcsd.models.network import Outputs
from fedcsd.training.batch import Batch, look_up
from fedcsd.training.engines.eager import Eager
from fedcsd.training.engines.launcher import Launcher, Program
from fedcsd.training.engines.recording import KINDS, recorded
from fedcsd.training.optimizer import Sgd
from fedcsd.training.task import Task, Trained, cut, tally, totals_of

SMALL = 1_000_000  # numbers in a model up to which several steps are recorded as one graph
RUN = 8  # steps in such a graph
PAYS = 8  # a last, smaller batch is recorded when it has come so often


class Steps:
    """The steps of one kind of task: buffers with a fixed place, and graphs by batch size.

    Buffers hold a client of at most `largest` samples.
    """

    def __init__(self, task: Task, largest: int):
        settings, device = task.settings, task.device
        self.loss, self.change, self.images, self.network = task.loss, task.change, task.images, task.network
        self.sgd = Sgd(self.network.parameters, self.network.gradient, settings)
        self.order = torch.zeros(settings.epochs * largest, dtype=torch.int64, device=device)
        self.rows = torch.zeros_like(self.order)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(len(self.order), 4, device=device) if task.images.augmented else None
        self.given = {name: torch.empty_like(tensor) for name, tensor in task.given.items()}
        self.known = {
            name: Outputs(*(out.new_zeros(largest, out.shape[1]) for out in table))
            for name, table in task.known.items()
        }
        self.task = task
        networks = [self.network, *task.live.networks.values()] if settings.compile else []
        self.compiled = [(network, torch.compile(network.module)) for network in networks]
        self.sums: dict[str, Tensor] = {}
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """by batch size and number of steps"""
        self.taken: Counter[int] = Counter()  # steps of a last batch that were not recorded, by size
        self.places = torch.arange(settings.batch_size + 1, device=device)

    def load(self, task: Task) -> None:
        """Copy a client's data into the buffers."""
        self.task = task
        positions = task.order.reshape(-1).to(task.device, non_blocking=True)
        self.order[: len(positions)] = positions
        self.rows[: len(positions)] = task.rows[positions]
        if self.numbers is not None:
            for epoch, part in enumerate(task.order):
                numbers, start = task.numbers(epoch), epoch * task.samples
                assert numbers is not None
                self.numbers[start : start + len(part)] = numbers[part.to(numbers.device)]
        for name, tensor in task.given.items():
            self.given[name].copy_(tensor)
        for name, table in task.known.items():
            for buffer, outputs in zip(self.known[name], table, strict=True):
                buffer[: len(outputs)] = outputs
        self.restart()

    def restart(self) -> None:
        """Go back to the start of the client's training."""
        self.task.start_generators()
        self.network.load(self.task.weights)
        self.sgd.start()
        self.cursor.zero_()
        for total in self.sums.values():
            total.zero_()

    def step(self, size: int) -> None:
        """Take a step on the next `size` samples; all that depends on the client lies in buffers."""
        network = self.network
        places = self.cursor + self.places[:size]
        self.cursor += size
        rows = self.rows[places]
        images = self.images(rows, None if self.numbers is None else self.numbers[places])
        network.train(single=size == 1)
        network.refresh()
        for one, compiled in self.compiled:
            # only for the size that most batches have: another size would compile again
            one.forward = compiled if size == self.task.settings.batch_size else one.module
        live = self.task.live
        frozen = look_up(self.known, self.order[places]) if self.known else live.outputs(images)
        batch = Batch(*network(images), self.images.labels[rows], frozen, self.given)
        network.differentiate(tally(self.sums, batch, self.loss(batch)))
        self.sgd.step(self.change, self.given)
        for one in (network, *live.networks.values()):
            one.hold_buffers(keep=True)  # a replay finds them at their present place

    def capture(self, size: int, steps: int, pool: Any, *, alone: bool) -> None:
        """Record the graph of so many steps on batches of this size."""
        self.cursor.zero_()
        self.graphs[size, steps] = recorded(lambda: self.step(size), steps, pool, self.cursor, alone=alone)
        self.restart()

    def program(self, samples: int, batch: int) -> list[tuple[tuple[int, int], int]]:
        """Return the graphs that make an epoch of so many samples, and the number of replays of each."""
        whole, rest = cut(samples, batch, self.network)
        run = RUN if self.network.layout.size <= SMALL else 1
        parts = (
            [((batch, run), whole // run), ((batch, 1), whole % run)] if run > 1 else [((batch, 1), whole)]
        )
        return [(graph, times) for graph, times in [*parts, ((rest, 1), int(rest > 0))] if times]


class Graphs:
    """Trains one client at a time on a stream of its own, by replay of recorded steps."""

    recording = threading.Lock()
    """one lane records at a time; the others go on"""

    def __init__(self, largest: int, launcher: Launcher):
        self.largest, self.launcher = largest, launcher
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.kinds: dict[Hashable, Steps] = {}
        self.eager = Eager()

    def sizes(self) -> set[int]:
        """Return the batch sizes whose steps are recorded."""
        return {size for steps in self.kinds.values() for size, _ in steps.graphs}

    def train(self, task: Task, *, alone: bool = False) -> Trained:
        """Replay the steps of a task; take them one by one if they cannot be recorded.

        With `alone` nothing else runs on the device.
        """
        if self.launcher.refused:
            return self.eager.train(task)
        settings, key = task.settings, task.key()
        whole, rest = cut(task.samples, settings.batch_size, task.network)
        if key is None:
            note(
                f"the loss or gradient of {type(task.method).__name__} is another function for every client, "
                "so that the GPU cannot record it once: give tensors as given=, not in a closure"
            )
            if whole * settings.epochs < PAYS:
                return self.eager.train(task)
        steps = self._steps(key, task)
        steps.load(task)
        try:
            program = self._recorded(steps, task, alone=alone)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refuse(error)
            return self.eager.train(task)
        recorded_rest = (rest, 1) in steps.graphs or not rest
        if recorded_rest and task.after_epoch is None:
            self.launcher.run(self.stream, program * settings.epochs)
        else:
            for _ in range(settings.epochs):
                self.launcher.run(self.stream, program)
                if not recorded_rest:
                    steps.step(rest)
                task.end_epoch()
        totals, diverged = totals_of(steps.network.flat, steps.sums)
        if not math.isfinite(totals["train_loss"]):
            diverged = "the loss is no longer finite in local training"
        return Trained(steps.network.weights(), settings.epochs * (whole + bool(rest)), totals, diverged)

    def _steps(self, key: Hashable | None, task: Task) -> Steps:
        """Return the steps of this kind; the last few kinds are kept, as a method may make new ones forever."""
        steps = self.kinds.pop(key, None) or Steps(task, self.largest)
        if key is not None:
            self.kinds[key] = steps
        if len(self.kinds) > KINDS:
            with Graphs.recording:  # memory that is freed during a recording would spoil it
                del self.kinds[next(iter(self.kinds))]
        return steps

    def _recorded(self, steps: Steps, task: Task, *, alone: bool) -> Program:
        """Return the graphs of an epoch; record those that are missing and come often."""
        settings = task.settings
        _, rest = cut(task.samples, settings.batch_size, steps.network)
        steps.taken[rest] += settings.epochs
        program: Program = []
        for graph, times in steps.program(task.samples, settings.batch_size):
            if graph not in steps.graphs:
                if graph[0] == rest and steps.taken[rest] <= PAYS:
                    continue
                with Graphs.recording:
                    steps.capture(*graph, self.pool, alone=alone)
            program.append((steps.graphs[graph], times))
        return program

    def _refuse(self, error: Exception) -> None:
        """Train step by step from now on, in all lanes."""
        self.launcher.refused = True
        torch.cuda.synchronize()
        why = (str(error) or type(error).__name__).splitlines()[0][:200]
        note(f"this training cannot be recorded on the GPU and runs step by step, which is slower: {why}")
