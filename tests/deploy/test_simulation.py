"""Test the same app in Flower's simulation runtime, on Ray."""

import time
from pathlib import Path

import pytest
from deploy_simulation import simulate

from fedcsd.deploy.processes import marked
from helpers.deployments import same_bits, simulated


@pytest.mark.flower
@pytest.mark.timeout(900)
def test_simulated_nodes_come_to_the_simulators_weights(tmp_path: Path) -> None:
    found = simulate(tmp_path, nodes=5, rounds=2, method="scaffold", data="digits")
    assert found["clients of the last round"] == 5
    assert same_bits(tmp_path / "run", simulated(tmp_path / "run"))
    mark, until = f"FLWR_HOME={tmp_path / 'superlink'}".encode(), time.monotonic() + 120
    while marked(mark) and time.monotonic() < until:
        time.sleep(0.2)  # Ray's own processes end after the one that began them, on a busy machine late
    still = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ") for pid in marked(mark)]
    assert not still, "something that was started is still there"
