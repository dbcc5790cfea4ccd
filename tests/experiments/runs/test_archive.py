"""Test runs in one parquet file: nothing is lost, and readers treat an archived run like a folder."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedcsd as package
from fedcsd.errors import Divergence, UserError
from fedcsd.experiments.runs import archive
from fedcsd.experiments.runs.recorded import RecordedRun
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.results import groups, plots
from fedcsd.results.report.collect import collect

SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "clients": 3, "min_samples": 2, "workers": 1}


@dataclass
class Made(RecordedRun):
    """A run of records that a test gives."""

    records: list[dict[str, Any]]
    told: dict[str, Any]
    end: Divergence | None

    @property
    def config(self) -> dict[str, Any]:
        return self.told

    @property
    def summary(self) -> dict[str, Any] | None:
        return None if self.end else self.told

    @property
    def divergence(self) -> Divergence | None:
        return self.end

    def history(self) -> list[dict[str, Any]]:
        return self.records

    def counts(self) -> None:
        return None


def same(a: Any, b: Any) -> bool:
    """Say if two values are equal, with equal types at every depth."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


number = st.floats(allow_nan=False) | st.none()
value = st.recursive(
    number | st.integers() | st.booleans() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
records = st.lists(
    st.dictionaries(st.sampled_from("abc"), value)
    | st.fixed_dictionaries(
        {},
        optional={
            "d": number,
            "e": st.integers(-(2**70), 2**70),
            "f": st.lists(number, max_size=3),
            "g": st.lists(st.integers(0, 9), max_size=3),
            "h": st.dictionaries(st.text(), number, max_size=3),
        },
    ),
    max_size=4,
)


@pytest.mark.slow
@given(st.lists(records, min_size=1, max_size=3), st.dictionaries(st.text(), value, max_size=3))
@settings(max_examples=150, deadline=None)
def test_nothing_is_lost(histories: list[list[dict[str, Any]]], told: dict[str, Any]) -> None:
    runs = {}
    for index, some in enumerate(histories):
        history = [{"round": number, **record} for number, record in enumerate(some, 1)]
        end = Divergence(index, "the loss is not finite") if index % 2 else None
        runs[f"run-{index}"] = Made(history, told, end)
    with TemporaryDirectory() as folder:
        path = Path(folder) / archive.FILE
        archive.write(path, runs)
        back = archive.read(path)
    assert list(back) == list(runs)
    for name, run in runs.items():
        assert same(back[name].history(), run.records)
        assert same(back[name].config, run.config)
        assert same(back[name].summary, run.summary)
        assert back[name].divergence == run.divergence


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, and `archived` with the same two in an archive."""
    folder = tmp_path_factory.mktemp("study")
    for seed in (0, 1):
        package.run(method="fedcsd", data="digits", seed=seed, out=folder / f"seed{seed}", **SMALL)
    (folder / "archived").mkdir()
    runs = {path.name: RunDirectory.open(path) for path in archive.paths_in(folder)}
    archive.write(folder / "archived" / archive.FILE, runs)
    return folder


@pytest.mark.slow
def test_readers_take_an_archive_as_they_take_folders(study: Path) -> None:
    shown = [plots.grouped(groups.found([path])) for path in (study, study / "archived")]
    assert shown[0] == shown[1]
    folders, archived = (collect([path]) for path in (study, study / "archived"))
    different = {key for key in folders if folders[key] != archived[key]}
    assert different <= {"title", "made", "partitions"}  # an archive has no partition
    one = study / "archived" / archive.FILE / "seed1"
    assert groups.found([one])[0].history() == RunDirectory.open(study / "seed1").history()


def test_a_round_is_a_row_for_any_reader_of_parquet(study: Path) -> None:
    rows = pq.read_table(study / "archived" / archive.FILE).to_pylist()
    assert [(row["run.name"], row["round"]) for row in rows] == [
        ("seed0", 1),
        ("seed0", 2),
        ("seed1", 1),
        ("seed1", 2),
    ]
    assert rows[0]["test_accuracy"] == RunDirectory.open(study / "seed0").history()[0]["test_accuracy"]


def test_what_an_archive_lacks_is_said(study: Path, tmp_path: Path) -> None:
    path = study / "archived" / archive.FILE
    with pytest.raises(UserError, match=r"runs\.parquet has no run seed7$"):
        archive.open_run(path / "seed7")
    with pytest.raises(UserError, match=r"is an archive: it has no weights of its runs"):
        package.load_run(path / "seed0")
    old = tmp_path / "old.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata({"format": "0"}), old)
    with pytest.raises(UserError, match=r"has format 0, and this version of fedcsd reads format 1$"):
        archive.read(old)
    (tmp_path / "torn.parquet").write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"^cannot read .*torn\.parquet: "):
        archive.read(tmp_path / "torn.parquet")
