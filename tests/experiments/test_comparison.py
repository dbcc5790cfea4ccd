"""Test comparisons: their tables, in which a run that diverged is a result too."""

import csv
import io
import json
import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

import fedcsd as package
from fedcsd import data
from fedcsd.errors import Diverged, Divergence, Note, UserError
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.experiments.summary import summarise
from fedcsd.federation.callbacks import Callbacks
from fedcsd.results import comparison, curves, tables
from fedcsd.results import terminal as console
from fedcsd.results.rows import Row, rows
from fedcsd.training import Client
from fedcsd.weights import Values, Weights
from helpers.comparisons import END, FIRST, NAN, ROWS, SMALL, a_row, a_run
from helpers.federations import blobs
from helpers.program import Fedcsd


@dataclass(frozen=True)
class Fragile(package.FedAvg):
    """Client 0 diverges from a round on, with one seed, unless the learning rate is small."""

    when: int = 2
    seed: int = 1

    def train(self, client: Client, weights: Weights) -> Values:
        settings = client.settings
        bad = client.round + 1 >= self.when and settings.seed == self.seed and client.number == 0
        factor = math.inf if bad and settings.lr > 0.005 else 1.0
        return client.train(weights, lambda batch: factor * self.loss(batch))


def test_divergence_is_told_in_the_cells() -> None:
    assert [row.accuracy for row in ROWS] == [
        "92.00 ± 2.00",
        "94.20 ± 1.06",
        "98.50 ± 0.71 (1 of 3 diverged)",
        "diverged (rounds 3 to 7)",
    ]
    assert [row.difference for row in ROWS[1:]] == ["+2.20 ± 1.39", "+6.50 ± 3.54", "–"]
    assert a_row("one", [NAN]).accuracy == "diverged (round 7)"


def test_differences_are_over_the_seeds_that_both_have() -> None:
    row = a_row("b", [93.0, 95.0, 94.0], [90.0, NAN, 92.0])
    assert row.accuracy == "94.00 ± 1.00"
    assert row.difference == "+2.50 ± 0.71 (2 of 3 seeds)"


def test_only_results_of_all_seeds_as_asked_compete_for_the_best() -> None:
    assert comparison.best_of(ROWS) == [False, True, False, False]
    assert comparison.best_of(ROWS[:1]) == [False]
    assert comparison.best_of(ROWS[2:]) == [False, False]
    mended = a_row("mended", [99.0] * 3, mended=True)
    assert comparison.best_of([*ROWS, mended, a_row("tie", [94.2001] * 3)]) == [False, True] + [False] * 3 + [
        True
    ]


def test_markdown() -> None:
    lines = comparison.markdown([*ROWS, a_row("x|y", [1.0] * 3, mended=True)], [0, 1, 2], {}).splitlines()
    assert lines[0] == "| method | accuracy (%) | vs fedavg | sent (MB) | best (%) |"
    assert lines[3] == "| a_b:c=5% | **94.20 ± 1.06** | +2.20 ± 1.39 | 1.50 | 97.00 |"
    assert lines[5] == "| gone | diverged (rounds 3 to 7) | – | – | – |"
    assert lines[6].startswith(r"| x\|y | 1.00 ± 0.00 † |")
    assert f"- shaky, seed 1: diverged in round 7: {END.message}" in lines


def test_csv_has_the_same_numbers() -> None:
    lines = list(csv.DictReader(io.StringIO(comparison.csv_text(ROWS))))
    assert [line["method"] for line in lines] == ["fedavg", "a_b:c=5%", "shaky", "gone"]
    assert float(lines[1]["accuracy_mean"]) == pytest.approx(94.2)
    assert float(lines[1]["difference_std"]) == pytest.approx(1.92**0.5, abs=1e-6)
    assert [line["diverged"] for line in lines] == ["0", "0", "1", "3"]
    assert (lines[2]["seeds"], lines[2]["difference_seeds"]) == ("3", "2")
    assert lines[3]["accuracy_mean"] == lines[3]["accuracy_std"] == lines[3]["megabytes"] == ""
    assert "round 7" in lines[2]["notes"]


def test_latex() -> None:
    text = comparison.latex(ROWS, [0, 1, 2], {})
    assert r"\begin{tabular}{lrrrr}" in text
    assert r"method & accuracy (\%) & vs fedavg & sent (MB) & best (\%) \\" in text
    assert r"a\_b:c=5\% & $\mathbf{94.20 \pm 1.06}$ & $+2.20 \pm 1.39$ & $1.50$ & $97.00$ \\" in text
    assert r"shaky & $98.50 \pm 0.71$ (1 of 3 diverged) &" in text
    assert r"gone & diverged (rounds 3 to 7) & -- & -- & -- \\" in text
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert all(line.isascii() for line in body)
    assert [line for line in body if "&" in line] == [line for line in body if line.count(" & ") == 4]


