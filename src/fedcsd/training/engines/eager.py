"""Take steps one by one, as the CPU does."""

import torch
from torch import Tensor

from fedcsd.training.batch import Batch, checked_loss, look_up
from fedcsd.training.optimizer import Sgd
from fedcsd.training.task import Task, Trained, batches, totals_of


class Eager:
    """An engine that starts each operation on its own; it trains one client at a time."""

    def __init__(self) -> None:
        self._sgd: Sgd | None = None

    def train(self, task: Task) -> Trained:
        """Take the steps of a task one by one."""
        network, size = task.network, task.settings.batch_size
        network.load(task.weights)
        task.start_generators()
        sgd = self._optimizer(task)
        labels_of = task.images.labels[task.rows]
        kept: dict[str, list[Tensor]] = {}
        steps = 0
        for epoch, order in enumerate(task.order.to(task.device)):
            numbers = task.numbers(epoch)
            parts = (batches(each, size, network) for each in (order, task.rows[order], labels_of[order]))
            known = look_up(task.known, order)  # once an epoch; a batch is then a slice of it
            for number, (part, rows, labels) in enumerate(zip(*parts, strict=True)):
                images = task.images(rows, None if numbers is None else numbers[part])
                network.train(single=len(part) == 1)
                at = number * size
                frozen = look_up(known, slice(at, at + len(part))) | task.live.outputs(images)
                batch = Batch(*network.record(images), labels, frozen, task.given)
                network.differentiate(_keep(kept, batch, task))
                sgd.step(task.change, task.given)
                network.refresh()
                steps += 1
            if not torch.cat(kept["train_loss"]).sum().isfinite():
                diverged = f"the loss is no longer finite in local epoch {epoch + 1}"
                return Trained(task.weights, steps, diverged=diverged)
            task.end_epoch()
        sums = {name: torch.cat(some).sum(dtype=torch.float64) for name, some in kept.items()}
        totals, diverged = totals_of(network.flat, sums)
        return Trained(network.weights(), steps, totals, diverged)

    def _optimizer(self, task: Task) -> Sgd:
        network = task.network
        if self._sgd is None or self._sgd.parameters is not network.parameters:
            self._sgd = Sgd(network.parameters, network.gradient, task.settings)
        self._sgd.start()
        return self._sgd


def _keep(kept: dict[str, list[Tensor]], batch: Batch, task: Task) -> Tensor:
    """Compute the loss of a batch; keep it and its measurements, to be added up at the end."""
    value, measured = checked_loss(batch, task.loss(batch))
    seen = value.detach()
    kept.setdefault("train_loss", []).append(seen if seen.dim() else seen.expand(len(batch.labels)))
    for name, values in measured.items():
        kept.setdefault(name, []).append(values.detach())
    return value
