"""Start Flower's own programs as processes, and stop them whatever happens."""

import ctypes
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from fedcsd.errors import RunStopped, UserError

MARK = "FEDCSD_DEPLOYMENT"
PATIENCE = 6.0  # seconds for a process to end by itself
PR_SET_PDEATHSIG = 1


def free_ports(count: int) -> list[int]:
    """Return ports that are free."""
    sockets = [socket.socket() for _ in range(count)]
    for some in sockets:
        some.bind(("127.0.0.1", 0))
    ports = [int(some.getsockname()[1]) for some in sockets]
    for some in sockets:
        some.close()
    return ports


def is_free(port: int) -> bool:
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):
            one.bind(("127.0.0.1", port))
            return True
    return False


def program(name: str) -> str:
    """Return the path of one of Flower's commands in this environment."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise UserError("this needs Flower: pip install 'fedcsd[flower]'")
    return str(path)


def _end_with_parent() -> None:
    """Ask the kernel to kill this child process when its parent dies."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with_launcher() -> None:
    """Kill this process of Flower's when the process that started all of them is gone.

    By itself it would tell the SuperLink first, and wait for ever if that is gone as well.
    """
    launcher = int(os.environ.get(MARK, "0").partition(" ")[0])

    def watch() -> None:
        with suppress(ProcessLookupError):
            while True:
                os.kill(launcher, 0)  # raises if it is gone
                time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    if launcher:
        threading.Thread(target=watch, daemon=True).start()


class Processes:
    """Run programs of Flower's that end with this object or this process; their children carry its mark."""

    def __init__(self, folder: Path):
        self.folder, self.mark = folder, f"{os.getpid()} {uuid4().hex}"
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a process: its own folder for Flower's files, and no telemetry."""
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.folder / name),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            MARK: self.mark,
        }

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start one of Flower's programs; its output goes to logs/NAME.log."""
        with open(self.logs / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                [program(command[0]), *command[1:]],
                env=self.environment(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process, which then stops them in order
                preexec_fn=_end_with_parent,
            )

    def call(self, command: Sequence[str], timeout: float = 60) -> None:
        """Run one of Flower's programs to its end; raise RunStopped if it fails."""
        done = subprocess.run(
            [program(command[0]), *command[1:]],
            env=self.environment("cli"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        with open(self.logs / "cli.log", "a", encoding="utf-8") as log:
            log.write(done.stdout + done.stderr)
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise RunStopped(f"{command[0]} {command[1]} failed: {said[-1] if said else done.returncode}")

    def check(self, name: str) -> None:
        """Raise RunStopped if a process has ended by itself."""
        if self.running[name].poll() is not None:
            raise RunStopped(f"{name} ended by itself: {self.last_words(name)}")

    def last_words(self, name: str) -> str:
        path = self.logs / f"{name}.log"
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1][:200]} (all of it: {path})" if lines else f"see {path}"

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop one process and all that it started."""
        process = self.running.pop(name)
        home = f"FLWR_HOME={self.folder / name}".encode()
        with suppress(ProcessLookupError):
            process.send_signal(how)
        if how is signal.SIGKILL:
            self._kill(home)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        self._kill(home)
        process.wait()

    def stop(self) -> None:
        """Stop all processes and all that they started."""
        for process in self.running.values():
            with suppress(ProcessLookupError):
                process.terminate()
        until = time.monotonic() + PATIENCE
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        self._kill(f"{MARK}={self.mark}".encode())
        for process in self.running.values():
            process.wait()
        self.running.clear()

    def _kill(self, mark: bytes) -> None:
        """Kill all processes with this in their environment; some of Flower's leave their parent's group."""
        until = time.monotonic() + PATIENCE
        while (found := marked(mark)) and time.monotonic() < until:
            for number in found:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.05)


def marked(mark: bytes) -> list[int]:
    """Return the processes with this in their environment, which children inherit."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def wait_for_server(
    address: str, certificate: Path | None, processes: Processes, seconds: float = 120
) -> None:
    """Wait until the SuperLink answers; without a certificate it is asked without TLS."""
    context = ssl.create_default_context(cafile=str(certificate)) if certificate else None
    url = f"http{'s' if certificate else ''}://{address}/health"
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        processes.check("superlink")
        with suppress(OSError), urllib.request.urlopen(url, timeout=2, context=context):
            return
        time.sleep(0.1)
    raise RunStopped(f"the SuperLink does not answer at {address}: {processes.last_words('superlink')}")
