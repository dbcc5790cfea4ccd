"""Federated learning as a textbook writes it: plain PyTorch, state dicts, dicts of clients and loops.

Nothing of the package's training or arithmetic is used, only its settings, its cohorts, its seeds and its
augmentation: who answers in a round, in which order a client sees its samples, and as which images.

A state is a state dict without integer buffers. A model has a `body`, whose output are the features,
and a `head`, the classifier.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcsd import seeds
from fedcsd.data.augment import AUGMENTATIONS
from fedcsd.experiments.experiment import Experiment
from fedcsd.federation.cohort import cohort, failing

State = dict[str, Tensor]


@dataclass
class Batch:
    """A training step has a network in training mode, its inputs, labels and outputs."""

    net: nn.Module
    x: Tensor
    y: Tensor
    h: Tensor
    z: Tensor

    def parameters(self) -> State:
        return dict(self.net.named_parameters())


Loss = Callable[[Batch], Tensor]


@dataclass
class Result:
    """The global model after all rounds, and what each client keeps, by name."""

    weights: State
    clients: dict[str, dict[int, State]] = field(default_factory=dict)
    personal: dict[int, State] = field(default_factory=dict)


class World:
    """A world has an experiment's data, clients and settings, and trains locally in plain PyTorch."""

    def __init__(self, experiment: Experiment, rounds: int):
        self.settings, self.data, self.parts = experiment.settings, experiment.data, experiment.parts
        self.number, self.clients = rounds, len(experiment.parts)
        self.model = experiment.factory()
        self.trainable = [name for name, _ in self.model.named_parameters()]
        self.start = {name: tensor.clone() for name, tensor in experiment.weights.named().items()}
        self.norms = any(isinstance(layer, nn.BatchNorm1d) for layer in self.model.modules())
        self.measured: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def rounds(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each round's clients that answer; a round without an answer is left out."""
        for t in range(self.number):
            clients = [k for k in cohort(self.settings, t) if k not in failing(self.settings, t)]
            if clients:
                yield t, clients

    def measure(self, t: int, name: str, values: Tensor) -> None:
        """One number a sample, whose mean over the round's clients and epochs is reported."""
        self.measured[t][name] += values.detach().double().tolist()

    def net(self, state: State) -> nn.Module:
        net = copy.deepcopy(self.model)
        missing = net.load_state_dict(state, strict=False).missing_keys
        assert all(name.endswith("num_batches_tracked") for name in missing)
        return net

    def frozen(self, state: State) -> nn.Module:
        return self.net(state).eval().requires_grad_(False)

    def local_data(self, k: int) -> tuple[Tensor, Tensor]:
        return self.data.images(self.data.x_train[self.parts[k]]), self.data.y_train[self.parts[k]]

    def images(self, t: int, k: int, epoch: int, purpose: str) -> Tensor:
        """The client's samples as this epoch sees them."""
        change, raw = AUGMENTATIONS[self.settings.augment], self.data.x_train[self.parts[k]]
        if change.active:
            seed = seeds.torch_seed(self.settings.seed, f"augment {purpose}", t, k, epoch)
            raw = change(raw, change.draw(len(raw), torch.Generator().manual_seed(seed)))
        return self.data.images(raw)

    def batches(self, order: np.ndarray) -> list[np.ndarray]:
        """A single sample left over joins the batch before it where BatchNorm needs statistics."""
        size = self.settings.batch_size
        parts = [order[at : at + size] for at in range(0, len(order), size)]
        if self.norms and len(parts[-1]) == 1 < size and len(parts) > 1:
            parts[-2:] = [np.concatenate(parts[-2:])]
        return parts

    def epoch(self, t: int, k: int, epoch: int, purpose: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels, batch by batch."""
        images, labels = self.images(t, k, epoch, purpose), self.local_data(k)[1]
        order = seeds.rng(self.settings.seed, purpose, t, k, epoch).permutation(len(labels))
        return ((images[rows], labels[rows]) for rows in self.batches(order))

    def train(self, t: int, k: int, start: State, loss: Loss, purpose: str = "batches") -> State:
        s, net = self.settings, self.net(start)
        sgd = torch.optim.SGD(net.parameters(), lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
        for x, y in (batch for e in range(s.epochs) for batch in self.epoch(t, k, e, purpose)):
            h = training(net, x).body(x)
            sgd.zero_grad()
            value = loss(Batch(net, x, y, h, net.head(h)))
            value.backward()
            sgd.step()
            if purpose == "batches":
                self.measure(t, "train_loss", value.expand(len(y)))
        return {
            name: tensor.clone() for name, tensor in net.state_dict().items() if tensor.is_floating_point()
        }

    def steps(self, k: int) -> int:
        return self.settings.epochs * len(self.batches(np.arange(len(self.parts[k]))))

    def effective_steps(self, k: int) -> float:
        """Compute how far steps of a constant gradient 1 and learning rate 1 go, with momentum."""
        speed = way = 0.0
        for _ in range(self.steps(k)):
            speed = self.settings.momentum * speed + 1
            way += speed
        return way

    def shares(self, clients: list[int]) -> dict[int, float]:
        total = sum(len(self.parts[k]) for k in clients)
        return {k: len(self.parts[k]) / total for k in clients}

    def mean(self, local: dict[int, State]) -> State:
        """Compute `Σ p_k w_k`, for buffers as for parameters."""
        p = self.shares(list(local))
        return {name: sum(p[k] * local[k][name] for k in local) for name in next(iter(local.values()))}

    def parameters(self, state: State) -> State:
        return {name: state[name] for name in self.trainable}

    def zeros(self) -> State:
        return {name: torch.zeros_like(self.start[name]) for name in self.trainable}


def training(net: nn.Module, x: Tensor) -> nn.Module:
    """Set training mode; for a batch of one, BatchNorm uses its running statistics."""
    net.train()
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm1d) and len(x) == 1:
            layer.eval()
    return net


def each(formula: Callable[..., Tensor], *states: State) -> State:
    """The formula for each name that all states have."""
    return {name: formula(*(s[name] for s in states)) for name in states[0] if all(name in s for s in states)}


def uniform_mean(states: list[State]) -> State:
    return each(lambda *tensors: sum(tensors) / len(tensors), *states)


def dot(a: State, b: State) -> Tensor:
    return sum(each(lambda x, y: (x * y).sum(), a, b).values())


def distance(a: State, b: State) -> Tensor:
    """Compute `‖a − b‖²`."""
    return sum(each(lambda x, y: ((x - y) ** 2).sum(), a, b).values())


def ce(b: Batch) -> Tensor:
    return -F.log_softmax(b.z, 1)[torch.arange(len(b.y)), b.y].mean()


def kl(p: Tensor, logits: Tensor) -> Tensor:
    """Compute `KL(p ‖ softmax(logits))`, the mean over the batch."""
    return (p * (p.log() - F.log_softmax(logits, 1))).sum(1).mean()


def class_means(values: Tensor, labels: Tensor) -> dict[int, Tensor]:
    return {c: values[labels == c].mean(0) for c in set(labels.tolist())}


def over_holders(known: dict[int, Tensor], local: list[dict[int, Tensor]]) -> dict[int, Tensor]:
    """The mean of the class means over those who hold the class; a class nobody holds keeps its last."""
    held = {c for means in local for c in means}
    new = {c: torch.stack([means[c] for means in local if c in means]).mean(0) for c in held}
    return {**known, **new}
