"""Test what lanes share in a GPU's process: random generators, the clients to train, and replays."""

import threading
import time
from collections import deque
from typing import Any

import pytest
import torch

from fedcsd import seeds
from fedcsd.aggregation import weighted_mean
from fedcsd.experiments.machine import backend_for
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.backends.memory import WAITING
from fedcsd.federation.backends.protocol import Backend
from fedcsd.federation.backends.streams import Dealt
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Request
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.training.engines.launcher import Launcher
from helpers.engines import experiment, interrupted


class Noisy(FedAvg):
    """A server that draws between replies and after them."""

    def round(self, server: Any, ask: Any) -> None:
        replies = []
        for reply in ask(self.train, weights=server.weights):
            server.between = torch.rand(1)
            replies.append(reply)
        server.weights, server.after = weighted_mean(replies), torch.rand(1)


@pytest.mark.slow
def test_the_server_draws_the_same_wherever_the_clients_are() -> None:
    def drawn(engine: str) -> list[float]:
        prepared = experiment(Noisy(), workers=2, participation=1.0, epochs=1)
        outside = torch.get_rng_state()
        if engine:
            federation = Federation(prepared, DeviceBackend(prepared.worker(), engine))
            federation.step()
        else:
            with backend_for(prepared) as backend:
                federation = Federation(prepared, backend)
                federation.step()
        assert torch.equal(outside, torch.get_rng_state())
        return [float(federation.server.between), float(federation.server.after)]

    assert drawn("") == drawn("eager") == drawn("stacked")


class Drawing(FedAvg):
    """A method that draws before or after training."""

    before = True

    def train(self, client: Client, weights: Any) -> Any:
        first = torch.rand(1) if self.before else torch.zeros(1)
        trained = client.train(weights, self.loss)
        return {**trained, "drawn": first if self.before else torch.rand(1)}


class DrawingAfter(Drawing):
    before = False


@pytest.mark.parametrize(("method", "draws"), [(FedAvg(), False), (Drawing(), True), (DrawingAfter(), True)])
def test_who_draws_is_noticed(method: FedAvg, draws: bool) -> None:
    prepared = experiment(method, epochs=1)
    worker, request = prepared.worker(), Request(0, "train", {"weights": prepared.weights})
    generators, outside = seeds.Watched(cuda=False), torch.get_rng_state()
    with seeds.kept(cuda=False):
        first = worker.answer(request, 0, {}, start_generators=generators.start)
        assert generators.drawn() == draws
    assert torch.equal(outside, torch.get_rng_state())
    torch.rand(3)
    again = worker.answer(request, 0, {})
    assert first.values.get("drawn") == again.values.get("drawn")


@pytest.mark.parametrize("method", [Drawing, DrawingAfter])
def test_what_stacked_clients_draw_is_what_they_draw_one_by_one(method: type[FedAvg]) -> None:
    class Kept(method):  # type: ignore[misc,valid-type]
        def round(self, server: Any, ask: Any) -> None:
            replies = list(ask(self.train, weights=server.weights))
            server.weights, server.drawn = weighted_mean(replies), torch.cat([r["drawn"] for r in replies])

    drawn = []
    for engine in ("eager", "stacked"):
        prepared = experiment(Kept(), epochs=1, participation=1.0)
        federation = Federation(prepared, DeviceBackend(prepared.worker(), engine))
        federation.step()
        drawn.append(federation.server.drawn)
    assert torch.equal(*drawn)


class Graph:
    def __init__(self, replay: Any):
        self.replay = replay


class Event:
    def record(self) -> None: ...

    def query(self) -> bool:
        return True


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """One on a machine that need not have a GPU."""
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return Launcher()


def told(launcher: Launcher, graph: Graph, times: int = 1) -> list[str]:
    """Return a list that is filled with the answer when the wait for a replay is over."""
    found: list[str] = []

    def run() -> None:
        try:
            launcher.run(None, [(graph, times)])  # type: ignore[arg-type,list-item]
            found.append("")
        except RuntimeError as error:
            found.append(str(error))

    threading.Thread(target=run, daemon=True).start()
    return found


def in_time(found: list[str]) -> str:
    for _ in range(500):
        if found:
            return found[0]
        time.sleep(0.01)
    pytest.fail("somebody still waits")


