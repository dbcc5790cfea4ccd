"""The one local training loop, and what a method sees of a client.

A `Site` is a place where clients' data lies: a worker process here, a node in a deployment. It has
one copy of the model to train and one for each frozen network, used for one client after another.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcsd import seeds
from fedcsd.config import Settings
from fedcsd.data.alike import Alike
from fedcsd.data.augment import AUGMENTATIONS
from fedcsd.data.dataset import Dataset
from fedcsd.errors import Diverged
from fedcsd.exchange import Notes, Reply, Request
from fedcsd.models import Factory
from fedcsd.models.network import Network, Outputs
from fedcsd.objectives import kl_divergence
from fedcsd.sgd import Gradient, Sgd
from fedcsd.weights import Values, Weights

FORWARD_BATCH = 500  # images at a time where no gradient is needed; fixed, since sums depend on it
PROBE = 1000  # test images on which drift is measured


@dataclass(frozen=True)
class Batch:
    """One batch as a loss sees it. The loss is a pure function of this."""

    logits: Tensor
    """of the model in training [B, C]"""
    features: Tensor
    """its penultimate features [B, D]"""
    labels: Tensor
    """[B]"""
    frozen: Mapping[str, Outputs]
    """logits and features of each frozen network on the same images"""
    given: Mapping[str, Tensor]
    """tensors that are the same for every batch, such as prototypes"""


Loss = Callable[[Batch], Tensor | tuple[Tensor, dict[str, Tensor]]]
"""A batch to its mean loss; beside it may stand measurements, one number a sample [B]."""


@dataclass
class Client:
    """One client in one round, as a method's client half sees it."""

    site: "Site"
    number: int
    round: int
    state: dict[str, Any] = field(default_factory=dict)
    """named tensors and numbers that this client keeps from round to round"""
    notes: Notes = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._trainings = 0
        self.rows = self.site.parts[self.number]
        self.labels = self.site.data.y_train[self.rows]
        self.samples = len(self.rows)
        self.classes = self.site.data.classes
        self.settings = self.site.settings

    def note(self, name: str, values: Tensor) -> None:
        """Measure something: one number a sample, averaged over all clients' samples."""
        self._add(name, float(values.sum(dtype=torch.float64)), values.numel())

    def _add(self, name: str, total: float, count: int) -> None:
        before = self.notes.get(name, (0.0, 0.0))
        self.notes[name] = (before[0] + total, before[1] + count)

    def outputs(self, weights: Weights) -> Outputs:
        """A frozen network on all local data, in eval mode, computed once a round."""
        key = (self.number, weights.token)
        if key not in self.site.cache:
            network = self.site.frozen("outputs", weights)
            self.site.cache[key] = self.site.forward(network, self.site.data.x_train, self.rows)
        return self.site.cache[key]

    def training_outputs(self, weights: Weights) -> tuple[Outputs, Tensor]:
        """A frozen network over one epoch as training sees it, and the labels: train mode, whole
        shuffled batches only. Empty for a client smaller than a batch."""
        network = self.site.frozen("outputs", weights)
        torch.manual_seed(self._torch_seed("prototypes"))
        whole = [
            part for part in self._batches("prototypes", 0) if len(part) == self.site.settings.batch_size
        ]
        if not whole:
            empty = torch.empty(0, self.classes, device=self.site.device)
            return Outputs(empty, empty), self.labels[:0]
        numbers = self._numbers("prototypes", 0)
        outputs = [_live(network, self._images(part, numbers), train=True) for part in whole]
        return _concatenate(outputs), self.labels[torch.cat(whole)]

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
        settings = self.settings
        frozen_outputs = self._frozen_outputs(frozen or {}, frozen_mode)
        network = self.site.network("student")
        network.load(weights)
        step = Sgd(network, settings)
        # A second training of the same client in the same round has a randomness of its own.
        again = f" {self._trainings}" if self._trainings else ""
        self._trainings += 1
        torch.manual_seed(self._torch_seed(f"training{again}"))
        sums: dict[str, Tensor] = defaultdict(
            lambda: torch.zeros((), dtype=torch.float64, device=self.site.device)
        )
        for epoch in range(settings.epochs):
            numbers = self._numbers(f"batches{again}", epoch)
            for part in self._batches(f"batches{again}", epoch):
                images = self._images(part, numbers)
                network.train(single=len(part) == 1)
                batch = Batch(*network(images), self.labels[part], frozen_outputs(part, images), given or {})
                step(_tally(sums, batch, loss(batch)), gradient)
            if not math.isfinite(sums["train_loss"].item()):
                raise Diverged(
                    f"client {self.number}: the loss is no longer finite in local epoch {epoch + 1}"
                )
        if not bool(network.flat.isfinite().all()):
            raise Diverged(f"client {self.number}: the weights are no longer finite after local training")
        for what, total in sums.items():
            self._add(f"{name}_{what}" if name else what, float(total), self.samples * settings.epochs)
        if not name:
            self._note_local_model(weights, network)
        return {"weights": network.weights(), "steps": step.taken}

    def _frozen_outputs(
        self, frozen: Mapping[str, Weights], mode: str
    ) -> Callable[[Tensor, Tensor], dict[str, Outputs]]:
        """How to get frozen networks' outputs for a batch: looked up, since a round's teacher says
        the same of the same image every epoch, or computed where that is not so."""
        if frozen and (mode == "train" or self.site.augmentation.active):
            networks = {name: self.site.frozen(name, w) for name, w in frozen.items()}
            stream = Stream(self._torch_seed("frozen"))

            def live(part: Tensor, images: Tensor) -> dict[str, Outputs]:
                with stream:
                    return {
                        n: _live(network, images, train=mode == "train") for n, network in networks.items()
                    }

            return live
        known = {name: self.outputs(w) for name, w in frozen.items()}
        return lambda part, images: {
            name: Outputs(out.logits[part], out.features[part]) for name, out in known.items()
        }

    def _batches(self, purpose: str, epoch: int) -> Iterator[Tensor]:
        """Positions among the client's samples, batch by batch; the last batch may be smaller."""
        settings = self.site.settings
        order = seeds.rng(settings.seed, purpose, self.round, self.number, epoch).permutation(self.samples)
        return iter(torch.split(torch.from_numpy(order).to(self.site.device), settings.batch_size))

    def _numbers(self, purpose: str, epoch: int) -> Tensor | None:
        """What is random in the augmentation of this epoch, a row for each sample of the client."""
        if not self.site.augmentation.active:
            return None
        seed = seeds.torch_seed(self.site.settings.seed, f"augment {purpose}", self.round, self.number, epoch)
        numbers = self.site.augmentation.draw(self.samples, torch.Generator().manual_seed(seed))
        return numbers.to(self.site.device)

    def _images(self, part: Tensor, numbers: Tensor | None) -> Tensor:
        """Training images at these positions, augmented, as a model sees them."""
        pixels = self.site.data.x_train.index_select(0, self.rows[part])
        return self.site.data.images(
            pixels if numbers is None else self.site.augmentation(pixels, numbers[part])
        )

    def _torch_seed(self, purpose: str) -> int:
        return seeds.torch_seed(self.site.settings.seed, purpose, self.round, self.number)

    def accuracy(self, weights: Weights) -> float:
        """A model on this client's own test data: what it holds out, or else the test images that
        are like its own. NaN if there are none."""
        x, y, rows, shares = self.site.own_test(self.number)
        if not len(rows):
            return math.nan
        logits = self.site.forward(self.site.frozen("outputs", weights), x, rows).logits
        return float((logits.argmax(1) == y[rows]).double() @ shares)

    def _note_local_model(self, before: Weights, after: Network) -> None:
        """The trained local model: on what this client holds out, and how far it moved on test images
        that belong to no client."""
        site, data = self.site, self.site.data
        if site.held and len(rows := site.held[self.number]):
            after.eval()
            right = site.forward(after, data.x_train, rows).logits.argmax(1) == data.y_train[rows]
            self.note("held_accuracy_local", right.float())
        if not self.settings.track_drift:
            return
        start = site.probe(before)
        after.eval()
        end = site.forward(after, data.x_test, site.probe_rows)
        self.note("logit_drift", kl_divergence(start.logits, end.logits))
        self.note("feature_drift", (end.features - start.features).norm(dim=1))
        self.note("local_accuracy", (end.logits.argmax(1) == data.y_test[site.probe_rows]).float())


