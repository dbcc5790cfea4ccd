"""A new measurement costs one row of the table of measurements: all that shows measurements shows it."""

import json
from pathlib import Path
from typing import Any

import pytest

import fedcsd as package
from fedcsd.experiments.summary import summarise
from fedcsd.experiments.tracking import scalars
from fedcsd.federation.rounds import Federation
from fedcsd.measurements import MEASUREMENTS, Measurement
from fedcsd.results import comparison, groups, plots
from fedcsd.results import terminal as console
from fedcsd.results.report.charts import CHARTS
from fedcsd.results.report.collect import collect
from fedcsd.results.report.page import page
from helpers.comparisons import SMALL
from helpers.federations import blobs

AUROC = Measurement(
    "test_auroc",
    "test AUROC",
    "%",
    100.0,
    better="higher",
    chart="accuracy",
    summary="final",
    column="AUROC",
    panel=True,
)


@pytest.fixture
def compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A comparison of two methods whose records have one number more; the better one is the second."""
    monkeypatch.setitem(MEASUREMENTS, AUROC.name, AUROC)
    evaluated = Federation._evaluate
    values = iter([0.5, 0.6, 0.7, 0.7, 0.8, 0.9])
    monkeypatch.setattr(Federation, "_evaluate", lambda self: evaluated(self) | {"test_auroc": next(values)})
    call = {"data": blobs(), "out": tmp_path / "c", "tensorboard": True, "lr": 0.1, **SMALL}
    return package.compare("fedavg,fedprox", **call)


def test_one_row_is_enough(compared: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = compared.runs["fedprox"][0]
    assert run.summary["final_auroc"] == summarise(run.history)["final_auroc"] == 0.9
    assert "| best (%) | AUROC (%) |" in compared.markdown()
    assert "| **90.00** |" in compared.markdown()
    assert r"$\mathbf{90.00}$" in compared.latex()
    assert "auroc_mean" in compared.csv().splitlines()[0]
    assert comparison.table(compared.rows).column("AUROC (%)") == ["70.00", "90.00"]
    console.show_comparison(compared.rows, [0])
    console.show_run(run.settings, run.summary)
    shown = capsys.readouterr().out
    assert shown.count("AUROC") == 2
    histories = plots.grouped(groups.found([tmp_path / "c"]))
    assert plots.plot(histories, tmp_path / "x.svg", y=["test_auroc"])
    assert scalars(run.history[-1])["test_auroc"] == 0.9
    content = collect([tmp_path / "c"])
    assert "AUROC (%)" in content["table"]["head"]
    assert "test_auroc" in [measure["key"] for measure in content["charts"][0]["measures"]]
    assert content["series"]["fedprox"]["y"]["test_auroc"]["mean"] == [70, 80, 90]
    assert "test AUROC (%)" in page(content)
    assert json.loads((tmp_path / "c/comparison.json").read_text())["rows"][1]["measured"]["test_auroc"] == [
        90
    ]


def test_tensorboard_has_it(compared: Any, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "c/fedprox-seed0/tensorboard"))
    events.Reload()
    assert [event.value for event in events.Scalars("test_auroc")] == pytest.approx([0.7, 0.8, 0.9])


def test_every_chart_that_a_measurement_names_exists() -> None:
    assert {row.chart for row in MEASUREMENTS.values() if row.chart} <= set(CHARTS)
