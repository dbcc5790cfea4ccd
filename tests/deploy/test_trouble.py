"""Test a deployment with strangers, killed nodes and servers, and a node that sends invalid answers.

The run ends with the weights that the simulator comes to without the answers that were refused.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fedcsd.deploy.keys import make_node_key
from fedcsd.deploy.local import LocalDeployment, read_status
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.federation.callbacks import Callbacks
from helpers.deployments import same_bits, settings, simulated

EVIL = '''
"""Node 2 answers with rubbish, of another kind in each round."""

import time

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp

from fedcsd.deploy.node.client import answer


def spoiled(message, context, call_next):
    round = message.metadata.group_id
    query = message.metadata.message_type == "query"
    if context.node_config["partition-id"] != 2 or round == "join":
        return call_next(message, context)
    if round == "5" and query:
        time.sleep(34)
    reply = call_next(message, context)
    arrays = reply.content.array_records["arrays"]
    if round == "1" and not query:
        weights = arrays["v.weights"].numpy().copy()
        weights[3] = np.nan
        arrays["v.weights"] = Array(weights)
    if round == "2" and query:
        arrays["v.prototypes"] = Array(np.zeros((3, 3), np.float32))
    if round == "3" and not query:
        arrays["v.weights"] = Array(arrays["v.weights"].numpy() * np.float32(1e9))
    if round == "4" and not query:
        arrays["v.more"] = Array(np.random.default_rng(0).random(8_000_000))
    if round == "6" and not query:
        arrays["v.weights"] = Array("float32", (1,), "pickle", b"cos\\nsystem\\n(S'true'\\ntR.")
    return reply


app = ClientApp()
app.train(mods=[spoiled])(answer)
app.query(mods=[spoiled])(answer)
'''
REFUSED = {(1, "train", 2), (2, "prototypes", 2), (3, "train", 2), (4, "train", 2), (6, "train", 2)}
LATE = {(5, "prototypes", 2)}


def wait_for(federation: LocalDeployment, out: Path, rounds: int, seconds: float = 400) -> None:
    until = time.monotonic() + seconds
    while len(RunDirectory(out).history()) < rounds:
        federation.tend()
        assert time.monotonic() < until, f"no round {rounds}"
        time.sleep(0.1)


def stranger(federation: LocalDeployment, name: str, *options: str) -> str:
    """Start a node that must not get in, check that it does not, and return its output."""
    log = federation.processes.logs / f"{name}.log"
    command = ["flower-supernode", "--superlink", federation.address, "--max-retries", "1", *options]
    federation.processes.start(name, [*command, "--port", str(federation.ports[-1] + 7)])
    process = federation.processes.running.pop(name)
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.returncode != 0
    return log.read_text()


@pytest.mark.flower
@pytest.mark.timeout(1200)
def test_trouble_ends_with_the_right_weights(tmp_path: Path) -> None:
    out = tmp_path / "run"
    values = settings(method="fedcsd", clients=3, rounds=6, out=str(out), min_clients=2, round_timeout=30.0)
    with LocalDeployment(tmp_path / "deploy", 3) as federation:
        federation.start()
        status = federation.run(values, client=EVIL)

        make_node_key(tmp_path / "unknown")
        ca = ("--root-certificates", str(federation.certificates / "ca.crt"))
        said = stranger(federation, "unknown", *ca, "--auth-supernode-private-key", str(tmp_path / "unknown"))
        assert "SuperNode ID" not in said
        said = stranger(federation, "plain", "--insecure")
        assert "SuperNode ID" not in said

        wait_for(federation, out, 1)
        federation.processes.end("node-1", signal.SIGKILL)

        wait_for(federation, out, 3)
        os.kill(read_status(status)["pid"], signal.SIGKILL)
        federation.processes.end("superlink", signal.SIGKILL)
        federation.start_superlink()
        status = federation.run({**values, "resume": True}, client=EVIL)
        federation.follow(out, status, Callbacks(), 6)

    history = RunDirectory(out).history()
    assert [r["refused"] for r in history] == [1, 1, 1, 1, 0, 1]
    assert sum(r["late"] for r in history) == 1
    reasons = ["not finite", "[3, 3] float32", "from the global ones", "v.more", "", "not an array"]
    for record, reason in zip(history, reasons, strict=True):
        assert not reason or reason in record["refusals"][0], record["refusals"]
    assert same_bits(out, simulated(out, REFUSED | LATE))
