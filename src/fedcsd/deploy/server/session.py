"""Read the app's config for one start of the server part."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedcsd.config.settings import COMPONENTS, DEFAULTS
from fedcsd.config.toml import merge, parse_assignments
from fedcsd.deploy.server.transport import Transport
from fedcsd.deploy.settings import Deployment, deployment_of
from fedcsd.experiments.runs.run_folder import RunDirectory


@dataclass
class Session:
    """Hold what the app's config asks for, and the way to the nodes."""

    grid: Grid
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        from flwr.superlink.grid.inmemory_grid import InMemoryGrid

        self.values = settings_of(self.config)
        self.out = Path(str(self.config.get("out", "runs/flower"))).expanduser()
        self.resume = bool(self.config.get("resume", False))
        self.mode = "sites" if self.config.get("mode") == "sites" else "partition"
        self.simulated = isinstance(self.grid, InMemoryGrid)
        self.deployment: Deployment = deployment_of(self.config)
        self.run = secrets.token_hex(8)
        if self.resume:
            kept = RunDirectory.open(self.out).config.get("deploy", {})
            self.run, self.mode = str(kept.get("run", self.run)), str(kept.get("mode", self.mode))
        norm = self.deployment.clipping_norm
        self.transport = Transport(self.grid, alone=self.deployment.mods or norm > 0, clipping_norm=norm)

    @property
    def hello(self) -> dict[str, Any]:
        return {"run": self.run, "mode": self.mode, "simulated": self.simulated}

    @property
    def facts(self) -> dict[str, Any]:
        again = str(self.config.get("again", "flwr run APP --run-config 'resume=true'"))
        return {**asdict(self.deployment), "mode": self.mode, "run": self.run, "again": again}


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of training in the app's run config.

    `experiment` holds settings as JSON; keys of their own replace them, and `set` replaces those.
    """
    values = {key: value for key, value in config.items() if key in DEFAULTS}
    # By default one client that diverges does not end the run of all.
    whole = {"on_divergence": "skip"} | json.loads(str(config.get("experiment") or "{}"))
    return merge(COMPONENTS, whole, values, parse_assignments(str(config.get("set", "")).split(), "set"))
