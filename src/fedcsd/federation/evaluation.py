"""An evaluation of a model becomes measurements of the round's record here."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcsd.data import Dataset
from fedcsd.data.matching import DOMAINS, MatchingTests
from fedcsd.data.partition import Rows
from fedcsd.messages import Reply

Record = dict[str, Any]
"""The measurements of one round, as one line of metrics.jsonl."""

LISTED = 100  # classes or clients; accuracies of more are recorded in the last round only


@dataclass(frozen=True)
class Evaluation:
    """An evaluation says for each test image if one model is right, or counts that by client."""

    loss: float
    """mean over the test data"""
    correct: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    """right predictions on the server's test images, then on the images that clients hold out"""
    counts: Sequence[tuple[int, int]] = ()
    """right predictions and test images of each client, where the server has no test data"""

    @classmethod
    def of_blocks(cls, replies: Iterable[Reply], tests: int) -> "Evaluation":
        """Join the replies of a workspace's blocks: `tests` test images, then held-out images."""
        replies = list(replies)
        correct = torch.cat([reply["correct"] for reply in replies]).cpu().numpy()
        ends = np.cumsum([reply.samples for reply in replies])
        losses = [r.notes["loss"][0] for r, end in zip(replies, ends, strict=True) if end <= tests]
        return cls(sum(losses) / tests, correct)


class TestData:
    """The test data of a federation knows classes, domains, and the images that are like each client's."""

    def __init__(self, data: Dataset, parts: Sequence[Rows], held: Sequence[Rows]):
        self.data, self.held = data, held
        alike = MatchingTests(data, len(parts))
        rows, shares = zip(*(alike.rows(k, rows) for k, rows in enumerate(parts)), strict=True)
        self.own_rows, self.own_shares = np.concatenate(rows), np.concatenate(shares)
        """test images like each client's own, client after client, and the share that each counts for"""
        self.own_sizes = np.array([len(some) for some in rows])

    def record(self, found: Evaluation, *, last: bool) -> Record:
        """Return accuracies and loss of a model; the last round lists all classes and clients."""
        if found.counts:
            right, images = (sum(numbers) for numbers in zip(*found.counts, strict=True))
            record = {"test_accuracy": right / max(images, 1), "test_loss": found.loss}
            return record | spread("client_accuracy", [r / n for r, n in found.counts if n])
        tests = len(self.data.y_test)
        test, held = found.correct[:tests], found.correct[tests:]
        record = {"test_accuracy": float(test.mean()), "test_loss": found.loss, **self._domains(test)}
        classes = means(test, self.data.y_test.numpy(), self.data.classes)
        sizes = [len(rows) for rows in self.held]
        own = means(held, np.repeat(np.arange(len(sizes)), sizes), len(sizes)) if sizes else self._own(test)
        record |= listed("class_accuracies", classes, last=last) | spread("client_accuracy", own)
        return record | listed("client_accuracies", own, last=last)

    def _domains(self, correct: NDArray[np.bool_]) -> Record:
        groups = self.data.groups
        if groups is None or groups.test is None or len(groups.names) > DOMAINS:
            return {}
        found = means(correct, groups.test.numpy(), len(groups.names))
        each = {name: a for name, a in zip(groups.names, found, strict=True) if not math.isnan(a)}
        return {"domain_accuracy": each, "domain_mean": sum(each.values()) / len(each)}

    def _own(self, correct: NDArray[np.bool_]) -> list[float]:
        """Accuracy on the test images that are like each client's own; NaN for a client without any."""
        full = self.own_sizes > 0
        accuracies = np.full(len(full), math.nan)
        if full.any():
            starts = (np.cumsum(self.own_sizes) - self.own_sizes)[full]
            accuracies[full] = np.add.reduceat(correct[self.own_rows] * self.own_shares, starts)
        return accuracies.tolist()


def means(correct: NDArray[np.bool_], kinds: NDArray[np.int64], number: int) -> list[float]:
    """Return the share of right predictions for each kind, 0 to number − 1; NaN for a kind without images."""
    right, all_ = np.bincount(kinds, correct, number), np.bincount(kinds, minlength=number)
    return [r / n if n else math.nan for r, n in zip(right.tolist(), all_.tolist(), strict=True)]


def spread(name: str, accuracies: Sequence[float]) -> Record:
    """Return mean, worst decile and standard deviation over the clients that have an accuracy."""
    known = [a for a in accuracies if not math.isnan(a)]
    if not known:
        return {}
    return {
        f"{name}_mean": float(np.mean(known)),
        f"{name}_worst_decile": float(np.mean(sorted(known)[: max(1, len(known) // 10)])),
        f"{name}_std": float(np.std(known)),
    }


def listed(name: str, accuracies: Sequence[float], *, last: bool) -> Record:
    """Return the accuracies of all classes or clients, unless they are too many for every round."""
    if all(map(math.isnan, accuracies)) or not (last or len(accuracies) <= LISTED):
        return {}
    return {name: [round(a, 5) for a in accuracies]}
