"""The report of runs that have lost something: shown with what there is."""

from pathlib import Path

import pytest
from test_report import made

from fedcsd.errors import Note
from fedcsd.report.collect import collect
from fedcsd.report.page import page


@pytest.mark.parametrize("content", [b"", None])
def test_a_finished_run_whose_measurements_are_lost(content: bytes | None, tmp_path: Path) -> None:
    run = made(tmp_path / "r", [0.5, 0.6])
    (run / "metrics.jsonl").unlink() if content is None else (run / "metrics.jsonl").write_bytes(content)
    with pytest.warns(Note, match="of the 2 rounds that were trained 0 are in it"):
        found = collect([run])
    assert found["table"]["cells"][0][:2] == ["fedavg", "60.00"]
    assert found["alerts"] == ["r: 2 of its rounds cannot be read"]
    page(found)
