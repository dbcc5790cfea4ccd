"""Take a step of many clients in one: their weights are the rows of one matrix."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedcsd.models.network import Outputs
from fedcsd.training.batch import Batch, checked_loss, look_up
from fedcsd.training.engines.recording import recorded
from fedcsd.training.task import Task


class NotStackable(Exception):
    """The reason why clients cannot be trained as one."""


@dataclass
class Schedule:
    """The samples of each client in each step: `order` [K, T, B] positions, `counts` [K, T]."""

    order: Tensor
    counts: Tensor
    steps: list[int]

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> "Schedule":
        size, epochs = tasks[0].settings.batch_size, tasks[0].settings.epochs
        each = [-(-task.samples // size) for task in tasks]
        order = np.zeros((len(tasks), epochs * max(each), size), dtype=np.int64)
        counts = np.zeros(order.shape[:2], dtype=np.int64)
        offset = 0
        for k, (task, batches) in enumerate(zip(tasks, each, strict=True)):
            padded = np.zeros((epochs, batches * size), dtype=np.int64)
            padded[:, : task.samples] = task.order.numpy()
            order[k, : epochs * batches] = padded.reshape(-1, size)
            order[k] += offset
            mine = counts[k, : epochs * batches].reshape(epochs, batches)
            mine[:], mine[:, -1] = size, task.samples - (batches - 1) * size
            offset += task.samples
        return cls(torch.from_numpy(order), torch.from_numpy(counts), [epochs * b for b in each])


class Stack:
    """Stacked steps of one kind; buffers have room for `width` clients, graphs are kept by number of rows."""

    def __init__(self, task: Task, shared: frozenset[str], width: int, sizes: Sequence[int]):
        settings, device = task.settings, task.device
        self.settings, self.loss, self.change = settings, task.loss, task.change
        self.width, self.shared = width, shared
        self.network, self.images, self.live = task.network, task.images, task.live
        layout, size = self.network.layout, settings.batch_size
        self.parameters = self.network.flat.new_zeros(width, layout.trainable)
        self.others = self.network.flat.new_zeros(width, layout.size - layout.trainable)
        self.momentum = torch.zeros_like(self.parameters)
        steps = settings.epochs * -(-max(sizes) // size)
        self.order = torch.zeros(width, steps, size, dtype=torch.int64, device=device)
        self.rows = torch.zeros_like(self.order)
        self.counts = torch.zeros(width, steps, dtype=torch.int64, device=device)
        self.numbers = torch.zeros(width, steps, size, 4, device=device) if task.images.augmented else None
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self.given = {
            name: (torch.empty_like(t) if name in shared else t.new_empty(width, *t.shape))
            for name, t in task.given.items()
        }
        most = sum(sorted(sizes, reverse=True)[:width])
        self.known = {
            name: Outputs(*(out.new_zeros(most, out.shape[1]) for out in table))
            for name, table in task.known.items()
        }
        self.sums: dict[str, Tensor] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def load(self, tasks: Sequence[Task], schedule: Schedule) -> None:
        """Copy the clients' data into the buffers."""
        device, used = tasks[0].device, len(tasks)
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
        table = torch.cat([task.rows for task in tasks])
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
        """Copy the random numbers of the augmentation, in the order of the schedule."""
        start, epochs = 0, self.settings.epochs
        for k, task in enumerate(tasks):
            batches = schedule.steps[k] // epochs
            order = schedule.order[k, : schedule.steps[k]].view(epochs, batches, -1) - start
            for epoch in range(epochs):
                drawn = task.numbers(epoch)
                assert drawn is not None
                part = order[epoch].clamp_min(0).to(drawn.device)
                numbers[k, epoch * batches : (epoch + 1) * batches] = drawn[part]
            start += task.samples

    def _loss_of_one(
        self,
        parameters: Mapping[str, Tensor],
        images: Tensor,
        labels: Tensor,
        part: Tensor,
        weight: Tensor,
        given: Mapping[str, Tensor],
        live: Mapping[str, tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of one client's batch and the sums of its measurements; `vmap` runs it for all."""
        network = self.network
        bf16 = self.settings.precision == "bf16"
        with torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
            logits = functional_call(network.module, dict(parameters), (images,))
        features = network.take_features()
        if bf16:
            logits, features = logits.float(), features.float()
        frozen = look_up(self.known, part) | {name: Outputs(*outputs) for name, outputs in live.items()}
        batch = Batch(logits, features, labels, frozen, given)
        value, measured = checked_loss(batch, self.loss(batch))
        counted = weight > 0
        sums = {name: (values.detach() * counted).sum() for name, values in measured.items()}
        return (value * weight).sum(), {"train_loss": (value.detach() * counted).sum(), **sums}

    def step(self, rows: int) -> None:
        """Take a step of the first `rows` clients; clients without a step left keep their weights."""
        settings, size = self.settings, self.order.shape[2]
        part = self.order[:rows].index_select(1, self.cursor)[:, 0]
        which = self.rows[:rows].index_select(1, self.cursor)[:, 0]
        counts = self.counts[:rows].index_select(1, self.cursor)
        numbers = self.numbers
        if numbers is not None:
            numbers = numbers[:rows].index_select(1, self.cursor).flatten(0, 2)
        self.cursor += 1
        images = self.images(which.flatten(), numbers)
        lacking = torch.arange(size, device=images.device) >= counts
        weight = (1 / counts.clamp_min(1).to(self.parameters.dtype)).masked_fill(lacking, 0)
        given = {n: t if n in self.shared else t[:rows] for n, t in self.given.items()}
        dims = {n: None if n in self.shared else 0 for n in given}
        self.network.train()
        every = vmap(
            grad(self._loss_of_one, has_aux=True), in_dims=(0, 0, 0, 0, 0, dims, 0), randomness="error"
        )
        gradients, sums = every(
            self._named(rows),
            images.view(rows, size, *images.shape[1:]),
            self.images.labels[which],
            part,
            weight,
            given,
            self._live(images, rows),
        )
        gradient = torch.cat([gradients[name].flatten(1) for name in self._trained()], dim=1)
        parameters = self.parameters[:rows]
        if self.change is not None:
            vmap(_in_place(self.change), in_dims=(0, 0, dims))(parameters, gradient, given)
        for name, total in sums.items():
            if name not in self.sums:
                self.sums[name] = torch.zeros(self.width, dtype=torch.float64, device=total.device)
            self.sums[name][:rows] += total
        if settings.weight_decay:
            gradient.add_(parameters, alpha=settings.weight_decay)
        if settings.momentum:
            gradient = self.momentum[:rows].mul_(settings.momentum).add_(gradient)
        parameters.addcmul_(gradient, (counts > 0).to(gradient.dtype), value=-settings.lr)

    def _live(self, images: Tensor, rows: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the outputs of frozen networks that all clients share, on all clients' images."""
        with torch.no_grad():
            found = {name: network(images) for name, network in self.live.networks.items()}
        return {
            name: (logits.view(rows, -1, *logits.shape[1:]), features.view(rows, -1, *features.shape[1:]))
            for name, (logits, features) in found.items()
        }

    def _trained(self) -> list[str]:
        return [name for name, p in self.network.module.named_parameters() if p.requires_grad]

    def _named(self, rows: int) -> dict[str, Tensor]:
        """Return the model's tensors by name, each with a row for each client."""
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
        """Record the graph of a step of so many clients."""
        self.graphs[rows] = recorded(lambda: self.step(rows), 1, pool, self.cursor, alone=True)


def _in_place(change: Callable[..., object]) -> Callable[..., Tensor]:
    """Return a change of the gradient in the form that `vmap` takes."""

    def changed(parameters: Tensor, gradient: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        change(parameters, gradient, given)
        return gradient

    return changed
