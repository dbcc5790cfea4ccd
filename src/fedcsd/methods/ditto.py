"""Ditto trains a model for each client beside the global one, and pulls it towards the global one.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedcsd.config import option
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class Ditto(FedAvg):
    """Train a personal model on the local loss + `(λ/2)‖v − w_G‖²`; the global model is FedAvg's."""

    mu: float = option(0.1, "strength λ of the personal model's pull towards the global one", ge=0)

    def train(self, client: Client, weights: Weights) -> Values:
        trained = client.train(weights, self.loss)
        client.state["personal"] = client.train(
            self.personal(client, weights),
            self.loss,
            gradient=self.pull,
            given={"start": weights.parameters},
            name="personal",
        )["weights"]
        return trained

    def pull(self, parameters: Tensor, gradient: Tensor, given: Mapping[str, Tensor]) -> None:
        gradient.add_(parameters - given["start"], alpha=self.mu)

    def personal(self, client: Client, weights: Weights) -> Weights:
        """Return the client's own model; before its first training that is the global one."""
        personal: Weights = client.state.get("personal", weights)
        return personal
