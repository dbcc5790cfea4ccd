"""Test clients' states in memory and on disk: results are the same, disk needs less memory, nothing is lost."""

import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import fedcsd
from fedcsd.aggregation import weighted_mean
from fedcsd.experiments.runs import checkpoints
from fedcsd.federation import states
from fedcsd.federation.cohort import cohort
from fedcsd.federation.rounds import Federation
from fedcsd.federation.states import DiskStates, MemoryStates, file_name
from fedcsd.messages import header_of
from fedcsd.methods import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.weights import Values, Weights
from helpers.federations import Here, blobs, small
from helpers.program import in_process
from helpers.runs import same, stop_after
from helpers.states import SETTINGS, Keeping, files, named, run


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_the_same_bit_for_bit(tmp_path: Path, whole: Path, workers: int) -> None:
    run(tmp_path / "disk", client_state="disk", workers=workers)
    same(whole, tmp_path / "disk")
    rounds = {k: [r for r in range(6) if k in cohort(small(**SETTINGS).settings, r)] for k in range(8)}
    pauses = [b - a for some in rounds.values() for a, b in pairwise(some)]
    assert max(pauses) >= 3  # someone came back after two rounds or more without a part
    assert not (whole / "clients").exists()
    assert fedcsd.load_run(tmp_path / "disk").settings["client_state"] == "disk"


def test_in_this_process_too(tmp_path: Path) -> None:
    experiment = small(Keeping(), **SETTINGS)
    federations = [
        Federation(experiment, Here(experiment), states=some)
        for some in (MemoryStates(), DiskStates(tmp_path / "clients", experiment.network.layout))
    ]
    for _ in range(6):
        records = [federation.step() for federation in federations]
        assert records[0]["test_loss"] == records[1]["test_loss"]
    memory, disk = (federation.states for federation in federations)
    assert dict(memory).keys() == dict(disk).keys()
    for client in memory:
        assert memory[client]["times"] == disk[client]["times"]
        assert torch.equal(memory[client]["previous"].flat, disk[client]["previous"].flat)


def test_a_server_is_not_given_what_clients_keep() -> None:
    class Looking(Keeping):
        def round(self, server: Server, ask: Ask) -> None:
            replies = list(ask(self.train, weights=server.weights))
            assert all(not reply.state for reply in replies)
            server.weights = weighted_mean(replies)

    run(method=Looking(), client_state="disk", rounds=2)


def test_versions_between_checkpoints_do_not_pile_up(tmp_path: Path) -> None:
    most: list[int] = []
    path = tmp_path / "run"
    run(
        path,
        client_state="disk",
        participation=1.0,
        checkpoint_every=5,
        rounds=9,
        on_round=lambda *_: most.append(len(files(path))),
    )
    assert most[3] == 16  # what round 4 made and what it replaced, without rounds 1 and 2
    assert most[7] == 24  # and the checkpoint of round 5


@pytest.mark.parametrize("first", ["memory", "disk"])
def test_flushed_before_the_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    flushed: set[str] = set()
    flush, write, written = states.flush, checkpoints.write_whole, []

    def flushing(path: Path) -> None:
        flushed.add(path.name)
        flush(path)

    def writing(path: Path, content: bytes) -> None:
        write(path, content)
        if path.parent.name == "checkpoints":
            wanted = {file_name(*v) for v in states.versions(header_of(path)).items()}
            assert wanted | {"clients", path.parent.parent.name} <= flushed
            written.append(path)

    monkeypatch.setattr(states, "flush", flushing)
    monkeypatch.setattr(checkpoints, "write_whole", writing)
    path, given = tmp_path / "run", {"data": blobs(), "method": Keeping()}
    if first == "memory":
        with monkeypatch.context() as context:
            context.setattr(checkpoints, "write_whole", write)
            run(path, rounds=2)
        fedcsd.resume(path, **given, rounds=6, client_state="disk", checkpoint_every=2)
    else:
        run(path, client_state="disk", checkpoint_every=2)
    assert len(written) == (2 if first == "memory" else 3)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_client_can_forget(tmp_path: Path, kind: str) -> None:
    class Forgetful(FedAvg):
        def train(self, client: Client, weights: Weights) -> Values:
            client.note("remembers", torch.tensor([float("x" in client.state)]))
            if client.state.pop("x", None) is None:
                client.state["x"] = torch.ones(3)
            return client.train(weights, self.loss)

    settings = {"participation": 1.0, "client_state": kind, "method": Forgetful()}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", on_round=stop_after(2), **settings)
    assert kind == "memory" or [len(some) for some in named(tmp_path / "run")] == [0, 8]
    history = fedcsd.resume(tmp_path / "run", data=blobs(), method=Forgetful()).history
    assert [r["remembers"] for r in history] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("every", [1, 10])
def test_a_failed_round_is_undone(tmp_path: Path, whole: Path, every: int) -> None:
    path = tmp_path / "run"
    with pytest.raises(fedcsd.RunStopped, match="something went wrong; rounds 1 to 3 are saved"):
        run(path, method=Keeping(fail_in=4), client_state="disk", checkpoint_every=every)
    assert not any("r000004" in name for name in files(path))
    assert named(path)[0] <= files(path)
    config = path / "config.toml"
    config.write_text(config.read_text().replace("fail_in = 4", "fail_in = 0"))
    fedcsd.resume(path, data=blobs(), method=Keeping())
    same(whole, path)


