"""A method keeps a part of the model at its client, as FedBN and FedPer do."""

from abc import abstractmethod
from dataclasses import dataclass

from torch import Tensor

from fedcsd.aggregation import Mean
from fedcsd.methods.base import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.weights import Layout, Values, Weights


@dataclass(frozen=True)
class PartlyLocal(FedAvg):
    """Average all weights but the local part.

    The global weights keep the initial values there; a client starts from them in its first round.
    """

    @abstractmethod
    def local(self, layout: Layout) -> Tensor:
        """Return true for the numbers of the flat weights that stay with the client [size]."""

    def round(self, server: Server, ask: Ask) -> None:
        shared = Mean()
        for reply in ask(self.train, weights=server.weights):
            shared.add(reply["shared"], reply.samples)
        server.weights = server.weights.replaced(~self.local(server.weights.layout), shared.value)

    def train(self, client: Client, weights: Weights) -> Values:
        trained: Weights = client.train(self.personal(client, weights), self.loss)["weights"]
        local = self.local(weights.layout)
        client.state["local"] = trained.flat[local]
        return {"shared": trained.flat[~local]}

    def personal(self, client: Client, weights: Weights) -> Weights:
        if "local" not in client.state:
            return weights
        return weights.replaced(self.local(weights.layout), client.state["local"])
