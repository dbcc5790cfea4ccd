"""Test how often a run is saved."""

from pathlib import Path
from typing import Any

import pytest

import fedcsd as package
from fedcsd.experiments.runs.checkpoints import Checkpoints
from helpers.federations import blobs
from helpers.runs import SMALL, same, stop_after


@pytest.mark.slow
def test_slow_checkpoints_are_made_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**SMALL, "rounds": 12, "checkpoint_every": 0}
    package.run(data=blobs(), out=tmp_path / "whole", **settings)
    made: list[int] = []
    quick = Checkpoints.save

    def slow(self: Checkpoints, header: Any, values: Any) -> None:
        quick(self, header, values)
        made.append(header["round"])
        self._saving = 60.0  # so that the next is due after twenty minutes

    monkeypatch.setattr(Checkpoints, "save", slow)
    package.run(data=blobs(), out=tmp_path / "rarely", **settings)
    assert made == [1, 12]
    same(tmp_path / "whole", tmp_path / "rarely")
    with pytest.raises(KeyboardInterrupt, match="rounds 1 to 7 are saved"):
        package.run(data=blobs(), out=tmp_path / "cut", on_round=stop_after(7), **settings)
    for path in (tmp_path / "cut/checkpoints").glob("*7*"):  # as if it had been killed
        path.unlink()
    package.resume(tmp_path / "cut", data=blobs())
    same(tmp_path / "whole", tmp_path / "cut")
