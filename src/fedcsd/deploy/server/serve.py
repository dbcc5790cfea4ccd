"""Run the round loop in Flower's server process, with nodes as clients: the server part of the app."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedcsd.deploy.processes import end_with_launcher
from fedcsd.deploy.server import sites
from fedcsd.deploy.server.backend import FlowerBackend
from fedcsd.deploy.server.checks import shown
from fedcsd.deploy.server.remote import NodeStates
from fedcsd.deploy.server.roster import Roster
from fedcsd.deploy.server.session import Session
from fedcsd.deploy.wire import Malformed
from fedcsd.errors import UserError, show_notes
from fedcsd.experiments import running as jobs
from fedcsd.experiments.experiment import config_of
from fedcsd.experiments.resuming import continued
from fedcsd.federation.backends.protocol import one_thread
from fedcsd.federation.callbacks import Callbacks
from fedcsd.federation.evaluation import Record
from fedcsd.federation.setup import Setup
from fedcsd.files import write_whole

OFTEN = 0.2  # least seconds between replies that the status file shows

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = {key: value for key, value in context.run_config.items() if value != ""}
    status = StatusFile(str(config.get("status", "")))
    end_with_launcher()
    show_notes()
    try:
        serve(grid, config, status)
    except BaseException as error:
        status.write(error=str(error) or type(error).__name__, user=isinstance(error, UserError))
        raise
    status.write(finished=True)


class StatusFile:
    """Write the app's status for the process that started it; without a path nothing is written."""

    def __init__(self, path: str):
        self.path = Path(path) if path else None
        self.write()

    def write(self, **facts: Any) -> None:
        if self.path:
            write_whole(self.path, json.dumps({"pid": os.getpid(), **facts}).encode())


class RoundLog(Callbacks):
    """Print a line for each round to Flower's own log, and put replies into the status file."""

    def __init__(self, status: StatusFile):
        self.status, self.written = status, 0.0

    def reply(self, function: str, done: int, clients: int) -> None:
        if time.monotonic() - self.written > OFTEN:
            self.status.write(reply=[function, done, clients])
            self.written = time.monotonic()

    def round(self, record: Record, rounds: int) -> None:
        dropped = ", ".join(f"{record[k]} {k}" for k in ("refused", "late", "missing") if record.get(k))
        text = f"round {record['round']}/{rounds}  accuracy {100 * record['test_accuracy']:.2f} %"
        print(f"{text}  {record['clients']} clients{f'  ({dropped})' if dropped else ''}", flush=True)


def serve(grid: Grid, config: Mapping[str, Any], status: StatusFile | None = None) -> jobs.Run:
    """Train a run over Flower, in a run's folder like any other."""
    session = Session(grid, config)
    job, roster = (sites.begin if session.mode == "sites" else begin)(session)
    if job is None:
        return jobs.load_run(session.out)

    @contextmanager
    def nodes(experiment: Setup, run: Path | None) -> Iterator[tuple[FlowerBackend, NodeStates]]:
        states = NodeStates()
        with one_thread():
            yield FlowerBackend(experiment, session.deployment, session.transport, roster, states), states

    roster.wait(
        lambda: roster.nodes, len(job.experiment.parts), "nodes", float(config.get("join_timeout", 0))
    )
    return jobs.train(job, RoundLog(status or StatusFile("")), nodes)


def begin(session: Session) -> tuple[jobs.Job | None, Roster]:
    """Start or continue a run whose data every node can load: each takes its part of the partition."""
    if session.resume:
        job = continued(session.out, changes={"rounds": session.values.get("rounds")}, deployed=True)
    else:
        overwrite = bool(session.config.get("overwrite", False))
        job = jobs.begin(session.values, out=session.out, overwrite=overwrite, deploy=session.facts)
    if job is None:
        return None, Roster(session.transport, {}, lambda _: None)
    experiment = job.experiment

    def admit(about: Mapping[str, Any]) -> int:
        client = int(about["name"])
        if not 0 <= client < len(experiment.parts):
            raise Malformed(f"it is client {client}, and the run has {len(experiment.parts)} clients")
        right = {
            "samples": len(experiment.parts[client]),
            "model": experiment.network.layout.fingerprint(),
            "data": experiment.data.fingerprint(),
        }
        for what, value in right.items():
            if about.get(what) != value:
                raise Malformed(f"its {what} are not those of the run: {shown(about.get(what))}")
        return client

    hello = {**session.hello, "config": config_of(experiment)}
    return job, Roster(session.transport, hello, admit)
