"""MyMethod: say here in a line what is new about it.

    fedcsd run --method my_method.py:MyMethod
    fedcsd run --method my_method.py:MyMethod:mu=0.1
    fedcsd compare --methods fedavg,my_method.py:MyMethod --seeds 0,1,2

What it does now: clients are pulled towards the middle between the global model
and their own last one while they train. Change it part by part.
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
    """FedAvg whose clients are held near the global model and their own last one."""

    # Options: default, meaning, and the range of values. They are checked, and set
    # with my_method.py:MyMethod:mu=0.1 or --set method.mu=0.1. An option needs a default.
    mu: float = option(0.01, "strength of the pull", ge=0)

    # Settings of the options that have a name: my_method.py:MyMethod:strong
    presets: ClassVar[dict[str, dict[str, Any]]] = {"strong": {"mu": 0.1}}

    # ---- The server's half ---------------------------------------------------------

    def start(self, server: Server) -> None:
        """Before round 1: set what the server remembers beside server.weights.

        Weights, tensors and numbers; all of it is in the checkpoints. Replace values,
        never change them in place: a round that is cut off is undone.
        """
        server.rounds = 0

    def round(self, server: Server, ask: Ask) -> None:
        """One round: ask the round's clients, and set the server's new values.

        Values named here are sent to the clients and counted as bytes. Read all replies
        of one question before you ask the next; a method may ask several times.
        """
        replies = ask(self.train, weights=server.weights)
        server.weights = weighted_mean(replies)  # by the clients' numbers of samples
        server.rounds = server.rounds + 1

    # ---- The client's half: what the server asks for --------------------------------

    def train(self, client: Client, weights: Weights) -> Values:
        """Local training from the global weights; what is returned is the reply."""
        # State: what this client keeps for the next round it takes part in. It is
        # empty at first, and holds tensors and numbers.
        last = client.state.get("last", weights.parameters)
        middle = (weights.parameters + last) / 2

        result = client.train(weights, self.loss, gradient=self.pull, given={"middle": middle})
        client.state["last"] = result["weights"].parameters

        # A note is a measurement, averaged over all clients into the round's record
        # (metrics.jsonl): here how far the client went.
        client.note("distance", (client.state["last"] - weights.parameters).norm())
        return result

    def pull(self, parameters: Tensor, gradient: Tensor, given: Mapping[str, Tensor]) -> None:
        """The gradient, changed in place before each step: here that of mu/2 * |w - middle|^2.

        Parameters and gradient are one flat vector each, for any model. Tensors come in
        given, not in a closure: so a GPU can record the step once for all clients.
        """
        gradient.add_(parameters - given["middle"], alpha=self.mu)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each sample of a batch; beside it measurements of each.

        batch has logits, features and labels, what was given, and the outputs of frozen
        networks (client.train(..., frozen={"teacher": weights}) gives batch.frozen["teacher"]).
        """
        right = batch.logits.argmax(1) == batch.labels
        return batch.cross_entropy, {"batch_accuracy": right.float()}
