"""Data as people have it on disk: parquet, image folders, the hub, and what is wrong with it."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import Fedcsd
from PIL import Image
from pyarrow import parquet as pq
from torch.utils.data import TensorDataset

import fedcsd as package
from fedcsd.data import load
from fedcsd.data.cache import cache_folder
from fedcsd.data.sources import hub
from fedcsd.errors import UserError


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDCSD_CACHE", str(folder))
    monkeypatch.delenv("FEDCSD_DATA", raising=False)
    return folder


def png(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    from io import BytesIO

    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, kind, lossless=True)
    return buffer.getvalue()


def pictures(count: int, shape: tuple[int, ...] = (28, 28), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_parquet(path: Path, pixels: np.ndarray, columns: dict[str, Any], image: str = "image") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"bytes": png(p), "path": f"{i}.png"} for i, p in enumerate(pixels)]
    pq.write_table(pa.table({image: rows, **columns}), path)


@pytest.fixture
def mnist_folder(tmp_path: Path) -> Path:
    """Small files of MNIST's schema on the hub."""
    write_parquet(
        tmp_path / "mnist/train-00000-of-00001.parquet", pictures(60), {"label": np.arange(60) % 10}
    )
    write_parquet(
        tmp_path / "mnist/test-00000-of-00001.parquet", pictures(20, seed=1), {"label": np.arange(20) % 10}
    )
    return tmp_path


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


def test_own_parquet_with_a_client_column(tmp_path: Path, fedcsd: Fedcsd) -> None:
    columns = {"diagnosis": np.arange(90) % 3, "hospital": [f"h{i % 5}" for i in range(90)]}
    write_parquet(tmp_path / "scans.parquet", pictures(90, (20, 20)), columns, image="scan")
    with pytest.raises(UserError, match=r"no label column among scan, diagnosis, hospital.*data\.label"):
        load(str(tmp_path / "scans.parquet"))
    sets = ("--set", "data.label=diagnosis", "--set", "data.client=hospital")
    run = fedcsd(
        "run",
        "--data",
        "scans.parquet",
        "--partition",
        "column",
        *sets,
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--out",
        "r",
    )
    assert run.returncode == 0, run.stderr
    assert "clients = 5" in (tmp_path / "r/config.toml").read_text()
    again = fedcsd("resume", "r", "--rounds", "2")  # the options are in the config
    assert again.returncode == 0, again.stderr


def image_tree(
    root: Path, domains: dict[str, int], classes: tuple[str, ...] = ("cat", "dog"), size: int = 24
) -> None:
    for d, (domain, count) in enumerate(domains.items()):
        for i in range(count):
            folder = root / domain / classes[i % len(classes)]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pictures(1, (size, size, 3), seed=1000 * d + i)[0]).save(folder / f"{i:03d}.png")


def test_image_folder_of_classes(tmp_path: Path) -> None:
    image_tree(tmp_path / "pets", {"": 30})
    data = load(str(tmp_path / "pets"))
    assert (data.classes, data.shape, len(data.y_train), len(data.y_test)) == (2, (3, 24, 24), 24, 6)
    assert data.groups is None
    smaller = load(str(tmp_path / "pets"), {"size": 16})
    assert smaller.shape == (3, 16, 16)


def test_image_folder_with_train_and_test(tmp_path: Path) -> None:
    image_tree(tmp_path / "pets", {"train": 20, "test": 8})
    data = load(str(tmp_path / "pets"))
    assert (len(data.y_train), len(data.y_test), data.groups) == (20, 8, None)


def test_domains_are_clients_with_a_fifth_for_test_each(tmp_path: Path) -> None:
    image_tree(
        tmp_path / "office_caltech_10", {"amazon": 23, "caltech": 31, "dslr": 11, "webcam": 16}, size=32
    )
    data = load("office_caltech_10", {"size": 64}, tmp_path)
    assert data.groups is not None
    assert data.groups.names == ["amazon", "caltech", "dslr", "webcam"]
    assert np.bincount(data.groups.test.numpy()).tolist() == [5, 7, 3, 4]  # a fifth, rounded up
    assert np.bincount(data.groups.train.numpy()).tolist() == [18, 24, 8, 12]
    assert (data.augment, data.model, data.partition) == ("office", "alexnet", "column")
    assert data.images(data.x_train[:1]).max() <= 1  # no normalisation
    pool = load("office_caltech_10", {"size": 64, "train_pool": 8}, tmp_path)
    assert np.bincount(pool.groups.train.numpy()).tolist() == [8, 8, 8, 8]
    assert torch.equal(pool.x_test, data.x_test)
    share = load("office_caltech_10", {"size": 64, "train_pool": 0.6}, tmp_path)
    assert np.bincount(share.groups.train.numpy()).tolist() == [13, 18, 6, 9]
    with pytest.raises(
        UserError, match=r"dslr has 11 images, 3 of them for testing: data.train_pool cannot be 9"
    ):
        load("office_caltech_10", {"size": 64, "train_pool": 9}, tmp_path)


