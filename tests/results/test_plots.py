"""Test curves of any measurement: which runs make one line, its label, and the positions of rounds."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcsd.cli.main import guarded
from fedcsd.cli.trained_runs import folder_for
from fedcsd.errors import Note, UserError
from fedcsd.measurements import measurement, of_chart
from fedcsd.plugins import digest_of
from fedcsd.results import groups, plots
from fedcsd.results.report import runs as report_runs
from helpers.runs import FACTS

BASE = {
    "data": "digits",
    "model": "mlp",
    "clients": 10,
    "beta": 0.1,
    "rounds": 3,
    "workers": 2,
    "device": "cpu",
}
FEDCSD = {"name": "fedcsd", "mu": 0.001, "tau": 10.0, "alpha": 0.9, "similarity": True, "mask": "adaptive"}
FEDCSD |= {"teacher": "average", "target": "teacher", "similarity_scale": "none", "variant": "paper"}


def record(round: int, **values: Any) -> dict[str, Any]:
    fixed = {"round": round, "test_accuracy": 0.1 * round, "seconds": 2.0, "bytes_down": 3e6, "bytes_up": 1e6}
    return {**fixed, **values}


def stored(path: Path, method: dict[str, Any], seed: int = 0, **changes: Any) -> Path:
    """A run directory with a config and three rounds."""
    import tomli_w

    path.mkdir(parents=True)
    facts = {**FACTS, **changes.pop("facts", {})}
    config = {**BASE, "seed": seed, **changes, "method": method, "facts": facts}
    (path / "config.toml").write_text(tomli_w.dumps(config))
    drift = {"logit_drift": 1.0} if changes.get("track_drift") else {}
    lines = [json.dumps(record(r, target_entropy=0.9, **drift)) for r in (1, 2, 3)]
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return path


def test_methods_are_called_as_one_names_them() -> None:
    def called(**changes: Any) -> str:
        return groups.method_label({**FEDCSD, **changes})

    assert called() == "fedcsd"
    assert called(mu=0.01) == "fedcsd:mu=0.01"
    assert called(target="uniform") == "fedcsd:uniform"
    assert called(target="uniform", mu=0.01) == "fedcsd:uniform:mu=0.01"
    assert called(similarity=False, mask="none", teacher="global") == "fedcsd:base"
    assert groups.method_label({"name": "/tmp/my_method.py:Mine", "mu": 1.0}) == "Mine"


OWN = """
from dataclasses import dataclass
import fedcsd
@dataclass(frozen=True)
class Mine(fedcsd.FedAvg):
    mu: float = 0.1
    kind: str = "plain"
    deep: bool = True
    steps: tuple[int, ...] = (1, 2)
    presets = {"strong": {"mu": 1.0, "kind": "plain"}}
