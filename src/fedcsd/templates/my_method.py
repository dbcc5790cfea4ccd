"""Say here in a line what is new about MyMethod.

    fedcsd run --method my_method.py:MyMethod
    fedcsd run --method my_method.py:MyMethod:mu=0.1
    fedcsd compare --methods fedavg,my_method.py:MyMethod --seeds 0,1,2

It pulls clients towards the middle between the global model and their own last
one while they train. Change it part by part.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedcsd.aggregation import weighted_mean
from fedcsd.config import option
from fedcsd.methods import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Batch, Client
from fedcsd.weights import Values, Weights
from torch import Tensor


@dataclass(frozen=True)  # frozen: what a method learns is state, not an option
class MyMethod(FedAvg):
    """Hold FedAvg's clients near the global model and their own last one."""

    # An option has a default, a meaning and the range of its values. It is checked, and
    # set with my_method.py:MyMethod:mu=0.1 or --set method.mu=0.1.
    mu: float = option(0.01, "strength of the pull", ge=0)

    # Presets are named values of the options: my_method.py:MyMethod:strong
    presets: ClassVar[dict[str, dict[str, Any]]] = {"strong": {"mu": 0.1}}

    # The server calls start() and round().

    def start(self, server: Server) -> None:
        """Set before round 1 what the server remembers beside server.weights.

        These are weights, tensors and numbers; all of them are in the checkpoints. Replace
        values, never change them in place: a round that is cut off is undone.
        """
        server.rounds = 0

    def round(self, server: Server, ask: Ask) -> None:
        """Ask the round's clients, and set the server's new values.

        Values named here are sent to the clients and counted as bytes. Read all replies
        of one question before you ask the next; a method may ask several times.
        """
        replies = ask(self.train, weights=server.weights)
        server.weights = weighted_mean(replies)  # by the clients' numbers of samples
        server.rounds = server.rounds + 1

    # A client runs the functions that the server asks for.

    def train(self, client: Client, weights: Weights) -> Values:
        """Train from the global weights, and return the reply."""
        # State is what this client keeps for the next round it takes part in. It is empty
        # at first, and holds tensors and numbers.
        last = client.state.get("last", weights.parameters)
        middle = (weights.parameters + last) / 2

        result = client.train(weights, self.loss, gradient=self.pull, given={"middle": middle})
        client.state["last"] = result["weights"].parameters

        # A note is a measurement, here how far the client went. Its average over all
        # clients is in the round's record (metrics.jsonl).
        client.note("distance", (client.state["last"] - weights.parameters).norm())
        return result

    def pull(self, parameters: Tensor, gradient: Tensor, given: Mapping[str, Tensor]) -> None:
        """Add the gradient of mu/2 * |w - middle|^2 in place, before each step.

        Parameters and gradient are one flat vector each, for any model. Tensors come in
        given, not in a closure: so a GPU can record the step once for all clients.
        """
        gradient.add_(parameters - given["middle"], alpha=self.mu)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each sample of a batch, and measurements of each.

        batch has logits, features and labels, what was given, and the outputs of frozen
        networks (client.train(..., frozen={"teacher": weights}) gives batch.frozen["teacher"]).
        """
        right = batch.logits.argmax(1) == batch.labels
        return batch.cross_entropy, {"batch_accuracy": right.float()}
