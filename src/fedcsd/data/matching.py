"""Choose test images that match a client's training data: its classes, in the same proportions.

If the test data has domains (photographs and sketches, for example), the images match its domains too.
"""

import numpy as np
from numpy.typing import NDArray

from fedcsd.data.dataset import Dataset
from fedcsd.data.partition import Rows

DOMAINS = 20  # more groups than this are writers or devices, with too few test images each
FEWEST = 50  # images that a client is tested on, however many clients there are


class MatchingTests:
    """Deal test images to clients by kind: a class, or a class of a domain.

    All clients together get about twice the number of test images, so that testing every client
    costs about as much as testing one model twice.
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
        """Return test rows that match a client's training rows, and their weights, which sum to 1.

        A kind weighs as much as in training, whatever the rounding; a kind without test images is left out.
        Both are empty if no test image matches.
        """
        held = np.bincount(self.train[rows], minlength=self.kinds) * (self.counts > 0)
        kinds = np.flatnonzero(held)
        if not len(kinds):
            return np.empty(0, dtype=np.int64), np.empty(0)
        shares = held[kinds] / held.sum()
        sizes = np.minimum(np.ceil(self.images * shares).astype(np.int64), self.counts[kinds])
        # Clients start at different places, so that together they use all images.
        chosen = [
            self.of_kind[kind][(client * size + np.arange(size)) % self.counts[kind]]
            for kind, size in zip(kinds, sizes, strict=True)
        ]
        return np.concatenate(chosen), np.repeat(shares / sizes, sizes)
