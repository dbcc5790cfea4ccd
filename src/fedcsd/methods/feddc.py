"""FedDC: each client keeps its drift from the global model, and is averaged with the drift put right.

Gao et al., "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction",
CVPR 2022.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedcsd.config import option
from fedcsd.methods.scaffold import Scaffold
from fedcsd.sgd import Gradient
from fedcsd.training import Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class FedDC(Scaffold):
    """SCAFFOLD's correction, `(α/2)‖w + h_k − w_G‖²`, and the mean of `w_k + h_k`, `h_k` the drift so far."""

    alpha: float = option(0.01, "strength of the pull towards the global model less the drift", ge=0)

    def train(self, client: Client, weights: Weights, variate: Tensor) -> Values:
        reply: dict[str, Any] = {**super().train(client, weights, variate)}
        trained: Weights = reply["weights"]
        drift = self.drift(client, weights) + (trained.parameters - weights.parameters)
        client.state["drift"] = drift
        reply["weights"] = trained.with_parameters(trained.parameters + drift)
        return reply

    def gradient(self, client: Client, weights: Weights, correction: Tensor) -> Gradient:
        goal = weights.parameters - self.drift(client, weights)
        return lambda w, g: g.add_(correction).add_(w - goal, alpha=self.alpha)

    def drift(self, client: Client, weights: Weights) -> Tensor:
        """`h_k`, the sum of all local updates that this client has made."""
        drift: Tensor = client.state.get("drift", torch.zeros_like(weights.parameters))
        return drift
