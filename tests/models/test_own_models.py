"""Test a user's model, by its file or its module: it is found, told apart by version, and found again elsewhere."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import fedcsd as package
from fedcsd.errors import Note, RunStopped, UserError
from fedcsd.experiments.experiment import Experiment, prepare
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.federation.backends.local import LocalBackend
from fedcsd.methods.fedavg import FedAvg
from fedcsd.methods.fedprox import FedProx
from fedcsd.models import find
from helpers.federations import assert_found_by_workers, blobs
from helpers.program import Fedcsd
from helpers.runs import SMALL, same, stop_after

NETS = """from math import prod

from torch import nn


def net(shape, classes, *, width: int = 8):
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), width), nn.ReLU(), nn.Linear(width, classes))


def broken():
    return 1 / 0


def number():
    return 3


def odd(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, classes), nn.LogSoftmax(1))
"""


@pytest.fixture
def nets(tmp_path: Path) -> Path:
    """A file of models in a folder where nobody stands."""
    file = tmp_path / "else where" / "nets.py"
    file.parent.mkdir()
    file.write_text(NETS)
    return file


@pytest.mark.parametrize("home", ["nets", "nets.py"])
def test_by_module_or_file(home: str, fedcsd: Fedcsd, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    base = ("run", "--rounds", "1", "--epochs", "1")
    assert fedcsd(*base, "--model", f"{home}:net", "--set", "model.width=5", "--out", "a").returncode == 0
    odd = fedcsd(*base, "--model", f"{home}:odd", "--out", "b")
    assert odd.returncode == 2
    assert "--classifier (1 or 2)" in odd.stderr
    named = fedcsd(*base, "--model", f"{home}:odd", "--classifier", "2", "--out", "b")
    assert named.returncode == 0, named.stderr
    for model, message in (
        (f"{home}:nett", f"unknown function or class of {home} 'nett': did you mean net?"),
        ("nomodule:net", "nomodule cannot be imported: ModuleNotFoundError"),
        ("nofile.py:net", "nofile.py: correct the path"),
        ("resnet19", "did you mean resnet18"),
        ("nets.py", "nets.py does not say which function or class makes the model"),
        (":net", "give your own as file.py:factory or package.module:factory"),
        (f"{home}:broken", "broken raised ZeroDivisionError"),
        (f"{home}:number", "must return an nn.Module; it returned a int"),
    ):
        wrong = fedcsd(*base, "--model", model)
        assert wrong.returncode == 2
        assert message in wrong.stderr


def test_a_file_without_models(tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("from torch import nn\nwidth = 3\n")
    with pytest.raises(UserError, match=r"none.py has no function or class that could make the model"):
        find(f"{tmp_path / 'none.py'}:net")


def test_options_of_the_built_in_ones_are_checked(fedcsd: Fedcsd) -> None:
    group = fedcsd("run", "--model", "resnet18", "--set", "model.norm=grup")
    assert group.returncode == 2
    assert "unknown value of model.norm 'grup': did you mean group?" in group.stderr


def test_a_run_goes_on_from_everywhere(nets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"data": blobs(), "model": {"name": "nets.py:net", "width": 5}, "rounds": 3, **SMALL}
    monkeypatch.chdir(nets.parent)
    package.run(out=tmp_path / "whole", **call)
    with pytest.raises(KeyboardInterrupt):
        package.run(out=tmp_path / "cut", on_round=stop_after(2), **call)
    monkeypatch.chdir(tmp_path)
    package.resume(tmp_path / "cut", data=blobs())
    same(tmp_path / "whole", tmp_path / "cut")


def test_a_file_that_has_moved(nets: Path, fedcsd: Fedcsd, tmp_path: Path) -> None:
    run = fedcsd("run", "--model", f"{nets}:net", "--rounds", "1", "--epochs", "1", "--out", "run")
    assert run.returncode == 0, run.stderr
    there = nets.rename(tmp_path / "moved.py")
    longer = ("resume", "run", "--rounds", "2")
    gone = fedcsd(*longer)
    assert gone.returncode == 2
    assert "nets.py, the model of run, is not there: give its new place" in gone.stderr
    other = fedcsd(*longer, "--model", f"{there}:odd")
    assert "--model gives the file of the same model anew, and nothing else" in other.stderr
    moved = fedcsd(*longer, "--model", f"{there}:net")
    assert moved.returncode == 0, moved.stderr
    assert package.resume(tmp_path / "run", rounds=3).summary["rounds"] == 3  # it is known from now on
    (tmp_path / "q").mkdir()
    there = there.rename(tmp_path / "q/mm.py")
    short = fedcsd("resume", "run", "--rounds", "4", "--model", "q/mm.py")  # what makes the model is known
    assert short.returncode == 0, short.stderr
    assert package.load_run(tmp_path / "run").settings["model"] == {"name": f"{there}:net"}


def test_a_built_in_model_has_no_file(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=1, out=tmp_path / "run", **SMALL)
    with pytest.raises(UserError, match="--model gives the file of the same model anew, and nothing else"):
        package.resume(tmp_path / "run", data=blobs(), model="simple_cnn", rounds=2)
    same_names = {"model": "mlp", "method": "fedcsd"}  # as they were: nothing moves
    assert package.resume(tmp_path / "run", data=blobs(), **same_names, rounds=2).summary["rounds"] == 2


def test_a_moved_model_beside_objects(nets: Path, tmp_path: Path) -> None:
    objects = {"data": blobs(), "method": FedProx(mu=0.5)}
    package.run(model=f"{nets}:net", rounds=1, out=tmp_path / "run", **objects, **SMALL)
    there = nets.rename(tmp_path / "moved.py")
    run = package.resume(tmp_path / "run", model=f"{there}:net", rounds=2, **objects)
    assert run.settings["model"] == f"{there}:net"
    with pytest.raises(UserError, match=r"the data of this run was given from Python"):
        package.resume(tmp_path / "run", model=f"{there.rename(nets)}:net", rounds=3)


@pytest.mark.parametrize("there", [True, False])
def test_an_object_in_place_of_a_file(there: bool, nets: Path, tmp_path: Path) -> None:
    package.run(model=f"{nets}:net", rounds=1, data=blobs(), out=tmp_path / "run", **SMALL)
    net = find(f"{nets}:net")
    nets.unlink() if not there else None
    before = RunDirectory.open(tmp_path / "run").config["facts"]["code"]["model"]
    with pytest.warns(Note, match=r"nets.py:net: from here on its model is the one given from Python"):
        package.resume(tmp_path / "run", data=blobs(), model=net, rounds=2)
    change = RunDirectory.open(tmp_path / "run").changes[-1]
    assert str(change) == f"after round 1: code of the model {before} -> given from Python"
    assert RunDirectory.open(tmp_path / "run").code("model") == [(0, before), (1, "given from Python")]
    with warnings.catch_warnings():
        warnings.simplefilter("error", Note)  # nothing is known of an object
        package.resume(tmp_path / "run", data=blobs(), model=net, rounds=3)
        package.load_run(tmp_path / "run")


def test_a_file_that_has_changed_is_told(nets: Path, tmp_path: Path) -> None:
    call = {"data": blobs(), "model": f"{nets}:net", **SMALL}
    first = package.compare("fedavg", rounds=2, out=tmp_path / "c", **call)
    assert first.rows[0].notes == []
    nets.write_text(NETS.replace("ReLU", "Tanh"))  # of the same shapes
    with pytest.warns(Note, match=r"was trained before .*nets.py changed"):
        again = package.compare("fedavg", rounds=2, out=tmp_path / "c", **call)
    assert again.rows[0].notes[0].startswith("seed 0: trained with other code than nets.py has now")
    with pytest.warns(Note, match=r"the code of .*nets.py:net has changed"):
        package.resume(tmp_path / "c/fedavg-seed0", data=blobs(), rounds=3)
    nets.write_text(NETS.replace("nn.ReLU(), ", ""))
    with pytest.raises(UserError, match="the model is not the model that"):
        package.resume(tmp_path / "c/fedavg-seed0", data=blobs(), rounds=4)


@pytest.mark.parametrize("home", ["marked_nets", "marked_nets.py"])
def test_a_change_is_marked_in_comparisons(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "marked_nets.py").write_text(NETS)
    call = {"data": blobs(), "model": f"{home}:net", "rounds": 1, "out": tmp_path / "c", **SMALL}
    try:
        package.compare("fedavg", **call)
        (tmp_path / "marked_nets.py").write_text(NETS.replace("ReLU", "Tanh"))
        with pytest.warns(Note, match=r"was trained before .*marked_nets.* changed"):
            again = package.compare("fedavg", **call)
    finally:
        sys.modules.pop("marked_nets", None)
    assert again.rows[0].notes[0].startswith(f"seed 0: trained with other code than {home} has now")
    assert "trained with other code of the method or model than there is now" in again.markdown()


def test_an_edit_while_it_trains_changes_nothing(nets: Path) -> None:
    call = {"method": "moon", "data": blobs(), "model": f"{nets}:net", "rounds": 4, "lr": 0.1, **SMALL}

    def edited(text: str) -> Callable[..., None]:
        return lambda record, rounds: nets.write_text(text) if record["round"] == 1 else None

    whole = package.run(**call).weights
    for text in (NETS.replace("ReLU", "Tanh"), "def net(:"):  # MOON's third network is first made in round 2
        nets.write_text(NETS)
        run = package.run(on_round=edited(text), **call)
        assert all(torch.equal(whole[name], run.weights[name]) for name in whole)


def experiment_of(nets: Path) -> Experiment:
    values = {**SMALL, "data": "given from Python", "model": f"{nets}:net"}
    return prepare(values, data=blobs(), method=FedAvg())


@pytest.mark.slow
def test_workers_of_every_kind_find_it(nets: Path) -> None:
    assert_found_by_workers(experiment_of(nets))


def test_workers_never_load_a_file_that_has_changed(nets: Path) -> None:
    experiment = experiment_of(nets)
    nets.write_text(NETS.replace("ReLU", "Tanh"))
    with pytest.raises(RunStopped, match=r"nets.py has changed since the run loaded it, .*: restore it"):
        LocalBackend(experiment.worker(), experiment.network.layout, 1, "spawn")


def test_it_goes_to_the_sites_with_the_app(nets: Path, fedcsd: Fedcsd, tmp_path: Path) -> None:
    method = nets.with_name("mine.py")
    method.write_text("import fedcsd\n\n\nclass Mine(fedcsd.FedAvg):\n    pass\n")
    init = ("deploy", "init", "fed", "--simulate", "digits", "--model", f"{nets}:net")
    made = fedcsd(*init, "--method", f"{method}:Mine")
    assert made.returncode == 0, made.stderr
    assert {"nets.py", "mine.py"} <= {path.name for path in (tmp_path / "fed/fedcsd_app").iterdir()}
    assert 'model = "fedcsd_app.nets:net"' in (tmp_path / "fed/pyproject.toml").read_text()
    twin = tmp_path / "nets.py"
    twin.write_text(method.read_text())
    both = fedcsd("deploy", "init", "fed2", *init[3:], "--method", f"{twin}:Mine")
    assert both.returncode == 2
    assert "method and model are in two files called nets.py: rename one of them" in both.stderr
