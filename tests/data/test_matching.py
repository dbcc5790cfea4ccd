"""Test images like a client's own."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcsd.data.dataset import Dataset, Groups
from fedcsd.data.matching import FEWEST, MatchingTests
from fedcsd.experiments.experiment import Experiment
from fedcsd.federation.rounds import Federation
from fedcsd.methods.fedavg import FedAvg
from helpers.federations import Here, blobs, small


def data(train: list[int], test: list[int], classes: int = 3) -> Dataset:
    x = np.zeros((len(train), 2), dtype=np.float32), np.zeros((len(test), 2), dtype=np.float32)
    return Dataset.of_arrays(x[0], np.array(train), x[1], np.array(test), classes=classes)


def test_a_client_is_tested_on_its_classes_in_its_proportions() -> None:
    # 3 of class 0 and 1 of class 2; the test data has 40 of each. 2 · 120 / 4 = 60 images a client.
    alike = MatchingTests(data([0, 0, 0, 2, 1, 1], [0, 1, 2] * 40), clients=4)
    rows, shares = alike.rows(0, np.arange(4))
    kinds = rows % 3
    assert set(kinds) == {0, 2}
    assert (kinds == 0).sum() == 40  # 45 would be its share, there are 40
    assert (kinds == 2).sum() == 15
    assert np.isclose(shares[kinds == 0].sum(), 3 / 4)
    assert np.isclose(shares[kinds == 2].sum(), 1 / 4)


def test_classes_without_test_images_are_left_out_and_none_at_all_is_nothing() -> None:
    alike = MatchingTests(data([0, 0, 1, 2], [0, 0, 1]), clients=1)
    rows, shares = alike.rows(0, np.array([0, 1, 2, 3]))
    assert sorted(rows) == [0, 1, 2]
    assert np.isclose(shares[np.asarray(rows) == 2], 1 / 3)
    assert [len(found) for found in alike.rows(0, np.array([3]))] == [0, 0]


def test_domains_are_kept_apart() -> None:
    both = data([0, 0, 1, 1], [0, 0, 1, 1], classes=2)
    domains = torch.tensor([0, 1, 0, 1])
    alike = MatchingTests(replace(both, groups=Groups(["photo", "sketch"], domains, domains)), clients=2)
    assert alike.rows(0, np.array([0, 2]))[0].tolist() == [0, 2]
    assert alike.rows(1, np.array([1, 3]))[0].tolist() == [1, 3]


@given(
    train=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    test=st.lists(st.integers(0, 3), min_size=1, max_size=200),
    client=st.integers(0, 99),
    clients=st.integers(1, 100),
)
def test_rows_are_different_and_count_one_in_all(
    train: list[int], test: list[int], client: int, clients: int
) -> None:
    rows, shares = MatchingTests(data(train, test, 4), clients).rows(client, np.arange(len(train)))
    assert len(set(rows.tolist())) == len(rows)
    if set(train) & set(test):
        assert np.isclose(shares.sum(), 1)
        assert len(rows) <= max(FEWEST, 2 * len(test) // clients) + 4
        for c in set(train) & set(test):
            here = sum(t == c for t in train) / sum(t in test for t in train)
            assert np.isclose(shares[np.array(test)[rows] == c].sum(), here)


def test_the_global_model_s_accuracy_on_clients_data_is_that_of_these_images() -> None:
    experiment = small(FedAvg(), dataset=blobs(samples=90), clients=3)
    labels = experiment.data.y_train.numpy()
    rows = [np.flatnonzero(labels == c) for c in range(3)]
    experiment = Experiment(**{**vars(experiment), "parts": rows})
    federation = Federation(experiment, Here(experiment))
    record = federation.step()
    network, y = experiment.network, experiment.data.y_test
    network.load(federation.server.weights)
    network.eval()
    with torch.no_grad():
        right = (network(experiment.data.x_test).logits.argmax(1) == y).double()
    # Each client has one class, and 2 · 90 / 3 = 60 images are more than there are of it.
    each = [float(right[y == c].mean()) for c in range(3)]
    assert np.isclose(record["client_accuracy_mean"], np.mean(each))
    assert np.isclose(record["client_accuracy_worst_decile"], min(each))
