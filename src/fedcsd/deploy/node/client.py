"""Connect a node to Flower: the client part of the app, which passes each message to the node."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedcsd.deploy.wire import Parcel, content_of, parcel_of

if TYPE_CHECKING:
    from fedcsd.deploy.node.answers import Node

_nodes: dict[int, "Node"] = {}  # only in processes of Flower's simulation, which stay


def home() -> Path:
    """Return the default folder of a node's files."""
    return Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr")) / "fedcsd"


def answer(message: Message, context: Context) -> Message:
    """Return the node's answer to a message of the server."""
    parcel = parcel_of(message.content)
    alone = bool(parcel.header.get("alone")) and message.metadata.message_type == "train"
    return Message(content_of(ask_node(parcel, context), alone=alone), reply_to=message)


def ask_node(parcel: Parcel, context: Context) -> Parcel:
    """Ask the node: in this process in a simulation, else in the process that holds its data in memory."""
    if parcel.header["simulated"]:
        return _node(context).answer(parcel)
    from fedcsd.deploy.node.keeper import ask_keeper

    # The parent is the SuperNode's process; the keeper ends with it.
    return ask_keeper(parcel, context.node_config, home(), os.getppid())


def _node(context: Context) -> "Node":
    from fedcsd.deploy.node.answers import Node

    if context.node_id not in _nodes:
        _nodes[context.node_id] = Node(context.node_config, home())
    return _nodes[context.node_id]


def make_app(mods: Sequence[Callable[..., Any]] = ()) -> ClientApp:
    """Make the app. Flower's mods, such as LocalDpMod, wrap training; the server's settings `mods` or
    `clipping_norm` must tell of them."""
    app = ClientApp()
    app.train(mods=list(mods))(answer)
    app.query()(answer)
    app.evaluate()(answer)
    return app


app = make_app()

__all__ = ["answer", "app", "make_app"]
