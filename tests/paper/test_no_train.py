"""Test `fedcsd reproduce --no-train`, which makes tables of existing runs without their data."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w

import fedcsd as package
from fedcsd.errors import UserError
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.paper.exhibits import EXHIBITS
from fedcsd.paper.plan import plan
from fedcsd.paper.reproduce import reproduce
from fedcsd.paper.scales import Choices, stand_ins
from helpers.program import Fedcsd


def trained(name: str, out: Path, **overrides: Any) -> None:
    """A run of a table at smoke scale, of digits in place of its data, where one of that data would be."""
    chosen = Choices("smoke", (0,), overrides)
    run = next(iter(plan(EXHIBITS[name], chosen, out).values()))
    quick = {"data": "digits", "model": "mlp", "augment": "none", "train_size": 0}
    package.run(**{**run.values, **quick, "device": "cpu", "precision": "fp32"}, out=run.path)
    names = {**run.values, **{key: run.values[key]["name"] for key in ("data", "model", "partition")}}
    config = RunDirectory.open(run.path).config
    (run.path / "config.toml").write_text(tomli_w.dumps({**config, **names, "method": config["method"]}))


@pytest.mark.parametrize(
    ("scale", "name", "there", "taken"),
    [
        ("smoke", "cifar100", {"cifar100", "digits"}, {}),
        ("smoke", "cifar100", {"digits"}, {"cifar100": "digits"}),
        ("paper", "cifar100", {"cifar100"}, {}),
        ("paper", "femnist", {"femnist", "mnist"}, {}),
        ("paper", "femnist", {"mnist"}, {"femnist": "mnist"}),
    ],
)
def test_what_has_runs_is_shown_and_the_real_data_first(
    scale: str, name: str, there: set[str], taken: dict[str, str], tmp_path: Path
) -> None:
    gone = {"data_dir": str(tmp_path / "gone")}
    found = stand_ins([name], scale, {}, gone, train=False, ended=lambda _, other: other in there)
    assert found[0] == taken


def test_runs_of_data_that_is_no_longer_there_are_shown(
    tmp_path: Path, fedcsd: Fedcsd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDCSD_DATA", raising=False)
    trained("table4", tmp_path / "p")
    shown = fedcsd("reproduce", "table4", "--scale", "smoke", "--no-train", "--out", "p")
    assert shown.returncode == 0, shown.stderr
    assert "5 of 6 runs" in shown.stdout
    assert "digits in place" not in shown.stdout
    assert {p.name for p in (tmp_path / "p").iterdir()} == {"runs", "smoke"}


def test_settings_without_runs_are_refused(tmp_path: Path, fedcsd: Fedcsd) -> None:
    trained("table4", tmp_path / "p", lr=0.03)
    shown = fedcsd("reproduce", "table4", "--scale", "smoke", "--no-train", "--out", "p")
    assert shown.returncode == 2
    assert "p has no finished run of table4 with these settings: give the settings" in shown.stderr
    assert [path.name for path in (tmp_path / "p").iterdir()] == ["runs"]


@pytest.mark.parametrize("name", ["fig1", "fig-tsne"])
def test_a_figure_that_needs_models_says_so(name: str, tmp_path: Path) -> None:
    chosen = Choices("smoke", (0,), {"workers": 1}, {"cifar100": "digits", "femnist": "digits"})
    runs = plan(EXHIBITS[name], chosen, tmp_path).values()
    for run in runs:
        package.run(**run.values, out=run.path)
        (run.path / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match=rf"^{name} needs the model of .*: remove that folder, and the run is"
    ):
        reproduce([name], chosen, tmp_path, train=False)
