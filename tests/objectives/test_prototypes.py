import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcsd.objectives import average_over_holders, class_prototypes


def test_worked_by_hand() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 0.0]])
    prototypes, counts = class_prototypes(logits, torch.tensor([2, 2, 0]), 4)
    assert prototypes.tolist() == [[10, 0], [0, 0], [2, 3], [0, 0]]
    assert counts.tolist() == [1, 0, 2, 0]


@given(seed=st.integers(0, 1000), samples=st.integers(0, 40), classes=st.integers(1, 6))
def test_means_of_each_class(seed: int, samples: int, classes: int) -> None:
    random = np.random.default_rng(seed)
    logits, labels = random.normal(size=(samples, 5)), random.integers(0, classes, samples)
    prototypes, counts = class_prototypes(torch.from_numpy(logits), torch.from_numpy(labels), classes)
    for c in range(classes):
        rows = logits[labels == c]
        assert counts[c] == len(rows)
        np.testing.assert_allclose(
            prototypes[c].numpy(), rows.mean(0) if len(rows) else np.zeros(5), atol=1e-12
        )


def test_average_over_holders() -> None:
    last = torch.full((4, 2), 9.0)
    first = (
        torch.tensor([[1.0, 1.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]),
        torch.tensor([True, True, False, False]),
    )
    second = (
        torch.tensor([[3.0, 5.0], [7.0, 7.0], [4.0, 4.0], [0.0, 0.0]]),
        torch.tensor([True, False, True, False]),
    )
    # Class 0 has two holders, 1 and 2 have one each (what is not held does not count), 3 has none.
    assert average_over_holders([first, second], last).tolist() == [[2, 3], [2, 2], [4, 4], [9, 9]]
    assert average_over_holders([], last).tolist() == last.tolist()
