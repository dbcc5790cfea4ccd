"""The one local training loop, and what a method sees of a client.

A `Site` is a place where clients' data lies: a worker process here, a node in a deployment. It has
one copy of the model to train and one for each frozen network, used for one client after another.
"""

import copy
import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fedcsd import seeds
from fedcsd.config import Settings
from fedcsd.data.alike import Alike
from fedcsd.data.augment import AUGMENTATIONS
from fedcsd.data.dataset import Dataset
from fedcsd.engines import Batch, Loss, Task, Trained, batches
from fedcsd.engines.eager import Eager, live
from fedcsd.errors import Diverged
from fedcsd.exchange import Notes, Reply, Request
from fedcsd.kernels.vectors import cross_entropy, look_up
from fedcsd.models import Factory
from fedcsd.models.network import Network, Outputs
from fedcsd.objectives import kl_divergence
from fedcsd.sgd import Gradient
from fedcsd.weights import Values, Weights

__all__ = ["Batch", "Client", "Loss", "Site"]

FORWARD_BATCH = 500  # images at a time where no gradient is needed; fixed, since sums depend on it
FORWARD_BYTES = 1 << 26  # of images at a time on a GPU, which is only busy with many
PROBE = 1000  # test images on which drift is measured


class Engine(Protocol):
    """Carries out local training (see fedcsd.engines)."""

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

    def note(self, name: str, values: Tensor, among: Tensor | None = None) -> None:
        """Measure something: one number a sample, averaged over all clients' samples, or over those
        that are true in `among`."""
        if among is None:
            self._add(name, values.sum(dtype=torch.float64), values.numel())
        else:
            self._add(name, (values * among).sum(dtype=torch.float64), among.sum())

    def _add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        before = self._noted.get(name, (0.0, 0.0))
        self._noted[name] = (before[0] + total, before[1] + count)

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
        key = (self.number, weights.token)
        if key not in self.site.cache:
            network = self.site.frozen("outputs", weights)
            self.site.cache[key] = self.site.forward(network, self.site.data.x_train, self.rows)
        return self.site.cache[key]

    def training_outputs(self, weights: Weights) -> tuple[Outputs, Tensor]:
        """A frozen network over one epoch as training sees it, and the labels: train mode, whole
        shuffled batches only. Empty for a client smaller than a batch."""
        network = self.site.frozen("outputs", weights)
        self.site.seed(self._torch_seed("prototypes"))
        order = self.order("prototypes", 0).to(self.site.device)
        size = self.settings.batch_size
        whole = [part for part in batches(order, size) if len(part) == size]
        if not whole:
            empty = torch.empty(0, self.classes, device=self.site.device)
            return Outputs(empty, empty), self.labels[:0]
        numbers = self.numbers("prototypes", 0)
        if numbers is None and network.steady(self.site.data.example()):
            known, places = self.outputs(weights), torch.cat(whole)
            return Outputs(known.logits[places], known.features[places]), self.labels[places]
        outputs = [live(network, self.images(part, numbers), train=True) for part in whole]
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
        # A second training of the same client in the same round has a randomness of its own.
        again = f" {self._trainings}" if self._trainings else ""
        self._trainings += 1
        frozen, given, live = frozen or {}, given or {}, {}
        if frozen and (frozen_mode == "train" or self.site.augmentation.active):
            live = {name: self.site.frozen(name, w) for name, w in frozen.items()}
        # A round's teacher says the same of the same image every epoch: it is asked once.
        known = {} if live else {name: self.outputs(w) for name, w in frozen.items()}
        change = gradient if gradient is None or _takes_given(gradient) else Plain(gradient)
        purpose, seed = f"batches{again}", self._torch_seed(f"training{again}")
        if live:
            self.beside = Stream(self._torch_seed("frozen"))
        task = Task(self, weights, loss, change, given, known, live, frozen_mode == "train", purpose, seed)
        trained = self.engine.train(task)
        if trained.diverged:
            raise Diverged(f"client {self.number}: {trained.diverged}")
        for what, total in trained.sums.items():
            self._add(f"{name}_{what}" if name else what, total, self.samples * self.settings.epochs)
        if not name:
            self._note_local_model(weights, trained.weights)
        return {"weights": trained.weights, "steps": trained.steps}

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
        logits = self.site.forward(self.site.frozen("outputs", weights), x, rows).logits
        return float((logits.argmax(1) == y[rows]).double() @ shares)

    def _note_local_model(self, before: Weights, after: Weights) -> None:
        """The trained local model: on what this client holds out, and how far it moved on test images
        that belong to no client."""
        site, data = self.site, self.site.data
        rows = site.held[self.number] if site.held else self.rows[:0]
        if not len(rows) and not self.settings.track_drift:
            return
        start = site.probe(before) if self.settings.track_drift else None
        network = site.frozen("outputs", after)
        if len(rows):
            right = site.forward(network, data.x_train, rows).logits.argmax(1) == data.y_train[rows]
            self.note("held_accuracy_local", right.float())
        if start is None:
            return
        end = site.forward(network, data.x_test, site.probe_rows)
        self.note("logit_drift", kl_divergence(start.logits, end.logits))
        self.note("feature_drift", (end.features - start.features).norm(dim=1))
        self.note("local_accuracy", (end.logits.argmax(1) == data.y_test[site.probe_rows]).float())


