"""Test images like a client's own: of the classes it trains on, in the same proportions.

Where the test data has domains (photographs and sketches, say), the images are of its domains too.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcsd.data.dataset import Dataset
from fedcsd.data.partition import Rows

DOMAINS = 20  # more groups than this are writers or devices, each with too few test images
IMAGES = 500  # test images that a client's own model is tried on


class Alike:
    """The kinds of test images (classes, or classes of a domain), and each client's share of them."""

    def __init__(self, data: Dataset):
        groups, c = data.groups, data.classes
        self.train, self.test = data.y_train.cpu().numpy(), data.y_test.cpu().numpy()
        self.kinds = c
        if groups is not None and groups.test is not None and len(groups.names) <= DOMAINS:
            self.train = self.train + c * groups.train.cpu().numpy()
            self.test = self.test + c * groups.test.cpu().numpy()
            self.kinds = c * len(groups.names)
        self.counts = np.bincount(self.test, minlength=self.kinds)

    def shares(self, rows: Rows) -> NDArray[np.float64]:
        """The share of each kind among these training rows; kinds without test images are left out.
        All 0 if no test image is like them [kinds]."""
        held = np.bincount(self.train[rows], minlength=self.kinds) * (self.counts > 0)
        return np.asarray(held / max(1, held.sum()), dtype=np.float64)

    def accuracies(self, correct: NDArray[np.bool_], shares: NDArray[np.float64]) -> list[float]:
        """From which test images a model gets right [N] to its accuracy on the data of each client
        whose shares are given [clients, kinds]; clients without any test image are left out."""
        right = np.bincount(self.test, weights=correct, minlength=self.kinds) / np.maximum(1, self.counts)
        return [float(share @ right) for share in shares if share.any()]

    def rows(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Test rows like these training rows, some hundreds, and what each counts for (in all 1)."""
        shares, chosen, counts = self.shares(rows), [], []
        for kind in np.flatnonzero(shares):
            some = np.flatnonzero(self.test == kind)[: int(np.ceil(IMAGES * shares[kind]))]
            chosen.append(some)
            counts.append(np.full(len(some), shares[kind] / len(some)))
        if not chosen:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
        return torch.from_numpy(np.concatenate(chosen)), torch.from_numpy(np.concatenate(counts))