def test_per_domain_accuracy_is_recorded(tmp_path: Path) -> None:
    image_tree(tmp_path / "shop", {"a": 20, "b": 15}, size=16)
    run = package.run(data={"name": str(tmp_path / "shop")}, partition="column", rounds=1, epochs=1)
    record = run.history[0]
    assert set(record["domain_accuracy"]) == {"a", "b"}
    assert record["domain_mean"] == pytest.approx(sum(record["domain_accuracy"].values()) / 2)
    overall = (record["domain_accuracy"]["a"] * 4 + record["domain_accuracy"]["b"] * 3) / 7
    assert record["test_accuracy"] == pytest.approx(overall)


def test_torch_datasets_from_python() -> None:
    x, y = torch.rand(40, 1, 20, 20), torch.arange(40) % 4
    data = load((TensorDataset(x, y), TensorDataset(x[:10], y[:10])))
    assert torch.equal(data.x_train, x)
    assert (data.classes, len(data.y_test)) == (4, 10)


# The cache


def test_the_second_load_reads_nothing_but_the_cache(
    mnist_folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load("mnist", {}, mnist_folder)
    monkeypatch.setattr("fedcsd.data.sources.parquet._read", lambda _: pytest.fail("decoded again"))
    monkeypatch.setattr("fedcsd.data.cache._hash", lambda _: pytest.fail("hashed again"))
    began = time.perf_counter()
    second = load("mnist", {}, mnist_folder)
    assert time.perf_counter() - began < 1
    assert torch.equal(first.x_train, second.x_train)
    assert first.fingerprint() == second.fingerprint()


def test_changed_files_are_decoded_anew(mnist_folder: Path) -> None:
    first = load("mnist", {}, mnist_folder)
    write_parquet(
        mnist_folder / "mnist/train-00000-of-00001.parquet",
        pictures(60, seed=7),
        {"label": np.arange(60) % 10},
    )
    second = load("mnist", {}, mnist_folder)
    assert not torch.equal(first.x_train, second.x_train)
    assert first.fingerprint() != second.fingerprint()


def test_a_damaged_cache_file_is_made_again(mnist_folder: Path, own_cache: Path) -> None:
    expected = load("mnist", {}, mnist_folder).x_train.clone()
    (file,) = own_cache.glob("mnist-*.safetensors")
    file.write_bytes(file.read_bytes()[:1000])
    assert torch.equal(load("mnist", {}, mnist_folder).x_train, expected)


def test_two_runs_that_start_together_and_one_that_is_killed(mnist_folder: Path, own_cache: Path) -> None:
    write_parquet(
        mnist_folder / "mnist/train-00000-of-00001.parquet", pictures(6000), {"label": np.arange(6000) % 10}
    )
    code = (
        "import sys; from pathlib import Path; from fedcsd.data import load\n"
        "print(int(load('mnist', {}, Path(sys.argv[1])).x_train.sum()))"
    )
    command = [sys.executable, "-c", code, str(mnist_folder)]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(2.2)
    killed.kill()
    killed.wait()
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    answers = {p.communicate(timeout=60)[0].strip() for p in both}
    assert answers == {str(int(pictures(6000).sum()))}
    assert [p.returncode for p in both] == [0, 0]
    assert len(list(own_cache.glob("mnist-*.safetensors"))) == 1
    assert cache_folder() == own_cache


def test_a_cache_that_cannot_be_written(mnist_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDCSD_CACHE", "/proc/nowhere")
    with pytest.raises(UserError, match=r"cannot write the decoded data to /proc/nowhere.*FEDCSD_CACHE"):
        load("mnist", {}, mnist_folder)


# What is wrong with data, one line each


def nothing_half_written(folder: Path) -> None:
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    assert not list(folder.glob("*.safetensors"))


def test_a_corrupt_image(tmp_path: Path, own_cache: Path) -> None:
    image_tree(tmp_path / "pets", {"": 30})
    bad = sorted((tmp_path / "pets").rglob("*.png"))[7]
    bad.write_bytes(bad.read_bytes()[:200])
    with pytest.raises(
        UserError, match=rf"{bad.name} cannot be read as an image \(.*\): replace or remove it"
    ):
        load(str(tmp_path / "pets"))
    nothing_half_written(own_cache)


def test_a_corrupt_image_inside_parquet(tmp_path: Path, own_cache: Path) -> None:
    rows = [{"bytes": png(p), "path": ""} for p in pictures(10)]
    rows[4]["bytes"] = b"not a picture"
    pq.write_table(pa.table({"image": rows, "label": np.arange(10) % 2}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 4 cannot be read as an image"):
        load(str(tmp_path / "a.parquet"))
    nothing_half_written(own_cache)


def test_a_truncated_parquet_file(mnist_folder: Path, own_cache: Path) -> None:
    file = mnist_folder / "mnist/train-00000-of-00001.parquet"
    file.write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(
        UserError, match=r"train-00000-of-00001\.parquet cannot be read as parquet .*fetch it again"
    ):
        load("mnist", {}, mnist_folder)
    nothing_half_written(own_cache)


def test_a_folder_with_one_class(tmp_path: Path) -> None:
    image_tree(tmp_path / "pets", {"": 10}, classes=("cat",))
    with pytest.raises(UserError, match=r"holds one class only \(cat\)"):
        load(str(tmp_path / "pets"))


def test_a_label_column_that_is_text(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pictures(10), {"label": ["cat", "dog"] * 5})
    with pytest.raises(
        UserError, match=r"the label column 'label' holds string, not class numbers.*data\.label"
    ):
        load(str(tmp_path / "a.parquet"))


def test_missing_labels(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", pictures(4), {"label": [0, 1, None, 1]})
    with pytest.raises(UserError, match="1 labels are missing"):
        load(str(tmp_path / "a.parquet"))


def test_images_of_different_sizes(tmp_path: Path) -> None:
    image_tree(tmp_path / "pets", {"": 10})
    image_tree(tmp_path / "pets", {"more": 2}, size=30)
    with pytest.raises(UserError, match="all images must be class/image or all domain/class/image"):
        load(str(tmp_path / "pets"))
    image_tree(tmp_path / "mixed", {"a": 6})
    image_tree(tmp_path / "mixed", {"b": 6}, size=30)
    with pytest.raises(UserError, match=r"is \d+×\d+ and .*data\.size=64"):
        load(str(tmp_path / "mixed"))


def test_deeper_images_are_refused_and_mixed_ones_are_colour(tmp_path: Path) -> None:
    image_tree(tmp_path / "scans", {"": 10})
    deep = tmp_path / "scans/cat/999.png"
    Image.fromarray(np.full((24, 24), 60_000, dtype=np.uint16)).save(deep)
    with pytest.raises(UserError, match=r"999\.png has more than 8 bits a pixel"):
        load(str(tmp_path / "scans"))
    Image.fromarray(pictures(1, (24, 24))[0]).save(deep)  # grey among colour
    assert load(str(tmp_path / "scans")).shape == (3, 24, 24)
    (tmp_path / "scans/.git/x").mkdir(parents=True)
    (tmp_path / "scans/.git/x/a.png").write_bytes(b"")
    (tmp_path / "scans/eel").symlink_to(tmp_path / "scans/dog")
    assert load(str(tmp_path / "scans")).classes == 3


def test_another_data_set_s_files_are_not_taken(mnist_folder: Path) -> None:
    with pytest.raises(UserError, match="holds no fashion_mnist"):
        load("fashion_mnist", {}, mnist_folder)


def test_split_by_words_in_names(tmp_path: Path) -> None:
    for name, seed in (("latest", 0), ("my-train", 1), ("my-test", 2), ("validation-0", 3)):
        write_parquet(tmp_path / f"p/{name}.parquet", pictures(10, seed=seed), {"label": np.arange(10) % 2})
    data = load(str(tmp_path / "p"))
    assert (len(data.y_train), len(data.y_test)) == (20, 10)
    alone = load(str(tmp_path / "p/my-test.parquet"))
    assert (len(alone.y_train), len(alone.y_test)) == (8, 2)


def test_images_as_plain_bytes(tmp_path: Path) -> None:
    table = {"scan": [png(p) for p in pictures(10)], "label": np.arange(10) % 2}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    assert len(load(str(tmp_path / "a.parquet")).y_train) == 8
    pq.write_table(pa.table({"image": [[1, 2]] * 10, "label": np.arange(10) % 2}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="not the bytes of image files"):
        load(str(tmp_path / "b.parquet"), {"image": "image"})
    with pytest.raises(UserError, match=r"data\.test must be between 0 and 1"):
        load(str(tmp_path / "a.parquet"), {"test": 1.5})
    with pytest.raises(UserError, match=r"data\.size must be at least 0"):
        load(str(tmp_path / "a.parquet"), {"size": -4})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mnist", {"clases": 3}, "this data has no options, but clases is given"),
        ("femnist", {"clases": 62}, "unknown option of data 'clases': did you mean classes?"),
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
    assert "--data-dir" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "r").exists()


def test_without_the_hub_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        hub.download("ylecun/mnist")


def test_colour_images_for_a_grey_model(tmp_path: Path) -> None:
    from torch import nn

    image_tree(tmp_path / "pets", {"": 30})
    grey = lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 22 * 22, 2))  # noqa: E731
    with pytest.raises(UserError, match=r"images of shape 3×24×24 do not fit the model .*--model"):
        package.run(data=str(tmp_path / "pets"), model=grey, clients=2, rounds=1)


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
