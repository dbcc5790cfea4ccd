"""Run `fedcsd …` without importing PyTorch and scikit-learn each time: a process that has them forks for each command.

A command is still a process of its own, with its own folder, environment, output and exit status.
"""

import atexit
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import fedcsd

Fedcsd = Callable[..., "subprocess.CompletedProcess[str]"]
FedcsdRun = Callable[..., Path]

PRELOADED = [
    "torch",
    "safetensors.torch",
    "sklearn.datasets",
    "pyarrow.parquet",
    "matplotlib.backends.backend_agg",
    "rich_click",
]
TESTS = Path(__file__).parents[1]
READ_AT_START = ("PYTHON", "LC_", "LANG", "OMP_", "MKL_", "TORCH")  # a fork has the first process's


def pass_on_no_ignored_signals() -> None:
    """Give processes that tests start the default for Ctrl-C and hang-up.

    A runner in the background or under nohup ignores these signals, and a child inherits that. A handler that does
    nothing ignores them here as well, but no child inherits a handler.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


class Forks:
    """A process that forks a new process for each command; tests use it through this object."""

    def __init__(self) -> None:
        self.began, self.lock = dict(os.environ), threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, arguments: tuple[str, ...], cwd: Path, timeout: float, env: dict[str, str]) -> Any:
        command = [sys.executable, "-m", "fedcsd", *arguments]
        if started(env) != started(self.began):
            return subprocess.run(
                command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=env, check=False
            )
        with self.lock, tempfile.TemporaryDirectory() as folder:
            places = [str(Path(folder, name)) for name in ("out", "err")]
            self._say({"arguments": arguments, "cwd": str(cwd), "env": env, "places": places})
            pid = int(self._answer(60))
            try:
                status = int(self._answer(timeout))
            except TimeoutError:
                os.kill(pid, 9)
                self._answer(60)
                raise subprocess.TimeoutExpired(command, timeout) from None
            output = [Path(place).read_text(encoding="utf-8") for place in places]
        return subprocess.CompletedProcess(command, status, *output)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)

    def _say(self, order: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)

    def _answer(self, timeout: float) -> str:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            raise TimeoutError
        return self.process.stdout.readline()


def started(env: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in env.items() if key.startswith(READ_AT_START)}


def serve() -> None:
    for name in PRELOADED:
        import_module(name)

    while line := sys.stdin.readline():
        order = json.loads(line)
        if not (pid := os.fork()):
            become(**order)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def become(arguments: list[str], cwd: str, env: dict[str, str], places: list[str]) -> None:
    """Run the command in the fork and end with its status, without tearing PyTorch down."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, place in enumerate(["/dev/null", *places]):
        file = os.open(place, os.O_RDWR | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["fedcsd", *arguments]
    sys.path[0] = cwd  # as `python -m` has it
    status: Any = 0
    try:
        runpy.run_module("fedcsd", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if isinstance(status, str):
        print(status, file=sys.stderr, flush=True)
    os._exit(status if isinstance(status, int) else int(status is not None))


def in_process(script: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    """Run a script that imports the same package and helpers as the tests."""
    paths = [str(TESTS), str(Path(fedcsd.__file__).parent.parent), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=150,
        capture_output=True,
        text=True,
    )


if __name__ == "__main__":
    serve()
