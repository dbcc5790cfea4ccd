"""Test the cache of decoded data: it is read once, made anew when files change, and never half written."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcsd.data import load
from fedcsd.errors import UserError
from fedcsd.files import cache_folder
from helpers.image_files import pictures, write_parquet


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


@pytest.mark.slow
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
    """It is said before anything is decoded."""
    monkeypatch.setenv("FEDCSD_CACHE", "/proc/nowhere")
    monkeypatch.setattr("fedcsd.data.dataset.Dataset.store", lambda _: pytest.fail("decoded"))
    with pytest.raises(UserError, match=r"cannot write to /proc/nowhere.*FEDCSD_CACHE"):
        load("mnist", {}, mnist_folder)
