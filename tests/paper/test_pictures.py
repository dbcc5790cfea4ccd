"""Test the pictures of `fedcsd reproduce`, and the tables of their numbers."""

import csv
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedcsd.federation.callbacks import Callbacks
from fedcsd.paper.exhibits import EXHIBITS, TITLES
from fedcsd.paper.figures import SPAN, caption
from fedcsd.paper.plan import PlannedRun, parse_only
from fedcsd.paper.report import Report
from fedcsd.paper.reproduce import Progress, reproduce
from fedcsd.paper.scales import Choices
from fedcsd.results.tables import unbroken


def choices(**overrides: Any) -> Choices:
    digits = dict.fromkeys(TITLES, "digits")
    notes = {name: f"digits in place of {title}" for name, title in TITLES.items()}
    return Choices("smoke", (0,), {"workers": 1, "rounds": 2, **overrides}, digits, notes)


class Stop(Progress):
    """Ctrl-C when the first run starts."""

    def start(self, run: PlannedRun, rounds: int, coming: Sequence[PlannedRun]) -> Callbacks:
        raise KeyboardInterrupt


def test_runs_that_diverge_at_once_are_told_in_the_picture(tmp_path: Path) -> None:
    only = parse_only("data=femnist,beta=0.05")
    made = reproduce(["fig-comm"], choices(lr=1e20), tmp_path, only=only)[0]
    picture = made.files[0].with_name("fig-comm.svg").read_text()
    assert "FedCSD: 1 of 1 diverged in round 1" in picture


def test_a_picture_has_no_empty_panel_and_all_names(tmp_path: Path) -> None:
    made = reproduce(["fig-mask"], choices(), tmp_path, only={"data": {"femnist"}})[0]
    picture = made.files[0].with_name("fig-mask.svg").read_text()
    assert "FEMNIST" in picture
    assert "CIFAR" not in picture
    names = ("wrong, filtered", "right, lost", "kept of all", "teacher right")
    assert all(name in picture for name in names)


@pytest.mark.parametrize(
    ("name", "scale", "instead", "told"),
    [
        ("fig1", "smoke", {"cifar100": "digits"}, "smoke scale, digits in place of CIFAR-100"),
        ("fig-alpha", "small", {}, "small scale"),
        ("fig-tsne", "paper", {"femnist": "mnist"}, "mnist in place of FEMNIST"),
        ("fig-alpha", "paper", {"femnist": "mnist"}, ""),
    ],
)
def test_a_picture_says_what_is_not_the_papers(
    name: str, scale: str, instead: dict[str, str], told: str
) -> None:
    assert caption(Report(EXHIBITS[name], Choices(scale, (0,), {}, instead), {}, {})) == told


@pytest.mark.slow
def test_the_line_above_a_picture_is_in_it(tmp_path: Path) -> None:
    for name in ("fig-alpha", "fig-mask", "fig1", "fig-tsne"):
        made = reproduce([name], choices(), tmp_path)[0]
        for picture in made.files[0].parent.glob("*.svg"):
            assert "smoke scale" in re.sub(r"<!-- | -->", " ", picture.read_text()), picture


@pytest.mark.slow
def test_small_differences_look_small(tmp_path: Path) -> None:
    made = reproduce(["fig-alpha"], choices(), tmp_path)[0]
    values = [result.mean for result in made.report.results]
    assert max(values) - min(values) < SPAN / 2
    picture = made.files[0].with_name("fig-alpha.svg").read_text()
    ticks = [float(tick) for tick in re.findall(r">(\d+)</text>", picture)]
    assert max(ticks) - min(ticks) >= SPAN - 1


@pytest.mark.slow
def test_what_pictures_show_is_in_tables_too(tmp_path: Path) -> None:
    folder = reproduce(["fig1"], choices(), tmp_path)[0].files[0].parent
    saved = json.loads((folder / "fig1.json").read_text())
    drifts, forgotten = json.loads((folder / "results.json").read_text())["numbers"]
    names = ["FedAvg", "feature distillation", "logit distillation", "FedCSD"]
    assert [row[0] for row in drifts["rows"]] == [row[0] for row in forgotten["rows"]] == names
    for row, curve in zip(drifts["rows"], saved["curves"].values(), strict=True):
        assert float(row[1]) == pytest.approx(curve["logit_drift"][-1], abs=1e-3)
        assert float(row[4]) == pytest.approx(100 * curve["average_accuracy"][-1], abs=0.01)
    for name, numbers in (("drift", drifts), ("forgetting", forgotten)):
        head, *rows = csv.reader((folder / f"fig1-{name}.csv").open())
        assert (head, rows) == ([unbroken(text) for text in numbers["head"]], numbers["rows"])
    text = (folder / "fig1.md").read_text()
    assert ": forgetting](fig1-forgetting.png)" in text
    assert f"| {' | '.join(drifts['rows'][0])} |" in text


@pytest.mark.slow
def test_an_interruption_leaves_the_picture_and_its_table(tmp_path: Path) -> None:
    folder = reproduce(["fig1"], choices(), tmp_path)[0].files[0].parent
    before = (folder / "fig1.md").read_text()
    next((tmp_path / "runs").glob("*/summary.json")).unlink()  # as a run that was cut off
    with pytest.raises(KeyboardInterrupt):
        reproduce(["fig1"], choices(), tmp_path, progress=Stop())
    after = (folder / "fig1.md").read_text()
    assert "without a result yet: 1 of 1 runs" in after
    table = before[before.index("## After") : before.index("## What was run")]
    assert table in after
