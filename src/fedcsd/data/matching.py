"""Test images like a client's own: of the classes it trains on, in the same proportions.

Where the test data has domains (photographs and sketches, say), the images are of its domains too.
"""

import numpy as np
from numpy.typing import NDArray

from fedcsd.data.dataset import Dataset
from fedcsd.data.partition import Rows

DOMAINS = 20  # more groups than this are writers or devices, each with too few test images
FEWEST = 50  # images that a client is tested on, however many clients there are


class Alike:
    """Deals test images to clients by kind: a class, or a class of a domain.

    All clients together test on about twice as many images as there are, so that testing every
    client costs about as much as testing one model twice.
    """

    def __init__(self, data: Dataset, clients: int):
        groups, c = data.groups, data.classes
        self.train, test = data.y_train.cpu().numpy(), data.y_test.cpu().numpy()
        self.kinds = c
        if groups is not None and groups.test is not None and len(groups.names) <= DOMAINS:
            self.train = self.train + c * groups.train.cpu().numpy()
            test = test + c * groups.test.cpu().numpy()
            self.kinds = c * len(groups.names)
        self.images = max(FEWEST, 2 * len(test) // clients)
        order = np.argsort(test, kind="stable")
        self.counts = np.bincount(test, minlength=self.kinds)
        self.of_kind = np.split(order, np.cumsum(self.counts)[:-1])

    def rows(self, client: int, rows: Rows) -> tuple[Rows, NDArray[np.float64]]:
        """Test rows like the client's training rows, and what each counts for (in all 1).

        A kind of few images counts as much as it does in training, whatever the rounding; one without
        test images is left out. Empty if no test image is like the client's.
        """
        held = np.bincount(self.train[rows], minlength=self.kinds) * (self.counts > 0)
        kinds = np.flatnonzero(held)
        if not len(kinds):
            return np.empty(0, dtype=np.int64), np.empty(0)
        shares = held[kinds] / held.sum()
        sizes = np.minimum(np.ceil(self.images * shares).astype(np.int64), self.counts[kinds])
        # Clients start at different places, so that together they see all of the images.
        chosen = [
            self.of_kind[kind][(client * size + np.arange(size)) % self.counts[kind]]
            for kind, size in zip(kinds, sizes, strict=True)
        ]
        return np.concatenate(chosen), np.repeat(shares / sizes, sizes)
