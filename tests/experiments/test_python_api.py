"""Test `import fedcsd` as notebooks use it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedcsd
from helpers.federations import blobs


def test_the_call_from_the_readme() -> None:
    run = fedcsd.run(data="digits", method=fedcsd.FedCSD(mu=0.01), clients=10, beta=0.1, rounds=2, epochs=1)
    assert len(run.history) == 2
    assert run.path is None
    assert run.accuracy == run.history[-1]["test_accuracy"]
    layers = ("hidden1", "hidden2", "classifier")
    assert set(run.weights) == {f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert run.settings["method"]["mu"] == 0.01


def test_own_model_and_arrays_as_closures() -> None:
    """Objects that exist in a notebook only and cannot be pickled work on every worker."""
    hidden = 5

    def model(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(), nn.Linear(int(np.prod(shape)), hidden), nn.Tanh(), nn.Linear(hidden, classes)
        )

    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    run = fedcsd.run(
        data=(x, y, x, y), model=model, clients=3, beta=1.0, min_samples=5, rounds=8, lr=0.1, workers=2
    )
    assert run.weights["1.weight"].shape == (5, 4)
    assert run.accuracy > 0.7
    net = model((4,), 2)
    net.load_state_dict(run.weights)
    assert torch.equal(net[3].weight, run.weights["3.weight"])  # type: ignore[index]


def test_factories_with_and_without_arguments() -> None:
    for model in (
        lambda: nn.Sequential(nn.Linear(6, 3)),
        lambda shape, classes: nn.Sequential(nn.Linear(*shape, classes)),
    ):
        fedcsd.run(data=blobs(), model=model, clients=4, min_samples=2, rounds=1, method="fedavg")
    with pytest.raises(fedcsd.UserError, match="not a model"):
        fedcsd.run(data=blobs(), model=nn.Linear(6, 3), clients=4, rounds=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: nn.Sequential(nn.Linear(6, 7))}, "7 outputs and the data has 3 classes"),
        ({"model": lambda: nn.Sequential(nn.Linear(9, 3))}, "do not fit the model"),
        ({"model": lambda: nn.Sequential(nn.Linear(6, 3), nn.Softmax(1))}, "does not end in an nn.Linear"),
        ({"clint": 3}, "did you mean clients"),
        ({"method": "fedcds"}, "did you mean fedcsd"),
        ({"method": fedcsd.FedCSD(tau=0.0)}, "method.tau must be more than 0"),
        ({"method": fedcsd.FedCSD(mask="soft")}, "unknown value of method.mask"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_user_errors(changes: dict, message: str) -> None:
    with pytest.raises(fedcsd.UserError, match=message):
        fedcsd.run(**{"data": blobs(), "clients": 4, "min_samples": 2, "rounds": 1, **changes})


def test_what_is_of_the_wrong_kind_is_a_user_error() -> None:
    wrong: Any = 3
    for call, message in (
        (lambda: fedcsd.run(model=wrong), "model must be a name, or a function or class .*, not 3"),
        (lambda: fedcsd.run(out=wrong), "out must be the path of a folder, not 3"),
        (lambda: fedcsd.resume(wrong), "path must be the path of a folder, not 3"),
        (lambda: fedcsd.load_run(wrong), "path must be the path of a folder, not 3"),
        (lambda: fedcsd.compare(wrong), "methods must be names or a list of methods, .* not 3"),
        (lambda: fedcsd.compare(["fedavg"], out=wrong), "out must be the path of a folder, not 3"),
        (lambda: fedcsd.compare(["fedavg"], seeds=wrong), r"seeds must be a list .* \[0, 1, 2\], not 3"),
        (lambda: fedcsd.compare(["fedavg"], seeds="0,1"), "seeds must be a list"),  # type: ignore[arg-type]
    ):
        with pytest.raises(fedcsd.UserError, match=message):
            call()


def test_callbacks_see_every_round() -> None:
    seen: list[tuple[int, int]] = []
    fedcsd.run(
        data=blobs(),
        clients=4,
        min_samples=2,
        rounds=3,
        on_round=lambda r, rounds: seen.append((r["round"], rounds)),
    )
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    half = np.float32(0.5)
    numbers = {
        "clients": np.int64(4),
        "lr": np.float32(0.1),
        "min_samples": np.int32(2),
        "track_drift": np.True_,
    }
    partition = {"name": "classes", "per_client": np.int64(2)}
    for number, method in enumerate((fedcsd.FedCSD(mu=half), {"name": "fedcsd", "mu": half})):  # type: ignore[arg-type]
        out = tmp_path / str(number)
        run = fedcsd.run(data=blobs(), method=method, partition=partition, rounds=1, out=out, **numbers)
        assert run.settings == fedcsd.load_run(out).settings
        assert (run.settings["clients"], run.settings["method"]["mu"]) == (4, 0.5)
        assert run.settings["lr"] == float(np.float32(0.1))
    assert fedcsd.resume(tmp_path / "1", data=blobs(), rounds=np.int64(2)).summary["rounds"] == 2
    with pytest.raises(fedcsd.UserError, match=r"clients must be a whole number, not 2\.5"):
        fedcsd.run(data=blobs(), clients=np.float64(2.5))


def test_compare_in_memory() -> None:
    result = fedcsd.compare("fedavg,fedcsd:mu=0", seeds=[0, 1], data="digits", rounds=1, epochs=1)
    assert [row.label for row in result.rows] == ["fedavg", "fedcsd:mu=0"]
    assert result.rows[1].differences == [0, 0]
    assert "| fedcsd:mu=0 |" in result.markdown()


class Mine(fedcsd.FedAvg):
    pass


def test_runs_and_comparisons_are_shown_in_a_line(tmp_path: Path) -> None:
    settings: dict = {"data": "digits", "rounds": 1, "epochs": 1}
    run = fedcsd.run(method={"name": "fedprox", "mu": 0.1}, out=tmp_path / "r", **settings)
    assert repr(run) == f"<Run: fedprox on digits, 1 round, accuracy {run.accuracy:.4g}, in {tmp_path / 'r'}>"
    assert repr(fedcsd.load_run(tmp_path / "r")) == repr(run)
    result = fedcsd.compare({"a": "fedavg", "b": Mine()}, seeds=[0, 1], lr=1e30, **settings)
    assert str(result) == "<Comparison: a, b, seeds 0, 1>"
    shown = r"<Run: Mine, given from Python on digits, 0 rounds, diverged in round 1: client \d.*>"
    assert re.fullmatch(shown, repr(result.runs["b"][0]))


def test_a_comparison_has_seeds_or_one_seed() -> None:
    settings: dict = {"data": blobs(), "clients": 4, "min_samples": 2, "rounds": 1}
    for given in ({"seed": 1}, {"seeds": [1]}, {"seeds": np.arange(1, 2)}):
        result = fedcsd.compare(["fedavg"], **given, **settings)
        assert result.seeds == [1]
        assert result.runs["fedavg"][0].settings["seed"] == 1
    with pytest.raises(fedcsd.UserError, match=r"name all seeds in seeds alone, such as seeds=\[1\]"):
        fedcsd.compare(["fedavg"], seeds=[0], seed=1, **settings)
    with pytest.raises(fedcsd.UserError, match="name all methods in methods alone"):
        fedcsd.compare(["fedavg"], method="fedcsd", **settings)


def test_random_state_of_the_caller_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fedcsd.run(data=blobs(), clients=4, min_samples=2, rounds=1)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
def test_importing_is_quick_and_names_are_there() -> None:
    code = (
        "import sys, fedcsd; assert 'torch' not in sys.modules\n"
        "assert all(getattr(fedcsd, n) for n in fedcsd.__all__); assert callable(fedcsd.compare)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'fedprox'"):
        _ = fedcsd.fedprox  # type: ignore[attr-defined]


def test_what_completion_shows() -> None:
    assert {*fedcsd.__all__, "__version__"} == set(dir(fedcsd))
