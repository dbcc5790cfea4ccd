"""Clients on one GPU, one after another, in this process."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fedcsd.backends import in_short
from fedcsd.errors import MethodFailed
from fedcsd.exchange import Reply, Request
from fedcsd.training import Site
from fedcsd.weights import Values, Weights, moved


class DeviceBackend:
    """The data lies on the device; requests are moved there, replies back to the CPU."""

    def __init__(self, site: Site):
        self.site = site

    def ask(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        there = replace(request, values=moved(request.values, self.site.device))
        for client in clients:
            state = states.get(client, {})
            try:
                reply = self.site.answer(there, client, moved(state, self.site.device))
            except Exception as error:
                failed = MethodFailed(f"client {client} failed: {in_short(error)}")
                failed.add_note(traceback.format_exc())
                raise failed from error
            yield replace(reply, values=moved(reply.values, "cpu"), state=moved(reply.state, "cpu"))

    def evaluate(self, round: int, weights: Weights) -> list[Reply]:
        request = Request(round, "evaluate", {"weights": weights.to(self.site.device)})
        replies = (self.site.evaluate(request, block) for block in range(len(self.site.blocks)))
        return [replace(reply, values=moved(reply.values, "cpu")) for reply in replies]

    def close(self) -> None:
        pass
