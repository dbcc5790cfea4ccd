"""Facts that a result depends on besides its settings: versions, machine, data, model and code."""

import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from fedcsd.__version__ import __version__
from fedcsd.errors import UserError
from fedcsd.experiments.experiment import Experiment
from fedcsd.methods import methods
from fedcsd.models import find
from fedcsd.plugins import digest_of, digest_of_source, file_of, source_of

OUTSIDE = ("results", "paper", "cli", "templates")
"""Folders of this package that no result depends on."""
SOURCES = (".py", ".c", ".cu", ".h")


def environment(device: str = "") -> dict[str, dict[str, Any]]:
    """Return versions and machine. The GPU is named if it is or will be used: to ask starts its use."""
    names = ("torch", "numpy", "safetensors")
    versions = {"fedcsd": __version__, "python": platform.python_version()}
    host = {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count() or 1}
    if torch.cuda.is_initialized() or (device == "cuda" and torch.cuda.is_available()):  # type: ignore[no-untyped-call]
        host["gpu"] = torch.cuda.get_device_name()
    return {"versions": versions | {name: metadata.version(name) for name in names}, "host": host}


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def digests(experiment: Experiment) -> dict[str, Any]:
    """Return digests of an experiment's data, model and code; of code only what may change."""
    name = experiment.tables.get("method", {}).get("name", "")
    own = bool(name) and name not in methods.names
    code = {
        "package": package(),
        "method": digest_of_source(type(experiment.method), name) if own else "",
        "model": experiment.factory.digest,
    }
    return {
        "data": experiment.data.fingerprint(),
        "model": experiment.network.layout.fingerprint(),
        "code": {what: digest for what, digest in code.items() if digest},
    }


def code_now(component: str, name: str) -> str:
    """Return the present digest of the file of a user's method or model; "" if it cannot be read."""
    file = file_of(name)
    with suppress(UserError):  # its package may be gone
        file = file or source_of(methods.load(name) if component == "method" else find(name), name)
    return digest_of(file)


@cache
def package(root: Path = Path(__file__).parents[2]) -> str:
    """Return a digest of all code of this package that can change a result."""
    digest = blake2b(digest_size=8)
    names = (file.relative_to(root) for file in root.rglob("*") if file.suffix in SOURCES)
    for name in sorted(name for name in names if name.parts[0] not in OUTSIDE):
        digest.update(f"{name.as_posix()}\n".encode() + (root / name).read_bytes())
    return digest.hexdigest()


def commit() -> str:
    """Return the git commit of this package's code, or "" outside a checkout."""
    here, found = Path(__file__), ""
    for question in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
        command = ["git", "-C", str(here.parent), *question]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""  # no git, no checkout, or another project's
        found = answer.stdout.strip()
    return found
