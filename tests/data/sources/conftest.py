"""What tests of data on disk need: a cache of their own, and MNIST in small."""

from pathlib import Path

import numpy as np
import pytest

from helpers.image_files import pictures, write_parquet


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FEDCSD_CACHE", str(folder))
    monkeypatch.delenv("FEDCSD_DATA", raising=False)
    return folder


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