def test_special_characters_in_latex() -> None:
    assert tables.latex(r"a_b %&#$ {x} \y ~^ <|> n--o") == (
        r"a\_b \%\&\#\$ \{x\} \textbackslash{}y \textasciitilde{}\textasciicircum{} "
        r"\textless{}\textbar{}\textgreater{} n-{}-o"
    )
    assert tables.latex("μ=1, µ, λ\nο") == r"$\mu$=1, $\mu$, $\lambda$ o"


def test_rows_survive_json() -> None:
    text = json.dumps([row.to_json() for row in ROWS], allow_nan=False)
    again = [Row.from_json(row) for row in json.loads(text)]
    assert str(again) == str(ROWS)  # NaN is not equal to itself


def test_summaries_have_the_final_round_s_results_per_client() -> None:
    measured = {"client_accuracy_mean": 0.6, "client_accuracy_worst_decile": 0.2, "client_accuracy_std": 0.1}
    personal = {"client_accuracy_personal_mean": 0.8, "client_accuracy_personal_worst_decile": 0.5}
    first, last = (a_run("a", 0.5, **{**measured, **more}).history[0] for more in ({}, personal))
    summary = summarise([first, last])
    assert {k: v for k, v in summary.items() if k.startswith("client_")} == {
        "client_accuracy_mean": 0.6,
        "client_accuracy_worst_decile": 0.2,
        **personal,
    }
    assert "client_accuracy_personal_mean" not in summarise([last, first])


def test_own_data_is_of_the_personal_models_where_there_are_any() -> None:
    on_global = [a_run("fedavg", 0.5, seed=s, client_accuracy_mean=v) for s, v in enumerate((0.6, 0.7))]
    personal = [
        a_run("mine", 0.5, seed=s, client_accuracy_mean=0.1, client_accuracy_personal_mean=v)
        for s, v in enumerate((0.8, 0.9))
    ]
    plain = [a_run("plain", 0.5), a_run("plain", 0.5, seed=1)]
    made = comparison.table(rows({"fedavg": on_global, "mine": personal, "plain": plain}))
    assert made.column("own data (%)") == ["65.00 ± 7.07", "85.00 ± 7.07", "–"]
    assert "each client's own model" in comparison.legend(rows({"mine": personal}), [0, 1])[1]
    line = next(csv.DictReader(io.StringIO(comparison.csv_text(rows({"mine": personal})))))
    assert (line["own_data_mean"], line["own_data_model"]) == ("85.0", "personal")
    # Without personal models and --holdout there is no such column.
    assert "own data (%)" not in comparison.table(rows({"fedavg": on_global})).head
    held = [a_run("fedavg", 0.5, holdout=0.2, client_accuracy_mean=0.6)]
    made = comparison.table(rows({"fedavg": held}))
    assert made.head == [
        "method",
        "accuracy (%)",
        "own data (%)",
        "sent (MB)",
        "best (%)",
    ]  # nothing to compare with
    assert made.texts[0][2] == "60.00"


def test_own_data_with_holdout() -> None:
    result = package.compare("fedavg", [0, 1], data=blobs(), holdout=0.2, **SMALL)
    means = [100 * run.history[-1]["client_accuracy_mean"] for run in result.runs["fedavg"]]
    assert result.rows[0].own == means
    assert not result.rows[0].personal
    assert tables.spread(means) in result.markdown()
    assert r"own data (\%)" in result.latex()


def begun(seen: list[tuple[str, int]]) -> Any:
    def on_start(label: str, seed: int, rounds: int, more: int) -> Callbacks:
        seen.append((label, seed))
        return Callbacks()

    return on_start


