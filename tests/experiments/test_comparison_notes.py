"""Test the notes beside the numbers in every file of a comparison."""

import csv
import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from matplotlib.figure import Figure

import fedcsd as package
from fedcsd.cli.main import guarded
from fedcsd.errors import Note
from fedcsd.experiments.comparison_folder import FILES
from fedcsd.experiments.running import Run
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.experiments.summary import notable
from fedcsd.results import comparison, curves
from fedcsd.results import terminal as console
from fedcsd.results.comparison import Comparison
from fedcsd.results.rows import About, Row, rows
from helpers.comparisons import FIRST, ROWS, SMALL, a_row, a_run
from helpers.federations import blobs
from helpers.program import Fedcsd

TEXTS = FILES[:4]
CODE = "import fedcsd\nclass Mine(fedcsd.FedAvg):\n def loss(self, batch): return super().loss(batch) * "
QUICK = ("--rounds", "1", "--epochs", "1", "--clients", "4", "--train-size", "200", "--min-samples", "2")


def texts_of(folder: Path) -> list[str]:
    return [(folder / name).read_text() for name in TEXTS]


def report(folder: Path) -> str:
    """Return the text of the comparison's report."""
    assert guarded(["report", str(folder), "--out", str(folder / "r.html")], debug=False) == 0
    return (folder / "r.html").read_text()


