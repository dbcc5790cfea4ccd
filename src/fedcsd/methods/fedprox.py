"""FedProx pulls clients back to the global model.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedcsd.config import option
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class FedProx(FedAvg):
    """Add `(μ/2)‖w − w_G‖²` to the local loss."""

    mu: float = option(0.001, "strength of the pull towards the global model", ge=0)

    def train(self, client: Client, weights: Weights) -> Values:
        # The term's gradient is exact and costs one operation, so it is not part of the loss.
        return client.train(weights, self.loss, gradient=self.pull, given={"start": weights.parameters})

    def pull(self, parameters: Tensor, gradient: Tensor, given: Mapping[str, Tensor]) -> None:
        gradient.add_(parameters - given["start"], alpha=self.mu)
