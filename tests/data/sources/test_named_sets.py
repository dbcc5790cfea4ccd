"""Data sets known by name: their schemas, the hub, and what is wrong with a folder of them."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet as pq

from fedcsd.data import load
from fedcsd.data.sources import hub
from fedcsd.errors import UserError
from helpers.image_files import nothing_half_written, pictures, png, write_parquet
from helpers.program import Fedcsd


def test_a_named_data_set_from_a_folder(mnist_folder: Path) -> None:
    data = load("mnist", {}, mnist_folder)
    assert torch.equal(data.x_train[:, 0], torch.from_numpy(pictures(60)))
    assert data.y_train.tolist() == [i % 10 for i in range(60)]
    assert (data.classes, len(data.y_test)) == (10, 20)
    images = data.images(data.x_train)
    assert images.mean().abs() < 1e-4
    assert abs(images.std(correction=0) - 1) < 1e-4
    inside = load("mnist", {}, mnist_folder / "mnist")
    assert torch.equal(inside.x_train, data.x_train)


def test_cifar100_uses_fine_labels_and_the_published_normalisation(tmp_path: Path) -> None:
    for part, count in (("train", 200), ("test", 100)):
        labels = {"fine_label": np.arange(count) % 100, "coarse_label": np.arange(count) % 20}
        write_parquet(
            tmp_path / f"cifar100/{part}-0.parquet", pictures(count, (32, 32, 3)), labels, image="img"
        )
    data = load("cifar100", {}, tmp_path)
    assert (data.classes, data.shape, data.augment, data.model) == (100, (3, 32, 32), "cifar", "resnet18")
    raw = data.x_train[:2].double() / 255
    mean = torch.tensor([0.50707516, 0.48654887, 0.44091784], dtype=torch.float64)[:, None, None]
    std = torch.tensor([0.26733429, 0.25643846, 0.27615047], dtype=torch.float64)[:, None, None]
    torch.testing.assert_close(
        data.images(data.x_train[:2]).double(), (raw - mean) / std, atol=1e-5, rtol=1e-5
    )


def test_several_files_and_webp(tmp_path: Path) -> None:
    first, second = pictures(30, (32, 32, 3)), pictures(20, (32, 32, 3), seed=1)
    for name, some in (("train-00000-of-00002", first), ("train-00001-of-00002", second), ("test-0", second)):
        rows = [{"bytes": png(p, "WEBP"), "path": None} for p in some]
        table = pa.table({"img": rows, "label": np.arange(len(some)) % 10})
        (tmp_path / "cifar10").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / f"cifar10/{name}.parquet")
    data = load("cifar10", {}, tmp_path)
    expected = torch.from_numpy(np.concatenate([first, second])).permute(0, 3, 1, 2)
    assert torch.equal(data.x_train, expected)


def test_femnist_has_writers_and_digits_by_default(tmp_path: Path) -> None:
    characters = np.arange(124) % 62
    writers = [f"w{i % 4}" for i in range(124)]
    columns = {"writer_id": writers, "hsf_id": np.zeros(124, int), "character": characters}
    write_parquet(tmp_path / "femnist/train-0.parquet", pictures(124), columns)
    digits = load("femnist", {}, tmp_path)
    assert (digits.classes, len(digits.y_train) + len(digits.y_test)) == (10, 20)
    every = load("femnist", {"classes": 62}, tmp_path)
    assert (every.classes, len(every.y_train), len(every.y_test)) == (62, 99, 25)  # a fifth, rounded up
    assert every.groups is not None
    assert every.groups.names == ["w0", "w1", "w2", "w3"]
    # Every sample is still its writer's: the picture tells which row it was.
    rows = {p.tobytes(): i for i, p in enumerate(pictures(124))}
    for x, y, g in zip(every.x_train, every.y_train, every.groups.train, strict=True):
        row = rows[x[0].numpy().tobytes()]
        assert int(y) == characters[row]
        assert every.groups.names[int(g)] == writers[row]
    with pytest.raises(UserError, match=r"must be 10 .* or 62"):
        load("femnist", {"classes": 26}, tmp_path)


def test_a_truncated_parquet_file(mnist_folder: Path, own_cache: Path) -> None:
    file = mnist_folder / "mnist/train-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(
        UserError, match=r"train-00000-of-00001\.parquet cannot be read as parquet .*fetch it again"
    ):
        load("mnist", {}, mnist_folder)
    nothing_half_written(own_cache)


def test_another_data_set_s_files_are_not_taken(mnist_folder: Path) -> None:
    with pytest.raises(UserError, match="holds no fashion_mnist"):
        load("fashion_mnist", {}, mnist_folder)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mnist", {"clases": 3}, "this data has no options, but clases is given"),
        ("femnist", {"clases": 62}, "'clases' is no option of this data: did you mean classes?"),
        ("office_caltech_10", {}, "give one with amazon, caltech, dslr and webcam as --data-dir"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(name, options)


def test_a_folder_without_the_data_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no cifar10: it should have cifar10/train-….parquet"):
        load("cifar10", {}, tmp_path)


def test_an_unreachable_hub(fedcsd: Fedcsd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    result = fedcsd("run", "--data", "mnist", "--out", "r")
    assert result.returncode == 2
    assert "the Hugging Face hub did not give ylecun/mnist" in result.stderr
    assert "a folder with its parquet files as --data-dir or FEDCSD_DATA" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    own = fedcsd("run", "--data", "hub:some/scans", "--out", "r")
    assert own.stderr.endswith("or give a folder with its parquet files as --data\n")
    assert not (tmp_path / "r").exists()


def test_without_the_hub_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        hub.download("ylecun/mnist")


@pytest.mark.skipif(
    "FEDCSD_REAL_DATA" not in os.environ, reason="FEDCSD_REAL_DATA names no folder with the real data sets"
)
def test_the_real_data_sets(own_cache: Path) -> None:
    folder = Path(os.environ["FEDCSD_REAL_DATA"])
    mnist = load("mnist", {}, folder)
    assert (len(mnist.y_train), len(mnist.y_test)) == (60_000, 10_000)
    assert np.bincount(mnist.y_train.numpy()).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]
    cifar = load("cifar100", {}, folder)
    assert np.bincount(cifar.y_train.numpy()).tolist() == [500] * 100
    office = load("office_caltech_10", {}, folder)
    assert np.bincount(office.groups.test.numpy()).tolist() == [192, 225, 32, 59]
