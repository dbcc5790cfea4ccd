"""Make the images of a batch from rows of the data."""

import torch
from torch import Tensor

from fedcsd.data.augment import AUGMENTATIONS
from fedcsd.data.dataset import Dataset
from fedcsd.kernels.vectors import look_up


class Images:
    """Images as a model sees them: training images may be augmented, and all are normalised."""

    def __init__(self, data: Dataset, augment: str):
        self.data, self.augmentation = data, AUGMENTATIONS[augment]
        self.labels = data.y_train

    @property
    def augmented(self) -> bool:
        return self.augmentation.active

    def __call__(self, rows: Tensor, numbers: Tensor | None) -> Tensor:
        """Return training images [B, ...]; `numbers` are the random numbers of their augmentation."""
        if numbers is None:
            return self.plain(self.data.x_train, rows)
        return self.data.images(self.augmentation(self.data.x_train.index_select(0, rows), numbers))

    def plain(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return these rows of training or test images, not augmented."""
        found = None if self.data.table is None else look_up(x, rows, self.data.table)
        return self.data.images(x.index_select(0, rows)) if found is None else found

    def draw(self, samples: int, seed: int) -> Tensor:
        """Draw the random numbers of an epoch's augmentation, a row for each sample."""
        numbers = self.augmentation.draw(samples, torch.Generator().manual_seed(seed))
        return numbers.to(self.labels.device)
