"""Answer Flower's messages by nodes that are objects of this process.

What is tested with it is what fedcsd makes of messages; the processes and the network are tested for real
in test_bits.py and test_trouble.py.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from fedcsd.deploy.node.answers import Node
from fedcsd.deploy.server.serve import serve
from fedcsd.deploy.wire import Parcel, content_of, parcel_of
from fedcsd.experiments import running as jobs

Change = Callable[[Parcel, Parcel, int], Parcel | None]
"""(request, reply, node) to what arrives instead, None for nothing at all."""


class LoopGrid:
    """A grid that has nodes 100, 101, …; each is the client of its position."""

    def __init__(self, folder: Path, nodes: int, change: Change | None = None):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        configs = [{"partition-id": k, "state": str(folder / f"node-{k}")} for k in range(nodes)]
        self.nodes = {100 + k: Node(config, folder) for k, config in enumerate(configs)}
        self.apps: dict[int, ClientApp] = {}
        self.online, self.change = set(self.nodes), change
        self.seen: list[tuple[int, Parcel]] = []
        self.replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        return list(self.online)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._deliver(message) for message in messages]

    def _deliver(self, message: Message) -> str:
        number = f"m{len(self.seen)}"
        message.metadata.__dict__["_message_id"] = number
        request, node = parcel_of(message.content), message.metadata.dst_node_id
        self.seen.append((node, request))
        alone = bool(request.header.get("alone")) and message.metadata.message_type == "train"
        if node in self.apps:  # with Flower's mods around it
            context = Context(1, node, self.nodes[node].config, RecordDict(), {})
            self.replies[number] = self.apps[node](message, context)
            return number
        reply: Parcel | None = self.nodes[node].answer(request)
        assert reply is not None
        if self.change:
            reply = self.change(request, reply, node)
        if reply is not None:
            self.replies[number] = Message(content_of(reply, alone=alone), reply_to=message)
        return number

    def pull_messages(self, numbers: Iterable[str]) -> Iterable[Message]:
        return [self.replies.pop(number) for number in list(numbers) if number in self.replies]


def of_sites(folder: Path, data: dict[str, str], change: Change | None = None) -> LoopGrid:
    """Return a grid whose nodes have data of their own, by the sites' names."""
    grid = LoopGrid(folder, 0, change)
    for number, (name, path) in enumerate(data.items()):
        grid.nodes[100 + number] = Node({"site": name, "data": path, "state": str(folder / name)}, folder)
    grid.online = set(grid.nodes)
    return grid


def with_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a small model with BatchNorm, whose statistics travel with the weights."""
    first = nn.Conv2d(shape[0], 4, 3, stride=2)
    body = [
        first,
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(8),
        nn.ReLU(),
        nn.Linear(8, classes),
    ]
    model = nn.Sequential(*body)
    model(torch.zeros(2, *shape))
    return model


def deployed(grid: LoopGrid, out: Path, **config: Any) -> jobs.Run:
    values = {"data": "digits", "clients": len(grid.nodes), "rounds": 2, "epochs": 1, "beta": 0.5}
    values |= {"join_timeout": 20.0, **config}
    return serve(grid, {"out": str(out), **values})  # type: ignore[arg-type]
