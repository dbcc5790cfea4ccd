"""Load scikit-learn's handwritten digits: 1,797 real 8×8 images of ten classes, part of scikit-learn."""

from pathlib import Path

import numpy as np

from fedcsd.data.dataset import Dataset


def digits(folder: Path | None = None) -> Dataset:
    """Load 1,797 handwritten digits of 8×8 pixels, ten classes; a fifth is the test set. Needs no download."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = images.astype(np.uint8).reshape(-1, 1, 8, 8)  # pixel values 0 to 16
    order = np.random.RandomState(0).permutation(len(labels))
    test, train = order[:360], order[360:]
    return Dataset.of_arrays(
        images[train], labels[train], images[test], labels[test], name="digits", largest=16
    )
