"""Test folders of images: their classes, their domains, and messages about mistakes."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import fedcsd as package
from fedcsd.data import load
from fedcsd.errors import Note, UserError
from helpers.image_files import nothing_half_written, pictures


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


@pytest.mark.parametrize(
    ("folders", "left_out"),
    [
        ("Train Test", ""),
        ("training TESTING", ""),
        ("train validation", ""),
        ("train test val", "val"),
        ("Train Test Valid", "Valid"),
        ("train test dev validation", "dev, validation"),
    ],
)
def test_training_and_test_folders_are_never_mixed(tmp_path: Path, folders: str, left_out: str) -> None:
    train, test, *others = folders.split()
    image_tree(tmp_path / "pets", {train: 20, test: 8})
    image_tree(tmp_path / "pets", dict.fromkeys(others, 6), classes=("cat", "not to be seen"))
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        data = load(str(tmp_path / "pets"))
    assert (len(data.y_train), len(data.y_test), data.groups, data.classes) == (20, 8, None, 2)
    expected = sorted(np.asarray(Image.open(f)).sum() for f in (tmp_path / "pets" / train).rglob("*.png"))
    assert sorted(data.x_train.sum((1, 2, 3)).tolist()) == expected
    said = f"{left_out} is left out, since there is a test folder"
    assert [str(n.message).endswith(said) for n in notes] == [True] * bool(left_out)


def test_a_class_of_the_test_folder_alone(tmp_path: Path) -> None:
    image_tree(tmp_path / "pets", {"train": 20, "test": 1})
    assert len(load(str(tmp_path / "pets")).y_test) == 1
    image_tree(tmp_path / "pets", {"test": 9}, classes=("cat", "dog", "ox"))
    with pytest.raises(UserError, match="the test data has class ox, which the training data lacks"):
        load(str(tmp_path / "pets"))
    assert load(str(tmp_path / "pets"), {"classes": "cat,dog,ox"}).classes == 3  # a site of a deployment


@pytest.mark.parametrize(
    "folders",
    [
        ("train", "test", "unlabelled"),
        ("train", "site"),
        ("test", "site"),
        ("test", "val"),
        ("train", "training"),
        ("train_set", "test_set"),
        ("a-train", "a-test", "b-train", "b-test"),
    ],
)
def test_folders_that_may_be_splits_are_refused(tmp_path: Path, folders: tuple[str, ...]) -> None:
    image_tree(tmp_path / "pets", dict.fromkeys(folders, 10))
    with pytest.raises(UserError, match=r"cannot tell training from test .*: expected are train and test"):
        load(str(tmp_path / "pets"))


def test_splits_in_the_place_of_classes(tmp_path: Path) -> None:
    for name, classes in (("flat", ("Train", "val")), ("more", ("cat", "dog", "test"))):
        image_tree(tmp_path / name, {"": 30}, classes)
        with pytest.raises(UserError, match=r"has a folder (val|test) in the place of a class: expected are"):
            load(str(tmp_path / name))
    image_tree(tmp_path / "below", {"cat": 10, "dog": 10}, ("train", "test"))
    with pytest.raises(UserError, match="has a folder test in the place of a class"):
        load(str(tmp_path / "below"))
    assert load(str(tmp_path / "more"), {"classes": "cat,dog,test"}).classes == 3
    image_tree(tmp_path / "traffic", {"": 30}, ("bus", "car", "train"))
    assert load(str(tmp_path / "traffic")).classes == 3
    image_tree(tmp_path / "hospitals", {"Val-de-Grâce": 10, "Charité": 10, "crash-test": 10})
    assert load(str(tmp_path / "hospitals")).groups.names == ["Charité", "Val-de-Grâce", "crash-test"]


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


def test_a_corrupt_image(tmp_path: Path, own_cache: Path) -> None:
    image_tree(tmp_path / "pets", {"": 30})
    bad = sorted((tmp_path / "pets").rglob("*.png"))[7]
    bad.write_bytes(bad.read_bytes()[:200])
    with pytest.raises(
        UserError, match=rf"{bad.name} cannot be read as an image \(.*\): replace or remove it"
    ):
        load(str(tmp_path / "pets"))
    nothing_half_written(own_cache)


def test_a_folder_with_one_class(tmp_path: Path) -> None:
    image_tree(tmp_path / "pets", {"": 10}, classes=("cat",))
    with pytest.raises(UserError, match=r"holds one class only \(cat\)"):
        load(str(tmp_path / "pets"))


def test_folders_without_an_image_are_told(tmp_path: Path) -> None:
    image_tree(tmp_path / "pets", {"": 10})
    (tmp_path / "pets/.hidden").mkdir()
    (tmp_path / "pets/cat/thumbs").mkdir()
    (tmp_path / "pets/ox").mkdir()
    (tmp_path / "pets/ox/notes.txt").write_text("no image")
    for _ in range(2):  # of decoded data too
        with pytest.warns(Note, match="pets: the folder ox holds no image that can be read: left out$"):
            assert load(str(tmp_path / "pets")).classes == 2
    for name in "abc":
        (tmp_path / "pets" / name).mkdir()
    with pytest.warns(Note, match="the folders a, b, c and 1 more hold no image that can be read: left out"):
        load(str(tmp_path / "pets"))


def test_one_class_beside_folders_without_an_image(tmp_path: Path) -> None:
    image_tree(tmp_path / "pets", {"": 10}, classes=("cat",))
    (tmp_path / "pets/dog").mkdir()
    (tmp_path / "pets/dog/a.txt").write_text("no image")
    with pytest.raises(UserError, match=r"holds one class only \(cat\) and the folder dog holds no image: "):
        load(str(tmp_path / "pets"))


def test_folders_without_an_image_in_domains(tmp_path: Path) -> None:
    image_tree(tmp_path / "pets", {"a": 10, "b": 10})
    image_tree(tmp_path / "pets", {"c": 10}, classes=("cat",))
    (tmp_path / "pets/c/dog").mkdir()  # a class that others have is not left out
    (tmp_path / "pets/b/ox").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error", Note)
        assert load(str(tmp_path / "pets"), {"classes": "cat,dog,ox"}).classes == 3
    (tmp_path / "pets/d/cat").mkdir(parents=True)
    with pytest.warns(Note, match="the folders b/ox, d hold no image that can be read: left out"):
        load(str(tmp_path / "pets"))


def test_images_of_different_sizes(tmp_path: Path) -> None:
    image_tree(tmp_path / "pets", {"": 10})
    image_tree(tmp_path / "pets", {"more": 2}, size=30)
    with pytest.raises(UserError, match="all images must be class/image or all domain/class/image"):
        load(str(tmp_path / "pets"))
    image_tree(tmp_path / "mixed", {"a": 6})
    image_tree(tmp_path / "mixed", {"b": 6}, size=30)
    with pytest.raises(UserError, match=r"is \d+×\d+ and .*data\.size=64"):
        load(str(tmp_path / "mixed"))


def test_images_that_do_not_fit_into_memory(tmp_path: Path, own_cache: Path) -> None:
    image_tree(tmp_path / "pets", {"": 10})
    with pytest.raises(
        UserError, match=r"10 images of 1000000×1000000 take 30,000 GB .*choose a smaller .*data\.size"
    ):
        load(str(tmp_path / "pets"), {"size": 1_000_000})
    nothing_half_written(own_cache)


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


def test_colour_images_for_a_grey_model(tmp_path: Path) -> None:
    image_tree(tmp_path / "pets", {"": 30})
    grey = lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 22 * 22, 2))  # noqa: E731
    with pytest.raises(UserError, match=r"images of shape 3×24×24 do not fit the model .*--model"):
        package.run(data=str(tmp_path / "pets"), model=grey, clients=2, rounds=1)