def test_a_round_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    experiment = small(Keeping(fail_in=3), **SETTINGS)
    kinds = MemoryStates(), DiskStates(tmp_path / "clients", experiment.network.layout)
    for some in kinds:
        federation = Federation(experiment, Here(experiment), states=some)
        federation.step()
        federation.step()
        before = {k: dict(state) for k, state in some.items()}
        with pytest.raises(fedcsd.RunStopped):
            federation.step()
        assert {k: state["times"] for k, state in some.items()} == {
            k: state["times"] for k, state in before.items()
        }
        object.__setattr__(experiment.method, "fail_in", 0)
        assert federation.step()["round"] == 3
        object.__setattr__(experiment.method, "fail_in", 3)
    assert {k: s["times"] for k, s in kinds[0].items()} == {k: s["times"] for k, s in kinds[1].items()}


def test_two_exchanges_in_a_round(tmp_path: Path) -> None:
    class Twice(Keeping):
        def round(self, server: Server, ask: Ask) -> None:
            list(ask(self.train, weights=server.weights))
            super().round(server, ask)

    memory, disk = (run(method=Twice(), client_state=kind) for kind in ("memory", "disk"))
    assert all(torch.equal(memory.weights[n], disk.weights[n]) for n in memory.weights)
    assert [r["times"] for r in memory.history] == [r["times"] for r in disk.history]


def test_without_a_run_directory_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(len(list(tmp_path.glob("fedcsd-clients-*/*"))))

    finished = run(client_state="disk", on_round=look)
    assert finished.accuracy == fedcsd.load_run(whole).accuracy
    assert max(seen) >= 8
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(fedcsd.RunStopped, match="something went wrong"):
        run(client_state="disk", method=Keeping(fail_in=3))
    assert list(tmp_path.iterdir()) == []


def test_overwrite_clears_the_states(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(path, client_state="disk", rounds=2)
    run(path, overwrite=True, rounds=1)
    assert not (path / "clients").exists()
    run(path, client_state="disk", overwrite=True, rounds=1)
    (path / "clients" / "notes.txt").write_text("someone's own")
    run(path, overwrite=True, rounds=1)
    assert files(path) == {"notes.txt"}


def test_states_that_will_not_fit_are_refused_at_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    monkeypatch.setattr(states.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 2 * 10**6))
    run(path, client_state="disk", rounds=2)

    class Large(Keeping):
        def train(self, client: Client, weights: Weights) -> Values:
            client.state["large"] = torch.zeros(10**5)
            return super().train(client, weights)

    expected = r"2 MB free and the clients' states will need about [67] MB more.*no round was finished"
    with pytest.raises(fedcsd.RunStopped, match=expected):
        run(path, client_state="disk", method=Large(), overwrite=True)


def test_files_that_are_there_need_no_more_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = small().network.layout
    first = DiskStates(tmp_path, layout, copies=4)
    for client in range(3):
        first.put(client, {"x": torch.zeros(1000)}, 1)
    monkeypatch.setattr(states.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 5000))
    again = DiskStates(tmp_path, layout, copies=4)
    again.put(3, {"x": torch.zeros(1000)}, 1)
    with pytest.raises(fedcsd.RunStopped, match="free some space"):
        DiskStates(tmp_path, layout, copies=6).put(4, {"x": torch.zeros(1000)}, 1)


def test_a_full_disk_in_mid_round_says_what_is_saved(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, path = Path.write_bytes, tmp_path / "run"

    def full(self: Path, content: bytes) -> int:
        if "r000003" in self.name:
            raise OSError(28, "No space left on device")
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(fedcsd.RunStopped, match=r"No space left on device; rounds 1 to 2 are saved"):
        run(path, client_state="disk", checkpoint_every=10)
    monkeypatch.undo()
    fedcsd.resume(path, data=blobs(), method=Keeping())
    same(whole, path)


PEAK = """
import re, sys
from pathlib import Path
import fedcsd, torch
from helpers.federations import blobs
from fedcsd.methods.fedavg import FedAvg

class Large(FedAvg):
    def train(self, client, weights):
        client.state["large"] = torch.full((1 << 20,), float(client.number))
        return client.train(weights, self.loss)

def peak():
    # not getrusage, whose peak begins with that of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

settings = {"data": blobs(600), "clients": 60, "min_samples": 1, "beta": 100.0, "epochs": 1, "workers": 1}
fedcsd.run(method=FedAvg(), rounds=1, **settings)
before = peak()
fedcsd.run(method=Large(), rounds=2, client_state=sys.argv[1], out=sys.argv[2], checkpoint_every=2, **settings)
print(peak() - before)
"""


@pytest.mark.slow
def test_states_on_disk_are_not_in_memory(tmp_path: Path) -> None:
    """Each of 60 clients keeps 4 MiB."""
    grown = {}
    for kind in ("memory", "disk"):
        grown[kind] = float(in_process(PEAK, kind, tmp_path / kind).stdout)
    assert grown["memory"] > 240
    assert grown["disk"] < 80
