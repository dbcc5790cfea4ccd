"""The client part of the Flower app: takes a message, has the node answer it, sends the answer."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedcsd.deploy.wire import Parcel, content_of, parcel_of

if TYPE_CHECKING:
    from fedcsd.deploy.node.answers import Node

_nodes: dict[int, "Node"] = {}  # in a process of Flower's simulation, which stays


def home() -> Path:
    """Where a node keeps its things, unless its config says otherwise."""
    return Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr")) / "fedcsd"


def answer(message: Message, context: Context) -> Message:
    parcel = parcel_of(message.content)
    alone = bool(parcel.header.get("alone")) and message.metadata.message_type == "train"
    return Message(content_of(ask_node(parcel, context), alone=alone), reply_to=message)


def ask_node(parcel: Parcel, context: Context) -> Parcel:
    """The node's answer: here in a simulation, else from the process that has its data in memory."""
    if parcel.header["simulated"]:
        return _node(context).answer(parcel)
    from fedcsd.deploy.node.keeper import ask_keeper

    # The parent is Flower's own process for starting these; the keeper lives as long as it does.
    return ask_keeper(parcel, context.node_config, home(), os.getppid())


def _node(context: Context) -> "Node":
    from fedcsd.deploy.node.answers import Node

    if context.node_id not in _nodes:
        _nodes[context.node_id] = Node(context.node_config, home())
    return _nodes[context.node_id]


def make_app(mods: Sequence[Callable[..., Any]] = ()) -> ClientApp:
    """The app. Flower's mods, such as LocalDpMod, go around training: the server has to be told with
    `mods` or `clipping_norm` that they are there."""
    app = ClientApp()
    app.train(mods=list(mods))(answer)
    app.query()(answer)
    app.evaluate()(answer)
    return app


app = make_app()

__all__ = ["answer", "app", "make_app"]
