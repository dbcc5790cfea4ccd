"""The report of runs that have lost something: shown with what there is."""

import json
import tomllib
from pathlib import Path

import pytest
import tomli_w

from fedcsd.errors import Note
from fedcsd.results.report.collect import collect
from fedcsd.results.report.page import page
from helpers.reports import made


@pytest.mark.parametrize("content", [b"", None])
def test_a_finished_run_whose_measurements_are_lost(content: bytes | None, tmp_path: Path) -> None:
    run = made(tmp_path / "r", [0.5, 0.6])
    (run / "metrics.jsonl").unlink() if content is None else (run / "metrics.jsonl").write_bytes(content)
    with pytest.warns(Note, match="of the 2 rounds that were trained 0 are in it"):
        found = collect([run])
    assert found["table"]["cells"][0][:2] == ["fedavg", "60.00"]
    assert found["alerts"] == ["r: 2 of its rounds cannot be read"]
    page(found)


@pytest.mark.parametrize("lost", ["holdout", "bytes_up", "best_accuracy", "train_size"])
def test_a_run_of_another_version_is_shown_with_what_it_has(lost: str, tmp_path: Path) -> None:
    run = made(tmp_path / "r", [0.5, 0.6])
    config, summary = (
        tomllib.loads((run / "config.toml").read_text()),
        json.loads((run / "summary.json").read_text()),
    )
    assert config.pop(lost, None) is not None or summary.pop(lost, None) is not None
    (run / "config.toml").write_text(tomli_w.dumps(config))
    (run / "summary.json").write_text(json.dumps(summary))
    found = collect([run])
    shown = dict(zip(found["table"]["head"], found["table"]["cells"][0], strict=True))
    assert (shown["method"], shown["accuracy (%)"], shown["time"]) == ("fedavg", "60.00", "4.0 s")
    assert shown.get("sent (MB)") == (None if lost == "bytes_up" else "4.00")
    assert shown.get("best (%)") == (None if lost == "best_accuracy" else "60.00")
    page(found)


def test_measurements_that_are_no_numbers(tmp_path: Path) -> None:
    run = made(tmp_path / "r", [0.5, 0.6], holdout=0.2)
    lost = {"mean_logit_drift": None, "client_accuracy_mean": None}
    (run / "summary.json").write_text(json.dumps({**json.loads((run / "summary.json").read_text()), **lost}))
    assert collect([run])["table"]["cells"][0][:2] == ["fedavg", "60.00"]


def test_a_method_whose_package_is_gone(tmp_path: Path) -> None:
    run = made(tmp_path / "r", [0.5, 0.6], method={"name": "gone.away:Mine"})
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("[facts.code]", '[facts.code]\nmethod = "0123"'))
    assert collect([run])["table"]["cells"][0][:2] == ["Mine", "60.00"]


def test_without_a_table_the_results_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: object) -> None:
        raise KeyError("anything")

    made(tmp_path / "a", [0.5, 0.6])
    made(tmp_path / "b", [0.2], rounds=2, ended=False, method={"name": "moon"})
    monkeypatch.setattr("fedcsd.results.report.collect.rows", damaged)
    assert collect([tmp_path])["table"]["cells"] == [["fedavg", "60.00"], ["moon", "20.00 so far"]]
