"""Test `fedcsd reproduce`: every table and figure at smoke scale, kept runs, interruptions, wrong input."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedcsd.errors import Note, UserError
from fedcsd.experiments.runs import provenance
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.federation.callbacks import Callbacks
from fedcsd.paper.exhibits import EXHIBITS, PRINTED, TITLES, Point
from fedcsd.paper.plan import PlannedRun, digest, parse_only, plan
from fedcsd.paper.reproduce import Made, Progress, reproduce
from fedcsd.paper.scales import SCALES, Choices, stand_ins
from helpers.program import Fedcsd

DIGITS = dict.fromkeys(TITLES, "digits")
STAND_IN = [text for name in TITLES for text in ("--stand-in", f"{name}=digits")]
FAST = {"workers": 1, "rounds": 2}
LATER = {"drift": "fedcsd.results.analysis.drift", "tsne": "fedcsd.results.analysis.tsne"}


class Counted(Progress):
    """Count the runs that are started."""

    def __init__(self, when: int = 0):
        self.labels: list[str] = []
        self.when = when

    def start(self, run: PlannedRun, rounds: int, coming: Sequence[PlannedRun]) -> Callbacks:
        self.labels.append(run.label)
        return Stop() if len(self.labels) == self.when else Callbacks()


class Stop(Callbacks):
    """Raise KeyboardInterrupt after the first round, as Ctrl-C does."""

    def round(self, record: Any, rounds: int) -> None:
        raise KeyboardInterrupt


def choices(**overrides: Any) -> Choices:
    notes = {name: f"digits in place of {title}" for name, title in TITLES.items()}
    return Choices("smoke", (0,), {**FAST, **overrides}, DIGITS, notes)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paper")


@pytest.fixture(scope="module")
def make(out: Path) -> Callable[..., Made]:
    """Make one table or figure; all tests of this file share their runs."""

    def make(name: str, **more: Any) -> Made:
        return reproduce([name], choices(), out, **more)[0]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("name", EXHIBITS)
def test_every_name_at_smoke_scale(name: str, make: Callable[..., Made]) -> None:
    figure = EXHIBITS[name].figure
    if figure in LATER:
        pytest.importorskip(LATER[figure])
    made = make(name)
    folder = made.files[0].parent
    assert folder.name == name
    for ending in ("md", "csv", "tex", *(("png", "svg", "pdf") if figure else ())):
        assert (folder / f"{name}.{ending}").stat().st_size > 100
    results = json.loads((folder / "results.json").read_text())
    assert results["missing"] == []
    cells = [cell for part in results["parts"] for cell in part["cells"]]
    assert len(cells) == sum(len(part.entries) for part in EXHIBITS[name].sections)
    for cell in cells:
        domain = cell["measure"] in PRINTED["table2"]["columns"][:-1]  # which digits have not
        assert (cell["mean"] is None) == domain
        if cell["printed"] is not None and not domain:
            assert cell["difference"] == pytest.approx(cell["mean"] - cell["printed"], abs=1e-5)
        for run in cell["runs"]:
            assert (folder / run / "config.toml").exists()
            assert len(results["runs"][run]["curves"]["test_accuracy"]) == 2
    if name == "table2":
        footnote = (
            r"\multicolumn{6}{l}{\footnotesize $^a$: MOON, average: the mean of its four columns is 63.72} \\"
        )
        assert footnote in (folder / f"{name}.tex").read_text()
    tables = {"fig1": 2, "fig-tsne": 1}.get(name, 0)
    assert len(results["numbers"]) == tables
    assert (folder / f"{name}.tex").read_text().count("\\toprule") == len(results["parts"]) + tables
    text = (folder / f"{name}.md").read_text()
    assert "digits in place of" in text
    assert "scale smoke" in text
    lines = list(csv.DictReader((folder / f"{name}.csv").open()))
    assert len(lines) == len(cells)
    assert {line["difference"] for line in lines} == {""}  # of models that have hardly learned anything


@pytest.mark.slow
def test_the_second_call_trains_nothing_and_tables_share_runs(make: Callable[..., Made], out: Path) -> None:
    make("table3")
    again = Counted()
    make("table3", progress=again)
    assert again.labels == []
    make("table4", progress=again)
    make("fig-alpha", progress=again)
    trained = list(again.labels)
    make("fig-mu-tau", progress=again)
    # τ = 10, μ = 0.001 and α = 0.9 are FedCSD itself, which table3 has.
    assert "fedcsd digits β 0.5 seed 0" not in again.labels
    assert all(label.startswith("fedcsd:") for label in trained if "β 0.5" in label)
    assert not any((path / "checkpoints").exists() for path in (out / "runs").iterdir())


def test_runs_of_other_code_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only = parse_only("method=fedavg,beta=0.5,data=cifar100")
    with warnings.catch_warnings():
        warnings.simplefilter("error", Note)
        for _ in range(2):
            made = reproduce(["table1"], choices(), tmp_path, only=only)
    (run,) = json.loads((made[0].files[0].parent / "results.json").read_text())["runs"].values()
    assert run["versions"]["package"] == provenance.package()
    monkeypatch.setattr(provenance, "package", lambda: "changed")
    with pytest.warns(Note, match="other code of fedcsd than this: 1 of the 1 runs that are there"):
        reproduce(["table1"], choices(), tmp_path, only=only, train=False)


def test_the_numbers_are_those_of_the_runs(make: Callable[..., Made]) -> None:
    made = make("table3")
    for result in made.report.results:
        run = made.report.plan[result.entry.point, 0]
        summary = RunDirectory.open(run.path).summary
        assert summary is not None
        assert result.values[0] == pytest.approx(100 * summary["final_accuracy"])


def test_only_trains_what_is_asked_for_and_shows_the_rest_as_missing(tmp_path: Path) -> None:
    counted = Counted()
    only = parse_only("method=fedavg,method=fedcsd,beta=.50,data=cifar100")
    (made,) = reproduce(["table1"], choices(), tmp_path, only=only, progress=counted)
    assert counted.labels == [
        "fedavg digits β 0.5 seed 0",
        "fedcsd digits β 0.5 seed 0",
    ]
    text = made.files[0].read_text()
    assert "without a result yet: " in text
    assert re.search(r"\| FedProx \| – \(59\.37\) \| – \(68\.64\) \| – \(69\.64\) \|", text)
    assert re.search(r"\| FedAvg \| – \(58\.50\) \| \d+\.\d+ \(66\.67\) \|", text)
    (shown,) = reproduce(["table1"], choices(), tmp_path, only=only, train=False)
    assert shown.report.missing == made.report.missing


def test_a_part_that_only_leaves_out_is_not_shown_nor_its_data_needed(tmp_path: Path, fedcsd: Fedcsd) -> None:
    only = parse_only("method=fedavg,beta=5")  # of CIFAR-100 alone
    (made,) = reproduce(["table1"], choices(), tmp_path, only=only)
    assert [part.section.title for part in made.report.sections] == [TITLES["cifar100"]]
    assert "## FEMNIST" not in made.files[0].read_text()
    (again,) = reproduce(["table1"], choices(), tmp_path, only=parse_only("data=femnist"), train=False)
    assert [part.section.title for part in again.report.sections] == [TITLES["cifar100"], TITLES["femnist"]]
    (tmp_path / "empty").mkdir()
    given = ("--scale", "small", "--data-dir", str(tmp_path / "empty"), "--stand-in", "femnist=digits")
    shown = fedcsd("reproduce", "table1", "--only", "data=femnist", *given, "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "48 runs, 48 to train" in shown.stdout
    assert fedcsd("reproduce", "table1", *given, "--dry-run").returncode == 0  # looks at nothing
    refused = fedcsd("reproduce", "table1", *given)
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith("error: CIFAR-100 is needed: ")


@pytest.mark.parametrize("more", [("--dry-run",), ()])
def test_only_that_leaves_nothing_says_what_there_is(more: tuple[str, ...], fedcsd: Fedcsd) -> None:
    said = fedcsd("reproduce", "target", "--only", "beta=5", "--scale", "smoke", *more)
    assert said.returncode == 2
    assert said.stderr == "error: --only leaves nothing of target, which has beta 0.5, 0.05, 0.01\n"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_nothing_is_looked_for(tmp_path: Path, fedcsd: Fedcsd) -> None:
    for command in (("reproduce", "table1"), ("run", "--data", "cifar100")):
        said = fedcsd(*command, "--device", "cuda", "--data-dir", str(tmp_path))  # which has no CIFAR-100
        assert said.returncode == 2
        assert said.stderr.startswith(("error: this PyTorch (", "error: PyTorch finds no CUDA device"))


def test_only_may_be_repeated(fedcsd: Fedcsd) -> None:
    given = ("--only", "method=fedavg", "--only", "beta=0.5", "--scale", "smoke", *STAND_IN, "--dry-run")
    assert "2 runs, 2 to train" in fedcsd("reproduce", "table1", *given).stdout


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("metrics.jsonl", "", "rounds 1 to 2 should be in it"),
        ("metrics.jsonl", '{"round": 2, "test_accuracy": 0.5}\n', "rounds 1 to 2 should be in it"),
        ("summary.json", "{", "summary.json is damaged"),
        ("summary.json", "[]", "is damaged"),
    ],
)
def test_a_finished_run_that_is_damaged_is_not_shown(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedcsd.cli.main import guarded

    only = parse_only("method=fedavg,beta=5")
    reproduce(["table1"], choices(), tmp_path, only=only)
    (run,) = (tmp_path / "runs").iterdir()
    (run / name).write_text(text)
    for train in (True, False):
        with pytest.raises(UserError, match=said) as error:
            reproduce(["table1"], choices(), tmp_path, only=only, train=train)
        assert str(run) in str(error.value)
    fast = [part for key, value in FAST.items() for part in ("--set", f"{key}={value}")]
    where = ["--scale", "smoke", *STAND_IN, *fast, "--out", str(tmp_path), "--only", "method=fedavg,beta=5"]
    assert guarded(["reproduce", "table1", *where, "--dry-run"], debug=False) == 2
    assert said in capsys.readouterr().err


def test_points_are_as_many_as_runs(tmp_path: Path) -> None:
    points = {point for exhibit in EXHIBITS.values() for point in exhibit.points}
    runs = {run.path for exhibit in EXHIBITS.values() for run in plan(exhibit, choices(), tmp_path).values()}
    assert len(points) == len(runs)


@pytest.mark.slow
def test_an_interruption_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    counted = Counted(when=3)
    with pytest.raises(
        KeyboardInterrupt, match=r"round 1 is saved; 4 runs left to train; go on with: the same"
    ) as stop:
        reproduce(["table3"], choices(), tmp_path / "cut", progress=counted)
    assert "fedcsd resume" not in str(stop.value)
    folder = tmp_path / "cut" / choices().folder(["cifar100"])
    assert folder.name == "smoke-rounds=2-cifar100=digits"  # another one than that of the real data
    written = json.loads((folder / "table3" / "results.json").read_text())
    assert len(written["missing"]) == 4
    states = [run.state for run in plan(EXHIBITS["table3"], choices(), tmp_path / "cut").values()]
    assert states == ["done", "done", "1 of 2 rounds", "to do", "to do", "to do"]
    rest = Counted()
    (cut,) = reproduce(["table3"], choices(), tmp_path / "cut", progress=rest)
    (whole,) = reproduce(["table3"], choices(), tmp_path / "whole")
    assert len(rest.labels) == 4
    assert [r.values for r in cut.report.results] == [r.values for r in whole.report.results]


@pytest.mark.slow
def test_ctrl_c_and_several_processes(tmp_path: Path, fedcsd: Fedcsd) -> None:
    arguments = ["reproduce", "table4", "--scale", "smoke", *STAND_IN, "--workers", "1", "--out", "p"]
    command = [sys.executable, "-m", "fedcsd", *arguments, "--rounds", "500"]
    env = {**os.environ, "COLUMNS": "100"}
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    deadline = time.monotonic() + 60
    while not any((tmp_path / "p" / "runs").glob("*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.lstrip().startswith("interrupted: ")
    assert "6 runs left to train; go on with: the same command again" in errors
    assert "Traceback" not in errors
    shared = fedcsd(*arguments, "--jobs", "2")
    assert shared.returncode == 0, shared.stderr
    assert "without a result" not in shared.stdout
    again = fedcsd(*arguments, "--dry-run")
    assert "6 runs, 0 to train" in again.stdout


@pytest.mark.slow
def test_domains_and_pools_of_office_caltech(tmp_path: Path) -> None:
    """With a folder like Office-Caltech-10, columns are domains, both pools are trained, and the nearer one is named."""
    random = np.random.default_rng(0)
    for domain in PRINTED["table2"]["columns"][:-1]:
        for number in range(80):
            file = tmp_path / "data" / "office_caltech_10" / domain / f"class{number % 10}" / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file)
    overrides = {**FAST, "data_dir": str(tmp_path / "data")}
    instead, notes = stand_ins(["office_caltech_10"], "smoke", {}, overrides)
    assert not instead
    chosen = Choices("smoke", (0,), overrides, instead, notes)
    only = parse_only("method=fedavg,method=fedcsd")
    (made,) = reproduce(["table2"], chosen, tmp_path / "out", only=only)
    webcam = [result for part in made.report.sections for result in part.column("Webcam")]
    assert [r.whole for r in webcam if r.entry.row == "FedCSD"] == [True, True]
    sizes = {
        run.point.pool: len(np.concatenate(RunDirectory.open(run.path).partition()[0]))
        for run in made.report.plan.values()
        if run.ended
    }
    assert sizes == {62: 248, 0.6: 192}
    text = made.files[0].read_text()
    assert "nearer to the paper: " not in text  # of models that were hardly trained
    values = [r.mean for r in made.report.sections[0].results if r.entry.row == "FedAvg"]
    assert values[4] == pytest.approx(np.mean(values[:4]))


def test_settings_that_matter_make_other_runs() -> None:
    point = Point("cifar100", "fedcsd:mu=0.001:tau=10", 0.5)
    usual = digest(choices().values(point, 0))
    assert digest(choices(workers=2, engine="eager", data_dir="x").values(point, 0)) == usual
    assert digest(choices().values(Point("cifar100", "fedcsd", 0.5), 0)) == usual
    different = {
        digest(choices(lr=0.2).values(point, 0)),
        digest(choices(model="simple_cnn").values(point, 0)),
        digest(choices().values(point, 1)),
        digest(choices().values(Point("cifar100", "fedcsd:mu=0.01", 0.5), 0)),
        digest(choices().values(Point("cifar100", "fedcsd", 5), 0)),
        *(digest(Choices(scale, (0,)).values(point, 0)) for scale in SCALES),
    }
    assert len(different | {usual}) == 9


def test_stand_ins_for_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDCSD_DATA", raising=False)
    with pytest.warns(Note, match="CIFAR-100 was not found"):  # without a folder nothing is fetched
        instead, notes = stand_ins(["cifar100"], "smoke", {}, {})
    assert instead == {"cifar100": "digits"}
    assert notes["cifar100"].startswith("digits in place of CIFAR-100: only the order of methods")
    assert stand_ins(["cifar100"], "smoke", {"cifar100": "cifar100"}, {}) == ({}, {})

    empty = {"data_dir": str(tmp_path)}
    with pytest.raises(UserError, match="FEMNIST is needed"):
        stand_ins(["femnist"], "paper", {}, empty)
    with pytest.warns(Note, match="FEMNIST was not found"):  # for tables of runs that are there
        assert stand_ins(["femnist", "cifar100"], "paper", {}, empty, train=False)[0] == {"femnist": "mnist"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tabel1"], "unknown table or figure 'tabel1': did you mean table1"),
        (["table1", "--only", "method=fedacg"], "did you mean fedavg"),
        (["table1", "--only", "bet=1"], "unknown key of --only 'bet': did you mean beta?"),
        (["table1", "--only", "fedavg"], "--only takes KEY=VALUE, not 'fedavg': such as method=fedcsd"),
        (["table1", "--only", "method=fedavg,fedcsd"], "not 'fedcsd': write method=fedcsd"),
        (["table3", "--only", "data=femnist"], "--only leaves nothing of table3"),
        (["table1", "--seeds", "a"], "--seeds takes whole numbers"),
        (["table1", "--seeds", "0,0"], "--seeds needs different whole numbers"),
        (["table1", "--stand-in", "mnist"], "--stand-in takes DATA=OTHER"),
        (["table1", "--stand-in", "femnits=mnist"], "did you mean femnist"),
        (["table1", "--set", "method.mu=1"], "the paper's tables and figures set method"),
        (["table1", "--set", "beta=1"], "choose among its values with --only beta=…"),
        (["table1", "--beta", "0.3"], "choose among its values with --only beta=…"),
        (["table1", "--seed", "1"], "give seeds as --seeds"),
        (["table1", "--only", "beta=0.3"], "'0.3': choose from 0.01, 0.05, 0.5, 5"),
        (["table9"], "unknown table or figure 'table9': choose from all, fig-alpha"),
        (["table1", "--lr", "-1"], "lr must be more than 0"),
        (["table1", "--set", "lrr=1"], "did you mean lr?"),
        (["table3", "--model", "resnet51"], "did you mean resnet50"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedcsd.cli.main import guarded

    where = ["--scale", "smoke", *STAND_IN, "--out", str(tmp_path / "p")]
    assert guarded(["reproduce", *where, *arguments], debug=False) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "p" / "runs").exists()


def test_without_a_name_the_names_are_listed(fedcsd: Fedcsd) -> None:
    listed = fedcsd("reproduce")
    assert listed.returncode == 0
    for name in (*EXHIBITS, "all"):
        assert name in listed.stdout
    taught = fedcsd("reproduce", "--help")
    assert "--stand-in" in taught.stdout
    assert "the paper's setup" in taught.stdout
