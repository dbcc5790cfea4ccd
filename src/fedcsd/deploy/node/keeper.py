"""Keep a node's data and model in memory between messages, in a process of its own: the keeper.

Flower starts a process for every message. Reading images and loading torch each time would take longer
than most training, so that process only passes the message on, over the node's private socket. The first
message starts the keeper. It ends with the node's own process, or after a long time without work.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from fedcsd.deploy.wire import Parcel

START, IDLE = 120.0, 900.0  # seconds to start, and seconds without work before the end


def to_bytes(parcel: Parcel) -> bytes:
    from safetensors.numpy import save

    return save(dict(parcel.arrays), {"header": json.dumps(parcel.header)})


def from_bytes(blob: bytes) -> Parcel:
    from safetensors.numpy import load

    size = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + size])["__metadata__"]["header"]
    return Parcel(json.loads(header), load(blob))


def ask_keeper(parcel: Parcel, config: Mapping[str, Any], home: Path, owner: int) -> Parcel:
    """Return the answer of the node's keeper; start the keeper if there is none."""
    folder = Path(config.get("state", home)).expanduser()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = json.dumps(dict(config), sort_keys=True)
    # The app that Flower sent may have a method of its own in it; another such app is another keeper.
    apps = [path for path in sys.path if Path(path).parent == home.parent / "apps" and _has_more(Path(path))]
    key = f"{folder.resolve()} {text} {owner} {os.getuid()} {apps}"
    mark = blake2b(key.encode(), digest_size=10).hexdigest()
    command = [mark, str(home), str(owner), str(folder), *apps]
    with _connection(command, text, folder) as pipe:
        pipe.send_bytes(to_bytes(parcel))
        try:
            return from_bytes(pipe.recv_bytes())
        except EOFError:
            raise RuntimeError("the node's own process ended while it answered: see keeper.log") from None


def _has_more(app: Path) -> bool:
    """Tell whether an app has more code than `fedcsd deploy init` writes."""
    return bool({path.name for path in app.rglob("*.py")} - {"__init__.py", "server_app.py", "client_app.py"})


def _connection(command: list[str], config: str, folder: Path) -> Connection:
    started: subprocess.Popen[bytes] | None = None
    until = time.monotonic() + START
    while time.monotonic() < until:
        # An abstract socket leaves no file behind and ends with its process.
        with suppress(OSError):
            return Client(f"\0fedcsd-{command[0]}", "AF_UNIX", authkey=_key(folder))
        if started is None or started.poll() is not None:
            with open(folder / "keeper.log", "ab") as log:
                started = subprocess.Popen(
                    [sys.executable, "-m", "fedcsd.deploy.node.keeper", *command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            assert started.stdin is not None
            started.stdin.write(config.encode())
            started.stdin.close()
        time.sleep(0.05)
    raise RuntimeError(f"the node's own process did not start: see {folder / 'keeper.log'}")


def _key(folder: Path) -> bytes:
    """Return the secret that a process must know to ask the keeper; only this user can read it."""
    path = folder / "keeper.key"
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(32))
    return path.read_bytes() or b"not yet written"


def serve(mark: str, home: Path, owner: int, folder: Path) -> None:
    """Answer parcels until the node's process is gone."""
    config = json.loads(sys.stdin.read())
    try:
        listener = Listener(f"\0fedcsd-{mark}", "AF_UNIX", backlog=16, authkey=_key(folder))
    except OSError:
        return  # another process was quicker
    last = [time.monotonic()]
    threading.Thread(target=_follow, args=(owner, last), daemon=True).start()
    from fedcsd.deploy.node.answers import Node

    node = Node(config, home)
    while True:
        with suppress(OSError, EOFError, ValueError), listener.accept() as pipe:
            last[0] = float("inf")
            reply = node.answer(from_bytes(pipe.recv_bytes()))
            if "error" in reply.header:
                print(time.strftime("%F %T"), reply.header["error"], flush=True)
            pipe.send_bytes(to_bytes(reply))
        last[0] = time.monotonic()


def _follow(owner: int, last: list[float]) -> None:
    while time.monotonic() - last[0] < IDLE:
        time.sleep(0.5)
        try:
            os.kill(owner, 0)
        except OSError:
            break
    os._exit(0)


if __name__ == "__main__":
    sys.path += sys.argv[5:]
    serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
