"""Test a user's parquet files: columns, splits, and messages about mistakes."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from fedcsd.data import load
from fedcsd.errors import Note, UserError
from helpers.image_files import nothing_half_written, pictures, png, write_parquet
from helpers.program import Fedcsd, FedcsdRun


def test_own_parquet_with_a_client_column(tmp_path: Path, fedcsd: Fedcsd, fedcsd_run: FedcsdRun) -> None:
    columns = {"diagnosis": np.arange(90) % 3, "hospital": [f"h{i % 5}" for i in range(90)]}
    write_parquet(tmp_path / "scans.parquet", pictures(90, (20, 20)), columns, image="scan")
    with pytest.raises(UserError, match=r"no label column among scan, diagnosis, hospital.*data\.label"):
        load(str(tmp_path / "scans.parquet"))
    sets = ("--set", "data.label=diagnosis", "--set", "data.client=hospital")
    run = fedcsd_run("--data", "scans.parquet", "--partition", "column", *sets)
    assert "clients = 5" in (run / "config.toml").read_text()
    again = fedcsd("resume", run.name, "--rounds", "2")  # the options are in the config
    assert again.returncode == 0, again.stderr


def test_split_by_words_in_names(tmp_path: Path) -> None:
    for name, seed in (("latest", 0), ("my-train", 1), ("my-test", 2), ("validation-0", 3)):
        write_parquet(tmp_path / f"p/{name}.parquet", pictures(10, seed=seed), {"label": np.arange(10) % 2})
    data = load(str(tmp_path / "p"))
    assert (len(data.y_train), len(data.y_test)) == (20, 10)
    alone = load(str(tmp_path / "p/my-test.parquet"))
    assert (len(alone.y_train), len(alone.y_test)) == (8, 2)


def test_split_by_words_in_the_names_of_folders(tmp_path: Path) -> None:
    for part, count in (("train", 20), ("test", 10), ("validation", 6)):
        file = tmp_path / f"test-hub/default/{part}/0000.parquet"
        write_parquet(file, pictures(count), {"label": np.arange(count) % 2})
    data = load(str(tmp_path / "test-hub"))
    assert (len(data.y_train), len(data.y_test)) == (20, 10)
    write_parquet(tmp_path / "test-hub/test-2/train-0.parquet", pictures(8), {"label": np.arange(8) % 2})
    assert len(load(str(tmp_path / "test-hub")).y_train) == 28  # the file's own name goes first


def test_labels_that_skip_numbers_are_told_of_decoded_data_too(tmp_path: Path, own_cache: Path) -> None:
    write_parquet(tmp_path / "gaps.parquet", pictures(20), {"label": 10 * (np.arange(20) % 2)})
    for _ in range(2):
        with pytest.warns(Note, match="gaps: 9 of the 11 classes have no samples"):
            load(str(tmp_path / "gaps.parquet"))


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


def test_a_corrupt_image_inside_parquet(tmp_path: Path, own_cache: Path) -> None:
    rows = [{"bytes": png(p), "path": ""} for p in pictures(10)]
    rows[4]["bytes"] = b"not a picture"
    pq.write_table(pa.table({"image": rows, "label": np.arange(10) % 2}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet, row 4 cannot be read as an image"):
        load(str(tmp_path / "a.parquet"))
    nothing_half_written(own_cache)


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
