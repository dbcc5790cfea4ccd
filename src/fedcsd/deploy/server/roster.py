"""Keep the roster: which node is which client, and what its data is."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedcsd.deploy.server.checks import shown
from fedcsd.deploy.server.transport import Transport
from fedcsd.deploy.wire import Malformed, Parcel
from fedcsd.errors import RunStopped, note

TELL = 30.0  # seconds between lines about the nodes that are waited for

Admit = Callable[[Mapping[str, Any]], int | None]
"""From a node's facts to its client, or None while that is open; raises Malformed for a node that cannot take part."""


class Roster:
    """Greets new nodes, and knows the others by their answers."""

    def __init__(self, transport: Transport, hello: Mapping[str, Any], admit: Admit):
        self.transport, self.hello, self.admit = transport, dict(hello), admit
        self.nodes: dict[int, int] = {}  # by client
        self.about: dict[int, dict[str, Any]] = {}  # by node
        self.refused: dict[int, str] = {}  # by node
        self._greeted: dict[str, int] = {}

    def refresh(self) -> None:
        """Greet new nodes and read the answers of those that were greeted."""
        online = self.transport.online()
        waiting = set(self._greeted.values())
        # A node that went away may come back corrected.
        self.refused = {node: why for node, why in self.refused.items() if node in online}
        if not self.nodes and self.about.keys() - online:  # no client has a node yet: a name is free again
            self.about = {node: about for node, about in self.about.items() if node in online}
            self.refused = {}
        for node in sorted(online - self.about.keys() - self.refused.keys() - waiting):
            if message := self.transport.send(node, Parcel({"kind": "join", **self.hello}), "query", "join"):
                self._greeted[message] = node
        for arrival in self.transport.collect(self._greeted):
            node = self._greeted.pop(arrival.message)
            if arrival.gone:
                continue
            parcel = arrival.parcel or Parcel({"error": arrival.failed or arrival.wrong})
            self._know(node, parcel.header, online)

    def _know(self, node: int, about: dict[str, Any], online: set[int]) -> None:
        try:
            if "error" in about:
                raise Malformed(shown(about["error"]))
            if not isinstance(about.get("name"), str) or type(about.get("samples")) is not int:
                raise Malformed("it does not say who it is")
            client = self.admit(about)
            if client is not None and self.nodes.get(client, node) in online - {node}:
                raise Malformed(f"another node is {shown(about['name'])} already")
            if client is None and about["name"] in {self.about[n]["name"] for n in self.about if n in online}:
                raise Malformed(
                    "another site has that name already: stop this one, and give it one of its own"
                )
        except (Malformed, ValueError, KeyError, TypeError, OverflowError) as error:
            self.refused[node] = str(error)
            note(f"node {node} ({shown(about.get('name', 'unnamed'))}) is not let in: {error}")
            return
        self.about[node] = about
        if client is not None:
            self.nodes[client] = node

    def wait(self, there: Callable[[], Collection[object]], wanted: int, what: str, timeout: float) -> None:
        """Wait for so many nodes; print who is there when that changes, and every half a minute."""
        until, told, last = time.monotonic() + (timeout or math.inf), -math.inf, ""
        while len(there()) < wanted:
            self.refresh()
            names = ", ".join(sorted(shown(about["name"]) for about in self.about.values()))
            text = f"{len(there())} of {wanted} {what} are there{f' ({names})' if names else ''}"
            if time.monotonic() > until:
                refused = f": {next(iter(self.refused.values()))}" if self.refused else ""
                raise RunStopped(f"{text}{refused}")
            if len(there()) < wanted and (text != last or time.monotonic() - told > TELL):
                print(f"{text}; waiting for the others", flush=True)
                told, last = time.monotonic(), text
            time.sleep(0.5)

    def assign(self, admit: Admit) -> None:
        """Give every known node its client."""
        self.admit, known = admit, self.about
        self.about = {}
        for node, about in known.items():
            self._know(node, about, set())

    def node(self, client: int) -> int | None:
        """Return the node of a client, or None if it is offline."""
        node = self.nodes.get(client)
        return node if node in self.transport.online() else None

    def name(self, client: int) -> str:
        """Return the name of a client's node."""
        node = self.nodes.get(client)
        return shown(self.about[node]["name"]) if node in self.about else str(client)
