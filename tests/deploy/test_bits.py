"""The simulator and a real SuperLink with real SuperNodes come to the same weights, bit for bit."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedcsd.deploy.local import LocalDeployment
from fedcsd.deploy.processes import MARK, marked
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.federation.callbacks import Callbacks
from helpers.deployments import same_bits, settings, simulated

METHODS = ("fedavg", "fedcsd", "moon", "scaffold")
NODES = 2


def like_mnist(path: Path) -> str:
    """28 × 28 grey images of ten classes in an .npz file, for where MNIST itself is not at hand."""
    random = np.random.default_rng(0)
    prototypes = random.integers(0, 256, (10, 28, 28))
    y = np.arange(400) % 10
    x = np.clip(prototypes[y] + random.normal(0, 40, (400, 28, 28)), 0, 255).astype(np.uint8)
    np.savez(path, x_train=x[:300], y_train=y[:300], x_test=x[300:], y_test=y[300:])
    return str(path)


class Seen(Callbacks):
    """A callback that keeps who answered."""

    def __init__(self) -> None:
        self.replies: list[tuple[str, int, int]] = []

    def reply(self, function: str, done: int, clients: int) -> None:
        self.replies.append((function, done, clients))


@pytest.mark.flower
@pytest.mark.timeout(900)
def test_deployed_weights_are_the_simulators(tmp_path: Path) -> None:
    folder = os.environ.get("FEDCSD_DATA", "")
    there = Path(folder, "mnist").is_dir() and folder
    mnist = {"data": "mnist", "train_size": 600} if there else {"data": like_mnist(tmp_path / "like.npz")}
    runs, seen = {}, Seen()
    with LocalDeployment(tmp_path / "deploy", NODES) as federation:
        federation.start()
        for kind, data in (("digits", {}), ("mnist", mnist)):
            wave = {}
            for method in METHODS:
                out = tmp_path / f"{method}-{kind}"
                values = settings(method=method, clients=NODES, out=str(out), beta=0.5, **data)
                wave[out] = federation.run(values)
            for out, status in wave.items():
                federation.follow(out, status, seen, 2)
            runs |= wave
        mark = f"{MARK}={federation.processes.mark}".encode()
        assert marked(mark)
    assert not marked(mark), "something that was started is still there"
    assert seen.replies
    assert all(1 <= done <= clients == NODES for _, done, clients in seen.replies)
    for out in runs:
        assert same_bits(out, simulated(out)), out.name
        last = RunDirectory(out).history()[-1]
        assert (last["refused"], last["late"], last["missing"], last["lost_states"]) == (0, 0, 0, 0)
