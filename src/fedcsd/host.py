"""Where a run is made: what its results may depend on beside the settings."""

import os
import platform
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from fedcsd import __version__


def facts() -> dict[str, dict[str, Any]]:
    """Versions of libraries, and what the machine is."""
    names = ("torch", "numpy", "safetensors")
    return {
        "versions": {
            "fedcsd": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in names},
        },
        "host": {"system": platform.platform(), "processor": _processor(), "cores": os.cpu_count() or 1},
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
