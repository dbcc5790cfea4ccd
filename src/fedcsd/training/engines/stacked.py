"""Train many clients as one, where models are small.

One client's step keeps a GPU busy for microseconds. Here the model, the loss and the change of the
gradient are applied to all clients by `torch.func.vmap`. Clients come longest first, so that those
still in training are always the first rows. A sample that a batch lacks counts with weight zero, which
is exact as long as the loss is a number for each sample and nothing mixes the samples of a batch.
"""

from collections.abc import Hashable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from fedcsd import seeds
from fedcsd.training.batch import Batch, checked_loss, look_up
from fedcsd.training.engines.launcher import Launcher
from fedcsd.training.engines.recording import KINDS
from fedcsd.training.engines.stack import NotStackable, Schedule, Stack
from fedcsd.training.task import NOT_FINITE, Task, Trained

SHARES = (1, 0.75, 0.5, 0.25, 0.1)  # of the clients, for which a step is recorded


class Stacked:
    """An engine that trains many clients as one; `sizes` are their numbers of samples."""

    def __init__(self, sizes: Sequence[int], width: int, launcher: Launcher | None = None):
        self.sizes, self.width, self.launcher = sizes, width, launcher
        self.kinds: dict[Hashable, Stack] = {}
        if launcher is not None:
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.pool = torch.cuda.graph_pool_handle()

    def train_all(self, tasks: Sequence[Task]) -> list[Trained]:
        """Return every task's result, in the order of the tasks."""
        found: dict[int, Trained] = {}
        for _, some in groupby(sorted(tasks, key=_kind), key=_kind):
            group = sorted(some, key=lambda task: (-task.samples, task.client))
            for task, trained in zip(group, self._train(group), strict=True):
                found[id(task)] = trained
        return [found[id(task)] for task in tasks]

    def _train(self, tasks: Sequence[Task]) -> list[Trained]:
        shared = frozenset(n for n, t in tasks[0].given.items() if all(task.given[n] is t for task in tasks))
        refuse_unstackable(tasks)
        kind = (tasks[0].key(), shared)
        stack = self.kinds.pop(kind, None)
        if stack is None:
            refuse_mixing(tasks[0])
            stack = Stack(tasks[0], shared, self.width, self.sizes)
        self.kinds[kind], schedule = stack, Schedule.of(tasks)
        if len(self.kinds) > KINDS:
            del self.kinds[next(iter(self.kinds))]
        stack.load(tasks, schedule)
        program = self._program(schedule.steps)
        if self.launcher is None:
            for width, times in program:
                for _ in range(times):
                    stack.step(width)
        else:
            if missing := [width for width, _ in program if width not in stack.graphs]:
                for width in missing:
                    stack.capture(width, self.pool)
                stack.load(tasks, schedule)
            self.launcher.run(self.stream, [(stack.graphs[width], times) for width, times in program])
        return self._results(stack, tasks, schedule)

    def _program(self, steps: Sequence[int]) -> list[tuple[int, int]]:
        """Return numbers of rows and of steps with them: `steps` fall from the first client to the last."""
        widths = sorted({max(1, round(len(steps) * share)) for share in SHARES})
        program: list[tuple[int, int]] = []
        for step in range(steps[0]):
            active = sum(s > step for s in steps)
            rows = next(width for width in widths if width >= active)
            if program and program[-1][0] == rows:
                program[-1] = (rows, program[-1][1] + 1)
            else:
                program.append((rows, 1))
        return program

    def _results(self, stack: Stack, tasks: Sequence[Task], schedule: Schedule) -> list[Trained]:
        used = len(tasks)
        flat = torch.cat([stack.parameters[:used], stack.others[:used]], dim=1)
        finite = flat.isfinite().all(1).double()
        *totals, whole = torch.stack([*(t[:used] for t in stack.sums.values()), finite]).tolist()
        results = []
        for k, task in enumerate(tasks):
            sums = {name: total[k] for name, total in zip(stack.sums, totals, strict=True)}
            diverged = "" if whole[k] else NOT_FINITE
            results.append(Trained(task.weights.like(flat[k]), schedule.steps[k], sums, diverged))
        return results


def _kind(task: Task) -> str:
    return repr(task.key())


def refuse_unstackable(tasks: Sequence[Task]) -> None:
    """Refuse tasks whose form cannot be stacked."""
    if tasks[0].network.norms:
        raise NotStackable("the model has BatchNorm, which mixes the samples of a batch")
    if any(task.key() is None for task in tasks):
        raise NotStackable("the loss or gradient is another function for every client")
    if any(task.after_epoch is not None for task in tasks):
        raise NotStackable("each client is observed after every epoch")
    if len({task.live.tokens for task in tasks}) > 1 or any(task.live.training for task in tasks):
        raise NotStackable("a frozen network of each client's own must look at every batch")


def refuse_mixing(task: Task) -> None:
    """Try the model and the loss on a batch, and with its second half replaced by a copy of the first.

    A sample's loss must not depend on its companions, and a step must not draw random numbers or change
    the model's buffers.
    """
    network = task.network
    network.load(task.weights)
    if network.remembers(task.images.data.example()):
        raise NotStackable("the model changes its buffers in training")
    network.train()
    part = task.order[0, : task.settings.batch_size].to(task.device)
    half = part[: max(1, len(part) // 2)]
    first, second = (
        _losses(task, places) for places in (part[: max(1, 2 * (len(part) // 2))], torch.cat([half, half]))
    )
    near = (1e-5 if task.settings.precision == "fp32" else 1e-2) * max(1.0, float(first.abs().max()))
    if not torch.allclose(first[:, : len(half)], second[:, : len(half)], rtol=0, atol=near, equal_nan=True):
        raise NotStackable("a sample's loss depends on the other samples of its batch")


def _losses(task: Task, places: Tensor) -> Tensor:
    """Return the loss and its measurements for samples at these positions [1 + measurements, samples]."""
    rows, numbers, cuda = task.rows[places], task.numbers(0), task.device.type == "cuda"
    with seeds.kept(cuda=cuda):
        seeds.start(0, cuda=cuda)
        images = task.images(rows, None if numbers is None else numbers[places])
        frozen = look_up(task.known, places) | task.live.outputs(images)
        batch = Batch(*task.network(images), task.images.labels[rows], frozen, task.given)
        value, measured = checked_loss(batch, task.loss(batch))
        if seeds.drawn_since(0, cuda=cuda):
            raise NotStackable("the model or the loss draws random numbers")
    if not value.dim():
        raise NotStackable("the loss is a mean; it must be a number for each sample")
    return torch.stack([values.detach().double() for values in (value, *measured.values())])
