"""Test a GPU that is full, shared, or interrupted."""

import gc
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedcsd.errors import RunStopped
from fedcsd.federation.backends import memory, streams
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.rounds import Federation
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training.worker import Worker
from helpers.engines import experiment, interrupted, trained

pytestmark = pytest.mark.gpu


@dataclass
class Full:
    """A lane for which there is no memory."""

    lanes: streams.Lanes
    answer: Any
    first_too: bool

    def __call__(self, lane: streams.StreamLane, *arguments: Any) -> Any:
        if self.first_too or lane is not self.lanes.lanes[0]:
            raise torch.OutOfMemoryError("no memory")
        return self.answer(lane, *arguments)


@pytest.mark.parametrize("first_too", [False, True])
def test_without_memory_there_are_fewer_lanes(first_too: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = experiment(FedAvg(), device="cuda", engine="graphs", participation=1.0)
    federation = Federation(prepared, DeviceBackend(prepared.worker(), "graphs"))
    federation.step()
    lanes = federation.backend.lanes
    assert len(lanes.lanes) > 1
    full = Full(lanes, streams.StreamLane.answer, first_too)
    monkeypatch.setattr(streams.StreamLane, "answer", lambda *a: full(*a))
    if first_too:
        with pytest.raises(RunStopped, match=r"memory.*--(batch-size|jobs)"):
            federation.step()
    else:
        federation.step()
        assert len(lanes.lanes) == 1
        assert federation.record["clients"] == 6


@pytest.mark.parametrize("engine", ["graphs", "stacked"])
def test_ctrl_c_does_not_wait_for_the_steps_that_clients_have_before_them(engine: str) -> None:
    prepared = experiment(FedAvg(), epochs=2000, lr=0.001, participation=1.0, device="cuda", engine=engine)

    def begun() -> Federation:
        federation = Federation(prepared, DeviceBackend(prepared.worker(), engine))
        for _ in range(2):  # records the steps
            federation.step()
        return federation

    def seconds(federation: Federation) -> float:
        began = time.perf_counter()
        federation.step()
        return time.perf_counter() - began

    whole, cut = begun(), begun()
    took = seconds(whole)
    began = time.perf_counter()
    with interrupted(took / 10):
        cut.step()
    assert time.perf_counter() - began < took / 2
    cut.step()  # the same round again
    assert torch.equal(whole.server.weights.flat, cut.server.weights.flat)
    for federation in (whole, cut):
        federation.backend.close()


def test_without_memory_to_evaluate_there_is_one_lane_left(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = experiment(FedAvg(), device="cuda", engine="graphs", participation=1.0)
    federation = Federation(prepared, DeviceBackend(prepared.worker(), "graphs"))
    federation.step()
    evaluate, times = Worker.evaluate, iter([True, False, True, True])

    def full(worker: Worker, *arguments: Any) -> Any:
        if next(times, False):
            raise torch.OutOfMemoryError("no memory")
        return evaluate(worker, *arguments)

    monkeypatch.setattr(Worker, "evaluate", full)
    federation.step()  # its test images are one block
    assert len(federation.backend.lanes.lanes) == 1
    with pytest.raises(RunStopped, match=r"does not hold an evaluation: .*--(batch-size|jobs)"):
        federation.step()


def test_a_try_without_memory_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = experiment(FedAvg(), device="cuda", engine="graphs", participation=1.0)
    federation = Federation(prepared, DeviceBackend(prepared.worker(), "graphs"))
    answer, times = streams.StreamLane.answer, iter([True])

    def full(*arguments: Any) -> Any:
        if next(times, False):
            raise torch.OutOfMemoryError("no memory")
        return answer(*arguments)

    monkeypatch.setattr(streams.StreamLane, "answer", full)
    federation.step()
    assert len(federation.backend.lanes.lanes) == 1
    federation.step()
    assert len(federation.backend.lanes.lanes) > 1


def test_a_share_of_the_memory_is_all_that_a_process_takes() -> None:
    torch.cuda.empty_cache()
    whole = memory.total()
    memory.share(4)
    try:
        assert 0.23 * whole < memory.total() < 0.25 * whole
        assert memory.free() <= memory.total()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(0.26 * whole), dtype=torch.uint8, device="cuda")
    finally:
        memory.share(1)
    assert memory.total() == whole


def test_memory_does_not_grow_with_clients() -> None:
    def peak(clients: int) -> int:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # one for each thread and stream that has multiplied
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        values = {"device": "cuda", "engine": "graphs", "participation": 1.0, "partition": "iid"}
        trained(experiment(FedAvg(), clients=clients, **values))
        return torch.cuda.max_memory_allocated() - before

    peak(40)  # every stream's workspace is there, and every size of a last batch has been met
    few, many = peak(40), peak(160)
    size = 4 * experiment(FedAvg()).weights.flat.numel()
    assert many - few < 40 * size  # replies that wait for their turn, at most 32
