"""Compile the C sources with the machine's compiler, once; the library stays in the cache folder.

Its name is a digest of sources, command, compiler, processor and user, so a folder that machines share holds
one for each. A machine without a compiler uses PyTorch's operators.
"""

import ctypes
import multiprocessing
import os
import platform
import shlex
import subprocess
import tempfile
import threading
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from fedcsd.errors import UserError, note
from fedcsd.files import cache_folder, write_whole

FOLDER = Path(__file__).parent
SOURCES = [
    FOLDER / name
    for name in ("lanes.h", "shape.h", "convolution.c", "dense.c", "chain.c", "csd.c", "vectors.c")
]
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")

_lock = threading.Lock()
_loaded: list[ctypes.CDLL | None] = []


def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if they are switched off or cannot be compiled.

    The main process tries the model before it forks worker processes, so these inherit the library.
    """
    if not _loaded:
        with _lock:
            if not _loaded:
                _loaded.append(_load())
    return _loaded[0]


def _load() -> ctypes.CDLL | None:
    if switched_off():
        return None
    try:
        return _find_or_build(shlex.split(os.environ.get("CC", "")) or ["cc"])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        if multiprocessing.parent_process() is None:
            note(
                f"small models and FedCSD's loss run without the compiled kernels, which are several times faster ({_reason(error)}): "
                "install gcc, name a C compiler in CC, or set FEDCSD_KERNELS=off to do without"
            )
        return None


def switched_off() -> bool:
    """Tell if FEDCSD_KERNELS is off."""
    wish = os.environ.get("FEDCSD_KERNELS", "on")
    if wish not in ("on", "off", ""):
        raise UserError(f"FEDCSD_KERNELS is {wish!r}: set it to on or off")
    return wish == "off"


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr or "").strip().splitlines()
        serious = [line for line in lines if "error" in line] or lines
        return serious[0][:200] if serious else f"{error.cmd[0]} failed"
    if isinstance(error, FileNotFoundError):
        return f"there is no C compiler {error.filename}"
    return str(error)[:200]


def _find_or_build(compiler: list[str]) -> ctypes.CDLL:
    version = _call([*compiler, "--version"])
    attempts = (FLAGS, tuple(flag for flag in FLAGS if flag != "-march=native"))
    for flags in attempts:  # the second is for compilers that do not know this processor
        command = [*compiler, *flags]
        path = cache_folder() / f"kernels-{_key(command, version)}.so"
        with suppress(OSError):  # not there, or not whole
            if path.stat().st_uid == os.getuid():
                return ctypes.CDLL(str(path))
        try:
            return _build(command, path)
        except subprocess.CalledProcessError:
            if flags is attempts[-1]:
                raise
    raise AssertionError


def _build(command: list[str], path: Path) -> ctypes.CDLL:
    """Compile to this path, or for this process alone if the path cannot be written."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "kernels.so"
        _call([*command, "-o", str(made), *(str(source) for source in SOURCES if source.suffix == ".c")])
        with suppress(OSError):
            write_whole(path, made.read_bytes())
            return ctypes.CDLL(str(path))
        return ctypes.CDLL(str(made))


def _key(command: list[str], version: str) -> str:
    digest = blake2b(b"\0".join(source.read_bytes() for source in SOURCES), digest_size=16)
    for part in (*command, version, processor(), str(os.getuid())):
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()


def processor() -> str:
    """Return the lines of /proc/cpuinfo that -march=native depends on: model and instructions."""
    telling = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU ", "Features")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join([platform.machine(), *(line for line in first.splitlines() if line.startswith(telling))])


def _call(command: list[str]) -> str:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=300,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "LC_ALL": "C"},
    )
    return done.stdout
