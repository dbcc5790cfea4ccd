"""Test worker processes: any number of them gives the same bits, and one that dies is replaced."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import fedcsd
from fedcsd.config import option
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.backends.local import LocalBackend, _next_item
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Request
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.weights import Values, Weights
from helpers.federations import blobs, small
from helpers.program import TESTS

pytestmark = pytest.mark.slow


def test_one_two_and_five_workers_give_the_same_bytes(tmp_path: Path) -> None:
    for workers in (1, 2, 5):
        fedcsd.run(
            method=fedcsd.FedCSD(mu=0.05),
            rounds=3,
            workers=workers,
            track_drift=True,
            participation=0.8,
            out=tmp_path / str(workers),
        )
    models = {(tmp_path / str(w) / "model.safetensors").read_bytes() for w in (1, 2, 5)}
    assert len(models) == 1
    histories = [
        [
            {k: v for k, v in r.items() if "seconds" not in k}
            for r in fedcsd.load_run(tmp_path / str(w)).history
        ]
        for w in (1, 2, 5)
    ]
    assert histories[0] == histories[1] == histories[2]


@dataclass(frozen=True)
class Deadly(FedAvg):
    """A method that kills its worker a given number of times at one client."""

    folder: str = option("", "where to note each death")
    times: int = option(0, "how often to die")

    def train(self, client: Client, weights: Weights) -> Values:
        deaths = len(list(Path(self.folder).iterdir()))
        if client.number == 2 and deaths < self.times:
            (Path(self.folder) / str(deaths)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return client.train(weights, self.loss)


@pytest.mark.parametrize("clients", [4, 24])  # of many, the next is with the worker already
@pytest.mark.parametrize("deaths", [1, 2])
def test_a_worker_that_dies_is_replaced_and_its_client_retrained(
    tmp_path: Path, deaths: int, clients: int
) -> None:
    settings: dict[str, Any] = {"clients": clients, "min_samples": 2, "rounds": 2, "workers": 2}
    settings |= {"data": blobs(20 * clients), "partition": "iid"}
    run = fedcsd.run(method=Deadly(str(tmp_path), deaths), **settings)
    assert len(list(tmp_path.iterdir())) == deaths
    plain = fedcsd.run(method="fedavg", **settings)
    assert all(torch.equal(run.weights[name], plain.weights[name]) for name in plain.weights)


def test_three_deaths_on_one_client_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "deaths").mkdir()
    with pytest.raises(fedcsd.RunStopped, match=r"client 2 died 3 times \(killed.*fedcsd resume"):
        fedcsd.run(
            method=Deadly(str(tmp_path / "deaths"), 99),
            data=blobs(),
            clients=4,
            min_samples=2,
            workers=2,
            out=tmp_path / "run",
        )


def lanes_of(backend: LocalBackend) -> list[psutil.Process]:
    return [psutil.Process(lane.process.pid) for lane in backend.lanes]


def test_a_worker_killed_between_requests_is_replaced() -> None:
    experiment = small(FedAvg())
    backend = LocalBackend(experiment.worker(), experiment.network.layout, 2)
    try:
        request = Request(0, "train", {"weights": experiment.weights})
        before = [reply.weights.flat for reply in backend.ask(request, range(4), {})]
        for lane in lanes_of(backend):
            lane.kill()
            lane.wait(5)
        after = [reply.weights.flat for reply in backend.ask(request, range(4), {})]
        assert all(map(torch.equal, before, after))
    finally:
        backend.close()


@pytest.mark.parametrize("clients", [4, 24])
def test_replies_left_over_from_a_request_given_up_are_ignored(clients: int) -> None:
    experiment = small(FedAvg(), clients=clients, partition="iid")
    backend = LocalBackend(experiment.worker(), experiment.network.layout, 2)
    try:
        request = Request(0, "train", {"weights": experiment.weights})
        next(backend.ask(request, range(clients), {}))  # the others are never fetched
        replies = list(backend.ask(Request(1, "train", {"weights": experiment.weights}), [3, 1], {}))
        assert [r.client for r in replies] == [3, 1]
        direct = experiment.worker().answer(Request(1, "train", {"weights": experiment.weights}), 3, {})
        assert torch.equal(replies[0].weights.flat, direct.weights.flat)
    finally:
        backend.close()


def test_spawned_workers_do_the_same_as_forked_ones() -> None:
    """Processes that cannot be forked are started anew and are sent all that they need."""
    experiment = small(fedcsd.FedCSD())
    request = Request(
        0, "train", {"weights": experiment.weights, "teacher": experiment.weights, "prototypes": torch.eye(3)}
    )
    results = []
    for start in ("fork", "spawn"):
        backend = LocalBackend(experiment.worker(), experiment.network.layout, 1, start)
        try:
            results.append([reply.weights.flat for reply in backend.ask(request, range(4), {})])
        finally:
            backend.close()
    assert all(map(torch.equal, *results))


class Keeping(FedAvg):
    """Clients that remember more than a pipe takes at a time."""

    def remember(self, client: Client, scale: float) -> Values:
        kept = client.state.get("kept", torch.arange(300_000.0) + client.number) * scale
        client.state["kept"] = kept
        return {"sum": kept.double().sum()}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_large_messages_to_lanes_that_are_busy(start: str) -> None:
    experiment = small(Keeping(), clients=24, partition="iid")
    backend = LocalBackend(experiment.worker(), experiment.network.layout, 2, start)
    try:
        states: dict[int, Values] = {}
        for round in range(3):
            for reply in backend.ask(Request(round, "remember", {"scale": 2.0}), range(24), states):
                states[reply.client] = reply.state
                expected = 2.0 ** (round + 1) * (torch.arange(300_000.0) + reply.client).double().sum()
                assert reply["sum"] == expected
    finally:
        backend.close()


def test_the_server_has_one_thread_while_there_are_lanes() -> None:
    before, experiment = torch.get_num_threads(), small(FedAvg())
    torch.set_num_threads(2)
    try:
        backend = LocalBackend(experiment.worker(), experiment.network.layout, 1)
        assert torch.get_num_threads() == 1
        backend.close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_after_a_gpu_was_used_workers_are_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process has none of the GPU's threads; one started anew must be sent everything."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    experiment = small(FedAvg())
    backend = LocalBackend(experiment.worker(), experiment.network.layout, 1)
    assert backend.context.get_start_method() == "spawn"
    backend.close()

    class Here(FedAvg):
        pass

    experiment = small(Here())
    with pytest.raises(fedcsd.errors.UserError, match=r"has used a GPU.*Here.*Python process of its own"):
        LocalBackend(experiment.worker(), experiment.network.layout, 1)


def test_lanes_end_with_their_parent(tmp_path: Path) -> None:
    """kill -9 on the main process leaves no worker behind, not even one that is training."""
    import subprocess
    import sys

    code = (
        "import fedcsd\nfrom helpers.federations import blobs\n"
        "fedcsd.run(data=blobs(20000), clients=4, rounds=1, epochs=1000, workers=2)"
    )
    main = subprocess.Popen([sys.executable, "-c", code], cwd=TESTS)
    workers: list[psutil.Process] = []
    until(lambda: len(psutil.Process(main.pid).children()) == 2)
    workers = psutil.Process(main.pid).children()
    time.sleep(0.3)
    main.kill()
    main.wait()
    until(lambda: not any(w.is_running() and w.status() != psutil.STATUS_ZOMBIE for w in workers))


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_clients_return_to_the_lane_that_knows_their_teacher() -> None:
    experiment = small(fedcsd.FedCSD(), clients=8)
    backend = LocalBackend(experiment.worker(), experiment.network.layout, 2)
    try:
        first, second = backend.lanes
        homes = {0: second, 1: first, 2: second}
        assert _next_item(first, [0, 1, 2, 3], homes) == 1  # its own, though 0 is larger
        assert _next_item(first, [0, 2, 3], homes) == 3  # then one that is nobody's
        assert _next_item(first, [0, 2], homes) == 0  # then another lane's, rather than wait
        values = {"weights": experiment.weights, "teacher": experiment.weights}
        list(backend.ask(Request(1, "prototypes", values), range(8), {}))
        assert set(backend.homes) == set(range(8))  # a new round starts afresh
    finally:
        backend.close()


def test_forked_after_threads_and_gradients_in_the_parent() -> None:
    """Other training and threads in the same process do no harm, as in a notebook."""
    threading.Thread(target=lambda: time.sleep(1), daemon=True).start()
    weight = torch.randn(200, 200, requires_grad=True)
    (weight @ weight).sum().backward()
    run = fedcsd.run(method="fedavg", data=blobs(), clients=4, min_samples=2, rounds=1, workers=2)
    assert np.isfinite(run.history[0]["test_loss"])


def test_the_device_backend_gives_what_lanes_give() -> None:
    """Results on a GPU may differ from the CPU's in the last digits only."""
    experiment = small(fedcsd.FedCSD(), holdout=0.2)
    lanes = LocalBackend(experiment.worker(), experiment.network.layout, 2)
    device = DeviceBackend(experiment.worker())
    try:
        federations = [Federation(experiment, backend) for backend in (lanes, device)]
        records = [[f.step() for _ in range(2)] for f in federations]
        assert torch.equal(federations[0].server.weights.flat, federations[1].server.weights.flat)
        plain = [[{k: v for k, v in r.items() if "seconds" not in k} for r in some] for some in records]
        assert plain[0] == plain[1]
    finally:
        lanes.close()


@pytest.mark.gpu
def test_a_gpu_agrees_with_the_cpu() -> None:
    runs = [
        fedcsd.run(data=blobs(), method=fedcsd.FedCSD(), clients=4, min_samples=2, rounds=2, device=d)
        for d in ("cpu", "cuda")
    ]
    for name, tensor in runs[0].weights.items():
        torch.testing.assert_close(runs[1].weights[name], tensor, rtol=1e-3, atol=1e-4)


@dataclass(frozen=True)
class Collecting(FedAvg):
    """A method that measures how many objects, shared with the main process, its collector leaves alone."""

    def train(self, client: Client, weights: Weights) -> Values:
        client.note("frozen", torch.tensor([float(gc.get_freeze_count())]))
        return super().train(client, weights)


def test_garbage_collection_in_a_lane_leaves_forked_objects_alone() -> None:
    """It would copy every page that holds one of them."""
    run = fedcsd.run(method=Collecting(), rounds=1, epochs=1, workers=1)
    assert run.history[0]["frozen"] > 10_000
    assert gc.get_freeze_count() == 0  # of the main process
