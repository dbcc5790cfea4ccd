"""A server optimizer treats the mean update as the gradient of an adaptive method.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (Algorithm 2).
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcsd.aggregation import weighted_mean
from fedcsd.config import option
from fedcsd.methods.base import Ask, Server
from fedcsd.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Adaptive(FedAvg):
    """Compute `Δ = Σ p_k w_k − w_G`, `m ← β₁m + (1 − β₁)Δ`, `w_G ← w_G + η m/(√v + τ)`.

    There is no bias correction. The step acts on trainable parameters; BatchNorm's statistics are averaged
    as in FedAvg.
    """

    server_lr: float = option(0.01, "learning rate η of the server", gt=0)
    beta1: float = option(0.9, "momentum of the server's updates", ge=0, lt=1)
    adaptivity: float = option(0.001, "τ, added to the root of v: larger is less adaptive", gt=0)

    @abstractmethod
    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """Return the new v from the old one and Δ²."""

    def start(self, server: Server) -> None:
        server.first = torch.zeros_like(server.weights.parameters)
        server.second = torch.full_like(server.first, self.adaptivity**2)

    def round(self, server: Server, ask: Ask) -> None:
        average = weighted_mean(ask(self.train, weights=server.weights))
        start = server.weights.parameters
        delta = average.parameters - start
        server.first = self.beta1 * server.first + (1 - self.beta1) * delta
        server.second = self.second_moment(server.second, delta.square())
        step = self.server_lr * server.first / (server.second.sqrt() + self.adaptivity)
        server.weights = average.with_parameters(start + step)
