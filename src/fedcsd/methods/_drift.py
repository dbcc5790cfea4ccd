"""The server of FedDyn and FedDC corrects the drift of all clients."""

from collections.abc import Iterable

from fedcsd.aggregation import Mean
from fedcsd.messages import Reply
from fedcsd.methods.base import Server


def average_with_drift(server: Server, replies: Iterable[Reply]) -> None:
    """Compute `H ← H + (1/N) Σ (w_k − w_G)`, `w_G ← mean w_k + H`, sums and means over the cohort.

    H (`server.drift`) is the mean over all N clients of each one's updates so far. The mean of the
    models is unweighted; BatchNorm's statistics do not drift and are averaged by samples.
    """
    start = server.weights
    plain, mean = Mean(), Mean()
    for reply in replies:
        plain.add(reply.weights.flat, reply.samples)
        mean.add(reply.weights.parameters)
    server.drift = server.drift + (mean.weight / server.clients) * (mean.value - start.parameters)
    server.weights = start.like(plain.value).with_parameters(mean.value + server.drift)
