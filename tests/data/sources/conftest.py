"""Fixtures for tests of data on disk: they have a cache of their own, and a small MNIST."""

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
    """Write small files that have the schema of MNIST on the hub."""
    write_parquet(
        tmp_path / "mnist/train-00000-of-00001.parquet", pictures(60), {"label": np.arange(60) % 10}
    )
    write_parquet(
        tmp_path / "mnist/test-00000-of-00001.parquet", pictures(20, seed=1), {"label": np.arange(20) % 10}
    )
    return tmp_path