def _tally(
    sums: dict[str, Tensor], batch: Batch, result: Tensor | tuple[Tensor, dict[str, Tensor]]
) -> Tensor:
    """Add up what a loss gave for a batch; the loss itself is returned."""
    value, measured = result if isinstance(result, tuple) else (result, {})
    if value.dim():
        raise ValueError(
            f"the loss is of shape {list(value.shape)}: it must be one number, the mean over the batch"
        )
    sums["train_loss"] += value.detach() * len(batch.labels)
    for name, values in measured.items():
        if values.shape != batch.labels.shape:
            raise ValueError(
                f"the loss measures {name!r} as {list(values.shape)}: give one number a sample, [B]"
            )
        sums[name] += values.detach().sum()
    return value


class Stream:
    """Random numbers of their own for what runs beside training, so that it does not disturb it."""

    def __init__(self, seed: int):
        self.inside = torch.Generator().manual_seed(seed).get_state()

    def __enter__(self) -> None:
        self.outside = torch.get_rng_state()
        torch.set_rng_state(self.inside)

    def __exit__(self, *_: object) -> None:
        self.inside = torch.get_rng_state()
        torch.set_rng_state(self.outside)


def _live(network: Network, images: Tensor, *, train: bool) -> Outputs:
    if train:
        network.train(single=len(images) == 1)
    with torch.no_grad():
        return network(images)


