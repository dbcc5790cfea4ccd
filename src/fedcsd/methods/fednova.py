"""FedNova normalises updates, so that clients with more local steps do not weigh more.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020.
"""

from dataclasses import dataclass

from fedcsd.aggregation import Mean
from fedcsd.methods.base import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.training.optimizer import effective_steps
from fedcsd.weights import Values, Weights


@dataclass(frozen=True)
class FedNova(FedAvg):
    """Divide each client's update by its effective number of steps, and multiply by their mean."""

    def round(self, server: Server, ask: Ask) -> None:
        start = server.weights
        plain, update, steps, samples = Mean(), Mean(), 0.0, 0
        for reply in ask(self.train, weights=start):
            plain.add(reply.weights.flat, reply.samples)
            update.add((reply.weights.parameters - start.parameters) / reply["steps"], reply.samples)
            steps += reply.samples * reply["steps"]
            samples += reply.samples
        average = start.like(plain.value)  # for BatchNorm's statistics, which take no steps
        server.weights = average.with_parameters(start.parameters + steps / samples * update.value)

    def train(self, client: Client, weights: Weights) -> Values:
        trained = client.train(weights, self.loss)
        return {**trained, "steps": effective_steps(trained["steps"], client.settings.momentum)}
