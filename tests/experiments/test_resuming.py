"""A run whose method's file or data has moved, or whose code has changed: how that is told, and that it goes on."""

import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import fedcsd as package
from fedcsd.errors import Note, UserError
from fedcsd.experiments.runs import provenance
from fedcsd.experiments.runs.recorded import Change
from fedcsd.experiments.runs.run_folder import RunDirectory
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
    places: tuple[str, ...] = ()
    for component, file in (("method", "mine.py"), ("data", "data.npz")):
        said = fedcsd("resume", cut, *places)
        assert said.returncode == 2
        assert f"old/{file}, the {component} of {cut}, is not there" in said.stderr
        assert f"fedcsd resume {cut} --{component} …" in said.stderr
        places += (f"--{component}", str(project / file))
    assert fedcsd("resume", cut, *places).returncode == 0
    same(project / "whole", project / "cut")
    assert package.resume(project / "cut", rounds=4).summary["rounds"] == 4  # it is known from now on


def test_a_finished_run_too(project: Path, fedcsd: Fedcsd) -> None:
    assert "old/mine.py, the method of" in fedcsd("drift", str(project / "whole"), "--epochs", "1").stderr
    package.resume(project / "whole", method=f"{project / 'mine.py'}:Mine", data=project / "data.npz")
    assert fedcsd("drift", str(project / "whole"), "--epochs", "1").returncode == 0


def test_something_else_is_refused(project: Path) -> None:
    both = {"method": f"{project / 'mine.py'}:Mine", "data": project / "data.npz"}
    before = (project / "cut/config.toml").read_text()
    shutil.copy(project / "mine.py", project / "other.py")
    (project / "other.py").write_text(OWN.replace("Mine", "Other"))
    for other in ("fedcsd", f"{project / 'other.py'}:Other"):
        with pytest.raises(
            UserError, match="--method gives the file of the same method anew, and nothing else"
        ):
            package.resume(project / "cut", **{**both, "method": other})
    with pytest.raises(UserError, match=r"unknown class of other.py 'Mine'"):
        package.resume(project / "cut", **{**both, "method": str(project / "other.py")})
    with pytest.raises(UserError, match=r"nowhere.py, the method of .*cut, is not there"):
        package.resume(project / "cut", **{**both, "method": str(project / "nowhere.py")})
    arrays = dict(np.load(project / "data.npz"))
    for changed in (arrays["x_train"] + 1, arrays["x_train"][:, :4]):
        np.savez(project / "data2.npz", **{**arrays, "x_train": changed})
        with pytest.raises(UserError, match=r"the data is not the data that|must have the same shape"):
            package.resume(project / "cut", **{**both, "data": project / "data2.npz"})
    assert (project / "cut/config.toml").read_text() == before


def test_a_built_in_method_has_no_file(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=1, out=tmp_path / "run", **SMALL)
    with pytest.raises(UserError, match="--method gives the file of the same method anew, and nothing else"):
        package.resume(tmp_path / "run", data=blobs(), method="fedavg", rounds=2)
    package.resume(tmp_path / "run", data=blobs(), method="fedcsd", rounds=2)  # as it was


def test_another_format_is_refused(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=1, out=tmp_path / "run", **SMALL)
    config = tmp_path / "run/config.toml"
    config.write_text(config.read_text().replace("format = 1", "format = 0"))
    for call in (package.load_run, package.resume):
        with pytest.raises(
            UserError, match=r"run has format 0 \(of fedcsd .*\) and this fedcsd reads format 1"
        ):
            call(tmp_path / "run")
    package.run(data=blobs(), rounds=1, out=tmp_path / "run", overwrite=True, **SMALL)


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
    change = RunDirectory.open(tmp_path / "c/fedavg-seed2").changes[-1]
    assert change == Change(1, "code", "package", before, "changed")
    monkeypatch.setattr(provenance, "package", lambda: before)
    with pytest.warns(Note, match=r"other code of fedcsd than this: 1 of the 3 runs"):  # in part
        package.compare("fedavg", [0, 1, 2], **call)
