"""Many clients as one: their weights lie in the rows of one matrix, and a step is a step of all of them.

For clients far more in number than a GPU has use for streams, and for models so small that one client's
step keeps it busy for microseconds. The model, the loss and the change of the gradient are applied to
all clients by `torch.func.vmap`. Clients come longest first, so that those still training are always
the first rows; a batch that is not full, or a client that is done, counts with weight zero where it
lacks samples, which is exact as long as the loss is one number a sample and no layer mixes samples.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedcsd.models.network import Outputs
from fedcsd.training.engines.graphs import KINDS, Launcher, recorded
from fedcsd.training.task import Batch, Task, Trained, checked, looked_up
from fedcsd.training.workspace import Site

SHARES = (1, 0.75, 0.5, 0.25, 0.1)  # of the rows, for which a step is recorded


class NotStackable(Exception):
    """This training cannot be done for many clients as one; the text says why."""


@dataclass
class Schedule:
    """Which samples each client takes in each step: `order` [K, T, B] positions, `counts` [K, T]."""

    order: Tensor
    counts: Tensor
    steps: list[int]

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> "Schedule":
        settings = tasks[0].client.settings
        size, epochs = settings.batch_size, settings.epochs
        each = [-(-task.samples // size) for task in tasks]
        order = np.zeros((len(tasks), epochs * max(each), size), dtype=np.int64)
        counts = np.zeros(order.shape[:2], dtype=np.int64)
        offset = 0
        for k, (task, batches) in enumerate(zip(tasks, each, strict=True)):
            padded = np.zeros((epochs, batches * size), dtype=np.int64)
            padded[:, : task.samples] = task.order().numpy()
            order[k, : epochs * batches] = padded.reshape(-1, size)
            order[k] += offset
            counts[k, : epochs * batches].reshape(epochs, batches)[:] = size
            counts[k, : epochs * batches].reshape(epochs, batches)[:, -1] = (
                task.samples - (batches - 1) * size
            )
            offset += task.samples
        return cls(torch.from_numpy(order), torch.from_numpy(counts), [epochs * b for b in each])


class Rows:
    """Stacked steps of one kind: buffers for at most `width` clients, and graphs by number of rows."""

    def __init__(self, site: Site, task: Task, shared: frozenset[str], width: int, most: int):
        settings, device = site.settings, site.device
        self.site, self.loss, self.change = site, task.loss, task.change
        self.width, self.shared = width, shared
        self.network = site.network("student")
        layout, size = self.network.layout, settings.batch_size
        self.parameters = self.network.flat.new_zeros(width, layout.trainable)
        self.others = self.network.flat.new_zeros(width, layout.size - layout.trainable)
        self.momentum = torch.zeros_like(self.parameters)
        steps = settings.epochs * -(-max(len(rows) for rows in site.parts) // size)
        self.order = torch.zeros(width, steps, size, dtype=torch.int64, device=device)
        self.rows = torch.zeros_like(self.order)
        self.counts = torch.zeros(width, steps, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(width, steps, size, 4, device=device) if site.augmentation.active else None
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.given = {
            name: (torch.empty_like(t) if name in shared else t.new_empty(width, *t.shape))
            for name, t in task.given.items()
        }
        self.known = {
            name: Outputs(*(out.new_zeros(most, out.shape[1]) for out in table))
            for name, table in task.known.items()
        }
        self.live = task.live
        self.sums: dict[str, Tensor] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def load(self, tasks: Sequence[Task], schedule: Schedule) -> None:
        device, used = self.site.device, len(tasks)
        first = tasks[0].weights
        if all(task.weights.token == first.token for task in tasks):
            self.parameters[:used], self.others[:used] = first.parameters, first.others
        else:
            torch.stack([task.weights.parameters for task in tasks], out=self.parameters[:used])
            torch.stack([task.weights.others for task in tasks], out=self.others[:used])
        self.momentum.zero_()
        steps = schedule.order.shape[1]
        self.counts.zero_()
        self.order[:used, :steps] = schedule.order.to(device)
        self.counts[:used, :steps] = schedule.counts.to(device)
        table = torch.cat([task.client.rows for task in tasks])
        self.rows[:used, :steps] = table[self.order[:used, :steps]]
        if self.numbers is not None:
            self._load_numbers(self.numbers, tasks, schedule)
        for name, buffer in self.given.items():
            some = [task.given[name] for task in tasks]
            if name in self.shared:
                buffer.copy_(some[0])
            else:
                torch.stack(some, out=buffer[:used])
        for name, tables in self.known.items():
            for place, looked in enumerate(tables):
                outputs = torch.cat([task.known[name][place] for task in tasks])
                looked[: len(outputs)] = outputs
        self.cursor.zero_()
        for total in self.sums.values():
            total.zero_()

    def _load_numbers(self, numbers: Tensor, tasks: Sequence[Task], schedule: Schedule) -> None:
        """What is random in the augmentation, batch by batch as the schedule has them."""
        start = 0
        for k, task in enumerate(tasks):
            epochs = task.client.settings.epochs
            batches = schedule.steps[k] // epochs
            order = schedule.order[k, : schedule.steps[k]].view(epochs, batches, -1) - start
            for epoch in range(epochs):
                drawn = task.numbers(epoch)
                assert drawn is not None
                part = order[epoch].clamp_min(0).to(drawn.device)
                numbers[k, epoch * batches : (epoch + 1) * batches] = drawn[part]
            start += task.samples

    def one(
        self,
        parameters: Mapping[str, Tensor],
        images: Tensor,
        labels: Tensor,
        part: Tensor,
        weight: Tensor,
        given: Mapping[str, Tensor],
        live: Mapping[str, tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one client's batch, and the sums of what is measured: what `vmap` makes many of."""
        network = self.network
        bf16 = self.site.settings.precision == "bf16"
        with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
            logits = functional_call(network.module, dict(parameters), (images,))
        features = network.take_features()
        if bf16:
            logits, features = logits.float(), features.float()
        frozen = looked_up(self.known, part) | {name: Outputs(*outputs) for name, outputs in live.items()}
        batch = Batch(logits, features, labels, frozen, given)
        value, measured = checked(batch, self.loss(batch))
        if not value.dim():
            raise NotStackable("the loss is a mean; it must be one number a sample")
        counted = weight > 0
        sums = {name: (values.detach() * counted).sum() for name, values in measured.items()}
        return (value * weight).sum(), {"train_loss": (value.detach() * counted).sum(), **sums}

    def step(self, rows: int) -> None:
        """One step of the first `rows` clients, as far as they have one left."""
        settings, data, size = self.site.settings, self.site.data, self.order.shape[2]
        part = self.order[:rows].index_select(1, self.cursor)[:, 0]
        which = self.rows[:rows].index_select(1, self.cursor)[:, 0]
        counts = self.counts[:rows].index_select(1, self.cursor)
        numbers = self.numbers
        if numbers is not None:
            numbers = numbers[:rows].index_select(1, self.cursor).flatten(0, 2)
        self.cursor += 1
        images = self.site.images(which.flatten(), numbers)
        labels = data.y_train[which]
        lacking = torch.arange(size, device=images.device) >= counts
        weight = (1 / counts.clamp_min(1).to(self.parameters.dtype)).masked_fill(lacking, 0)
        given = {n: t if n in self.shared else t[:rows] for n, t in self.given.items()}
        dims = {n: None if n in self.shared else 0 for n in given}
        self.network.train()
        every = vmap(grad(self.one, has_aux=True), in_dims=(0, 0, 0, 0, 0, dims, 0), randomness="error")
        gradients, sums = every(
            self._named(rows),
            images.view(rows, size, *images.shape[1:]),
            labels,
            part,
            weight,
            given,
            self._live(images, rows),
        )
        gradient = torch.cat([gradients[name].flatten(1) for name in self._trained()], dim=1)
        parameters, momentum = self.parameters[:rows], self.momentum[:rows]
        if self.change is not None:
            vmap(_in_place(self.change), in_dims=(0, 0, dims))(parameters, gradient, given)
        for name, total in sums.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros(self.width, dtype=torch.float64, device=total.device)
            self.sums[name][:rows] += total
        if settings.weight_decay:
            gradient.add_(parameters, alpha=settings.weight_decay)
        if settings.momentum:
            gradient = momentum.mul_(settings.momentum).add_(gradient)
        parameters.addcmul_(gradient, (counts > 0).to(gradient.dtype), value=-settings.lr)

    def _live(self, images: Tensor, rows: int) -> dict[str, tuple[Tensor, Tensor]]:
        """What frozen networks that all clients have in common say of all their images."""
        with torch.no_grad():
            found = {name: network(images) for name, network in self.live.items()}
        return {
            name: (logits.view(rows, -1, *logits.shape[1:]), features.view(rows, -1, *features.shape[1:]))
            for name, (logits, features) in found.items()
        }

    def _trained(self) -> list[str]:
        return [name for name, p in self.network.module.named_parameters() if p.requires_grad]

    def _named(self, rows: int) -> dict[str, Tensor]:
        layout = self.network.layout
        named, start = {}, 0
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            size = int(np.prod(shape, dtype=np.int64))
            source, at = (
                (self.parameters, start)
                if start < layout.trainable
                else (self.others, start - layout.trainable)
            )
            named[name] = source[:rows, at : at + size].view(rows, *shape)
            start += size
        return named

    def capture(self, rows: int, pool: Any) -> None:
        def one() -> None:
            self.step(rows)

        self.graphs[rows] = recorded(one, 1, pool, self.cursor, alone=True)


