"""FedProto draws features to the federation's mean feature of their class.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022. The
original keeps models local; here weights are averaged as well, as the FedCSD paper compares it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedcsd.aggregation import Mean
from fedcsd.config import option
from fedcsd.methods.base import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.objectives import HolderMean, class_prototypes
from fedcsd.training import Batch, Client
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class FedProto(FedAvg):
    """Add `μ · MSE(h, P_y)`, `P_y` being the mean over clients of their mean features of class y."""

    mu: float = option(1.0, "weight of the distance to the prototypes", ge=0)

    def start(self, server: Server) -> None:
        server.prototypes = server.weights.flat.new_zeros(server.classes, server.features)
        server.known = server.weights.flat.new_zeros(server.classes, dtype=torch.bool)

    def round(self, server: Server, ask: Ask) -> None:
        weights, prototypes = Mean(), HolderMean(server.prototypes)
        for reply in ask(
            self.train, weights=server.weights, prototypes=server.prototypes, known=server.known
        ):
            weights.add(reply.weights.flat, reply.samples)
            prototypes.add(reply["prototypes"], reply["held"])
        server.weights = server.weights.like(weights.value)
        server.prototypes, server.known = prototypes.value, server.known | prototypes.held

    def train(self, client: Client, weights: Weights, prototypes: Tensor, known: Tensor) -> Values:
        trained = client.train(weights, self.loss, given={"prototypes": prototypes, "known": known})
        features = client.outputs(trained["weights"]).features
        own, counts = class_prototypes(features, client.labels, client.classes)
        return {**trained, "prototypes": own, "held": counts > 0}

    def loss(self, batch: Batch) -> Tensor:
        """Count zero for a class without a prototype, as all are in the first round."""
        known = batch.given["known"][batch.labels].to(batch.features.dtype)
        distance = (batch.features - batch.given["prototypes"][batch.labels]).pow(2).mean(1)
        return batch.cross_entropy + self.mu * known * distance
