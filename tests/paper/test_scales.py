"""Test the scales of runs: their sizes, their expected time, and the sharing of a GPU."""

import pytest

from fedcsd.paper.exhibits import Point
from fedcsd.paper.helpers import on_the_same
from fedcsd.paper.scales import SCALES, Choices


def test_each_process_knows_how_many_share_its_gpu() -> None:
    assert on_the_same(5, 4) == [2, 1, 1, 1, 2]
    assert on_the_same(6, 2) == [3] * 6
    assert on_the_same(2, 4) == [1, 1]
    assert on_the_same(3, 0) == [1] * 3  # on a CPU


def test_the_time_a_run_takes_grows_with_its_length() -> None:
    point = Point("cifar100", "fedavg", 0.5)
    usual = Choices("small", (0,)).seconds(point)
    assert Choices("small", (0,), {"rounds": 60, "epochs": 6}).seconds(point) == pytest.approx(6 * usual)
    assert Choices("small", (0,), {"train_size": 2500}).seconds(point) == pytest.approx(usual / 4)
    assert Choices("small", (0,), {"train_size": 90_000}).seconds(point) == usual
    whole = Choices("paper", (0,)).seconds(point)
    assert Choices("paper", (0,), {"train_size": 10_000}).seconds(point) == pytest.approx(whole / 5)
    assert "another model" in Choices("paper", (0,), {"model": "resnet18"}).machine
    assert Choices("paper", (0,)).machine == SCALES["paper"].machine


def test_the_scale_paper_is_the_papers_setup() -> None:
    for data, model in (
        ("cifar100", "resnet50"),
        ("femnist", "simple_cnn"),
        ("office_caltech_10", "alexnet"),
    ):
        pool, beta = (62, None) if data == "office_caltech_10" else (None, 0.5)
        values = Choices("paper", (0,)).values(Point(data, "fedavg", beta, pool), 3)
        expected = {"rounds": 100, "epochs": 5, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-5, "seed": 3}
        assert {key: values[key] for key in expected} == expected
        assert values["model"] == {"name": model}
        assert values["batch_size"] == (32 if pool else 64)
    assert values["data"] == {"name": "office_caltech_10", "train_pool": 62.0}
