"""Define the settings of a deployment beside those of training; their defaults change no result."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedcsd.config import option
from fedcsd.config.options import build
from fedcsd.errors import UserError

_shown = partial(option, panel="The deployment")


@dataclass(frozen=True)
class Deployment:
    """Set how a federation over Flower behaves, in the table [deploy] of a run's config.toml."""

    min_clients: int = _shown(
        0, "clients that must have answered before a round goes on without the others (0: all)", ge=0
    )
    round_timeout: float = _shown(
        0.0, "seconds that each exchange of a round waits for more than --min-clients (0: for ever)", ge=0
    )
    max_update_norm: float = _shown(
        0.0,
        "refuse a client's weights farther than this from the global ones (0: a thousand times their norm and one)",
        ge=0,
    )
    prototype_noise: float = _shown(
        0.0, "standard deviation of the noise that clients add to their class prototypes", ge=0
    )
    prototype_min_count: int = _shown(
        0, "samples of a class below which a client keeps its prototype to itself", ge=0
    )
    client_teacher: bool = _shown(True, "clients make the teacher themselves from what they hold")
    mods: bool = option(False, "the clients' app has Flower's mods for clipping or noise around training")
    clipping_norm: float = option(0.0, "the norm that Flower's clipping mods are told", ge=0)


def deployment_of(values: Mapping[str, Any]) -> Deployment:
    """Make the settings of a deployment from plain values; other values are left out."""
    found = build(Deployment, {key: v for key, v in values.items() if key in Deployment.__dataclass_fields__})
    if found.round_timeout and not found.min_clients:
        raise UserError(
            "--round-timeout needs --min-clients: how many answers are enough when the time is up"
        )
    return found
