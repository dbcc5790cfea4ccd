"""FedDC keeps each client's drift from the global model and corrects it at the server.

Gao et al., "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction",
CVPR 2022.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcsd.config import option
from fedcsd.messages import Reply
from fedcsd.methods._drift import average_with_drift
from fedcsd.methods.base import Server
from fedcsd.methods.scaffold import Scaffold
from fedcsd.training import Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class FedDC(Scaffold):
    """Add `(α/2)‖w + h_k − w_G‖²` to SCAFFOLD's correction, `h_k` the client's drift; the server adds their mean."""

    alpha: float = option(0.01, "strength of the pull towards the global model less the drift", ge=0)

    def start(self, server: Server) -> None:
        super().start(server)
        server.drift = torch.zeros_like(server.weights.parameters)

    def average(self, server: Server, replies: Iterable[Reply]) -> None:
        average_with_drift(server, replies)

    def train(self, client: Client, weights: Weights, variate: Tensor) -> Values:
        reply = super().train(client, weights, variate)
        update = reply["weights"].parameters - weights.parameters
        client.state["drift"] = self.drift(client, weights) + update
        return reply

    def given(self, client: Client, weights: Weights, correction: Tensor) -> dict[str, Tensor]:
        return {"correction": correction, "goal": weights.parameters - self.drift(client, weights)}

    def correct(self, parameters: Tensor, gradient: Tensor, given: Mapping[str, Tensor]) -> None:
        gradient.add_(given["correction"]).add_(parameters - given["goal"], alpha=self.alpha)

    def drift(self, client: Client, weights: Weights) -> Tensor:
        """Return `h_k`, the sum of all local updates that this client has made."""
        drift: Tensor = client.state.get("drift", torch.zeros_like(weights.parameters))
        return drift
