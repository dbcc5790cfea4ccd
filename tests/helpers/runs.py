"""Small runs: their settings, a callback that interrupts them, and a comparison of two."""

from pathlib import Path
from typing import Any

import fedcsd
from fedcsd.experiments.runs.recorded import FORMAT
from fedcsd.experiments.runs.run_folder import RunDirectory
from helpers.federations import blobs

FACTS: dict[str, Any] = {"format": FORMAT, "data": "", "model": "", "code": {"package": ""}}
"""the facts of a run's config.toml"""
SMALL: dict[str, Any] = {"clients": 4, "min_samples": 2, "epochs": 1, "workers": 2, "checkpoint_every": 1}


def stop_after(rounds: int) -> Any:
    def on_round(record: dict[str, Any], _: int) -> None:
        if record["round"] == rounds:
            raise KeyboardInterrupt

    return on_round


def same(a: Path, b: Path) -> None:
    """Two runs have the same model byte for byte, and the same measurements but for the time."""
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    histories = [
        [{k: v for k, v in r.items() if "seconds" not in k} for r in RunDirectory.open(p).history()]
        for p in (a, b)
    ]
    assert histories[0] == histories[1]


def run_once(method: fedcsd.Method, **settings: object) -> fedcsd.Run:
    return fedcsd.run(
        **{
            "method": method,
            "data": blobs(),
            "clients": 4,
            "min_samples": 2,
            "rounds": 2,
            "epochs": 1,
            **settings,
        }
    )
