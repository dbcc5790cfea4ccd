"""Test the report's table: which methods it compares with which."""

from pathlib import Path

from fedcsd.results.report.collect import collect
from helpers.reports import made


def test_only_methods_on_the_same_data_and_partition_are_compared(tmp_path: Path) -> None:
    for method, accuracy in (("fedavg", 0.5), ("moon", 0.6)):
        for name, change in (
            ("digits", {}),
            ("mnist", {"data": "mnist"}),
            ("pool", {"data": {"name": "office", "train_pool": 0.6}}),
            ("beta", {"beta": 5.0}),
        ):
            accuracy += 0.01
            made(tmp_path / f"{method}-{name}", [accuracy], method={"name": method}, **change)
    made(tmp_path / "alone", [0.9], partition="iid")
    found = collect([tmp_path])["table"]
    assert found["head"][:3] == ["method", "accuracy (%)", "vs first"]
    cells = {cell[0]: cell[1:3] for cell in found["cells"]}
    strong = [cell[0] for cell, best in zip(found["cells"], found["strong"], strict=True) if any(best)]
    assert cells["fedavg, data=mnist"] == ["52.00", ""]
    assert cells["moon, data=mnist"] == ["62.00", "+10.00"]
    assert [cell[1] for label, cell in cells.items() if label.startswith("moon")] == ["+10.00"] * 4
    assert cells["fedavg, data=digits, partition=iid"] == ["90.00", "–"]
    assert strong == [label for label in cells if label.startswith("moon")]
    assert found["notes"][1].startswith("vs first: ")


def test_runs_of_different_data_have_nothing_to_be_compared_with(tmp_path: Path) -> None:
    made(tmp_path / "a", [0.5])
    made(tmp_path / "b", [0.6], data="mnist")
    found = collect([tmp_path])["table"]
    assert found["head"] == ["method", "accuracy (%)", "sent (MB)", "best (%)", "time"]
    assert not any(map(any, found["strong"]))


def test_a_long_label_makes_no_wide_column(tmp_path: Path) -> None:
    made(tmp_path / "a", [0.5], lr=0.01, epochs=2)
    made(tmp_path / "b", [0.6], lr=0.02, epochs=3)
    assert collect([tmp_path])["table"]["head"][2] == "vs first"
