"""Deal the training samples to clients. Each function in `partitions` is one way."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from fedcsd import seeds
from fedcsd.config import Settings
from fedcsd.config.options import call_with
from fedcsd.data.dataset import Dataset, Groups
from fedcsd.errors import UserError, note, unknown

Rows = npt.NDArray[np.int64]
Counts = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""Samples of each class at each client: [clients, classes]."""
TRIES = 1000
UNREADABLE = (OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, BadZipFile, zlib.error)
"""Errors of NumPy for a damaged .npz file."""


def counts_of(data: Dataset, parts: Sequence[Rows]) -> Counts:
    """Count the samples of each class at each client."""
    labels = data.y_train.cpu().numpy()
    return np.array([np.bincount(labels[rows], minlength=data.classes) for rows in parts])


def names_of(data: Dataset, parts: Sequence[Rows]) -> list[str]:
    """Return the names of the clients if each is one writer, hospital or domain; else an empty list."""
    if data.groups is None:
        return []
    held = [np.unique(data.groups.train.numpy()[rows]) for rows in parts]
    numbers = [int(some[0]) for some in held if len(some) == 1]
    return [data.groups.names[n] for n in numbers] if len(set(numbers)) == len(parts) else []


@dataclass(frozen=True)
class Deal:
    """All that a partition is made from."""

    labels: Rows
    groups: Groups | None
    clients: int
    beta: float
    min_samples: int
    random: np.random.Generator

    def until_large_enough(self, attempt: Callable[[], list[Rows]]) -> list[Rows]:
        """Try until the smallest client has enough samples, at most TRIES times."""
        for _ in range(TRIES):
            parts = attempt()
            if min(map(len, parts)) >= self.min_samples:
                return parts
        raise UserError(
            f"no partition in {TRIES} tries gave each of {self.clients} clients {self.min_samples} samples "
            f"at beta {self.beta:g}: raise --beta, lower --clients or --min-samples, or try another --partition-seed"
        )


def dirichlet(deal: Deal) -> list[Rows]:
    """Skew the labels: deal each class in shares drawn from Dir(beta); a client that has its fair share gets no more."""
    return deal.until_large_enough(lambda: _dirichlet(deal))


def _dirichlet(deal: Deal) -> list[Rows]:
    clients, random, fair = deal.clients, deal.random, len(deal.labels) / deal.clients
    held: list[list[Rows]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, dtype=np.int64)
    for label in np.unique(deal.labels):
        rows = random.permutation(np.flatnonzero(deal.labels == label))
        shares = random.dirichlet(np.full(clients, deal.beta)) * (sizes < fair)
        if shares.sum() <= 0:  # at tiny beta the whole draw may go to a client that is full
            shares = np.zeros(clients)
            shares[random.choice(np.flatnonzero(sizes < fair))] = 1
        cuts = (np.cumsum(shares / shares.sum())[:-1] * len(rows)).astype(np.int64)
        for client, some in enumerate(np.split(rows, cuts)):
            held[client].append(some)
            sizes[client] += len(some)
    return [random.permutation(np.concatenate(some)) for some in held]


def iid(deal: Deal) -> list[Rows]:
    """Deal at random into clients of equal size, without skew."""
    return _cut(deal.random.permutation(len(deal.labels)), deal.clients)


def quantity(deal: Deal) -> list[Rows]:
    """Skew the quantity: draw the sizes of the clients from Dir(beta), without skew of their classes."""

    def attempt() -> list[Rows]:
        shares = deal.random.dirichlet(np.full(deal.clients, deal.beta))
        cuts = (np.cumsum(shares)[:-1] * len(deal.labels)).astype(np.int64)
        return list(np.split(deal.random.permutation(len(deal.labels)), cuts))

    return deal.until_large_enough(attempt)


def classes(deal: Deal, *, per_client: int = 2) -> list[Rows]:
    """Give each client samples of `per_client` classes only; the holders of a class share it evenly."""
    names = np.unique(deal.labels)
    if not 1 <= per_client <= len(names):
        raise UserError(
            f"partition.per_client must be 1 to {len(names)}, the number of classes, not {per_client}"
        )
    if deal.clients * per_client < len(names):
        raise UserError(
            f"{deal.clients} clients with {per_client} classes each cannot hold all {len(names)} classes: "
            "raise --clients or partition.per_client"
        )
    holders: dict[int, list[int]] = {int(c): [] for c in names}
    for client in deal.random.permutation(deal.clients):
        # Classes with the fewest holders come first, equal ones in random order.
        order = sorted(holders, key=lambda c: (len(holders[c]), deal.random.random()))
        for c in order[:per_client]:
            holders[c].append(int(client))
    held: list[list[Rows]] = [[] for _ in range(deal.clients)]
    for c, some in holders.items():
        rows = deal.random.permutation(np.flatnonzero(deal.labels == c))
        for client, part in zip(some, _cut(rows, len(some)), strict=True):
            held[client].append(part)
    return _large_enough(
        [np.concatenate(h) for h in held],
        deal,
        "lower --clients or --min-samples, or raise partition.per_client",
    )


def shards(deal: Deal, *, per_client: int = 2) -> list[Rows]:
    """Sort the samples by class, cut them into equal shards, and give each client `per_client` of them."""
    count = deal.clients * per_client
    if per_client < 1:
        raise UserError(f"partition.per_client must be at least 1, not {per_client}")
    if count > len(deal.labels):
        raise UserError(
            f"{len(deal.labels)} samples cannot be cut into {count} shards: lower --clients or partition.per_client"
        )
    shuffled = deal.random.permutation(len(deal.labels))
    pieces = _cut(shuffled[np.argsort(deal.labels[shuffled], kind="stable")], count)
    order = deal.random.permutation(count).reshape(deal.clients, per_client)
    return _large_enough(
        [np.concatenate([pieces[i] for i in some]) for some in order], deal, "lower --clients"
    )


