"""`fedcsd deploy local`: a real SuperLink and real SuperNodes on this machine, for one run."""

import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from fedcsd.deploy.app import write_app
from fedcsd.deploy.keys import make_certificates, make_node_key
from fedcsd.deploy.processes import Processes, free_ports, is_free, wait_for_server
from fedcsd.errors import RunStopped, UserError
from fedcsd.experiments.run_folder import RunDirectory
from fedcsd.federation.callbacks import Callbacks

FOLDER = ".deploy"  # in the run directory, until the run is finished
POLL = 0.2
PAUSE, RESTARTS = 10.0, 30  # seconds between starts of a node that ended, and how often it is started again


class Federation:
    """A SuperLink and its SuperNodes in processes, with TLS and authentication on."""

    def __init__(self, folder: Path, nodes: int, *, port: int = 0):
        if port and not is_free(port):
            raise UserError(f"port {port} is taken: leave --port out, or choose another")
        self.folder, self.nodes = folder, nodes
        self.processes = Processes(folder)
        self.ports = free_ports(nodes + 1)
        self.address = f"127.0.0.1:{port or self.ports[-1]}"
        self.reached_at = self.address  # by nodes; something may stand between
        self.certificates = folder / "certificates"
        self.runs = 0
        self.started: dict[int, list[float]] = {}

    def __enter__(self) -> "Federation":
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.stop()

    def start(self) -> None:
        """Everything up to the point where the nodes are on their way in."""
        known = (self.folder / "superlink.db").exists()
        if not (self.certificates / "server.key").exists():
            make_certificates(self.certificates, ["127.0.0.1", "localhost"])
        self.start_superlink()
        home = self.folder / "cli"
        home.mkdir(exist_ok=True)
        connection = {"address": self.address, "root-certificates": str(self.certificates / "ca.crt")}
        config = {"superlink": {"default": "here", "here": connection}}
        (home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        if not known:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(self.register, range(self.nodes)))
        for number in range(self.nodes):
            self.start_node(number)

    def start_superlink(self) -> None:
        host, _, port = self.address.rpartition(":")
        command = ["flower-superlink", "--host", host, "--port", port, "--enable-supernode-auth"]
        command += ["--ssl-ca-certfile", str(self.certificates / "ca.crt")]
        command += ["--ssl-certfile", str(self.certificates / "server.crt")]
        command += ["--ssl-keyfile", str(self.certificates / "server.key")]
        command += [
            "--database",
            str(self.folder / "superlink.db"),
            "--disable-runtime-dependency-installation",
        ]
        self.processes.start("superlink", command)
        wait_for_server(self.address, self.certificates / "ca.crt", self.processes)

    def register(self, number: int) -> None:
        """Make a node's key and let the server know it."""
        public = make_node_key(self.key(number))
        self.processes.call(["flwr", "supernode", "register", str(public), "here"])

    def key(self, number: int) -> Path:
        return self.folder / "keys" / f"node-{number}"

    def start_node(self, number: int) -> None:
        config = (
            f'partition-id={number} num-partitions={self.nodes} state="{self.folder / f"state-{number}"}"'
        )
        command = ["flower-supernode", "--superlink", self.reached_at, "--node-config", config]
        command += ["--root-certificates", str(self.certificates / "ca.crt")]
        command += ["--auth-supernode-private-key", str(self.key(number))]
        command += ["--host", "127.0.0.1", "--port", str(self.ports[number])]
        self.started.setdefault(number, []).append(time.monotonic())
        self.processes.start(f"node-{number}", command)

    def tend(self) -> None:
        """Start a node again that has ended, as a service manager does. Flower takes a minute to see that a
        node was killed, and sends it away until then."""
        for number in range(self.nodes):
            name = f"node-{number}"
            process, starts = self.processes.running.get(name), self.started[number]
            if (process and process.poll() is None) or time.monotonic() - starts[-1] < PAUSE:
                continue
            if len(starts) > RESTARTS:
                raise RunStopped(f"{name} does not stay up: {self.processes.last_words(name)}")
            if process:
                self.processes.end(name)
            self.start_node(number)
        self.processes.check("superlink")

    def run(self, config: Mapping[str, Any], *, client: str | None = None) -> Path:
        """Start the app; gives the file in which it says how it does."""
        self.runs += 1
        status, app = self.folder / f"status-{self.runs}.json", self.folder / f"app-{self.runs}"
        status.unlink(missing_ok=True)
        write_app(app, {**config, "status": str(status)}, **({"client": client} if client else {}))
        self.processes.call(["flwr", "run", str(app), "here"])
        return status

    def follow(self, out: Path, status: Path, watch: Callbacks, rounds: int, done: int = 0) -> None:
        """Show replies and each round as it is recorded, until the run has ended; RunStopped if it did not
        end well."""
        shown, told = done, None
        while True:
            facts = read_status(status)
            history = RunDirectory(out).history() if out.is_dir() else []
            for record in history[shown:]:
                watch.round(record, rounds)
            shown = max(shown, len(history))
            if (reply := facts.get("reply")) and reply != told:
                told = reply
                watch.reply(*reply)
            if facts.get("finished"):
                return
            if "error" in facts:
                raise (UserError if facts.get("user") else RunStopped)(facts["error"])
            if facts and not alive(facts["pid"]):
                raise RunStopped(
                    f"the server's part ended by itself: {self.processes.last_words('superlink')}"
                )
            self.tend()
            time.sleep(POLL)


def read_status(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
