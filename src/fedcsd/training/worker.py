"""Run one client function of the method for one client; evaluate a model on a block of images."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fedcsd import seeds
from fedcsd.errors import Diverged
from fedcsd.kernels.vectors import cross_entropy
from fedcsd.messages import Reply, Request, check_kinds
from fedcsd.plugins import check_call
from fedcsd.training.client import Client
from fedcsd.training.engines.eager import Eager
from fedcsd.training.task import Engine
from fedcsd.training.workspace import Workspace
from fedcsd.weights import Values


class Worker:
    """Answers requests for the clients of a workspace, one at a time."""

    def __init__(self, workspace: Workspace, method: Any):
        self.workspace, self.method = workspace, method
        self.engine = Eager()
        self.start_generators: Callable[[int], object] = partial(
            seeds.start, cuda=workspace.device.type == "cuda"
        )

    def another(self) -> "Worker":
        """Return a worker for the same clients with models of its own, for another lane."""
        return Worker(self.workspace.another(), self.method)

    def answer(
        self,
        request: Request,
        number: int,
        state: Values,
        *,
        engine: Engine | None = None,
        start_generators: Callable[[int], object] | None = None,
    ) -> Reply:
        """Run one client function of the method for one client.

        `start_generators` replaces the start of the process's random generators, for lanes that share
        them with others.
        """
        self.workspace.begin(request.round)
        client = Client(
            self.workspace,
            number,
            request.round,
            dict(state),
            self.method,
            engine or self.engine,
            start_generators or self.start_generators,
        )
        place = (request.round, number)
        purpose = f"function {request.function}"
        client.start_generators(seeds.torch_seed(client.settings.seed, purpose, *place))
        function = getattr(self.method, request.function)
        try:
            values = function(client, **request.values)
        except Diverged as error:
            return Reply(number, client.samples, notes=client.notes, state=state, problem=str(error))
        except TypeError:
            check_call(function, ["client"], request.values)
            raise
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{request.function} must return a dict of values; it returned a {type(values).__name__}"
            )
        check_kinds(values, "a reply")
        check_kinds(client.state, "the state")
        return Reply(number, client.samples, dict(values), client.notes, client.state)

    def evaluate(self, request: Request, block: int) -> Reply:
        """Return which images of a block are classified rightly, and the summed loss."""
        workspace = self.workspace
        workspace.begin(request.round)
        x, y, rows = workspace.blocks[block]
        logits = workspace.forward(workspace.frozen("", request.values["weights"]), x, rows).logits
        loss = float(cross_entropy(logits, y[rows]).sum(dtype=torch.float64))
        return Reply(block, len(rows), {"correct": logits.argmax(1) == y[rows]}, {"loss": (loss, len(rows))})

    def evaluate_all(self, request: Request) -> tuple[list[Reply], int]:
        """Return the replies of all blocks, and the number of test images; they come before held-out images."""
        blocks = range(len(self.workspace.blocks))
        return [self.evaluate(request, block) for block in blocks], len(self.workspace.data.y_test)
