"""The same app in Flower's simulation runtime, on Ray."""

from pathlib import Path

import pytest
from deploy_simulation import simulate
from federations import same_bits, simulated

from fedcsd.deploy.processes import marked


@pytest.mark.flower
@pytest.mark.timeout(900)
def test_simulated_nodes_come_to_the_simulators_weights(tmp_path: Path) -> None:
    found = simulate(tmp_path, nodes=5, rounds=2, method="scaffold", data="digits")
    assert found["clients of the last round"] == 5
    assert same_bits(tmp_path / "run", simulated(tmp_path / "run"))
    assert not [n for n in marked(f"FLWR_HOME={tmp_path / 'superlink'}".encode()) if n]