"""


def test_variants_of_ones_own_method_are_called_as_one_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine.py", "other.py", "pack/its.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    plain: dict[str, Any] = {"mu": 0.1, "kind": "plain", "deep": True, "steps": [1, 2]}
    changes: list[dict[str, Any]] = [{}, {"kind": "power"}, {"mu": 1.0}, {"mu": 1.0, "deep": False}]

    def labels(name: str) -> list[str]:
        return groups.labels_of([{**BASE, "method": {"name": name, **plain, **c}} for c in changes])

    for name in (f"{tmp_path}/mine.py:Mine", "pack.its:Mine"):
        assert labels(name) == ["Mine", "Mine:kind=power", "Mine:strong", "Mine:strong:deep=false"]
    gone = labels(f"{tmp_path}/gone.py:Mine")
    assert gone[:2] == ["Mine:mu=0.1:kind=plain:deep=true", "Mine:mu=0.1:kind=power:deep=true"]
    files = [{**BASE, "method": {"name": f"{tmp_path}/{f}.py:Mine", **plain}} for f in ("mine", "other")]
    assert groups.labels_of(files) == ["mine.Mine", "other.Mine"]
    assert groups.labels_of([files[0], files[0]]) == ["Mine", "Mine"]


def test_seeds_are_one_line_and_what_differs_is_told(tmp_path: Path) -> None:
    stored(tmp_path / "c" / "a", FEDCSD, 0)
    stored(tmp_path / "c" / "b", FEDCSD, 1, workers=1)
    other = stored(tmp_path / "other", FEDCSD, 0, beta=0.5)
    stored(tmp_path / "c" / "d", {"name": "fedavg"}, 0)
    found = plots.grouped(groups.found([tmp_path / "c", other, tmp_path / "c" / "a"]))
    assert {label: len(runs) for label, runs in found.items()} == {
        "fedcsd, beta=0.1": 2,
        "fedavg, beta=0.1": 1,
        "fedcsd, beta=0.5": 1,
    }
    together = plots.grouped(groups.found([tmp_path / "c"]))
    assert list(together) == ["fedcsd", "fedavg"]


def test_options_that_differ_are_told_and_settings_that_do_nothing_are_not() -> None:
    def labels(*changes: dict[str, Any]) -> list[str]:
        return groups.labels_of([{**BASE, "method": {"name": "fedavg"}, **change} for change in changes])

    pools = [{"data": {"name": "office_caltech_10", "train_pool": pool}} for pool in (62.0, 0.6)]
    assert labels(*pools) == ["fedavg, train_pool=62", "fedavg, train_pool=0.6"]
    sizes = [{"data": {"name": "digits", "size": n}, "model": {"name": "cnn", "size": n}} for n in (3, 5)]
    assert labels(*sizes) == ["fedavg, data.size=3, model.size=3", "fedavg, data.size=5, model.size=5"]
    mnist = {"data": "mnist", "model": "cnn"}  # its model goes without saying
    assert labels({}, mnist, {**mnist, "lr": 0.1}) == [
        "fedavg, data=digits",
        "fedavg, data=mnist, lr=0.01",
        "fedavg, data=mnist, lr=0.1",
    ]
    column, skewed = {"partition": "column"}, {"partition": "quantity", "beta": 0.5}
    assert labels(column, skewed) == ["fedavg, partition=column", "fedavg, partition=quantity, beta=0.5"]
    assert labels({}, {"holdout": 0.0}, {"holdout": 0.2}) == [
        "fedavg, holdout=0",
        "fedavg, holdout=0",
        "fedavg, holdout=0.2",
    ]


def test_a_beta_that_does_nothing_makes_no_other_line(tmp_path: Path) -> None:
    for seed, beta in enumerate((0.1, 0.5)):
        stored(tmp_path / str(seed), {"name": "fedavg"}, seed, partition="column", beta=beta)
    assert [len(runs) for runs in groups.by_label(groups.found([tmp_path])).values()] == [2]


def test_a_seed_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        stored(tmp_path / "c" / f"fedavg-seed{seed}", {"name": "fedavg"}, seed, workers=1)
    alone = stored(tmp_path / "alone", {"name": "fedavg"}, track_drift=True)
    again = f"left out, for .* of another run: {tmp_path}/c/fedavg-seed0 \\(as {alone}\\)$"
    for paths in ([alone, tmp_path / "c"], [tmp_path / "c", alone]):
        with pytest.warns(Note, match=again):
            found = groups.by_label(groups.found(paths))
        (runs,) = found.values()
        assert sorted(run.path.name for run in runs) == ["alone", "fedavg-seed1", "fedavg-seed2"]
    with pytest.warns(Note, match=r"^fedavg \(2 of its 3 runs\): logit_drift was not measured there"):
        plots.check_recorded({"fedavg": [plots.flat(run.history()) for run in runs]}, ["logit_drift"])


@pytest.mark.parametrize(
    ("other", "labels"),
    [
        ({"device": "cuda"}, ["fedavg, device=cpu", "fedavg, device=cuda"]),
        ({"facts": {"code": {"method": "b" * 16}}}, ["fedavg, code=aaaaaaaa", "fedavg, code=bbbbbbbb"]),
    ],
)
def test_a_seed_of_other_code_or_on_another_device_is_another_line(
    other: dict[str, Any], labels: list[str], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    code = {"facts": {"code": {"method": "a" * 16}}}
    runs = [stored(tmp_path / str(seed), {"name": "fedavg"}, seed, **code) for seed in (0, 1)]
    new = stored(tmp_path / "new", {"name": "fedavg"}, 0, **{**code, **other})
    assert list(groups.by_label(groups.found([*runs, new]))) == labels
    assert list(groups.by_label(groups.found([runs[1], new]))) == ["fedavg"]
    assert not recwarn.list


def test_seeds_trained_with_other_code_are_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    codes = ("0" * 16, digest_of(file))
    for seed, code in enumerate(codes):
        method = {"name": f"{file}:Mine", "mu": 0.1}
        stored(tmp_path / f"c/Mine-seed{seed}", method, seed, facts={"code": {"method": code}})
    with pytest.warns(Note) as notes:
        assert [len(runs) for runs in plots.grouped(groups.found([tmp_path / "c"])).values()] == [2]
    assert [str(note.message) for note in notes] == [
        "Mine, seed 0: trained with other code than mine.py has now; to train only this run again, "
        "remove its folder Mine-seed0 and give the same command"
    ]


def test_folders_of_runs_among_runs_are_told(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    stored(tmp_path / "alone", {"name": "fedavg"})
    stored(tmp_path / "compare/fedprox-seed0", {"name": "fedprox"})
    stored(tmp_path / "alone/odd", {"name": "moon"})
    assert len(groups.found([tmp_path, tmp_path / "compare"])) == 2
    assert len(groups.found([tmp_path / "compare"])) == 1
    assert not recwarn.list
    told = f"without the runs in {tmp_path}/compare: name such a folder as well"
    with pytest.warns(Note, match=told):
        assert [run.path.name for run in groups.found([tmp_path])] == ["alone"]
    with pytest.warns(Note, match=told):
        assert list(report_runs.find([tmp_path]).groups) == ["fedavg"]


def test_a_comparisons_runs_are_in_its_own_order(tmp_path: Path) -> None:
    for name in ("fedavg-seed0", "fedavg-seed10", "fedcsd-mu=0.01-seed0", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    assert [folder.name[:7] for folder in groups.folders(tmp_path)] == [
        "fedavg-",
        "fedavg-",
        "fedcsd-",
        "other",
    ]
    rows = [{"label": "fedcsd:mu=0.01"}, {"label": "fedavg"}]
    (tmp_path / "comparison.json").write_text(json.dumps({"rows": rows}))
    assert [folder.name[:7] for folder in groups.folders(tmp_path)] == [
        "fedcsd-",
        "fedavg-",
        "fedavg-",
        "other",
    ]


def test_where_rounds_lie_on_the_axis() -> None:
    short, long = [record(1, seconds=1.0)], [record(1, seconds=3.0), record(2, seconds=5.0)]
    assert plots.times([short, long], "round").tolist() == [1, 2]
    assert plots.times([short, long], "seconds").tolist() == [2.0, 8.0]
    assert plots.times([long], "bytes").tolist() == [4.0, 8.0]


def test_bytes_on_an_axis_have_a_unit() -> None:
    assert measurement("bytes_up").axis == "sent by clients (MB)"
    assert measurement("bytes_down").axis == "sent to clients (MB)"


def test_unknown_metrics_suggest_the_nearest(tmp_path: Path) -> None:
    histories = {"a": [[record(1)]], "b": [[record(1, logit_drift=1.0)]]}
    with pytest.raises(UserError, match="unknown metric 'test_acuracy': did you mean test_accuracy"):
        plots.plot(histories, tmp_path / "x.png", y=["test_acuracy"])
    with pytest.raises(
        UserError, match="logit_drift was not measured in these runs: train them with --track"
    ):
        plots.plot({"a": [[record(1)]]}, tmp_path / "x.png", y=["logit_drift"])
    with pytest.raises(UserError, match="unknown axis"):
        plots.plot(histories, tmp_path / "x.png", x="hours")
    with pytest.raises(UserError, match="no finished round"):
        plots.plot({"a": [[]]}, tmp_path / "x.png")
    with pytest.warns(Note, match="a: logit_drift was not measured there"):
        assert plots.plot(histories, tmp_path / "x.pdf", y=["logit_drift"]) == [tmp_path / "x.pdf"]
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")


def test_groups_within_a_record_have_names_with_a_dot() -> None:
    history = [record(1, domain_accuracy={"amazon": 0.5})]
    assert plots.recorded({"a": [plots.flat(history)]})[-5:] == [
        "bytes_up",
        "domain_accuracy.amazon",
        "megabytes",
        "seconds",
        "test_accuracy",
    ]


def test_the_distance_from_a_uniform_target() -> None:
    distance = measurement("target_distance").value
    assert distance({"target_entropy": 0.75}) == 0.25
    assert distance({"target_entropy": 1.0}) == 1e-7
    assert np.isnan(distance({}))


@pytest.mark.parametrize("figure", [plots.plot_mask, plots.plot_target])
def test_pictures_of_fedcsd_need_fedcsd(figure: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of these runs has a"):
        figure({"fedavg": [[record(1)]]}, tmp_path / "x.png")
    shares = dict.fromkeys((row.name for row in of_chart("mask")), 0.5)
    paths = figure({"fedcsd": [[record(r, target_entropy=0.9, **shares) for r in (1, 2)]]}, tmp_path / "x")
    assert [path.name for path in paths] == ["x.png", "x.svg", "x.pdf"]


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (["runs/a"], "runs/a"),
        (["runs/a", "runs/a/."], "runs/a"),
        (["runs/a", "runs/b"], "runs"),
        (["runs/a", "runs/deep/c"], "runs"),
        (["runs/deep", "runs/deep/c"], "runs"),
        (["runs/a", "other"], "."),
        ([".", "../other"], ".."),
    ],
)
def test_what_is_made_of_several_runs_goes_to_the_folder_that_holds_them(
    given: list[str], where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_for([Path(path) for path in given]) == Path(where)
    absolute = [tmp_path / path for path in given]
    assert folder_for(absolute).resolve() == (tmp_path / where).resolve()


def test_the_commands_leave_single_runs_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [stored(tmp_path / method, {"name": method}) for method in ("fedavg", "moon")]
    both = [str(run) for run in runs]
    before = [sorted(run.iterdir()) for run in runs]
    assert guarded(["report", *both], False) == 0
    assert guarded(["plot", *both], False) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"report: {tmp_path}/report.html",
        f"written: {tmp_path}/analysis/test_accuracy.png (.svg, .pdf)",
    ]
    assert [sorted(run.iterdir()) for run in runs] == before
    assert guarded(["plot", both[0]], False) == 0
    assert (runs[0] / "analysis/test_accuracy.png").is_file()
    assert guarded(["plot", both[0], "-o", "x.txt"], False) == 2
    assert capsys.readouterr().err == "error: -o writes .png, .svg or .pdf, not x.txt\n"


def test_labels_are_no_formulas(tmp_path: Path) -> None:
    history = [record(1, mask_rate=0.5, target_entropy=0.5)]
    for figure in (plots.plot, plots.plot_mask, plots.plot_target):
        assert figure({r"fedcsd:x=$\frac$": [history]}, tmp_path / "x.png") == [tmp_path / "x.png"]


@pytest.mark.parametrize(
    ("x", "lost"), [("seconds", "seconds"), ("bytes", "bytes_up"), ("bytes", "bytes_down")]
)
def test_an_axis_needs_every_round(x: str, lost: str, tmp_path: Path) -> None:
    for damaged in ({k: v for k, v in record(2).items() if k != lost}, record(2, **{lost: None})):
        history = {"fedavg": [[record(1), damaged]]}
        with pytest.raises(UserError, match=f"lacks {lost}: draw them against rounds, with --x round"):
            plots.plot(history, tmp_path / "x.png", x=x)
        assert plots.plot(history, tmp_path / "x.png")