def _concatenate(outputs: Sequence[Outputs]) -> Outputs:
    return Outputs(torch.cat([o.logits for o in outputs]), torch.cat([o.features for o in outputs]))


class Site:
    """Answers requests for its clients, one at a time."""

    def __init__(
        self,
        settings: Settings,
        method: object,
        data: Dataset,
        parts: list[Tensor],
        held: list[Tensor],
        factory: Factory,
    ):
        self.settings, self.method, self.factory = settings, method, factory
        self.device = torch.device(settings.device)
        self.data = data = data.to(self.device)
        self.parts, self.held = ([rows.to(self.device) for rows in some] for some in (parts, held))
        self.augmentation = AUGMENTATIONS[settings.augment]
        # Blocks of test images, and then of what the clients hold out, to evaluate a model on.
        test = torch.arange(len(data.y_test), device=self.device)
        kept = torch.cat(self.held) if self.held else test[:0]
        self.blocks = [(data.x_test, data.y_test, rows) for rows in torch.split(test, FORWARD_BATCH)]
        self.blocks += [
            (data.x_train, data.y_train, rows) for rows in torch.split(kept, FORWARD_BATCH) if len(rows)
        ]
        self.probe_rows = test[:PROBE]
        self.alike = Alike(data, len(parts))
        self.cache: dict[tuple[int, int], Outputs] = {}
        self._networks: dict[str, Network] = {}
        self._round = -1

    def network(self, name: str) -> Network:
        """The site's copy of the model for this use, made on first use."""
        if name not in self._networks:
            module = self.factory().to(self.device)
            self._networks[name] = Network(module, self.data.example(), self.settings.classifier)
        return self._networks[name]

    def frozen(self, name: str, weights: Weights) -> Network:
        """A frozen network with these weights, in eval mode."""
        network = self.network("frozen " + name)
        network.load(weights)
        network.eval()
        return network

    def forward(self, network: Network, x: Tensor, rows: Tensor) -> Outputs:
        """Outputs for many images, without gradients."""
        with torch.no_grad():
            return _concatenate(
                [network(self.data.images(x[part])) for part in torch.split(rows, FORWARD_BATCH)]
            )

    def own_test(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a client's own model is tested on: images, labels, which rows of them, and what each
        counts for."""
        data = self.data
        if self.held:
            rows = self.held[number]
            even = torch.full((len(rows),), 1 / max(1, len(rows)), dtype=torch.float64, device=self.device)
            return data.x_train, data.y_train, rows, even
        rows, shares = (
            torch.from_numpy(found).to(self.device)
            for found in self.alike.rows(number, self.parts[number].cpu().numpy())
        )
        return data.x_test, data.y_test, rows, shares

    def probe(self, weights: Weights) -> Outputs:
        """Outputs on the probe images; remembered for the round."""
        key = (-1, weights.token)
        if key not in self.cache:
            network = self.frozen("outputs", weights)
            self.cache[key] = self.forward(network, self.data.x_test, self.probe_rows)
        return self.cache[key]

    def answer(self, request: Request, number: int, state: Values) -> Reply:
        """Run one function of the method's client half for one client."""
        self._begin(request.round)
        client = Client(self, number, request.round, dict(state))
        torch.manual_seed(client._torch_seed(f"function {request.function}"))
        try:
            values = getattr(self.method, request.function)(client, **request.values)
        except Diverged as error:
            return Reply(number, client.samples, notes=client.notes, state=state, problem=str(error))
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{request.function} must return a dict of values; it returned a {type(values).__name__}"
            )
        return Reply(number, client.samples, values, client.notes, client.state)

    def evaluate(self, request: Request, number: int) -> Reply:
        """Which images of one block are classified rightly, and the summed loss."""
        self._begin(request.round)
        x, y, rows = self.blocks[number]
        logits = self.forward(self.frozen("outputs", request.values["weights"]), x, rows).logits
        loss = float(F.cross_entropy(logits, y[rows], reduction="none").sum(dtype=torch.float64))
        return Reply(number, len(rows), {"correct": logits.argmax(1) == y[rows]}, {"loss": (loss, len(rows))})

    def _begin(self, round: int) -> None:
        if round != self._round:
            self._round = round
            self.cache.clear()
