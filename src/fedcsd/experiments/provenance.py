"""What a result may depend on beside its settings: versions, machine, code."""

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

OUTSIDE = ("results", "paper", "cli", "templates")
"""folders of this package that no result depends on"""
ENDS = (".py", ".c", ".cu", ".h")


def facts(device: str = "") -> dict[str, dict[str, Any]]:
    """Versions and machine; the GPU only if it is or will be used, for asking would begin to use it."""
    names = ("torch", "numpy", "safetensors")
    host: dict[str, Any] = {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
    }
    if torch.cuda.is_initialized() or (device == "cuda" and torch.cuda.is_available()):  # type: ignore[no-untyped-call]
        host["gpu"] = torch.cuda.get_device_name()
    return {
        "versions": {
            "fedcsd": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in names},
        },
        "host": host,
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def package(here: Path = Path(__file__).parents[1]) -> str:
    """Tells versions of the code that trains apart, whether they have a version's number or not."""
    found = blake2b(digest_size=8)
    files = {file.relative_to(here).as_posix(): file for end in ENDS for file in here.rglob(f"*{end}")}
    for name in sorted(name for name in files if name.partition("/")[0] not in OUTSIDE):
        found.update(f"{name}\n".encode() + files[name].read_bytes())
    return found.hexdigest()


def commit() -> str:
    """The version of this package's code where it is a git checkout; else empty."""
    here, found = Path(__file__), ""
    for question in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
        command = ["git", "-C", str(here.parent), *question]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return ""  # no git, no checkout, or another project's
        found = answer.stdout.strip()
    return found