def column(deal: Deal) -> list[Rows]:
    """Make a client of each writer, hospital or domain in the data; --clients follows from it."""
    if deal.groups is None:
        raise UserError(
            "this data does not say which client a sample belongs to: name a column of the parquet or .npz file with "
            "--set data.client=…, or arrange images as domain/class/image"
        )
    numbers = deal.groups.train.numpy()
    return [np.flatnonzero(numbers == g) for g in np.unique(numbers)]


def saved(deal: Deal, *, file: str = "") -> list[Rows]:
    """Read from a file: the partition.npz of a run, or any .npz with `rows` and `sizes`."""
    if not file:
        raise UserError("which file? --set partition.file=runs/first/partition.npz")
    if not Path(file).is_file():
        raise UserError(f"there is no file {file}: correct partition.file")
    try:
        with np.load(Path(file), allow_pickle=False) as content:
            parts = unpacked(content["rows"], content["sizes"])
            if "held_rows" in content:
                held = unpacked(content["held_rows"], content["held_sizes"])
                parts = [np.concatenate(pair) for pair in zip(parts, held, strict=True)]
            samples = int(content["samples"]) if "samples" in content else len(deal.labels)
    except UNREADABLE:
        needs = "whole numbers `rows` and `sizes`, as in a run's partition.npz"
        raise UserError(f"cannot read a partition from {file}: it needs {needs}") from None
    if samples != len(deal.labels):
        raise UserError(
            f"the partition in {file} is of {samples} training samples, this data has {len(deal.labels)}"
        )
    rows = np.concatenate(parts)
    if len(rows) and (rows.min() < 0 or rows.max() >= len(deal.labels) or len(np.unique(rows)) != len(rows)):
        raise UserError(f"the rows in {file} must be different numbers from 0 to {len(deal.labels) - 1}")
    return parts


def packed(train: list[Rows], held: list[Rows], samples: int, counts: Counts | None = None) -> bytes:
    """Return an .npz file with the clients' rows, one client after another, their sizes and their class counts."""
    arrays = {
        "rows": np.concatenate(train),
        "sizes": np.array([len(p) for p in train]),
        "samples": np.array(samples),
    }
    if held:
        arrays |= {"held_rows": np.concatenate(held), "held_sizes": np.array([len(p) for p in held])}
    if counts is not None:
        arrays["counts"] = counts
    buffer = BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def unpacked(rows: Rows, sizes: Rows) -> list[Rows]:
    """Return the clients' rows from an array of all rows and one of sizes."""
    if rows.dtype.kind not in "iu" or sizes.dtype.kind not in "iu" or sizes.sum() != len(rows):
        raise ValueError("rows and sizes must be whole numbers, and the sizes add up to the rows")
    return [np.ascontiguousarray(part, dtype=np.int64) for part in np.split(rows, np.cumsum(sizes)[:-1])]


def _cut(rows: Rows, count: int) -> list[Rows]:
    return [np.array(part) for part in np.array_split(rows, count)]


def _large_enough(parts: list[Rows], deal: Deal, advice: str) -> list[Rows]:
    if min(map(len, parts)) < deal.min_samples:
        raise UserError(
            f"the smallest of {deal.clients} clients would hold {min(map(len, parts))} samples: {advice}"
        )
    return parts


partitions: dict[str, Callable[..., list[Rows]]] = {
    "dirichlet": dirichlet,
    "iid": iid,
    "quantity": quantity,
    "classes": classes,
    "shards": shards,
    "column": column,
    "saved": saved,
}


def split(
    labels: Rows, settings: Settings, table: Mapping[str, Any], groups: Groups | None = None
) -> list[Rows]:
    """Return the rows of each client, by the partition's name and options and its own seed."""
    options = dict(table)
    name = options.pop("name", "dirichlet")
    if name not in partitions:
        raise unknown("partition", name, partitions)
    if name not in ("column", "saved") and settings.clients * settings.min_samples > len(labels):
        raise UserError(
            f"{len(labels)} training samples cannot give {settings.clients} clients {settings.min_samples} each: "
            "lower --clients or --min-samples"
        )
    if groups and groups.array and name not in ("column", "saved"):
        note(
            f"the file names {len(groups.names)} clients in its array {groups.array}: --partition column uses them, "
            f"--partition {name} does not"
        )
    random = seeds.rng(settings.partition_seed, "partition")
    deal = Deal(labels, groups, settings.clients, settings.beta, settings.min_samples, random)
    parts = call_with(partitions[name], options, "partition", deal)
    if settings.clients not in (len(parts), Settings.clients):  # which is the default
        note(f"--partition {name} has {len(parts)} clients: --clients {settings.clients} has no effect")
    if not parts or min(map(len, parts)) == 0:
        raise UserError("the partition leaves a client without samples: choose another")
    return [np.ascontiguousarray(part, dtype=np.int64) for part in parts]


def hold_out(parts: list[Rows], share: float, seed: int) -> tuple[list[Rows], list[Rows]]:
    """Split each client's rows into training rows and a share to test on, rounded up but never all."""
    if not share:
        return parts, []
    train, held = [], []
    for client, rows in enumerate(parts):
        order = seeds.rng(seed, "holdout", client).permutation(len(rows))
        cut = min(int(np.ceil(share * len(rows))), len(rows) - 1)
        held.append(rows[np.sort(order[:cut])])
        train.append(rows[np.sort(order[cut:])])
    return train, held