class Plain:
    """A change of the gradient that takes no `given`, as one that does."""

    def __init__(self, change: Gradient):
        self.change = change

    def __call__(self, parameters: Tensor, gradient: Tensor, given: Mapping[str, Tensor]) -> object:
        return self.change(parameters, gradient)


def _takes_given(change: Gradient) -> bool:
    return len(inspect.signature(change).parameters) > 2


class Stream(AbstractContextManager[None]):
    """Random numbers of their own for what runs beside training, so that it does not disturb it."""

    def __init__(self, seed: int = 0):
        self.inside = torch.Generator().manual_seed(seed).get_state()

    def __enter__(self) -> None:
        self.outside = torch.get_rng_state()
        torch.set_rng_state(self.inside)

    def __exit__(self, *_: object) -> None:
        self.inside = torch.get_rng_state()
        torch.set_rng_state(self.outside)


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
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = settings.precision != "fp32"
            torch.backends.cudnn.allow_tf32 = settings.precision != "fp32"
            torch.backends.cudnn.benchmark = settings.compile  # both take their time at the start
        self.data = data = data.to(self.device)
        self.parts, self.held = ([rows.to(self.device) for rows in some] for some in (parts, held))
        self.augmentation = AUGMENTATIONS[settings.augment]
        # Blocks of test images, and then of what the clients hold out, to evaluate a model on.
        test = torch.arange(len(data.y_test), device=self.device)
        kept = torch.cat(self.held) if self.held else test[:0]
        if self.device.type == "cuda":
            self.forward_batch = max(64, min(10_000, FORWARD_BYTES // (4 * math.prod(data.shape))))
        else:
            self.forward_batch = FORWARD_BATCH
        self.blocks = [(data.x_test, data.y_test, rows) for rows in torch.split(test, self.forward_batch)]
        self.blocks += [
            (data.x_train, data.y_train, rows) for rows in torch.split(kept, self.forward_batch) if len(rows)
        ]
        self.probe_rows = test[:PROBE]
        self.alike = Alike(data, len(parts))
        self.cache = Cache()
        self.engine: Engine = Eager()
        self.alone = True  # nothing else draws from the global generator while a client is answered
        self.seeded = 0  # what the global generator was last started with
        self._networks: dict[str, Network] = {}

    def another(self) -> "Site":
        """A second place for the same clients' data, with models of its own: another lane on a GPU."""
        other = copy.copy(self)
        other._networks, other.alone = {}, False
        return other

    def seed(self, seed: int) -> None:
        """Start the global generator, for what draws inside a model or a method's client half."""
        if self.alone:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for every kind of device
            if self.device.type == "cuda":
                torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
            self.seeded = seed

    def images(self, rows: Tensor, numbers: Tensor | None) -> Tensor:
        """Training images [B, ...], augmented as the numbers say, as a model sees them."""
        if numbers is None:
            return self.plain(self.data.x_train, rows)
        return self.data.images(self.augmentation(self.data.x_train.index_select(0, rows), numbers))

    def plain(self, x: Tensor, rows: Tensor) -> Tensor:
        """These rows of training or test images as a model sees them."""
        found = None if self.data.table is None else look_up(x, rows, self.data.table)
        return self.data.images(x.index_select(0, rows)) if found is None else found

    def network(self, name: str) -> Network:
        """The site's copy of the model for this use, made on first use."""
        if name not in self._networks:
            with torch.random.fork_rng(devices=[]):  # initial weights that nobody needs
                module = self.factory().to(self.device)
            bf16 = self.settings.precision == "bf16"
            self._networks[name] = Network(module, self.data.example(), self.settings.classifier, bf16=bf16)
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
                [network(self.plain(x, part)) for part in torch.split(rows, self.forward_batch)]
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

    def answer(self, request: Request, number: int, state: Values, engine: Engine | None = None) -> Reply:
        """Run one function of the method's client half for one client."""
        self.begin(request.round)
        client = Client(self, number, request.round, dict(state))
        client.engine = engine or self.engine
        self.seed(client._torch_seed(f"function {request.function}"))
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
        self.begin(request.round)
        x, y, rows = self.blocks[number]
        logits = self.forward(self.frozen("outputs", request.values["weights"]), x, rows).logits
        loss = float(cross_entropy(logits, y[rows]).sum(dtype=torch.float64))
        return Reply(number, len(rows), {"correct": logits.argmax(1) == y[rows]}, {"loss": (loss, len(rows))})

    def begin(self, round: int) -> None:
        """Forget what was known of an earlier round."""
        if self.cache.round != round:
            self.cache.clear()
            self.cache.round = round


class Cache(dict[tuple[int, int], Outputs]):
    """Outputs by client and weights, of one round; lanes of the same device share it."""

    round = -1
