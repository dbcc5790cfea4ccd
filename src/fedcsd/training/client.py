"""What a method sees of a client: its data, its models, and the one way to train."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from fedcsd import seeds
from fedcsd.config.options import native
from fedcsd.errors import Diverged
from fedcsd.measurements import check_own_measurement
from fedcsd.messages import Notes
from fedcsd.models.network import Outputs, concatenated
from fedcsd.objectives import kl_divergence
from fedcsd.plugins import check_call
from fedcsd.training.engines.eager import live
from fedcsd.training.optimizer import Gradient, with_given
from fedcsd.training.task import Batch, Loss, Task, Trained
from fedcsd.weights import Weights, moved

if TYPE_CHECKING:
    from fedcsd.training.workspace import Site

__all__ = ["Batch", "Client", "Loss"]

OWN_PROBE = 250  # of a client's training samples on which its models are compared

Observer = Callable[["Client", Weights, Weights], Mapping[str, Tensor]]
"""Looks on in local training: called after each epoch with the client, the weights it started from and
those it has now. What it gives goes back with the reply, epoch after epoch: `observed.NAME` [epochs, ...]."""


class Engine(Protocol):
    """Carries out local training (see fedcsd.training.task)."""

    def train(self, task: Task) -> Trained: ...


@dataclass
class Client:
    """One client in one round, as a method's client half sees it."""

    site: "Site"
    number: int
    round: int
    state: dict[str, Any] = field(default_factory=dict)
    """named tensors and numbers that this client keeps from round to round"""

    def __post_init__(self) -> None:
        self._noted: dict[str, tuple[Tensor | float, Tensor | float]] = {}
        self._trainings = 0
        self._observed: list[Mapping[str, Tensor]] = []
        self.rows = self.site.parts[self.number]
        self.samples = len(self.rows)
        self.classes = self.site.data.classes
        self.settings = self.site.settings
        self.engine = self.site.engine
        self.beside: AbstractContextManager[None] = nullcontext()  # where frozen networks draw

    @cached_property
    def labels(self) -> Tensor:
        """of the client's samples [samples]"""
        return self.site.data.y_train[self.rows]

    def note(self, name: str, values: Tensor | float, among: Tensor | None = None) -> None:
        """Measure something: one number a sample, averaged over all clients' samples, or over those
        that are true in `among`; or one number in all."""
        check_own_measurement(name)
        if isinstance(number := native(values), (int, float)):
            values = torch.tensor(float(number))
        if not isinstance(values, Tensor) or not isinstance(among, Tensor | None):
            kind = type(among if isinstance(values, Tensor) else values).__name__
            raise TypeError(f"client.note takes tensors or a number: {name!r} has a {kind}")
        self._note(name, values, among)

    def _note(self, name: str, values: Tensor, among: Tensor | None = None) -> None:
        if among is None:
            self._add(name, values.sum(dtype=torch.float64), values.numel())
        else:
            self._add(name, (values * among).sum(dtype=torch.float64), among.sum())

    def _add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        if name in self._noted:
            before = self._noted[name]
            total, count = before[0] + total, before[1] + count
        self._noted[name] = total, count

    @property
    def notes(self) -> Notes:
        """What was measured, as numbers: here the device is waited for."""
        numbers = [number for pair in self._noted.values() for number in pair]
        tensors = [n.double().to(self.site.device) for n in numbers if isinstance(n, Tensor)]
        values = iter(torch.stack(tensors).tolist() if tensors else [])
        found = [next(values) if isinstance(n, Tensor) else float(n) for n in numbers]
        return dict(zip(self._noted, zip(found[::2], found[1::2], strict=True), strict=True))

    def outputs(self, weights: Weights) -> Outputs:
        """A frozen network on all local data, in eval mode, computed once a round."""
        return self.site.local_outputs(weights, self.number)

    def training_outputs(self, weights: Weights) -> tuple[Outputs, Tensor]:
        """A frozen network over one epoch as training sees it, and the labels: train mode, whole
        shuffled batches only. Empty for a client smaller than a batch."""
        network = self.site.frozen("", weights)
        self.site.seed(self._torch_seed("prototypes"))
        order = self.order("prototypes", 0).to(self.site.device)
        size = self.settings.batch_size
        whole = [part for part in torch.split(order, size) if len(part) == size]
        if not whole:
            empty = weights.flat.new_empty(0, self.classes, device=self.site.device)
            return Outputs(empty, empty), self.labels[:0]
        numbers = self.numbers("prototypes", 0)
        if numbers is None and network.steady(self.site.data.example()):
            known, places = self.outputs(weights), torch.cat(whole)
            return Outputs(known.logits[places], known.features[places]), self.labels[places]
        outputs = [live(network, self.images(part, numbers), train=True) for part in whole]
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
        """Local training from `weights`: SGD on `loss`, for the epochs and batches of the settings.

        Returns the new weights and the number of steps taken. `frozen` networks see the same images
        as the model; in "train" mode they use batch statistics. A training of something other than the
        round's model (a personal one) has a `name`, which its measurements bear.
        """
        # A second training of the same client in the same round has a randomness of its own.
        again = f" {self._trainings}" if self._trainings else ""
        self._trainings += 1
        frozen, live = frozen or {}, {}
        given = moved(given or {}, self.site.device)
        if frozen and (frozen_mode == "train" or self.site.augmentation.active):
            live = {name: self.site.frozen(name, w) for name, w in frozen.items()}
        # A round's teacher says the same of the same image every epoch: it is asked once.
        known = {} if live else {name: self.outputs(w) for name, w in frozen.items()}
        change = None if gradient is None else with_given(gradient)
        purpose, seed = f"batches{again}", self._torch_seed(f"training{again}")
        if live:
            self.beside = seeds.Stream(self._torch_seed("frozen"))
        # What is observed is the round's model, not a personal one beside it or a second training of it.
        observed = self.site.observer is not None and not name and not again
        task = Task(
            client=self,
            weights=weights,
            loss=loss,
            change=change,
            given=given,
            known=known,
            live=live,
            live_training=frozen_mode == "train",
            live_tokens=tuple(frozen[name].token for name in live),
            purpose=purpose,
            seed=seed,
            observed=observed,
        )
        try:
            trained = self.engine.train(task)
        except TypeError:
            check_call(loss, ["batch"])
            raise
        if trained.diverged:
            raise Diverged(f"client {self.number}: {trained.diverged}")
        for what, total in trained.sums.items():
            if name:
                check_own_measurement(f"{name}_{what}")
            self._add(f"{name}_{what}" if name else what, total, self.samples * self.settings.epochs)
        if not name:
            self._note_local_model(weights, trained.weights)
        return {"weights": trained.weights, "steps": trained.steps}

    def observe(self, start: Weights, now: Weights) -> None:
        """An epoch of local training is done, and somebody looks on."""
        if self.site.observer is not None:
            with seeds.Stream():
                self._observed.append(self.site.observer(self, start, now))

    @property
    def observed(self) -> dict[str, Tensor]:
        """What was seen after each epoch: by name [epochs, ...]."""
        names = self._observed[0] if self._observed else {}
        return {f"observed.{name}": torch.stack([seen[name] for seen in self._observed]) for name in names}

    def order(self, purpose: str, epoch: int) -> Tensor:
        """The client's samples as an epoch goes through them, on the CPU [samples]."""
        rng = seeds.rng(self.settings.seed, purpose, self.round, self.number, epoch)
        return torch.from_numpy(rng.permutation(self.samples))

    def numbers(self, purpose: str, epoch: int) -> Tensor | None:
        """What is random in the augmentation of this epoch, a row for each sample of the client."""
        if not self.site.augmentation.active:
            return None
        seed = seeds.torch_seed(self.settings.seed, f"augment {purpose}", self.round, self.number, epoch)
        numbers = self.site.augmentation.draw(self.samples, torch.Generator().manual_seed(seed))
        return numbers.to(self.site.device)

    def images(self, part: Tensor, numbers: Tensor | None) -> Tensor:
        """Training images at these positions, augmented, as a model sees them."""
        return self.site.images(self.rows[part], None if numbers is None else numbers[part])

    def _torch_seed(self, purpose: str) -> int:
        return seeds.torch_seed(self.settings.seed, purpose, self.round, self.number)

    def accuracy(self, weights: Weights) -> float:
        """A model on this client's own test data: what it holds out, or else the test images that
        are like its own. NaN if there are none."""
        x, y, rows, shares = self.site.own_test(self.number)
        if not len(rows):
            return math.nan
        logits = self.site.forward(self.site.frozen("", weights), x, rows).logits
        return float((logits.argmax(1) == y[rows]).double() @ shares)

    def _note_local_model(self, before: Weights, after: Weights) -> None:
        """The trained local model: on what this client holds out, how far it moved on test images that
        belong to no client, and beside the one it started from on this client's training data."""
        site, data = self.site, self.site.data
        rows = site.held[self.number] if site.held else self.rows[:0]
        if not len(rows) and not self.settings.track_drift:
            return
        start = site.probe(before) if self.settings.track_drift else None
        network = site.frozen("", after)
        if len(rows):
            right = site.forward(network, data.x_train, rows).logits.argmax(1) == data.y_train[rows]
            self._note("held_accuracy_local", right.float())
        if start is None:
            return
        end = site.forward(network, data.x_test, site.probe_rows)
        self._note("logit_drift", kl_divergence(start.logits, end.logits))
        self._note("feature_drift", (end.features - start.features).norm(dim=1))
        self._note("local_accuracy", (end.logits.argmax(1) == data.y_test[site.probe_rows]).float())
        own = self.rows[:: -(-self.samples // OWN_PROBE)]
        for name, weights in (("local_train_accuracy", after), ("train_accuracy", before)):
            logits = site.forward(site.frozen("", weights), data.x_train, own).logits
            self._note(name, (logits.argmax(1) == data.y_train[own]).float())
