"""FedAvg averages the weights of models that clients train.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from dataclasses import dataclass

from torch import Tensor

from fedcsd.aggregation import weighted_mean
from fedcsd.methods.base import Ask, Method, Server
from fedcsd.training import Batch, Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class FedAvg(Method):
    """Average the clients' weights by their number of samples; most methods build on this one."""

    def round(self, server: Server, ask: Ask) -> None:
        replies = ask(self.train, weights=server.weights)
        server.weights = weighted_mean(replies)

    def train(self, client: Client, weights: Weights) -> Values:
        return client.train(weights, self.loss)

    def loss(self, batch: Batch) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        return batch.cross_entropy
