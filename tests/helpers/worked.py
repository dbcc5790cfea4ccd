"""Make a federation for calculation by hand: two clients, quadratic losses, a model that is its weights.

Client 0 holds one sample and client 1 three, so that p = (1/4, 3/4). Every image is (1, s), and the
model's logits are its two weights, whatever the image; its one buffer `seen` adds up s, which is 1
for client 0 and 2 for client 1, over the steps trained. The gradient of client k's loss is w − t_k,
with t_0 = 16 and t_1 = −8 for the first weight; the second weight has −1/2 times these targets and,
all starting at zero, −1/2 times every result of a method that is linear in the gradients. With a
learning rate of 1/2 a step goes halfway to the target: w ← (w + t)/2.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcsd.data import Dataset
from fedcsd.experiments.experiment import Experiment
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Reply, Request
from fedcsd.training import Batch, Client
from helpers.federations import Here, small

TARGETS = torch.tensor([[16.0, -8.0], [-8.0, 4.0]])
"""of each client [2, 2]: a client's samples all have its number as label"""

Term = Callable[[Batch], Tensor]


class Toy(nn.Module):
    """A model whose logits are its weights, with a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(self.head.weight)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x[:, 1].mean()
        return self.head(x[:, :1])


def quadratic(
    cls: type, scale: float = 1, curvature: Sequence[float] = (1, 1), more: Term | None = None
) -> Any:
    """Return the method with `curvature/2 · (w − scale · t)²` as its clients' loss, plus `more`."""

    def loss(self: Any, batch: Batch) -> Tensor:
        far = batch.logits - scale * TARGETS[batch.labels]
        bent = torch.tensor(curvature)[batch.labels]
        value = 0.5 * (bent * far.square().sum(1)).mean()
        return value if more is None else value + more(batch)

    return type(cls.__name__, (cls,), {"loss": loss})


def towards(name: str) -> Term:
    """Return the term `1/4 · (w − w_name)²`, whose gradient is `(w − w_name)/2`; it is 0 without such a network."""

    def term(batch: Batch) -> Tensor:
        if name not in batch.frozen:
            return batch.logits.sum() * 0
        return 0.25 * (batch.logits - batch.frozen[name].logits).square().sum(1).mean()

    return term


class Overheard(Here):
    """A backend that keeps the clients' replies and their requests."""

    def __init__(self, experiment: Experiment):
        super().__init__(experiment)
        self.heard: list[tuple[str, Reply]] = []

    def ask(self, request: Request, clients: Sequence[int], states: Any) -> Iterator[Reply]:
        for reply in super().ask(request, clients, states):
            self.heard.append((request.function, reply))
            yield reply


def trainings(federation: Federation) -> list[Reply]:
    """Return the replies of all rounds to requests that train."""
    assert isinstance(federation.backend, Overheard)
    return [reply for function, reply in federation.backend.heard if function == "train"]


def federate(method: Any, data: Dataset, parts: Sequence[Any], factory: Any, **values: Any) -> Federation:
    """Return a federation of two clients with these rows; by default plain SGD, learning rate 1/2, one epoch of one batch."""
    plain = {"epochs": 1, "batch_size": 8, "lr": 0.5, "momentum": 0.0, "weight_decay": 0.0}
    values = {**plain, **values, "dataset": data, "factory": factory}
    experiment = small(method, clients=2, min_samples=1, **values)
    experiment = Experiment(**{**vars(experiment), "parts": [np.array(rows) for rows in parts]})
    return Federation(experiment, Overheard(experiment))


def toy(method: Any, samples: tuple[int, int] = (1, 3), factory: Any = Toy, **values: Any) -> Federation:
    """Return the toy federation."""
    labels = np.repeat([0, 1], samples)
    images = np.stack([np.ones(len(labels)), labels + 1], 1).astype(np.float32)
    parts = [np.flatnonzero(labels == k) for k in (0, 1)]
    return federate(method, Dataset.of_arrays(images, labels, images, labels), parts, factory, **values)


def flats(federation: Federation, rounds: int) -> list[list[float]]:
    """Return the global weights after each round: the two weights and the buffer."""
    found = []
    for _ in range(rounds):
        federation.step()
        found.append(federation.server.weights.flat.tolist())
    return found


def heads(found: list[list[float]]) -> Any:
    """Return the two weights of each round."""
    return np.array(found)[:, :2]


def doubled(*first: float) -> Any:
    """Return the expectation for both weights from that for the first, up to float32's rounding."""
    return pytest.approx(np.array([[w, -w / 2] for w in first]), rel=1e-6)


def personal(federation: Federation, client: int) -> dict[str, Tensor]:
    """Return the model that a client uses for itself, by name."""
    experiment = federation.setup
    here = Client(
        experiment.worker().workspace, client, federation.round, dict(federation.states.get(client, {}))
    )
    return experiment.method.personal(here, federation.server.weights).named()
