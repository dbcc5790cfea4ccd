"""Who holds what: the training samples dealt to clients. Each function is one way, named in `partitions`."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fedcsd import seeds
from fedcsd.config import Settings
from fedcsd.errors import UserError, unknown

Rows = npt.NDArray[np.int64]
TRIES = 1000


def dirichlet(labels: Rows, settings: Settings, random: np.random.Generator) -> list[Rows]:
    """Label skew: each class is dealt in shares drawn from Dir(β); a client that has its fair share gets no more."""
    clients, fair = settings.clients, len(labels) / settings.clients
    classes = np.unique(labels)
    for _ in range(TRIES):
        held: list[list[Rows]] = [[] for _ in range(clients)]
        sizes = np.zeros(clients, dtype=np.int64)
        for label in classes:
            rows = np.flatnonzero(labels == label)
            random.shuffle(rows)
            shares = random.dirichlet(np.full(clients, settings.beta)) * (sizes < fair)
            if shares.sum() <= 0:  # every client with a share is full: at tiny β the draw is one client
                open_clients = np.flatnonzero(sizes < fair)
                shares = np.zeros(clients)
                shares[random.choice(open_clients)] = 1
            cuts = (np.cumsum(shares / shares.sum())[:-1] * len(rows)).astype(np.int64)
            for client, some in enumerate(np.split(rows, cuts)):
                held[client].append(some)
                sizes[client] += len(some)
        if sizes.min() >= settings.min_samples:
            return [random.permutation(np.concatenate(some)) for some in held]
    raise UserError(
        f"no Dirichlet partition in {TRIES} tries gave each of {clients} clients {settings.min_samples} samples at beta {settings.beta}: "
        "raise --beta, lower --clients or --min-samples, or try another --partition-seed"
    )


def iid(labels: Rows, settings: Settings, random: np.random.Generator) -> list[Rows]:
    """No skew: a random deal into clients of equal size."""
    return [np.array(part) for part in np.array_split(random.permutation(len(labels)), settings.clients)]


partitions: dict[str, Callable[[Rows, Settings, np.random.Generator], list[Rows]]] = {
    "dirichlet": dirichlet,
    "iid": iid,
}


def split(labels: Rows, settings: Settings) -> list[Rows]:
    """The rows of each client, by the settings' partition and its own seed."""
    if settings.partition not in partitions:
        raise unknown("partition", settings.partition, partitions)
    if settings.clients * settings.min_samples > len(labels):
        raise UserError(
            f"{len(labels)} training samples cannot give {settings.clients} clients {settings.min_samples} each: "
            "lower --clients or --min-samples"
        )
    parts = partitions[settings.partition](labels, settings, seeds.rng(settings.partition_seed, "partition"))
    return [np.ascontiguousarray(part, dtype=np.int64) for part in parts]
