"""Test `fedcsd new-method`: its file runs at once, passes ruff and mypy, and equals FedAvg at strength 0."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcsd as package
from fedcsd.cli.new_method import class_name, method_text
from fedcsd.errors import UserError
from helpers.federations import blobs
from helpers.program import Fedcsd

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "data": blobs(),
    "clients": 4,
    "min_samples": 2,
    "epochs": 1,
    "participation": 0.5,
}


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "pulled.py").write_text(method_text("pulled.py", "Pulled"))
    return f"{tmp_path / 'pulled.py'}:Pulled"


def test_what_it_says_to_try_works(fedcsd: Fedcsd, tmp_path: Path) -> None:
    made = fedcsd("new-method", "fed_mine.py")
    assert made.returncode == 0, made.stderr
    text = (tmp_path / "fed_mine.py").read_text()
    assert "class FedMine(FedAvg)" in text
    assert "MyMethod" not in text
    assert "my_method" not in text
    commands = [
        line.split("fedcsd ", 1)[1]
        for line in made.stdout.splitlines()
        if ": " in line and " fedcsd " in line
    ]
    assert len(commands) == 2
    for command in commands:
        result = fedcsd(*command.split(), "--rounds", "1", "--epochs", "1")
        assert result.returncode == 0, result.stderr
    assert (tmp_path / "runs/FedMine-digits/summary.json").exists()
    assert (tmp_path / "runs/FedMine/FedMine-seed2/summary.json").exists()
    again = fedcsd("new-method", "fed_mine.py")
    assert again.returncode == 2
    assert "fed_mine.py exists already" in again.stderr
    assert (tmp_path / "fed_mine.py").read_text() == text


def test_names_of_files_and_classes() -> None:
    assert class_name(Path("my_method.py")) == "MyMethod"
    assert class_name(Path("a/fedX2.py")) == "FedX2"
    assert class_name(Path("_.py")) == "MyMethod"
    for wrong, better in (("my-method.py", "my_method"), ("class.py", "my_class"), ("2nd.py", "my_2nd")):
        with pytest.raises(UserError, match=f"call it {better}.py"):
            class_name(Path(wrong))
    with pytest.raises(UserError, match=r"must end in \.py"):
        class_name(Path("mine.txt"))
    for name in ("a b", "", "class", "1st"):
        with pytest.raises(UserError, match="no name for a class"):
            method_text("x.py", name)
    for name in ("FedAvg", "Tensor", "Mapping", "float", "dataclass"):
        with pytest.raises(UserError, match="is the name of something else"):
            method_text("x.py", name)


@pytest.mark.slow
def test_it_is_tidy_and_typed(tmp_path: Path) -> None:
    """Check the file with our ruff rules, in a folder where fedcsd is a library, and with mypy in strict mode."""
    (tmp_path / "mine.py").write_text(method_text("mine.py", "ARatherLongNameForAMethodThatDoesManyThings"))
    ruff = [sys.executable, "-m", "ruff"]
    config = f"--config={ROOT / 'pyproject.toml'}"
    for command in (
        [*ruff, "check", "--no-cache", config, "mine.py"],
        [*ruff, "format", "--no-cache", "--check", config, "mine.py"],
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--follow-imports=silent",
            f"--cache-dir={tmp_path}/.c",
            "mine.py",
        ],
    ):
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def test_at_0_it_is_fedavg(mine: str) -> None:
    settings = {**SETTINGS, "rounds": 3, "workers": 2, "track_drift": True}
    ours = package.run(method=f"{mine}:mu=0", **settings)
    plain = package.run(method="fedavg", **settings)
    assert all(torch.equal(ours.weights[name], plain.weights[name]) for name in plain.weights)
    assert {"distance", "batch_accuracy"} <= ours.history[-1].keys() - plain.history[-1].keys()


def test_it_resumes_and_does_not_depend_on_workers(mine: str, tmp_path: Path) -> None:
    one, two = (package.run(method=f"{mine}:strong", rounds=4, workers=w, **SETTINGS) for w in (1, 2))
    assert one.settings["method"]["mu"] == 0.1
    package.run(method=f"{mine}:strong", rounds=2, workers=2, out=tmp_path / "half", **SETTINGS)
    resumed = package.resume(tmp_path / "half", data=SETTINGS["data"], rounds=4)
    plain = package.run(method="fedavg", rounds=4, workers=2, **SETTINGS)
    for name in one.weights:
        assert torch.equal(one.weights[name], two.weights[name])
        assert torch.equal(one.weights[name], resumed.weights[name])
    assert not all(torch.equal(one.weights[name], plain.weights[name]) for name in one.weights)


def test_the_template_is_part_of_the_package() -> None:
    from importlib.resources import files

    assert files("fedcsd").joinpath("templates/my_method.py").is_file()
