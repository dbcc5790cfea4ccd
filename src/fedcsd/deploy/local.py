"""Train a run over Flower on this machine: a real SuperLink and real SuperNodes (`fedcsd deploy local`)."""

import json
import os
import shlex
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedcsd.deploy.app import write_app
from fedcsd.deploy.keys import make_certificates, make_node_key
from fedcsd.deploy.processes import Processes, free_ports, is_free, wait_for_server
from fedcsd.deploy.settings import Deployment, deployment_of
from fedcsd.errors import RunStopped, UserError, end
from fedcsd.experiments.experiment import prepare
from fedcsd.experiments.machine import sigterm_as_interrupt
from fedcsd.experiments.running import Run, load_run
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.federation.callbacks import Callbacks
from fedcsd.files import writing
from fedcsd.results.terminal import RunProgress

FOLDER = ".deploy"  # in the run's folder, until the run is finished
POLL = 0.2
PAUSE, RESTARTS = 10.0, 30  # seconds between starts of a node that ended, and how often it is started again


@dataclass(frozen=True)
class LocalRun:
    """A run over Flower on this machine is checked here before a process is started."""

    path: Path
    """the run's folder"""
    config: dict[str, Any]
    """the app's settings"""
    nodes: int
    rounds: int
    method: str
    done: int = 0
    """rounds that were trained before"""

    @classmethod
    def new(
        cls, values: Mapping[str, Any], given: Mapping[str, Any], path: Path, *, overwrite: bool
    ) -> "LocalRun":
        """Check the settings of a new run; `given` are those of the deployment."""
        deployment, settings = deployment_of(given), prepare(values).settings
        RunDirectory(path).check_free(overwrite)
        if deployment.min_clients > settings.clients:
            raise UserError(
                f"--min-clients {deployment.min_clients} is more than the {settings.clients} nodes"
            )
        config = {"experiment": json.dumps(values), "overwrite": overwrite, **asdict(deployment)}
        return cls(path, config, settings.clients, settings.rounds, values["method"]["name"])

    @classmethod
    def resumed(cls, path: Path, values: Mapping[str, Any], given: Mapping[str, Any]) -> "LocalRun":
        """Continue a run that was cut off; only rounds and settings of the deployment may change."""
        run, rounds = RunDirectory.open(path), values.get("rounds")
        kept, settings = run.config.get("deploy"), run.settings
        if other := sorted(set(values) - {"rounds"}):
            raise UserError(f"{other[0]} cannot change in a run: start a new one, or change rounds")
        if kept is None:
            command = f"fedcsd resume {shlex.quote(str(path))}"
            raise UserError(f"{path} is no run of fedcsd deploy: {command} goes on with it")
        if run.summary is not None:
            raise UserError(f"{path} is finished: {run.summary['rounds']} rounds")
        if not (path / FOLDER).is_dir():
            raise UserError(f"{path} was not started with fedcsd deploy local: go on with {kept['again']}")
        kept = {key: kept[key] for key in Deployment.__dataclass_fields__ if key in kept}
        config = {"resume": True, **asdict(deployment_of({**kept, **given}))}
        config |= {"rounds": rounds} if rounds else {}
        method, rounds = settings["method"]["name"], rounds or settings["rounds"]
        return cls(path.resolve(), config, settings["clients"], rounds, method, run.checkpoints.rounds_saved)

    def train(self, callbacks: RunProgress, port: int = 0) -> Run:
        """Start the processes, train to the end, and stop the processes."""
        folder, again = self.path / FOLDER, f"fedcsd deploy local --resume {shlex.quote(str(self.path))}"
        if not self.config.get("resume"):
            shutil.rmtree(folder, ignore_errors=True)
        with writing(self.path, "choose another --out"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        config = {**self.config, "out": str(self.path), "again": again, "join_timeout": 120.0}
        try:
            with sigterm_as_interrupt(), LocalDeployment(folder, self.nodes, port=port) as deployment:
                callbacks.stage(f"starting a SuperLink and {self.nodes} SuperNodes on {deployment.address}")
                deployment.start()
                callbacks.stage("the nodes join and read their data")
                deployment.follow(self.path, deployment.run(config), callbacks, self.rounds, self.done)
        except KeyboardInterrupt as error:
            if self._begun:
                end(error, saved=RunDirectory(self.path).checkpoints.rounds_saved, command=again)
            raise
        finally:
            if not self._begun:
                shutil.rmtree(folder, ignore_errors=True)
                with suppress(OSError):
                    self.path.rmdir()
        shutil.rmtree(folder, ignore_errors=True)  # keys, copies and logs
        return load_run(self.path)

    @property
    def _begun(self) -> bool:
        return (self.path / "config.toml").exists()


class LocalDeployment:
    """Run a SuperLink and its SuperNodes as processes, with TLS and authentication on."""

    def __init__(self, folder: Path, nodes: int, *, port: int = 0):
        if port and not is_free(port):
            raise UserError(f"port {port} is taken: leave --port out, or choose another")
        self.folder, self.nodes = folder, nodes
        self.processes = Processes(folder)
        self.ports = free_ports(nodes + 1)
        self.address = f"127.0.0.1:{port or self.ports[-1]}"
        self.reached_at = self.address  # by nodes, perhaps through a proxy
        self.certificates = folder / "certificates"
        self.runs = 0
        self.started: dict[int, list[float]] = {}

    def __enter__(self) -> "LocalDeployment":
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.stop()

    def start(self) -> None:
        """Start the SuperLink and the nodes."""
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
        command += ["--database", str(self.folder / "superlink.db")]
        command += ["--disable-runtime-dependency-installation"]
        self.processes.start("superlink", command)
        wait_for_server(self.address, self.certificates / "ca.crt", self.processes)

    def register(self, number: int) -> None:
        """Make a node's key and register it at the SuperLink."""
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
        """Start nodes again that have ended, as a service manager does.

        Flower takes a minute to see that a node was killed, and refuses it until then.
        """
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
        """Start the app; return the path of its status file."""
        self.runs += 1
        status, app = self.folder / f"status-{self.runs}.json", self.folder / f"app-{self.runs}"
        status.unlink(missing_ok=True)
        write_app(app, {**config, "status": str(status)}, **({"client": client} if client else {}))
        self.processes.call(["flwr", "run", str(app), "here"])
        return status

    def follow(self, out: Path, status: Path, callbacks: Callbacks, rounds: int, done: int = 0) -> None:
        """Call the callbacks for replies and rounds until the run has ended; raise the error that ended it."""
        shown, told = done, None
        while True:
            facts = read_status(status)
            history = RunDirectory(out).history() if out.is_dir() else []
            for record in history[shown:]:
                callbacks.round(record, rounds)
            shown = max(shown, len(history))
            if (reply := facts.get("reply")) and reply != told:
                told = reply
                callbacks.reply(*reply)
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
    """Return the facts in an app's status file; none before it is written."""
    with suppress(OSError, ValueError):
        return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


def alive(process: int) -> bool:
    """Tell whether a process of this user exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
