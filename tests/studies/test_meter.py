"""Test the clock of studies/scale.py, which splits the seconds of a round."""

import pytest
from meter import Meter, Phase

from fedcsd.experiments import running as jobs


def test_a_phase_is_taken_apart() -> None:
    """The seconds of two lanes are those worked out by hand."""
    phase = Phase(2, began=0.0, ended=10.0)
    phase.work[1] = [(1.0, 4.0), (5.0, 9.0)]
    phase.work[2] = [(1.0, 6.0)]
    phase.server = [(4.5, 5.0), (6.5, 7.0), (9.25, 10.0)]
    # Lane 1 waits 0 to 1, 4 to 5 (half of it for the server) and 9 to 10 (three quarters); lane 2 waits
    # 0 to 1 and 9 to 10, and has nothing left to do from 6 to 9.
    assert phase.parts() == pytest.approx(
        {"training": 12 / 2, "imbalance": 3 / 2, "aggregation": 2 / 2, "messages": 3 / 2}
    )


def test_a_lane_without_work_is_imbalance() -> None:
    phase = Phase(2, began=0.0, ended=4.0)
    phase.work[1] = [(0.0, 4.0)]
    assert phase.parts() == pytest.approx({"training": 2, "imbalance": 2, "aggregation": 0, "messages": 0})


@pytest.mark.parametrize("method", ["fedavg", "fedcsd"])
def test_the_parts_of_a_round_are_all_of_it(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the records are what they are without a clock."""
    values = {"method": method, "data": "digits", "rounds": 2, "epochs": 1, "workers": 2, "clients": 4}
    plain = jobs.train(jobs.begin(values))
    for owner, name in Meter.PLACES:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # is put back after the test
    meter = Meter(lambda done, rounds: None)
    meter.install()
    timed = jobs.train(jobs.begin(values), meter)
    times = ("seconds", "seconds_evaluating")
    assert [{k: v for k, v in r.items() if k not in times} for r in timed.history] == [
        {k: v for k, v in r.items() if k not in times} for r in plain.history
    ]
    assert len(meter.rounds) == 2
    for parts in meter.rounds:
        wall = parts.pop("wall")
        assert sum(parts.values()) == pytest.approx(wall)
        assert min(parts.values()) >= 0
        assert parts["training"] > 0
