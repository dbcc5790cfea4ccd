"""Step after step, each operation started when its turn comes: what CPU lanes do."""

import torch
from torch import Tensor

from fedcsd.models.network import Network, Outputs
from fedcsd.training.optimizer import Sgd
from fedcsd.training.task import Batch, Measured, Task, Trained, batches, checked, finish, looked_up


class Eager:
    """Trains one client at a time on one copy of the model."""

    def __init__(self) -> None:
        self._sgd: Sgd | None = None

    def train(self, task: Task) -> Trained:
        client, settings = task.client, task.client.settings
        network = client.site.network("student")
        network.load(task.weights)
        client.site.seed(task.seed)
        sgd = self._optimizer(network, task)
        kept: dict[str, list[Tensor]] = {}
        steps = 0
        for epoch, order in enumerate(task.order().to(client.site.device)):
            numbers = task.numbers(epoch)
            lists = (
                batches(each, settings.batch_size, network)
                for each in (order, client.rows[order], client.labels[order])
            )
            known = looked_up(task.known, order)  # once an epoch: a batch is then a piece of it
            for number, (part, rows, labels) in enumerate(zip(*lists, strict=True)):
                images = client.site.images(rows, None if numbers is None else numbers[part])
                network.train(single=len(part) == 1)
                at = number * settings.batch_size
                frozen = looked_up(known, slice(at, at + len(part))) | run_live(task, images)
                batch = Batch(*network.record(images), labels, frozen, task.given)
                network.differentiate(keep(kept, batch, task.loss(batch)))
                sgd.step(task.change, task.given)
                network.refresh()
                steps += 1
            if not torch.cat(kept["train_loss"]).sum().isfinite():
                where = f"the loss is no longer finite in local epoch {epoch + 1}"
                return Trained(task.weights, steps, diverged=where)
            task.after_epoch(network)
        sums = {name: torch.cat(some).sum(dtype=torch.float64) for name, some in kept.items()}
        totals, diverged = finish(network.flat, sums)
        return Trained(network.weights(), steps, totals, diverged)

    def _optimizer(self, network: Network, task: Task) -> Sgd:
        if self._sgd is None or self._sgd.parameters is not network.parameters:
            self._sgd = Sgd(network.parameters, network.gradient, task.client.settings)
        self._sgd.start()
        return self._sgd


def keep(kept: dict[str, list[Tensor]], batch: Batch, result: Tensor | tuple[Tensor, Measured]) -> Tensor:
    """Put down what a loss gave for a batch, to be added up at the end; the loss is returned."""
    value, measured = checked(batch, result)
    seen = value.detach()
    kept.setdefault("train_loss", []).append(seen if seen.dim() else seen.expand(len(batch.labels)))
    for name, values in measured.items():
        kept.setdefault(name, []).append(values.detach())
    return value


def run_live(task: Task, images: Tensor) -> dict[str, Outputs]:
    """Frozen networks on a batch of images, without gradients."""
    if not task.live:
        return {}
    with task.client.beside, torch.no_grad():
        return {name: live(network, images, train=task.live_training) for name, network in task.live.items()}


def live(network: Network, images: Tensor, *, train: bool) -> Outputs:
    if train:
        network.train(single=len(images) == 1)
    with torch.no_grad():
        return network(images)
