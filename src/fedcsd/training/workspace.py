"""Where clients' data lies: a worker process here, a node in a deployment.

A site has one copy of the model to train and one for each frozen network, used for one client after
another.
"""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedcsd import seeds
from fedcsd.config import Settings
from fedcsd.data.augment import AUGMENTATIONS
from fedcsd.data.dataset import Dataset
from fedcsd.data.matching import Alike
from fedcsd.errors import Diverged
from fedcsd.kernels.vectors import cross_entropy, look_up
from fedcsd.messages import Reply, Request, check_kinds
from fedcsd.models import Factory
from fedcsd.models.network import Network, Outputs, concatenated
from fedcsd.plugins import check_call
from fedcsd.training.client import Client, Engine, Observer
from fedcsd.training.engines.eager import Eager
from fedcsd.weights import Values, Weights

FORWARD_BATCH = 500  # images at a time where no gradient is needed; fixed, since sums depend on it
FORWARD_BYTES = 1 << 26  # of images at a time on a GPU, which is only busy with many
COHORT = 100_000  # samples of a cohort up to which a GPU computes outputs on them as one
PROBE = 1000  # test images on which drift is measured


class Site:
    """Answers requests for its clients, one at a time."""

    def __init__(
        self,
        settings: Settings,
        method: Any,
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
            torch.backends.cudnn.benchmark = False  # while it tries its ways, no lane could record
            torch.backends.cudnn.deterministic = True  # in float32 some of its sums have no fixed order
        self.data = data = data.to(self.device)
        self.parts, self.held = ([rows.to(self.device) for rows in some] for some in (parts, held))
        self.augmentation = AUGMENTATIONS[settings.augment]
        # Blocks of test images, and then of what the clients hold out, to evaluate a model on.
        test = torch.arange(len(data.y_test), device=self.device)
        kept = torch.cat(self.held) if self.held else test[:0]
        many = max(64, min(10_000, FORWARD_BYTES // (4 * math.prod(data.shape))))
        self.forward_batch = many if self.device.type == "cuda" else FORWARD_BATCH
        self.blocks = [(data.x_test, data.y_test, rows) for rows in torch.split(test, self.forward_batch)]
        self.blocks += [
            (data.x_train, data.y_train, rows) for rows in torch.split(kept, self.forward_batch) if len(rows)
        ]
        self.probe_rows = test[:PROBE]
        self.alike = Alike(data, len(parts))
        self.cache = Cache()
        self.engine: Engine = Eager()
        self.alone = True  # nothing else draws from the process's generators while a client is answered
        self.observer: Observer | None = None
        self.seeded: int | None = None  # what the generators were last started with
        self.drew: bool | None = None  # whether a client drew from them; None where nobody wants to know
        self._networks: dict[str, Network] = {}

    def another(self) -> "Site":
        """A second place for the same clients' data, with models of its own: another lane on a GPU."""
        other = copy.copy(self)
        other._networks, other.alone = {}, False
        return other

    def short(self, batches: float) -> "Site":
        """Another place where clients hold so many batches at most and train one epoch: for trials."""
        other = self.another()
        other.settings, other.cache = replace(self.settings, epochs=1), Cache()
        other.parts = [rows[: int(batches * self.settings.batch_size)] for rows in self.parts]
        return other

    def seed(self, seed: int) -> None:
        """Start the process's generators, for what draws inside a model or a method's client half."""
        if self.alone:
            self.notice()
            seeds.start(seed, cuda=self.device.type == "cuda")
            self.seeded = seed

    def notice(self) -> None:
        """See whether somebody drew since the generators were started."""
        if self.drew is False and self.seeded is not None:
            self.drew = seeds.drawn_since(self.seeded, cuda=self.device.type == "cuda")

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """While nothing else draws: clients may start the process's generators, which are put back then."""
        before, self.alone = self.alone, True
        try:
            with seeds.kept(cuda=self.device.type == "cuda"):
                yield
        finally:
            self.alone = before

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
        """A frozen network with these weights, in eval mode. The one without a name is for looking on."""
        network = self.network("frozen " + name)
        network.load(weights)
        network.eval()
        return network

    def forward(self, network: Network, x: Tensor, rows: Tensor) -> Outputs:
        """Outputs for many images, without gradients."""
        with torch.no_grad():
            return concatenated(
                [network(self.plain(x, part)) for part in torch.split(rows, self.forward_batch)]
            )

    def local_outputs(self, weights: Weights, number: int) -> Outputs:
        """Outputs on all of a client's samples; remembered for the round. A GPU has little use for one
        client's at a time: there the whole cohort's are computed as one, if they fit."""
        cache = self.cache
        with cache.lock:
            if (number, weights.token) not in cache:
                cohort = self._with(number, weights)
                rows = torch.cat([self.parts[k] for k in cohort])
                found = self.forward(self.frozen("", weights), self.data.x_train, rows)
                sizes = [len(self.parts[k]) for k in cohort]
                pieces = zip(
                    torch.split(found.logits, sizes), torch.split(found.features, sizes), strict=True
                )
                for k, (logits, features) in zip(cohort, pieces, strict=True):
                    cache[k, weights.token] = Outputs(logits, features)
                self._share()
            return cache[number, weights.token]

    def _with(self, number: int, weights: Weights) -> Sequence[int]:
        """The clients whose outputs are computed with this one's: those that were sent the same weights."""
        cohort, sent = self.cache.cohort, self.cache.sent
        many = sum(len(self.parts[k]) for k in cohort) > COHORT
        return [number] if many or weights.token not in sent or self.device.type == "cpu" else cohort

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

        def compute() -> Outputs:
            return self.forward(self.frozen("", weights), self.data.x_test, self.probe_rows)

        return self.remembered((-1, weights.token), compute)

    def remembered(self, key: tuple[int, int], compute: Callable[[], Outputs]) -> Outputs:
        """What has this key in this round; computed by the first lane that asks, while others wait."""
        with self.cache.lock:
            if key not in self.cache:
                self.cache[key] = compute()
                self._share()
            return self.cache[key]

    def _share(self) -> None:
        """Wait until what was remembered is there: the other lanes of a GPU have streams of their own."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def answer(self, request: Request, number: int, state: Values, engine: Engine | None = None) -> Reply:
        """Run one function of the method's client half for one client."""
        self.begin(request.round)
        client = Client(self, number, request.round, dict(state))
        client.engine = engine or self.engine
        self.seed(client._torch_seed(f"function {request.function}"))
        function = getattr(self.method, request.function)
        try:
            values = function(client, **request.values)
        except Diverged as error:
            return Reply(number, client.samples, notes=client.notes, state=state, problem=str(error))
        except TypeError:
            check_call(function, ["client"], request.values)
            raise
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{request.function} must return a dict of values; it returned a {type(values).__name__}"
            )
        check_kinds(values, "a reply")
        check_kinds(client.state, "the state")
        return Reply(number, client.samples, {**values, **client.observed}, client.notes, client.state)

    def evaluate(self, request: Request, number: int) -> Reply:
        """Which images of one block are classified rightly, and the summed loss."""
        self.begin(request.round)
        x, y, rows = self.blocks[number]
        logits = self.forward(self.frozen("", request.values["weights"]), x, rows).logits
        loss = float(cross_entropy(logits, y[rows]).sum(dtype=torch.float64))
        return Reply(number, len(rows), {"correct": logits.argmax(1) == y[rows]}, {"loss": (loss, len(rows))})

    def begin(self, round: int, cohort: Sequence[int] = (), values: Values | None = None) -> None:
        """Forget what was known of an earlier round. A GPU's is told which clients will be asked what."""
        if self.cache.round != round:
            self.cache.clear()
            self.cache.round = round
        if values is not None:
            self.cache.cohort = cohort
            self.cache.sent = {value.token for value in values.values() if isinstance(value, Weights)}


class Cache(dict[tuple[int, int], Outputs]):
    """Outputs by client and weights, of one round; lanes of the same device share it."""

    round = -1
    cohort: Sequence[int] = ()
    sent: frozenset[int] | set[int] = frozenset()

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[type["Cache"], tuple[()]]:
        return Cache, ()  # a spawned process starts with nothing known
