"""A run whose method's file or data has moved: how that is told, and that it goes on to the same bits."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import Fedcsd, blobs
from test_runs import SMALL, same, stop_after

import fedcsd as package
from fedcsd.errors import UserError

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
    said = fedcsd("resume", str(project / "cut"))
    assert said.returncode == 2
    assert "old/mine.py, the method of" in said.stderr
    assert "--method FOLDER/mine.py:Mine tells where it is" in said.stderr
    said = fedcsd("resume", str(project / "cut"), "--method", f"{project / 'mine.py'}:Mine")
    assert "there is no file or folder" in said.stderr  # both have moved
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
        package.resume(project / "cut", **{**both, "method": str(project / "other.py")})
    arrays = dict(np.load(project / "data.npz"))
    np.savez(project / "data2.npz", **{**arrays, "x_train": arrays["x_train"] + 1})
    with pytest.raises(UserError, match="the data is not the data that"):
        package.resume(project / "cut", **{**both, "data": project / "data2.npz"})
    assert (project / "cut/config.toml").read_text() == before


def test_a_built_in_method_has_no_file(tmp_path: Path) -> None:
    package.run(data=blobs(), rounds=1, out=tmp_path / "run", **SMALL)
    with pytest.raises(UserError, match="--method says nothing, for that has no file; start a new run"):
        package.resume(tmp_path / "run", method="fedavg", rounds=2)
