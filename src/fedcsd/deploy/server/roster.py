"""Who is who: which node is which client, and what each of them has."""

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fedcsd.deploy.server.checks import shown
from fedcsd.deploy.server.post import Post
from fedcsd.deploy.wire import Malformed, Parcel
from fedcsd.errors import RunStopped, note

TELL = 30.0  # seconds after which it is said again who is waited for

Admit = Callable[[Mapping[str, Any]], int | None]
"""Which client a node is by what it says of itself, None for not yet known; Malformed if it cannot be one."""


class Roster:
    """Greets nodes that are new, and knows the others by what they answered."""

    def __init__(self, post: Post, hello: Mapping[str, Any], admit: Admit):
        self.post, self.hello, self.admit = post, dict(hello), admit
        self.nodes: dict[int, int] = {}  # of each client
        self.about: dict[int, dict[str, Any]] = {}  # by node
        self.refused: dict[int, str] = {}  # by node
        self._greeted: dict[str, int] = {}

    def refresh(self) -> None:
        """Greet who is new and read who has answered."""
        online = self.post.online()
        waiting = set(self._greeted.values())
        # One that went away may come back put right.
        self.refused = {node: why for node, why in self.refused.items() if node in online}
        if not self.nodes and self.about.keys() - online:  # nobody is appointed yet: a name is free again
            self.about = {node: about for node, about in self.about.items() if node in online}
            self.refused = {}
        for node in sorted(online - self.about.keys() - self.refused.keys() - waiting):
            if message := self.post.send(node, Parcel({"kind": "join", **self.hello}), "query", "join"):
                self._greeted[message] = node
        for arrival in self.post.collect(self._greeted):
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
        """Until so many are there; who is, is said when it changes and every half a minute."""
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

    def appoint(self, admit: Admit) -> None:
        """Give every node that is known its client, now that it can be told."""
        self.admit, known = admit, self.about
        self.about = {}
        for node, about in known.items():
            self._know(node, about, set())

    def node(self, client: int) -> int | None:
        """The node of a client, if it is there."""
        node = self.nodes.get(client)
        return node if node in self.post.online() else None

    def name(self, client: int) -> str:
        node = self.nodes.get(client)
        return shown(self.about[node]["name"]) if node in self.about else str(client)