def _in_place(change: Callable[..., object]) -> Callable[..., Tensor]:
    def changed(parameters: Tensor, gradient: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        change(parameters, gradient, given)
        return gradient

    return changed


class Stacked:
    """Trains all clients that meet here as one."""

    def __init__(self, site: Site, width: int, launcher: Launcher | None = None):
        self.site, self.width, self.launcher = site, width, launcher
        self.kinds: dict[Hashable, Rows] = {}
        self.most = sum(sorted((len(rows) for rows in site.parts), reverse=True)[:width])
        if site.device.type == "cuda":
            self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self.pool = torch.cuda.graph_pool_handle()

    @cached_property
    def reason_against(self) -> str:
        """Why this model cannot be stacked; empty if it can, as far as one sees."""
        network = self.site.network("student")
        if network.norms:
            return "the model has BatchNorm, which mixes the samples of a batch"
        if network.remembers(self.site.data.example()):
            return "the model changes its buffers in training"
        return ""

    def train_all(self, tasks: Sequence[Task]) -> list[Trained]:
        """Every task's result, in the order of the tasks."""
        found: dict[int, Trained] = {}
        for key, some in groupby(sorted(tasks, key=_kind), key=_kind):
            group = sorted(some, key=lambda task: (-task.samples, task.client.number))
            for task, trained in zip(group, self._train(key, group), strict=True):
                found[id(task)] = trained
        return [found[id(task)] for task in tasks]

    def _train(self, key: str, tasks: Sequence[Task]) -> list[Trained]:
        if self.reason_against:
            raise NotStackable(self.reason_against)
        if any(task.key() is None for task in tasks):
            raise NotStackable("the loss or gradient is another function for every client")
        if any(task.observed for task in tasks):
            raise NotStackable("each client is looked at after every epoch")
        if len({task.live_tokens for task in tasks}) > 1 or any(task.live_training for task in tasks):
            raise NotStackable("a frozen network of each client's own must look at every batch")
        shared = frozenset(n for n, t in tasks[0].given.items() if all(task.given[n] is t for task in tasks))
        kind = (tasks[0].key(), shared)
        rows = self.kinds.pop(kind, None) or Rows(self.site, tasks[0], shared, self.width, self.most)
        self.kinds[kind], schedule = rows, Schedule.of(tasks)
        if len(self.kinds) > KINDS:
            del self.kinds[next(iter(self.kinds))]
        rows.load(tasks, schedule)
        program = self._program(schedule.steps)
        if self.launcher is None:
            for width, times in program:
                for _ in range(times):
                    rows.step(width)
        else:
            if missing := [width for width, _ in program if width not in rows.graphs]:
                for width in missing:
                    rows.capture(width, self.pool)
                rows.load(tasks, schedule)
            self.launcher.run(self.stream, [(rows.graphs[width], times) for width, times in program])
        return self._results(rows, tasks, schedule)

    def _program(self, steps: Sequence[int]) -> list[tuple[int, int]]:
        """How many rows, and how often: `steps` fall from the first client to the last."""
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

    def _results(self, rows: Rows, tasks: Sequence[Task], schedule: Schedule) -> list[Trained]:
        used = len(tasks)
        flat = torch.cat([rows.parameters[:used], rows.others[:used]], dim=1)
        finite = flat.isfinite().all(1).double()
        *totals, whole = torch.stack([*(t[:used] for t in rows.sums.values()), finite]).tolist()
        results = []
        for k, task in enumerate(tasks):
            sums = {name: total[k] for name, total in zip(rows.sums, totals, strict=True)}
            diverged = "" if whole[k] else "the weights are no longer finite after local training"
            results.append(Trained(task.weights.like(flat[k]), schedule.steps[k], sums, diverged))
        return results


def _kind(task: Task) -> str:
    return repr(task.key())