def stop(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
def test_seeds_trained_with_other_code_are_told_everywhere(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.py", tmp_path / "c"

    def compare(seeds: list[int]) -> Comparison:
        return package.compare(f"fedprox,{file}:Mine", seeds, data=blobs(), out=out, **SMALL)

    file.write_text(f"{CODE}1\n")
    assert not any(row.marked or row.notes for row in compare([0, 1]).rows)
    file.write_text(f"{CODE}2\n")
    with pytest.warns(Note, match="Mine-seed0 was trained before"):
        result = compare([0, 1, 2])
    row = result.rows[1]
    assert row.other_code
    assert row.accuracy.endswith("†")
    assert row.notes == [
        f"seed {seed}: trained with other code than mine.py has now; to train only this run again, "
        f"remove its folder Mine-seed{seed} and give the same command"
        for seed in (0, 1)
    ]
    assert comparison.best_of(result.rows) == [True, False]
    for text in texts_of(out):
        assert row.notes[0] in text
        assert row.notes[1] in text
    assert "†: with runs whose rounds, some or all, were trained with other code" in result.markdown()
    for seed in (0, 1):  # as the note says
        for path in sorted((out / f"Mine-seed{seed}").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (out / f"Mine-seed{seed}").rmdir()
    assert not any(row.marked or row.notes for row in compare([0, 1, 2]).rows)


def test_a_run_trained_partly_with_other_code(tmp_path: Path) -> None:
    file, path = tmp_path / "mine.py", tmp_path / "c/Mine-seed0"
    call: dict[str, Any] = {"data": blobs(), **SMALL}
    file.write_text(f"{CODE}1\n")
    with pytest.raises(KeyboardInterrupt):
        package.run(method=f"{file}:Mine", out=path, on_round=stop, **call)
    file.write_text(f"{CODE}2\n")
    with pytest.warns(Note, match="from here on it trains with the new code"):
        row = package.compare(f"{file}:Mine", out=tmp_path / "c", **call).rows[0]
    assert row.other_code
    assert row.notes[0].startswith("seed 0: round 1 trained with other code than mine.py has now")
    file.write_text(f"{CODE}1\n")
    with pytest.warns(Note):
        row = package.compare(f"{file}:Mine", out=tmp_path / "c", **call).rows[0]
    assert row.notes[0].startswith("seed 0: rounds 2 on trained with other code")
    file.unlink()
    assert [round for round, _ in RunDirectory.open(path).code("method")] == [0, 1]


def test_code_that_trained_no_round_does_not_count(tmp_path: Path) -> None:
    run = package.run(method="fedavg", data=blobs(), out=tmp_path / "run", **SMALL)
    directory = RunDirectory.open(tmp_path / "run")
    assert directory.code("method") == []
    assert run.path is not None
    config = directory.config
    config["facts"]["code"]["method"] = "a"
    (run.path / "config.toml").write_text(tomli_w.dumps(config))
    directory.change(0, {}, {"method": "b"})
    directory.change(2, {}, {"method": "c"})
    assert directory.code("method") == [(0, "b"), (2, "c")]


def test_show_tells_of_other_code(fedcsd: Fedcsd, tmp_path: Path) -> None:
    command = ("compare", "--methods", "mine.py:Mine", *QUICK, "--out", "c")
    (tmp_path / "mine.py").write_text(f"{CODE}1\n")
    assert fedcsd(*command).returncode == 0
    (tmp_path / "mine.py").write_text(f"{CODE}2\n")
    again = fedcsd(*command)
    assert "remove that folder to train it again" in again.stderr
    shown = fedcsd("show", "c").stdout
    assert "Mine, seed 0: trained with other code than mine.py has now" in shown
    assert "settings: data digits, train_size 200, model mlp, clients 4, beta 0.1, min_samples 2" in shown
    assert shown in again.stdout


def personal_runs() -> dict[str, list[Run]]:
    own = {"client_accuracy_mean": 0.3, "client_accuracy_personal_mean": 0.8}
    plain = a_run("fedavg", 0.6, client_accuracy_mean=0.5)
    return {"fedavg": [plain], "fedper": [a_run("fedper", 0.1, train_loss=1.0, **own)]}


def test_personalised_methods_are_compared_by_own_data() -> None:
    made = rows(personal_runs(), About(untrained=frozenset({"fedper"})))
    table = comparison.table(made)
    assert (table.column("own data (%)"), table.column("accuracy (%)")) == (
        ["50.00", "80.00"],
        ["60.00", "10.00"],
    )
    assert [row.index(True) if any(row) else 0 for row in table.best] == [1, table.head.index("own data (%)")]
    below = "\n".join(comparison.legend(made, [0]))
    assert "personalised methods, which give each client a model of its own, are to be compared by" in below
    assert "accuracy of fedper: of a global model in which the part that stays" in below
    held = [a_run("fedavg", 0.5, holdout=0.2, client_accuracy_mean=0.6)]
    assert "personalised" not in "\n".join(comparison.legend(rows({"fedavg": held}), [0]))


def test_which_global_models_are_untrained_in_part() -> None:
    result = package.compare("fedavg,fedper,fedbn,ditto", data=blobs(), **SMALL)
    # This model has no BatchNorm, so that nothing of it stays with a client in FedBN.
    assert [row.label for row in result.rows if row.untrained] == ["fedper"]
    by_class = package.compare([package.FedPer, package.FedAvg], data=blobs(), **SMALL)
    assert [row.untrained for row in by_class.rows] == [True, False]


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, histories: Any) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path: figures.append(self))
    curves.plot_curves(histories, path)
    return figures[0]


def test_a_panel_for_own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    histories = {label: [run.history for run in runs] for label, runs in personal_runs().items()}
    first, second = drawn(monkeypatch, tmp_path / "a.png", histories).axes
    assert first.get_ylabel() == "test accuracy (%)"
    assert second.get_ylabel() == "accuracy on clients' own data (%)"
    assert [line.get_ydata()[0] for line in second.get_lines()] == [50.0, 80.0]
    del histories["fedper"]
    assert len(drawn(monkeypatch, tmp_path / "a.png", histories).axes) == 1
    held_out = {"test_accuracy": 0.5, "client_accuracy_mean": 0.4, "client_accuracy_local_mean": 0.6}
    assert len(drawn(monkeypatch, tmp_path / "a.png", {"fedavg": [[held_out]]}).axes) == 2


def test_labels_are_drawn_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    histories = {label: [[{"test_accuracy": 0.5}]] for label in (r"$\frac$", "_mine", "5 $ a_b", "fedavg")}
    curves.plot_curves(histories, tmp_path / "a.png")  # no formula, which could be a wrong one
    legend = drawn(monkeypatch, tmp_path / "a.png", histories).axes[0].get_legend()
    assert legend
    shown = [text.get_text().replace(r"\$", "$").strip() for text in legend.get_texts()]
    assert shown == list(histories)


@pytest.mark.parametrize(("methods", "bands"), [(8, 8), (9, 0)])
def test_many_methods_have_no_bands(
    methods: int, bands: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = [{"test_accuracy": 0.5}, {"test_accuracy": 0.6}]
    figure = drawn(monkeypatch, tmp_path / "a.png", {f"m{i}": [history, history] for i in range(methods)})
    assert len(figure.axes[0].collections) == bands


def test_options_for_all_methods_are_told(tmp_path: Path) -> None:
    call: dict[str, Any] = {"data": blobs(), "out": tmp_path, "method": {"mu": 1.0}, **SMALL}
    result = package.compare("fedavg,fedcsd,fedcsd:mu=0.1,fedprox", **call)
    assert [row.shared for row in result.rows] == [{}, {"mu": 1.0}, {}, {"mu": 1.0}]
    markdown, table, latex, _ = texts_of(tmp_path)
    assert "- with method.mu=1.0 for fedcsd, fedprox\n" in markdown
    assert "% with method.mu=1.0 for fedcsd, fedprox\n" in latex
    notes = [line["notes"] for line in csv.DictReader(io.StringIO(table))]
    assert notes == ["", "with method.mu=1.0", "", "with method.mu=1.0"]
    assert comparison.best_of([a_row("a", FIRST), a_row("b", [99.0] * 3, shared={"mu": 1})]) == [False, True]
    default = package.FedProx().mu  # what changes nothing needs no note
    same = package.compare("fedavg,fedprox", data=blobs(), method={"mu": default}, **SMALL)
    assert not any(row.shared for row in same.rows)


def test_ctrl_c_while_the_tables_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "--methods", "fedavg", *QUICK, "--out", str(tmp_path / "c")]
    with monkeypatch.context() as patched:
        patched.setattr(curves, "plot_curves", stop)
        assert guarded(command, debug=False) == 130
    said = "interrupted: the tables are not written; all runs are finished; go on with: the same command again (without --overwrite)"
    assert said in capsys.readouterr().err
    assert guarded(command, debug=False) == 0
    assert (tmp_path / "c/comparison.md").exists()


def test_the_settings_stand_below_the_table(tmp_path: Path) -> None:
    result = package.compare(
        "fedavg,fedprox", [0, 1], data=blobs(), out=tmp_path, partition="iid", momentum=0.5, **SMALL
    )
    line = (
        "settings: data given from Python, model mlp, partition iid, clients 4, min_samples 2, rounds 3, "
        "epochs 1, lr 0.01, momentum 0.5; seeds 0, 1"
    )
    markdown, _, latex, _ = texts_of(tmp_path)
    assert f"\n- {line}\n" in markdown
    assert "\n- accuracy of the final round, mean ± standard deviation over seeds 0, 1;" in markdown
    assert f"\n% {line}\n" in latex
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert content["settings"] == result.settings
    assert content["settings"]["momentum"] == 0.5
    assert "beta" not in content["settings"]


def test_settings_that_are_told() -> None:
    base = {"data": "digits", "model": "mlp", "partition": "dirichlet", "train_size": 0, "augment": "none"}
    assert notable(base) == {
        "data": "digits",
        "model": "mlp",
        "clients": 10,
        "beta": 0.1,
        "rounds": 30,
        "epochs": 5,
        "lr": 0.01,
    }
    other = {
        **base,
        "data": {"name": "/home/me/mine.npz", "size": 64},
        "partition": {"name": "quantity"},
        "workers": 3,
        "track_drift": True,
        "augment": "cifar",
    }
    values = notable(other)
    assert values["data"] == "mine.npz (size=64)"
    assert (values["partition"], values["beta"], values["augment"]) == ("quantity", 0.1, "cifar")
    assert "workers" not in values
    assert "track_drift true;" in comparison.legend([a_row("a", FIRST)], [0], values)[-1]


@pytest.mark.parametrize("loss", [6e33, 231.0, math.inf, math.nan, None])
def test_a_run_that_blew_up_is_marked(loss: float | None, tmp_path: Path) -> None:
    good = [a_run("fedavg", 0.5), a_run("fedavg", 0.5, seed=1)]
    wild = [a_run("wild", 0.9), a_run("wild", 0.9, seed=1, test_loss=loss)]  # type: ignore[arg-type]
    made = rows({"fedavg": good, "wild": wild}, About(classes=10))
    assert [row.blew_up for row in made] == [False, True]
    assert made[1].accuracy.endswith("†")
    assert made[1].notes[0].startswith("seed 1: blew up: the test loss of its final round is ")
    assert comparison.best_of(made) == [True, False]
    assert "†: with runs whose loss blew up; never" in comparison.markdown(made, [0, 1], {})
    assert str([Row.from_json(row.to_json()) for row in made]) == str(made)


def test_an_untrained_part_is_no_blow_up() -> None:
    about = About(classes=10, untrained=frozenset({"fedbn"}))
    for loss, blew_up in ((2.0, False), (math.nan, False), (1e9, True)):
        runs = [a_run("fedbn", 0.1, test_loss=1e9, train_loss=loss)]
        assert rows({"fedbn": runs}, about)[0].blew_up == blew_up


def test_the_terminal_shows_the_best_own_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = console.Console(width=120, force_terminal=True, color_system="standard", file=io.StringIO())
    monkeypatch.setattr(console, "console", screen)
    console.show_comparison(rows(personal_runs()), [0], {"data": "digits"})
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1;32m60.00" in text
    assert "\x1b[1;32m80.00" in text
    assert "settings: data digits; seed 0" in text
    console.show_comparison(ROWS, [0, 1, 2])


def test_objects_are_called_by_their_options(tmp_path: Path) -> None:
    chosen = [
        package.FedAvg(),
        package.FedProx(mu=0.1),
        package.FedProx(mu=1),
        package.FedCSD(mask="none"),
        package.FedCSD(),
    ]
    made = package.compare(chosen, data=blobs(), out=tmp_path / "c", **SMALL)
    labels = ["FedAvg", "FedProx:mu=0.1", "FedProx:mu=1", "FedCSD:mask=none", "FedCSD"]
    assert [row.label for row in made.rows] == labels
    assert (tmp_path / "c/FedProx-mu=0.1-seed0").is_dir()


def test_what_learned_nothing_is_not_the_best(tmp_path: Path) -> None:
    call = {**SMALL, "data": blobs(), "out": tmp_path / "c"}
    nothing = package.compare("fedavg,fedprox", lr=1e-9, **call)
    assert all(row.guessing for row in nothing.rows)
    for text in (nothing.markdown(), nothing.latex()):
        assert "no better than guessing (" in text
        assert "%): fedavg, fedprox; more rounds, another learning rate" in text
        assert "**" not in text
        assert r"\textbf" not in text
    made = report(tmp_path / "c")
    assert "no better than guessing" in made
    learned = package.compare("fedavg,fedprox", lr=0.1, **{**call, "out": None, "rounds": 5})
    assert not any(row.guessing for row in learned.rows)
    assert "**" in learned.markdown()


def test_a_method_that_is_fedavg_here_is_said_to_be(tmp_path: Path) -> None:
    with pytest.warns(Note, match="no BatchNorm"):
        made = package.compare("fedavg,fedbn", data=blobs(), out=tmp_path / "c", **SMALL)
    assert "- fedbn, the same as fedavg: of this model nothing stays with the clients\n" in made.markdown()
    assert "the same as fedavg: of this model nothing stays" in report(tmp_path / "c")


@pytest.mark.parametrize(
    ("guess", "accuracy", "guessing"),
    [
        (10, 11, True),
        (10, 11.1, False),
        (50, 55, True),
        (50, 56, False),
        (91.1, 91.9, True),
        (91.1, 92.1, False),
        (91.1, 100, False),
        (0, 0, False),
    ],
)
def test_what_guessing_gets_right_says_how_much_must_be_learned(
    guess: float, accuracy: float, guessing: bool
) -> None:
    made = [a_row("a", [accuracy], guess=guess), a_row("b", [accuracy], guess=guess)]
    assert [row.guessing for row in made] == [guessing] * 2
    assert comparison.best_of(made) == [not guessing] * 2
    assert ("no better than guessing" in comparison.markdown(made, [0], {})) == guessing


@dataclass(frozen=True)
class Listed(package.FedAvg):
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    made: int = field(default=3, init=False)


def test_an_object_is_called_by_options_that_are_not_as_they_would_be_anyway(
    tmp_path: Path, fedcsd: Fedcsd
) -> None:
    chosen = [Listed(), Listed(sizes=[5])]
    result = package.compare(chosen, data=blobs(), **SMALL)
    assert [row.label for row in result.rows] == ["Listed", "Listed:sizes=[5]"]
    (tmp_path / "listed.py").write_text(
        "from dataclasses import dataclass, field\nimport fedcsd\n\n\n@dataclass(frozen=True)\n"
        "class Listed(fedcsd.FedAvg):\n    sizes: list[int] = field(default_factory=lambda: [1, 2])\n"
    )
    assert "[1, 2]" in fedcsd("list", "methods", "listed.py").stdout
    named = f"{tmp_path / 'listed.py'}:Listed"
    for sizes in ([1, 2], [5]):
        shared = package.compare(named, data=blobs(), method={"sizes": sizes}, **SMALL).rows[0].shared
        assert shared == ({"sizes": sizes} if sizes == [5] else {})
