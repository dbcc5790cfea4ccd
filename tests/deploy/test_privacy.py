"""Test Flower's mods for clipping and noise around our methods' training."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod

from fedcsd.deploy.node import client
from fedcsd.deploy.node.client import make_app
from fedcsd.deploy.wire import MAIN, parcel_of
from fedcsd.experiments.runs.run_folder import RunDirectory
from helpers.loop import LoopGrid, deployed

pytestmark = pytest.mark.slow


class Witness:
    """A mod outside of the others that measures the distance between sent and returned weights."""

    def __init__(self) -> None:
        self.away: list[np.ndarray] = []

    def __call__(self, message: Message, context: Context, call_next: object) -> Message:
        sent = parcel_of(message.content).arrays[MAIN]
        reply = call_next(message, context)  # type: ignore[operator]
        self.away.append(parcel_of(reply.content).arrays[MAIN] - sent)
        return reply


@pytest.fixture
def grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopGrid:
    made = LoopGrid(tmp_path, 2)
    monkeypatch.setattr(
        client, "ask_node", lambda parcel, context: made.nodes[context.node_id].answer(parcel)
    )
    return made


@pytest.mark.parametrize("method", ["fedavg", "fedcsd", "moon", "scaffold"])
def test_clipping_holds_the_update_within_its_norm(method: str, grid: LoopGrid, tmp_path: Path) -> None:
    witness = Witness()
    grid.apps = dict.fromkeys(grid.nodes, make_app(mods=[witness, fixedclipping_mod]))
    deployed(grid, tmp_path / "run", method=method, mods=True, clipping_norm=0.05)
    norms = [float(np.linalg.norm(away.astype(np.float64))) for away in witness.away]
    assert len(norms) == 4
    assert max(norms) == pytest.approx(0.05, rel=1e-3)
    assert [r["refused"] for r in RunDirectory(tmp_path / "run").history()] == [0, 0]


def test_noise_has_the_deviation_that_the_mod_promises(grid: LoopGrid, tmp_path: Path) -> None:
    witness, delta = Witness(), 1e-5
    mod = LocalDpMod(clipping_norm=1e-6, sensitivity=0.1, epsilon=2.0, delta=delta)
    grid.apps = dict.fromkeys(grid.nodes, make_app(mods=[witness, mod]))
    deployed(grid, tmp_path / "run", method="fedcsd", mods=True, rounds=1)
    promised = 0.1 * np.sqrt(2 * np.log(1.25 / delta)) / 2.0
    assert witness.away[0].std() == pytest.approx(promised, rel=0.03)
    assert witness.away[0].dtype == np.float32
