"""A client as a method sees it: its data, its models and local training."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor

from fedcsd import seeds
from fedcsd.config.options import native
from fedcsd.errors import Diverged
from fedcsd.measurements import check_own_measurement
from fedcsd.messages import Notes
from fedcsd.models.network import Outputs, concatenated
from fedcsd.plugins import check_call
from fedcsd.training.batch import Loss
from fedcsd.training.drift import measure_local_model
from fedcsd.training.engines.eager import Eager
from fedcsd.training.optimizer import Gradient, with_given
from fedcsd.training.task import Engine, Live, Task, Trained, frozen_outputs
from fedcsd.training.workspace import Workspace
from fedcsd.weights import Weights, moved

AfterEpoch = Callable[[Weights, Weights], object]
"""Called after each epoch with the weights that training started from and the present ones."""


@dataclass
class Client:
    """One client in one round, as the client half of a method sees it."""

    workspace: Workspace
    number: int
    round: int
    state: dict[str, Any] = field(default_factory=dict)
    """named tensors and numbers that this client keeps from round to round"""
    method: object = None
    """the method that asks; its functions are the same for all clients"""
    engine: Engine = field(default_factory=Eager)
    start_generators: Callable[[int], object] = seeds.start
    """starts the process's generators, unless other clients use them at the same time"""
    after_epoch: AfterEpoch | None = None
    """for the first training of the round's model"""
    measured: dict[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict, repr=False)
    """sum and count of each measurement"""

    def __post_init__(self) -> None:
        self._trainings = 0
        self.rows = self.workspace.parts[self.number]
        self.samples = len(self.rows)
        self.classes = self.workspace.data.classes
        self.settings = self.workspace.settings

    @cached_property
    def labels(self) -> Tensor:
        """Labels of the client's samples [samples]."""
        return self.workspace.data.y_train[self.rows]

    def note(self, name: str, values: Tensor | float, among: Tensor | None = None) -> None:
        """Measure a number for each sample, averaged over all clients' samples; or one number in all.

        With `among`, a mask, the average is over the samples that are true in it.
        """
        check_own_measurement(name)
        if isinstance(number := native(values), (int, float)):
            values = torch.tensor(float(number))
        if not isinstance(values, Tensor) or not isinstance(among, Tensor | None):
            kind = type(among if isinstance(values, Tensor) else values).__name__
            raise TypeError(f"client.note takes tensors or a number: {name!r} has a {kind}")
        if among is None:
            self._add(name, values.sum(dtype=torch.float64), values.numel())
        else:
            self._add(name, (values * among).sum(dtype=torch.float64), among.sum())

    def _add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        if name in self.measured:
            before = self.measured[name]
            total, count = before[0] + total, before[1] + count
        self.measured[name] = total, count

    @property
    def notes(self) -> Notes:
        """Return the measurements as numbers; wait for the device."""
        numbers = [number for pair in self.measured.values() for number in pair]
        tensors = [n.double().to(self.workspace.device) for n in numbers if isinstance(n, Tensor)]
        values = iter(torch.stack(tensors).tolist() if tensors else [])
        found = [next(values) if isinstance(n, Tensor) else float(n) for n in numbers]
        return dict(zip(self.measured, zip(found[::2], found[1::2], strict=True), strict=True))

    def outputs(self, weights: Weights) -> Outputs:
        """Return a frozen network's outputs on all local data in eval mode, computed once a round."""
        return self.workspace.local_outputs(weights, self.number)

    def training_outputs(self, weights: Weights) -> tuple[Outputs, Tensor]:
        """Return a frozen network's outputs over one epoch in train mode, and the labels.

        Only whole shuffled batches count: the result is empty for a client smaller than a batch.
        """
        workspace, size = self.workspace, self.settings.batch_size
        network = workspace.frozen("", weights)
        self.start_generators(self._torch_seed("prototypes"))
        order = self._order("prototypes", 0).to(workspace.device)
        whole = [part for part in torch.split(order, size) if len(part) == size]
        if not whole:
            empty = weights.flat.new_empty(0, self.classes, device=workspace.device)
            return Outputs(empty, empty), self.labels[:0]
        numbers = self._numbers("prototypes", 0)
        if numbers is None and network.steady(workspace.data.example()):
            known, places = self.outputs(weights), torch.cat(whole)
            return Outputs(known.logits[places], known.features[places]), self.labels[places]
        outputs = []
        for part in whole:
            images = workspace.images(self.rows[part], None if numbers is None else numbers[part])
            outputs.append(frozen_outputs(network, images, train=True))
        return concatenated(outputs), self.labels[torch.cat(whole)]

    def train(
        self,
        weights: Weights,
        loss: Loss,
        *,
        frozen: Mapping[str, Weights] | None = None,
        given: Mapping[str, Tensor] | None = None,
        gradient: Gradient | None = None,
        frozen_mode: Literal["eval", "train"] = "eval",
        name: str = "",
    ) -> dict[str, Any]:
        """Train from `weights`: SGD on `loss`, for the epochs and batches of the settings.

        Return the new weights and the number of steps. `frozen` networks see the same images as the
        model; in "train" mode they use batch statistics. A training of another model than the round's,
        such as a personal one, has a `name`, which its measurements bear.
        """
        # A second training of the same client in the same round draws its own random numbers.
        again = f" {self._trainings}" if self._trainings else ""
        self._trainings += 1
        live = self._live(frozen or {}, training=frozen_mode == "train")
        purpose, epochs = f"batches{again}", range(self.settings.epochs)
        task = Task(
            client=self.number,
            settings=self.settings,
            network=self.workspace.model,
            weights=weights,
            loss=loss,
            change=None if gradient is None else with_given(gradient),
            method=self.method,
            images=self.workspace.images,
            rows=self.rows,
            order=torch.stack([self._order(purpose, epoch) for epoch in epochs]),
            numbers=partial(self._numbers, purpose),
            start_generators=partial(self.start_generators, self._torch_seed(f"training{again}")),
            given=moved(given or {}, self.workspace.device),
            known={} if live.networks else {n: self.outputs(w) for n, w in (frozen or {}).items()},
            live=live,
        )
        if self.after_epoch is not None and not name and not again:
            task.after_epoch = partial(self.after_epoch, weights)
        try:
            trained = self.engine.train(task)
        except TypeError:
            check_call(loss, ["batch"])
            raise
        if trained.diverged:
            raise Diverged(f"client {self.number}: {trained.diverged}")
        self._note_training(name, weights, trained)
        return {"weights": trained.weights, "steps": trained.steps}

    def _note_training(self, name: str, start: Weights, trained: Trained) -> None:
        """Note the loss and its measurements, and measure the trained model if it is the round's."""
        for measure, total in trained.sums.items():
            if name:
                check_own_measurement(f"{name}_{measure}")
            count = self.samples * self.settings.epochs
            self._add(f"{name}_{measure}" if name else measure, total, count)
        if not name:
            local = measure_local_model(self.workspace, self.number, start, trained.weights)
            for measure, values in local.items():
                self._add(measure, values.sum(dtype=torch.float64), values.numel())

    def _live(self, frozen: Mapping[str, Weights], *, training: bool) -> Live:
        """Return the networks that must see every batch; other outputs are the same in every epoch."""
        if not frozen or not (training or self.workspace.images.augmented):
            return Live()
        networks = {name: self.workspace.frozen(name, weights) for name, weights in frozen.items()}
        tokens = tuple(weights.token for weights in frozen.values())
        return Live(networks, tokens, training, seeds.Stream(self._torch_seed("frozen")))

    def _order(self, purpose: str, epoch: int) -> Tensor:
        """Return the positions of the client's samples in an epoch, on the CPU [samples]."""
        rng = seeds.rng(self.settings.seed, purpose, self.round, self.number, epoch)
        return torch.from_numpy(rng.permutation(self.samples))

    def _numbers(self, purpose: str, epoch: int) -> Tensor | None:
        """Return the random numbers of an epoch's augmentation, a row for each sample."""
        if not self.workspace.images.augmented:
            return None
        seed = seeds.torch_seed(self.settings.seed, f"augment {purpose}", self.round, self.number, epoch)
        return self.workspace.images.draw(self.samples, seed)

    def _torch_seed(self, purpose: str) -> int:
        return seeds.torch_seed(self.settings.seed, purpose, self.round, self.number)

    def accuracy(self, weights: Weights) -> float:
        """Return a model's accuracy on this client's own test data; NaN if there is none.

        That is what the client holds out, or else the test images that are like its own.
        """
        workspace = self.workspace
        x, y, rows, shares = workspace.own_test(self.number)
        if not len(rows):
            return math.nan
        logits = workspace.forward(workspace.frozen("", weights), x, rows).logits
        return float((logits.argmax(1) == y[rows]).double() @ shares)
