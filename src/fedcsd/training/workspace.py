"""The data and the models that a worker uses for one client after another."""

import copy
import math
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedcsd.config import Settings
from fedcsd.data.dataset import Dataset
from fedcsd.data.matching import MatchingTests
from fedcsd.models import Factory
from fedcsd.models.network import Network, Outputs, concatenated
from fedcsd.training.images import Images
from fedcsd.weights import Values, Weights

FORWARD_BATCH = 500  # images in one forward pass on the CPU; fixed, since sums depend on it
FORWARD_BYTES = 1 << 26  # of images in one forward pass on a GPU, which needs many to be busy
COHORT = 100_000  # samples of a cohort whose outputs a GPU computes in one call
PROBE = 1000  # test images on which drift is measured


class Workspace:
    """Hold a device's copy of the data and of the models that clients share."""

    def __init__(
        self, settings: Settings, data: Dataset, parts: list[Tensor], held: list[Tensor], factory: Factory
    ):
        self.settings, self.factory = settings, factory
        self.device = torch.device(settings.device)
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = settings.precision != "fp32"
            torch.backends.cudnn.allow_tf32 = settings.precision != "fp32"
            torch.backends.cudnn.benchmark = False  # a trial of algorithms cannot be recorded in a graph
            torch.backends.cudnn.deterministic = True  # some float32 sums have no fixed order otherwise
        self.data = data = data.to(self.device)
        self.parts, self.held = ([rows.to(self.device) for rows in some] for some in (parts, held))
        self.images = Images(data, settings.augment)
        # Blocks of test images and then of held-out samples, to evaluate a model on.
        test = torch.arange(len(data.y_test), device=self.device)
        kept = torch.cat(self.held) if self.held else test[:0]
        many = max(64, min(10_000, FORWARD_BYTES // (4 * math.prod(data.shape))))
        self.forward_batch = many if self.device.type == "cuda" else FORWARD_BATCH
        self.blocks = [(data.x_test, data.y_test, rows) for rows in torch.split(test, self.forward_batch)]
        self.blocks += [
            (data.x_train, data.y_train, rows) for rows in torch.split(kept, self.forward_batch) if len(rows)
        ]
        self.probe_rows = test[:PROBE]
        self.alike = MatchingTests(data, len(parts))
        self.cache = Cache()
        self._networks: dict[str, Network] = {}

    def another(self) -> "Workspace":
        """Return a workspace on the same data and cache with models of its own, for another lane."""
        other = copy.copy(self)
        other._networks = {}
        return other

    def begin(self, round: int, cohort: Sequence[int] = (), values: Values | None = None) -> None:
        """Drop the outputs of an earlier round; note which clients are sent which weights."""
        if self.cache.round != round:
            self.cache.clear()
            self.cache.round = round
        if values is not None:
            self.cache.cohort = cohort
            self.cache.sent = {value.token for value in values.values() if isinstance(value, Weights)}

    @property
    def model(self) -> Network:
        """Return the network that clients train."""
        return self._network("model")

    def frozen(self, name: str, weights: Weights) -> Network:
        """Return the frozen network of this name with these weights, in eval mode."""
        network = self._network("frozen " + name)
        network.load(weights)
        network.eval()
        return network

    def _network(self, name: str) -> Network:
        if name not in self._networks:
            with torch.random.fork_rng(devices=[]):  # the initial weights are not used
                module = self.factory().to(self.device)
            bf16 = self.settings.precision == "bf16"
            self._networks[name] = Network(module, self.data.example(), self.settings.classifier, bf16=bf16)
        return self._networks[name]

    def forward(self, network: Network, x: Tensor, rows: Tensor) -> Outputs:
        """Return a network's outputs for these rows of the images, without gradients."""
        with torch.no_grad():
            parts = torch.split(rows, self.forward_batch)
            return concatenated([network(self.images.plain(x, part)) for part in parts])

    def local_outputs(self, weights: Weights, number: int) -> Outputs:
        """Return outputs on all of a client's samples, computed once a round.

        A GPU computes those of the whole cohort in one call, if they fit.
        """
        cache = self.cache
        with cache.lock:
            if (number, weights.token) not in cache:
                cohort = self._clients_beside(number, weights)
                rows = torch.cat([self.parts[k] for k in cohort])
                found = self.forward(self.frozen("", weights), self.data.x_train, rows)
                sizes = [len(self.parts[k]) for k in cohort]
                logits, features = (torch.split(some, sizes) for some in found)
                for k, *outputs in zip(cohort, logits, features, strict=True):
                    cache[k, weights.token] = Outputs(*outputs)
                self._share()
            return cache[number, weights.token]

    def _clients_beside(self, number: int, weights: Weights) -> Sequence[int]:
        """Return the clients whose outputs are computed with this one's: all that were sent the weights."""
        cohort, sent = self.cache.cohort, self.cache.sent
        many = sum(len(self.parts[k]) for k in cohort) > COHORT
        return [number] if many or weights.token not in sent or self.device.type == "cpu" else cohort

    def own_test(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a client's own test data: images, labels, its rows of them and each row's share."""
        data = self.data
        if self.held:
            rows = self.held[number]
            even = torch.full((len(rows),), 1 / max(1, len(rows)), dtype=torch.float64, device=self.device)
            return data.x_train, data.y_train, rows, even
        found = self.alike.rows(number, self.parts[number].cpu().numpy())
        rows, shares = (torch.from_numpy(some).to(self.device) for some in found)
        return data.x_test, data.y_test, rows, shares

    def probe(self, weights: Weights) -> Outputs:
        """Return outputs on the probe images, computed once a round."""

        def compute() -> Outputs:
            return self.forward(self.frozen("", weights), self.data.x_test, self.probe_rows)

        return self.remembered((-1, weights.token), compute)

    def remembered(self, key: tuple[int, int], compute: Callable[[], Outputs]) -> Outputs:
        """Return what was computed for this key in this round; the first lane computes, others wait."""
        with self.cache.lock:
            if key not in self.cache:
                self.cache[key] = compute()
                self._share()
            return self.cache[key]

    def _share(self) -> None:
        """Wait until the outputs are computed: other lanes of a GPU read them on other streams."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


class Cache(dict[tuple[int, int], Outputs]):
    """Outputs of one round by client and weights, shared by the lanes of a device."""

    round = -1
    cohort: Sequence[int] = ()
    sent: frozenset[int] | set[int] = frozenset()

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[type["Cache"], tuple[()]]:
        return Cache, ()  # a spawned process starts with an empty cache
