"""Write a Flower app: the folder that `flwr run` starts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedcsd.__version__ import __version__

TESTED = ">=1.41,<2"
PACKAGE = "fedcsd_app"
MODULES = ("__init__", "server_app", "client_app")
SERVER = '''"""Flower starts the round loop of fedcsd here, at the server."""

from fedcsd.deploy.server.serve import app

__all__ = ["app"]
'''
CLIENT = '''"""Flower starts the client here, at each site.

Flower's mods for clipping or noise wrap training like this; set mods = true in pyproject.toml as well:

    from flwr.clientapp.mod import LocalDpMod
    from fedcsd.deploy.node.client import make_app

    app = make_app(mods=[LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=10.0, delta=1e-5)])
"""

from fedcsd.deploy.node.client import app

__all__ = ["app"]
'''
TEXTS = ("out", "experiment", "again", "status", "mode", "set", "data_options")
DEFAULTS: dict[str, Any] = dict.fromkeys(TEXTS, "")
DEFAULTS |= {"resume": False, "overwrite": False, "join_timeout": 0.0}


def write_app(folder: Path, config: Mapping[str, Any], *, client: str = CLIENT) -> None:
    """Write an app with these settings; `flwr run --run-config` may change each of them."""
    package = folder / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    about = {
        "name": "fedcsd-app",
        "version": "1.0.0",
        "description": "A federation trained with fedcsd",
        "license": "Apache-2.0",
        "dependencies": [f"flwr{TESTED}", f"fedcsd[flower]>={__version__}"],
    }
    components = {"serverapp": f"{PACKAGE}.server_app:app", "clientapp": f"{PACKAGE}.client_app:app"}
    document = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": about,
        "tool": {
            "hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}},
            "flwr": {
                "app": {"publisher": "fedcsd", "components": components, "config": {**DEFAULTS, **config}}
            },
        },
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(document), encoding="utf-8")
    for name, text in zip(MODULES, ('"""A Flower app."""\n', SERVER, client), strict=True):
        (package / f"{name}.py").write_text(text, encoding="utf-8")
