"""Test features in the plane: seeds, shapes, scores, and the commands on a small run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedcsd as package
from fedcsd.cli.main import guarded
from fedcsd.errors import Note, UserError
from fedcsd.files import check_writable
from fedcsd.messages import Request
from fedcsd.results.analysis import drift, tsne
from fedcsd.results.analysis.one_round import latest, ready
from helpers.program import Fedcsd


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train FedAvg and FedCSD on digits."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "fedcsd"):
        package.run(
            method=method,
            data="digits",
            clients=5,
            rounds=2,
            epochs=1,
            lr=0.1,
            track_drift=True,
            out=folder / method,
        )
    return {method: folder / method for method in ("fedavg", "fedcsd")}


def test_embedding_is_seeded_and_in_the_plane() -> None:
    features = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    first = tsne.embedded(features, 3)
    assert first.shape == (60, 2)
    assert np.isfinite(first).all()
    assert np.array_equal(first, tsne.embedded(features, 3))


def test_features_that_t_sne_itself_cannot_take() -> None:
    plain = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    with pytest.warns(Note, match="the same for all images"):
        points = tsne.embedded(np.ones_like(plain), seed=0)  # a dead model's
    assert points.shape == (60, 2)
    assert not points.any()
    assert np.isfinite(tsne.embedded(plain * np.float32(1e37), seed=0)).all()
    with pytest.raises(UserError, match="are not finite"):
        tsne.embedded(plain * np.float32(np.inf), seed=0)


@pytest.mark.slow
def test_the_papers_four_panels(runs: dict[str, Path], tmp_path: Path) -> None:
    told: list[int] = []
    loaded = {label: latest(path) for label, path in runs.items()}
    paths = tsne.picture(
        loaded, tmp_path / "x" / "tsne", samples=80, client=2, report=lambda _, done, total: told.append(done)
    )
    assert [path.name for path in paths] == ["tsne.png", "tsne.svg", "tsne.pdf", "tsne.json"]
    clouds = json.loads(paths[-1].read_text())
    assert [cloud["title"].replace("\n", ", ") for cloud in clouds] == [
        "fedavg, global model",
        "fedcsd, global model",
        "fedcsd, client 2, cross-entropy alone",
        "fedcsd, client 2, full local loss",
    ]
    assert np.array(clouds[0]["points"]).shape == (80, 2)
    assert told == list(range(7))
    # Each image told by its ten nearest others, worked out one by one.
    experiment = ready(loaded["fedavg"])
    features, labels = tsne.features_of(experiment, experiment.weights, 80)
    assert labels.tolist() == clouds[0]["labels"]
    right = 0
    for one in range(80):
        distance = ((features.astype(np.float64) - features[one]) ** 2).sum(1)
        distance[one] = np.inf
        right += np.bincount(labels[np.argsort(distance)[:10]], minlength=10).argmax() == labels[one]
    assert clouds[0]["neighbours_accuracy"] == pytest.approx(right / 80)
    assert -1 <= clouds[0]["silhouette"] <= 1


@pytest.mark.slow
def test_a_method_that_adds_nothing_here_is_said_to_add_nothing(tmp_path: Path) -> None:
    small = {"data": "digits", "clients": 5, "rounds": 1, "epochs": 1}
    runs = {name: package.run(method=name, **small) for name in ("fedavg", "fedcsd:mu=0", "moon")}
    for name in ("fedcsd:mu=0", "moon"):
        with pytest.warns(match=rf"{name} adds nothing to cross-entropy for client \d in this round"):
            tsne.picture({"fedavg": runs["fedavg"], name: runs[name]}, tmp_path / "x", samples=30)


def test_the_local_model_is_that_of_the_methods_next_round(runs: dict[str, Path]) -> None:
    run = latest(runs["fedavg"])
    experiment = ready(run)
    (method,) = tsne._methods(run, plain=True).values()
    client, weights = tsne._local(experiment, method, 2, None, 0)
    held = [len(np.unique(experiment.data.y_train.numpy()[rows])) for rows in experiment.parts]
    assert held[client] == min(held)
    expected = experiment.worker().answer(Request(2, "train", {"weights": experiment.weights}), client, {})
    assert weights.flat.equal(expected.weights.flat)


def test_a_client_that_is_not_there(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no client 9: choose from 0 to 4"):
        tsne.picture({"a": latest(runs["fedavg"])}, tmp_path / "x", client=9)
    with pytest.raises(UserError, match="at least one run"):
        tsne.picture({}, tmp_path / "x")


def test_runs_of_other_data_or_models_are_not_put_side_by_side(runs: dict[str, Path], tmp_path: Path) -> None:
    first, second = (latest(path) for path in runs.values())
    for what, value in (("data", "mnist"), ("model", {"name": "mlp", "hidden": 9})):
        other = replace(second, settings={**second.settings, what: value})
        with pytest.raises(
            UserError, match=f"these runs differ in their {what} \\(.* and .*: give runs of the same"
        ):
            tsne.picture({"a": first, "b": other}, tmp_path / "x")


def test_drift_writes_beside_the_run(fedcsd: Fedcsd, runs: dict[str, Path]) -> None:
    own = runs["fedcsd"]
    result = fedcsd("drift", str(own), "--epochs", "2")
    assert result.returncode == 0, result.stderr
    for word in ("feature_distillation", "logit drift", "not held", "analysis/drift.png (.svg, .pdf, .json)"):
        assert word in result.stdout
    saved = json.loads((own / "analysis/drift.json").read_text())
    assert list(saved["curves"]) == ["fedavg", "feature_distillation", "logit_distillation", "fedcsd"]
    assert len(saved["curves"]["fedcsd"]["logit_drift"]) == 2
    assert (own / "analysis/forgetting.pdf").exists()


@pytest.mark.slow
def test_tsne_and_plot_write_where_they_are_told(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["tsne", str(runs["fedcsd"]), "--samples", "50", "-o", f"{tmp_path}/x"], False) == 0
    clouds = json.loads((tmp_path / "x/tsne.json").read_text())
    assert len(clouds) == 2
    shown = capsys.readouterr().out
    assert "10 nearest (%)" in shown
    for cloud in clouds:
        line = next(line for line in shown.splitlines() if cloud["title"].split("\n")[0] + "," in line)
        assert f"{100 * cloud['neighbours_accuracy']:.1f}" in line
        assert f"{cloud['silhouette']:.2f}" in line
    assert shown.endswith(f"written: {tmp_path}/x/tsne.png (.svg, .pdf, .json)\n")
    both = [str(path) for path in runs.values()]
    picture = f"{tmp_path}/p.svg"
    assert guarded(["plot", *both, "--y", "local_train_accuracy", "-o", picture], False) == 0
    assert capsys.readouterr().out == f"written: {picture}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("plot", "{run}", "--y", "loss"), "error: unknown metric 'loss': did you mean"),
        (("plot", "{run}", "--mask", "--target"), "error: --mask and --target are two pictures"),
        (
            ("plot", "{run}", "--mask", "--y", "test_loss"),
            "error: --mask is a picture of its own: leave out --y",
        ),
        (
            ("plot", "{run}", "--target", "--x", "bytes"),
            "error: --target is a picture of its own: leave out --x",
        ),
        (("plot", "nowhere"), "error: nowhere holds no run"),
        (("drift", "{run}", "--methods", "fedavgg"), "error: unknown method 'fedavgg': did you mean"),
        pytest.param(
            ("drift", "{run}", "--device", "cuda"),
            ("error: this PyTorch (", "error: PyTorch finds no CUDA device"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
        ),
        (("tsne", "nowhere"), "error: nowhere holds no run"),
    ],
)
def test_mistakes_are_one_line(
    runs: dict[str, Path],
    arguments: tuple[str, ...],
    line: str | tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert guarded([a.format(run=runs["fedavg"]) for a in arguments], False) == 2
    said = capsys.readouterr().err
    assert said.startswith(line)
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", ["drift", "tsne"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    command: str, runs: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((drift, "study"), (tsne, "picture")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("it was worked on"))
    run, before = runs["fedavg"], sorted(runs["fedavg"].iterdir())
    for place in ("config.toml", "config.toml/x/y"):
        assert guarded([command, str(run), "-o", f"{run / place}"], False) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: cannot write to {run / place}: ")
        assert said.endswith(": choose another -o\n")
    assert sorted(run.iterdir()) == before
    check_writable(run / "x/y")
    assert sorted(run.iterdir()) == before


def test_overwriting_a_run_removes_what_was_made_of_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "method": "fedavg",
        "clients": 3,
        "rounds": 1,
        "epochs": 1,
        "out": tmp_path / "r",
    }
    package.run(**settings)
    (tmp_path / "r/analysis").mkdir()
    (tmp_path / "r/analysis/drift.json").write_text("{}")
    package.run(**settings, overwrite=True)
    assert not (tmp_path / "r/analysis").exists()
