"""The client of the Flower run, in a module of its own so that Ray's actors can import it."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.nn import functional as F
from workload import Batches, Work, read


@cache
def at_hand(folder: str) -> tuple[Work, nn.Module]:
    """Load the workload and a network once in each actor."""
    torch.set_num_threads(1)
    work = read(Path(folder))
    return work, work.network()


def client_app(folder: str) -> Any:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        work, network = at_hand(folder)
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        network.train()
        x, y = work.client(int(message.content["config"]["client"]))
        sgd = work.optimizer(network)
        for _ in range(work.settings.epochs):
            for some, labels in Batches(x, y, work.settings.batch_size):
                sgd.zero_grad()
                F.cross_entropy(network(some), labels).backward()  # type: ignore[no-untyped-call]
                sgd.step()
        content = {
            "arrays": ArrayRecord(network.state_dict()),
            "metrics": MetricRecord({"num-examples": len(y)}),
        }
        return Message(content=RecordDict(content), reply_to=message)

    return app
