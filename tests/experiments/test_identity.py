"""A run whose method's file or data has moved, or whose code has changed: how that is told, and that it goes on."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import fedcsd as package
from fedcsd.errors import Note, UserError
from fedcsd.experiments import provenance
from fedcsd.experiments.run_folder import RunDirectory
from helpers.federations import blobs
from helpers.program import Fedcsd
from helpers.runs import SMALL, same, stop_after

OWN = """from fedcsd import FedAvg


class Mine(FedAvg):
    pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a method of one's own and data, a run to the end and one that was cut off; then it moves."""
    old = tmp_path / "old"
    old.mkdir()
    (old / "mine.py").write_text(OWN)
    data = blobs()
    arrays = {name: getattr(data, name).numpy() for name in ("x_train", "y_train", "x_test", "y_test")}
    np.savez(old / "data.npz", **arrays)
    given = {
        "method": f"{old / 'mine.py'}:Mine",
        "data": str(old / "data.npz"),
        "model": "mlp",
        "rounds": 3,
        **SMALL,
    }
    package.run(out=old / "whole", **given)
    with pytest.raises(KeyboardInterrupt):
        package.run(out=old / "cut", on_round=stop_after(2), **given)
    old.rename(tmp_path / "new")
    return tmp_path / "new"


def test_it_goes_on_from_the_new_place(project: Path, fedcsd: Fedcsd) -> None:
    cut = str(project / "cut")
    said = fedcsd("resume", cut)
    assert said.returncode == 2
    assert f"old/mine.py, the method of {cut}, and " in said.stderr
    assert f"old/data.npz, the data of {cut}, are not there" in said.stderr
    assert "--method FOLDER/mine.py:Mine --data PATH tells where they are" in said.stderr
    for option, place, other in (
        ("--method", f"{project / 'mine.py'}:Mine", "--data PATH"),
        ("--data", str(project / "data.npz"), "--method FOLDER/mine.py:Mine"),
    ):  # each alone says what else is missing, in a command that is complete
        said = fedcsd("resume", cut, option, place)
        assert f"is not there: fedcsd resume {cut} {option} {place} {other} tells where it is" in said.stderr
    both = ("--method", f"{project / 'mine.py'}", "--data", str(project / "data.npz"))
    assert fedcsd("resume", str(project / "cut"), *both).returncode == 0
    same(project / "whole", project / "cut")
    assert package.resume(project / "cut", rounds=4).summary["rounds"] == 4  # it is known from now on


def test_a_finished_run_too(project: Path, fedcsd: Fedcsd) -> None:
    assert "old/mine.py, the method of" in fedcsd("drift", str(project / "whole"), "--epochs", "1").stderr
    package.resume(project / "whole", method=f"{project / 'mine.py'}:Mine", data=project / "data.npz")
    assert fedcsd("drift", str(project / "whole"), "--epochs", "1").returncode == 0


def test_something_else_is_refused(project: Path) -> None:
    both = {"method": f"{project / 'mine.py'}:Mine", "data": project / "data.npz"}
    before = (project / "cut/config.toml").read_text()
    with pytest.raises(UserError, match="--method tells where the file of Mine is, and nothing else"):
        package.resume(project / "cut", **{**both, "method": "fedcsd"})
    shutil.copy(project / "mine.py", project / "other.py")
    (project / "other.py").write_text(OWN.replace("Mine", "Other"))
    with pytest.raises(UserError, match="and nothing else"):
        package.resume(project / "cut", **{**both, "method": f"{project / 'other.py'}:Other"})
    with pytest.raises(UserError, match=r"unknown class of other.py 'Mine'"):
        package.resume(project / "cut", **{**both, "method": str(project / "other.py")})
    with pytest.raises(UserError, match=r"^there is no file .*nowhere.py"):  # the data has no part in that
        package.resume(project / "cut", **{**both, "method": str(project / "nowhere.py")})
    arrays = dict(np.load(project / "data.npz"))
    np.savez(project / "data2.npz", **{**arrays, "x_train": arrays["x_train"] + 1})
    with pytest.raises(UserError, match="the data is not the data that"):
        package.resume(project / "cut", **{**both, "data": project / "data2.npz"})
    np.savez(project / "data3.npz", **{**arrays, "x_train": arrays["x_train"][:, :4]})
    with pytest.raises(UserError, match=r"data3.npz cannot be the data that .*cut was started with: "):
        package.resume(project / "cut", **{**both, "data": project / "data3.npz"})
    assert (project / "cut/config.toml").read_text() == before


def test_a_built_in_method_has_no_file(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=1, out=tmp_path / "run", **SMALL)
    with pytest.raises(
        UserError, match="has no file that --method could tell the place of; leave --method out"
    ):
        package.resume(tmp_path / "run", data=blobs(), method="fedavg", rounds=2)
    package.resume(tmp_path / "run", data=blobs(), method="fedcsd", rounds=2)  # as it was


def test_runs_of_other_code_of_the_package_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"data": blobs(), "rounds": 3, "out": tmp_path / "c", **SMALL}
    with warnings.catch_warnings():
        warnings.simplefilter("error", Note)
        package.compare("fedavg", [0, 1], **call)
        package.compare("fedavg", [0, 1], **call)  # the same code: nothing to tell
    with pytest.raises(KeyboardInterrupt):
        package.run(
            method="fedavg", on_round=stop_after(1), seed=2, **{**call, "out": tmp_path / "c/fedavg-seed2"}
        )
    before = provenance.package()
    monkeypatch.setattr(provenance, "package", lambda: "changed")
    with pytest.warns(Note) as told:
        package.compare("fedavg", [0, 1, 2], **call)
    first, second = (str(some.message) for some in told)
    assert first.startswith("trained with other code of fedcsd than this: 2 of the 2 runs that are there")
    assert f"({tmp_path / 'c/fedavg-seed0'}, {tmp_path / 'c/fedavg-seed1'})" in first
    assert "the code of fedcsd itself has changed since" in second
    facts = RunDirectory.open(tmp_path / "c/fedavg-seed2").config["facts"]
    assert facts["changes"][-1] == f"after round 1: code of the package {before} -> changed"
    monkeypatch.setattr(provenance, "package", lambda: before)
    with pytest.warns(Note, match=r"other code of fedcsd than this: 1 of the 3 runs"):  # in part
        package.compare("fedavg", [0, 1, 2], **call)


def test_the_package_is_told_apart_by_what_trains(tmp_path: Path) -> None:
    here = Path(provenance.__file__).parent
    assert all((here / part).exists() for part in provenance.TRAINS)
    copy = tmp_path / "copy"
    shutil.copytree(here, copy, ignore=shutil.ignore_patterns("__pycache__"))

    def digest() -> str:
        provenance.package.cache_clear()
        return provenance.package(copy)

    seen = [digest()]
    assert seen[0] == provenance.package()  # wherever it lies
    for name in ("cli.py", "report/page.js", "paper/files.py"):  # these train nothing
        with (copy / name).open("a") as file:
            file.write("\n")
    assert digest() == seen[0]
    for name in ("methods/fedavg.py", "kernels/csd.c", "kernels/csd.cu", "sgd.py", "models/resnet.py"):
        with (copy / name).open("a") as file:
            file.write("\n")
        seen.append(digest())
    (copy / "sgd.py").rename(copy / "data/sgd.py")
    seen.append(digest())
    assert len(set(seen)) == len(seen)