def test_a_device_that_fails_leaves_nobody_waiting(launcher: Launcher) -> None:
    def fail() -> None:
        raise RuntimeError("device-side assert")

    assert in_time(told(launcher, Graph(lambda: None))) == ""
    assert "device-side assert" in in_time(told(launcher, Graph(fail)))
    assert "device-side assert" in in_time(told(launcher, Graph(lambda: None)))


def test_closing_leaves_nobody_waiting(launcher: Launcher) -> None:
    found = told(launcher, Graph(lambda: time.sleep(0.02)), 10_000)
    time.sleep(0.2)
    launcher.close()
    assert "closed" in in_time(found)


def test_what_is_dropped_is_told_and_what_comes_then_is_replayed(launcher: Launcher) -> None:
    replayed: list[int] = []
    found = told(launcher, Graph(lambda: time.sleep(0.02)), 10_000)
    time.sleep(0.1)
    launcher.drop(True)
    assert "stopped" in in_time(found)
    assert "stopped" in in_time(told(launcher, Graph(lambda: replayed.append(1))))
    assert not replayed
    launcher.drop(False)
    assert in_time(told(launcher, Graph(lambda: replayed.append(1)), 3)) == ""
    assert len(replayed) == 3


def test_an_interrupted_replay_does_not_go_on(launcher: Launcher) -> None:
    replayed: list[str] = []

    def old() -> None:
        replayed.append("old")
        time.sleep(0.01)

    with interrupted(0.2):
        launcher.run(None, [(Graph(old), 10_000)])  # type: ignore[arg-type,list-item]
    count = len(replayed)
    assert 0 < count < 1000
    launcher.run(None, [(Graph(lambda: replayed.append("new")), 5)])  # type: ignore[arg-type,list-item]
    assert replayed[count:] == ["new"] * 5


class Slow(FedAvg):
    """A method whose client half waits before it trains in the first round."""

    started = threading.Event()

    def train(self, client: Client, weights: Any) -> Any:
        if not self.started.is_set():
            self.started.set()
            time.sleep(1)
        return super().train(client, weights)


def test_stacked_clients_that_were_interrupted_start_anew() -> None:
    prepared = [experiment(method, epochs=1, participation=1.0) for method in (FedAvg(), Slow())]
    expected, found = (Federation(one, DeviceBackend(one.worker(), "stacked")) for one in prepared)
    expected.step()
    Slow.started.clear()
    threads = threading.active_count()
    with interrupted(0.3):
        found.step()
    found.step()
    assert torch.equal(found.server.weights.flat, expected.server.weights.flat)
    found.backend.close()
    for _ in range(100):
        if threading.active_count() <= threads:
            break
        time.sleep(0.02)
    assert threading.active_count() <= threads


class Stopping(FedAvg):
    """A server that is interrupted between two replies."""

    def round(self, server: Any, ask: Any) -> None:
        replies = ask(self.train, weights=server.weights)
        for _ in replies:
            raise KeyboardInterrupt


def test_a_backend_is_told_at_once_that_nobody_reads_on() -> None:
    prepared = experiment(Stopping(), epochs=1, participation=1.0)
    backend, closed = DeviceBackend(prepared.worker(), "eager"), []

    class Told(Backend):
        server_device, evaluate = backend.server_device, backend.evaluate

        def ask(self, *arguments: Any) -> Any:
            try:
                yield from backend.ask(*arguments)
            finally:
                closed.append(True)

    federation = Federation(prepared, Told())
    with pytest.raises(KeyboardInterrupt) as kept:  # as a notebook keeps the last error
        federation.step()
    assert closed
    assert kept.value.__traceback__ is not None


def test_a_client_that_is_given_up_is_trained_by_another_lane() -> None:
    """The second lane gives up the client that the reader waits for, when no more replies may wait."""
    clients = list(range(3 * WAITING))
    dealt = Dealt(clients, {0: deque(clients[::2]), 1: deque(clients[1::2])})
    given = dealt.next(1)

    def train() -> None:
        while (client := dealt.next(0)) is not None:
            dealt.put(client, client)  # type: ignore[arg-type]

    threading.Thread(target=train, daemon=True).start()
    while len(dealt.replies) < WAITING:
        time.sleep(0.01)
    assert given is not None
    assert dealt.give_up(1, given)
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.extend(map(dealt.wait_for, clients)), daemon=True)
    reader.start()
    reader.join(10)
    assert found == clients
