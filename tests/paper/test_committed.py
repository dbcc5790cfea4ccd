"""Committed results are read from their archives, and their tables are made again."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

import fedcsd
from fedcsd.cli.main import guarded
from fedcsd.experiments.runs import archive
from fedcsd.results.report.collect import collect

ROOT = Path(fedcsd.__file__).parents[2]
RESULTS = ROOT / "results"
ARCHIVES = sorted(RESULTS.glob("*/*/runs.parquet"))
COMMANDS = re.findall(
    r"`fedcsd (reproduce .*)`", (RESULTS / "paper" / "README.md").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("path", ARCHIVES, ids=lambda path: path.parent.name)
def test_archives_have_whole_runs(path: Path) -> None:
    runs = archive.read(path)
    assert len(runs) >= 4
    for run in runs.values():
        summary = run.summary
        rounds = run.divergence.round - 1 if run.divergence else summary and summary["rounds"]
        assert len(run.history()) == rounds


@pytest.mark.slow
@pytest.mark.parametrize("study", ["cifar100-resnet50", "office-62"])
def test_tables_are_made_again(study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "results" / "paper" / study
    folder.mkdir(parents=True)
    shutil.copy(RESULTS / "paper" / study / archive.FILE, folder)
    (command,) = [command for command in COMMANDS if command.endswith(f"--out results/paper/{study}")]
    assert guarded(shlex.split(command), debug=False) == 0
    found = (RESULTS / "paper" / study).glob("*/*.*")
    committed = [path for path in found if path.suffix in (".md", ".csv")]
    assert committed
    for path in committed:
        assert (folder / path.parent.name / path.name).read_bytes() == path.read_bytes(), path


def test_a_report_is_made_of_an_archive() -> None:
    page = collect([RESULTS / "methods" / "rate-mnist"])
    assert len(page["runs"]) == 60
    assert {line["label"] for line in page["methods"]} >= {"fedavg, lr=0.1", "fedcsd:uniform, lr=0.03"}


def test_results_stay_small() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12e6