@pytest.mark.slow
def test_a_comparison_goes_on_after_a_divergence_and_takes_the_mended_run(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def compare(**changes: Any) -> Any:
        methods = {"fragile": Fragile(), "plain": "fedavg"}
        settings = {**SMALL, "data": blobs(), "out": tmp_path / "c", "on_start": begun(seen), **changes}
        return package.compare(methods, [0, 1], **settings)

    result = compare()
    assert seen == [("fragile", 0), ("fragile", 1), ("plain", 0), ("plain", 1)]
    run = result.runs["fragile"][1]
    assert run.diverged == Divergence(2, "client 0: the loss is no longer finite in local epoch 1")
    assert math.isnan(run.accuracy)
    assert len(run.history) == 1
    assert result.rows[0].accuracy.endswith("(1 of 2 diverged)")
    assert math.isnan(result.rows[1].differences[1])
    assert result.rows[1].difference.endswith("(1 of 2 seeds)")
    files = {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir() if p.is_file()}
    made = (f"comparison.{kind}" for kind in ("md", "csv", "tex", "json"))
    assert set(files) == {*made, "curves.png", "lock"}

    compare()  # nothing is trained again, nothing changes
    assert len(seen) == 4
    assert {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir() if p.is_file()} == files
    assert package.load_run(run.path).diverged == run.diverged

    mended = package.resume(run.path, data=blobs(), method=Fragile(), lr=0.001)
    assert mended.diverged is None
    assert [str(change) for change in mended.changes] == ["after round 1: lr 0.01 -> 0.001"]
    result = compare()
    assert len(seen) == 4
    assert result.runs["fragile"][1].accuracy == mended.accuracy
    assert result.rows[0].accuracy.endswith("†")
    assert result.rows[0].notes == ["seed 1: after round 1: lr 0.01 -> 0.001"]
    # It began with the other learning rate, so it is no run of a comparison with the new one.
    with pytest.raises(UserError, match=r"lr is 0\.01 there and 0\.001 here"):
        compare(lr=0.001)
    seen.clear()
    assert compare(overwrite=True).runs["fragile"][1].diverged == run.diverged
    assert len(seen) == 4


def test_a_mended_run_that_was_cut_off_goes_on_in_the_comparison(tmp_path: Path) -> None:
    def compare() -> Any:
        return package.compare({"f": Fragile()}, [1], data=blobs(), out=tmp_path / "c", **SMALL)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    path = compare().runs["f"][0].path
    with pytest.raises(KeyboardInterrupt):
        package.resume(path, data=blobs(), method=Fragile(), on_divergence="skip", on_round=stop)
    assert RunDirectory.open(path).divergence is None
    result = compare()
    assert [r["diverged"] for r in result.runs["f"][0].history] == [0, 1, 1]
    assert result.rows[0].mended


def test_a_divergence_of_code_that_has_changed_since(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "c"
    code = "import fedcsd\nclass Mine(fedcsd.FedAvg):\n def loss(self, batch): return super().loss(batch) * "
    file.write_text(f"{code}float('inf')\n")
    path = package.compare(f"{file}:Mine", data=blobs(), out=out, **SMALL).runs["Mine"][0].path
    file.write_text(f"{code}1\n")
    with pytest.warns(Note, match=r"Mine-seed0 was trained before .*mine\.py changed"):
        result = package.compare(f"{file}:Mine", data=blobs(), out=out, **SMALL)
    assert result.rows[0].accuracy == "diverged (round 1)"
    with pytest.warns(Note, match="from here on it trains with the new code"):
        mended = package.resume(path, data=blobs(), lr=0.001)
    assert str(mended.changes[0]) == "after round 0: lr 0.01 -> 0.001"
    directory = RunDirectory.open(path)
    assert directory.began["lr"] == 0.01
    assert (directory.changes[1].kind, directory.changes[1].name) == ("code", "method")


def test_a_reference_that_diverged_at_once(tmp_path: Path) -> None:
    methods = {"fragile": Fragile(when=1, seed=0), "plain": "fedavg"}
    for out in (None, tmp_path / "c"):
        result = package.compare(methods, data=blobs(), out=out, **SMALL)
        assert result.runs["fragile"][0].history == []
        assert result.rows[0].accuracy == "diverged (round 1)"
        assert result.rows[1].difference == "–"
        assert result.rows[0].values("megabytes") == []
    alone = package.compare({"f": Fragile(when=1, seed=0)}, data=blobs(), out=tmp_path / "d", **SMALL)
    assert alone.picture is not None
    assert alone.picture.exists()


def test_a_single_run_that_diverges_stops_as_before(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"round 1 is saved; go on with: fedcsd resume .* --lr …"):
        package.run(method=Fragile(), data=blobs(), seed=1, out=tmp_path / "run", **SMALL)
    assert RunDirectory.open(tmp_path / "run").divergence == Divergence(
        2, "client 0: the loss is no longer finite in local epoch 1"
    )
    again = {**SMALL, "lr": 0.001, "overwrite": True}
    assert package.run(method=Fragile(), data=blobs(), seed=1, out=tmp_path / "run", **again).diverged is None
    assert RunDirectory.open(tmp_path / "run").divergence is None


def test_curves_are_drawn_as_far_as_they_go() -> None:
    axis = Figure().subplots()
    curves.line(axis, [[1.0, 2.0, 3.0], [3.0], []], "a", 0, rounds=3)
    mean, cross = axis.get_lines()
    assert list(mean.get_ydata()) == [2.0, 2.0, 3.0]
    assert (list(cross.get_xdata()), list(cross.get_ydata())) == ([1], [3.0])
    curves.line(axis, [[1.0]], "b", 1, rounds=1)
    assert (mean.get_marker(), axis.get_lines()[2].get_marker()) == ("", ".")  # one round makes no line


def test_thirty_curves_look_different(tmp_path: Path) -> None:
    axis = Figure().subplots()
    for index in range(30):
        curves.line(axis, [[1.0, 2.0]], str(index), index, rounds=2)
    assert len({(line.get_color(), line.get_linestyle()) for line in axis.get_lines()}) == 30
    history = [{"test_accuracy": 0.5}, {"test_accuracy": 0.6}]
    assert curves.plot_curves({f"method {i}": [history] for i in range(30)}, tmp_path / "c.png").exists()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_thirty_rows_in_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(width=width, force_terminal=True, color_system=None, file=io.StringIO())
    monkeypatch.setattr(console, "console", screen)
    labels = [f"fedcsd:mu=0.{i}:similarity=false:teacher=global" for i in range(27)]
    console.show_comparison([*ROWS[:3], *(a_row(label, FIRST, FIRST) for label in labels)], [0, 1, 2])
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    lines = [line for line in text.splitlines() if line.startswith("│")]
    assert len([line for line in lines if re.search(r"│  *9\d\.\d\d ± \d\.\d\d", line)]) == 30
    assert max(map(len, lines)) <= max(width, 70)
    assert len({line.index("±") for line in lines if "±" in line}) == 1
    assert ("no room here for" in text) == (width <= 80)


QUICK = ("--epochs", "1", "--workers", "2")


def test_divergence_from_the_command_line(fedcsd: Fedcsd, tmp_path: Path) -> None:
    command = ("compare", "--methods", "fedcsd:mu=1e30,fedavg", "--rounds", "2", *QUICK, "--out", "c")
    first = fedcsd(*command)
    assert first.returncode == 0, first.stderr
    assert "fedcsd:mu=1e30 seed 0: diverged in round 1  1 more run" in first.stdout
    assert "│ diverged (round 1)" in first.stdout
    assert "To continue a diverged run: `fedcsd resume RUN --lr …`" in first.stdout
    assert fedcsd("show", "c").stdout in first.stdout
    shown = fedcsd("show", "c/fedcsd-mu=1e30-seed0")
    assert shown.returncode == 0
    assert "diverged in round 1: client" in shown.stdout
    assert "--on-divergence skip" in shown.stdout
    (tmp_path / "c/comparison.json").unlink()
    assert "diverged (round 1)" in fedcsd("show", "c").stdout  # while the comparison is not finished
    again = fedcsd("resume", "c/fedcsd-mu=1e30-seed0", "--on-divergence", "skip")
    assert again.returncode == 1
    assert "no client of this round returned usable weights" in again.stderr


@pytest.mark.slow
def test_ctrl_c_in_the_second_run_and_the_same_command_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedcsd", "compare", "--methods", "fedavg,fedcsd", "--rounds", "40"]
    command += [*QUICK, "--out", "c"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics, deadline = tmp_path / "c/fedcsd-seed0/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "fedcsd, seed 0: rounds 1 to" in errors
    assert "the same command again" in errors
    model = tmp_path / "c/fedavg-seed0/model.safetensors"
    first = model.stat().st_mtime_ns
    done = metrics.read_text().splitlines()
    assert len(done) < 40
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=120)
    assert model.stat().st_mtime_ns == first
    assert metrics.read_text().splitlines()[: len(done) - 1] == done[:-1]
    assert len(metrics.read_text().splitlines()) == 40
    assert (tmp_path / "c/comparison.tex").exists()


@pytest.mark.slow
def test_data_is_loaded_and_dealt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(name: str) -> None:
        function = getattr(data, name)
        monkeypatch.setattr(data, name, lambda *a, **k: made.append(name) or function(*a, **k))

    counted("load")
    counted("split")
    short = {"rounds": 1, "epochs": 1, "clients": 3, "workers": 1}
    whole = package.compare("fedavg,fedprox", [0, 1], out=tmp_path / "c", **short)
    assert made == ["load", "split"]
    made.clear()
    longer = package.compare("fedavg,fedprox", [0, 1], out=tmp_path / "c", **(short | {"rounds": 2}))
    assert made == ["load", "split"]  # four runs are resumed
    assert [len(run.history) for runs in longer.runs.values() for run in runs] == [2] * 4
    for seed in (0, 1):
        alone = package.run(method="fedprox", seed=seed, **short)
        assert whole.runs["fedprox"][seed].history[-1]["test_loss"] == alone.history[-1]["test_loss"]
