"""What methods keep of each client, in memory or on disk: the same results, less memory, nothing lost."""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import blobs, small
from test_runs import same, stop_after
from test_training import Here

import fedcsd
from fedcsd import runs, states
from fedcsd.config import option
from fedcsd.errors import UserError
from fedcsd.federation import Federation, cohort
from fedcsd.jobs import take_up, train
from fedcsd.methods import Ask, Server
from fedcsd.methods.fedavg import FedAvg
from fedcsd.packing import header_of
from fedcsd.states import DiskStates, MemoryStates, file_name
from fedcsd.training import Client
from fedcsd.weights import Values, Weights, weighted_mean

SETTINGS: dict[str, Any] = {
    "clients": 8,
    "min_samples": 2,
    "participation": 0.5,
    "epochs": 1,
    "rounds": 6,
    "workers": 2,
}


@dataclass(frozen=True)
class Keeping(FedAvg):
    """A client is pulled to its last weights and kept apart from its last model, as in MOON."""

    fail_in: int = option(0, "the round in which the third client that is asked fails")

    def train(self, client: Client, weights: Weights) -> Values:
        previous = client.state.get("previous", weights)
        client.note("times", torch.tensor([float(client.state.get("times", 0))]))
        result = client.train(
            weights,
            self.loss,
            frozen={"previous": previous},
            gradient=lambda w, g: g.add_(w - previous.parameters, alpha=0.5),
        )
        client.state["previous"] = result["weights"]
        client.state["times"] = client.state.get("times", 0) + 1
        return result

    def round(self, server: Server, ask: Ask) -> None:
        def some() -> Any:
            for number, reply in enumerate(ask(self.train, weights=server.weights)):
                if self.fail_in == server.count and number == 2:
                    raise fedcsd.RunStopped("something went wrong")
                yield reply

        server.count = server.count + 1
        server.weights = weighted_mean(some())

    def start(self, server: Server) -> None:
        server.count = 0

    def loss(self, batch):
        apart = batch.features - batch.frozen["previous"].features
        return super().loss(batch) + 0.1 * apart.pow(2).mean()


def run(out: Path | None = None, *, method: Any = None, **settings: Any) -> fedcsd.Run:
    return fedcsd.run(method=method or Keeping(), data=blobs(), out=out, **{**SETTINGS, **settings})


def files(path: Path) -> set[str]:
    return {p.name for p in (path / "clients").iterdir()}


def named(path: Path) -> list[set[str]]:
    """The files that each checkpoint names, newest first."""
    checkpoints = sorted((path / "checkpoints").iterdir(), reverse=True)
    return [{file_name(*v) for v in states.versions(header_of(c)).items()} for c in checkpoints]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run with states in memory."""
    path = tmp_path_factory.mktemp("states") / "whole"
    run(path)
    return path


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


@pytest.mark.parametrize("every", [1, 4])
def test_interrupted_and_resumed_is_the_same_run(tmp_path: Path, whole: Path, every: int) -> None:
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(cut, client_state="disk", checkpoint_every=every, on_round=stop_after(3))
    fedcsd.resume(cut, data=blobs(), method=Keeping())
    same(whole, cut)
    assert files(cut) == set.union(*named(cut))


@pytest.mark.parametrize(("before", "after"), [("memory", "disk"), ("disk", "memory")])
def test_a_run_may_go_on_with_the_other_kind(tmp_path: Path, whole: Path, before: str, after: str) -> None:
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(cut, client_state=before, on_round=stop_after(2))
    with pytest.raises(KeyboardInterrupt):
        fedcsd.resume(cut, data=blobs(), method=Keeping(), client_state=after, on_round=stop_after(4))
    fedcsd.resume(cut, data=blobs(), method=Keeping())
    same(whole, cut)
    assert runs.RunDirectory.open(cut).config["facts"]["changes"] == [
        f"after round 2: client_state {before} -> {after}"
    ]
    assert files(cut) == set.union(*named(cut))
    assert bool(files(cut)) == (after == "disk")


def test_cut_off_while_it_moves_to_disk(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut, write = tmp_path / "cut", DiskStates._write
    with pytest.raises(KeyboardInterrupt):
        run(cut, on_round=stop_after(3))

    def some(self: DiskStates, path: Path, content: bytes) -> None:
        write(self, path, content)
        if len(files(cut)) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(DiskStates, "_write", some)
    with pytest.raises(KeyboardInterrupt):
        fedcsd.resume(cut, data=blobs(), method=Keeping(), client_state="disk")
    monkeypatch.undo()
    fedcsd.resume(cut, data=blobs(), method=Keeping())
    same(whole, cut)


def test_a_run_from_before_the_setting_can_go_on(tmp_path: Path, whole: Path) -> None:
    shutil.copytree(whole, tmp_path / "old")
    config = tmp_path / "old" / "config.toml"
    config.write_text(config.read_text().replace('client_state = "memory"\n', ""))
    fedcsd.resume(tmp_path / "old", data=blobs(), method=Keeping(), rounds=7, client_state="disk")
    assert len(named(tmp_path / "old")[0]) >= 7


KILLED = """
import os, signal, sys
from pathlib import Path
import fedcsd
from conftest import blobs
from fedcsd import runs, states
from test_states import SETTINGS, Keeping

place, at, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
calls = 0

def die_at(function, before=lambda *a: None, after=False, counts=lambda *a: True):
    def wrapped(*arguments, **named):
        global calls
        calls += counts(*arguments)
        if calls == at and not after:
            before(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*arguments, **named)
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return wrapped

def half(self, path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content[: len(content) // 2])

if place == "state":  # half a state is written
    states.DiskStates._write = die_at(states.DiskStates._write, before=half)
elif place == "flush":
    states._flush = die_at(states._flush)
elif place == "checkpoint":  # the states are flushed, the checkpoint is not written
    runs.RunDirectory.checkpoint = die_at(runs.RunDirectory.checkpoint)
elif place == "sweep":  # the checkpoint is written, some files are not removed
    Path.unlink = die_at(Path.unlink, after=True, counts=lambda path: path.parent.name == "clients")
try:
    if (out / "config.toml").exists():
        fedcsd.resume(out, data=blobs(), method=Keeping())
    else:
        fedcsd.run(data=blobs(), method=Keeping(), out=out, client_state="disk", **SETTINGS)
except fedcsd.RunStopped as error:
    sys.exit(str(error))
"""


def in_process(place: str, at: int, out: Path) -> int:
    paths = [*map(str, (Path(__file__).parent, Path(fedcsd.__file__).parent.parent)), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", KILLED, place, str(at), str(out)]
    return subprocess.run(command, env=environment, timeout=100).returncode


@pytest.mark.parametrize(
    ("place", "at"), [("state", 2), ("state", 15), ("flush", 14), ("checkpoint", 3), ("sweep", 3)]
)
def test_killed_anywhere_and_resumed_is_the_same_run(
    tmp_path: Path, whole: Path, place: str, at: int
) -> None:
    cut = tmp_path / "cut"
    assert in_process(place, at, cut) == -9
    assert 0 <= runs.RunDirectory.open(cut).rounds_saved < 6
    fedcsd.resume(cut, data=blobs(), method=Keeping())
    same(whole, cut)
    assert files(cut) == set.union(*named(cut))


def test_only_what_a_checkpoint_names_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(path, client_state="disk")
    newest, older = named(path)
    assert files(path) == newest | older
    assert newest != older
    assert len(newest) == len({name.partition("-")[0] for name in newest}) == 7  # one was never drawn
    (path / "clients" / "000003-r000099.safetensors").write_bytes(b"left over")
    (path / "clients" / "notes.safetensors").write_bytes(b"someone's own")
    job = take_up(path, given={"data": blobs(), "method": Keeping()}, changes={"rounds": 7})
    assert files(path) == {*newest, *older, "notes.safetensors"}
    assert job is not None
    train(job)
    assert files(path) == set.union(*named(path), {"notes.safetensors"})


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
    flush, write, checkpoints = states._flush, runs.write_whole, []

    def flushing(path: Path) -> None:
        flushed.add(path.name)
        flush(path)

    def writing(path: Path, content: bytes) -> None:
        write(path, content)
        if path.parent.name == "checkpoints":
            wanted = {file_name(*v) for v in states.versions(header_of(path)).items()}
            assert wanted | {"clients", path.parent.parent.name} <= flushed
            checkpoints.append(path)

    monkeypatch.setattr(states, "_flush", flushing)
    monkeypatch.setattr(runs, "write_whole", writing)
    path, given = tmp_path / "run", {"data": blobs(), "method": Keeping()}
    if first == "memory":
        with monkeypatch.context() as context:
            context.setattr(runs, "write_whole", write)
            run(path, rounds=2)
        fedcsd.resume(path, **given, rounds=6, client_state="disk", checkpoint_every=2)
    else:
        run(path, client_state="disk", checkpoint_every=2)
    assert len(checkpoints) == (2 if first == "memory" else 3)


def spoil(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "torn":
        path.write_bytes(content[:-40])
    else:  # one bit
        path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])


@pytest.mark.parametrize("how", ["missing", "torn", "changed"])
def test_a_lost_state_falls_back_to_the_checkpoint_before(tmp_path: Path, whole: Path, how: str) -> None:
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(cut, client_state="disk", on_round=stop_after(4))
    newest, older = named(cut)
    spoil(cut / "clients" / min(newest - older), how)
    taken: list[int] = []
    fedcsd.resume(cut, data=blobs(), method=Keeping(), on_round=lambda r, _: taken.append(r["round"]))
    assert taken == [4, 5, 6]
    same(whole, cut)


def test_a_checkpoint_that_was_passed_over_does_not_come_back(tmp_path: Path) -> None:
    """Its lost file is made anew, but by another learning rate: it must not look complete again."""
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(cut, client_state="disk", checkpoint_every=2, on_round=stop_after(4))
    newest, older = named(cut)
    spoil(cut / "clients" / min(newest - older), "missing")
    with pytest.raises(KeyboardInterrupt):
        fedcsd.resume(cut, data=blobs(), method=Keeping(), lr=0.1, checkpoint_every=5, on_round=stop_after(3))
    assert runs.RunDirectory.open(cut).rounds_saved == 3


def test_a_state_that_no_checkpoint_can_do_without(tmp_path: Path, whole: Path) -> None:
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(cut, client_state="disk", on_round=stop_after(4))
    lost = cut / "clients" / min(set.intersection(*named(cut)))
    content = lost.read_bytes()
    spoil(lost, "torn")
    with pytest.raises(UserError, match=rf"{lost.name} is missing or damaged.*restore it, or start again"):
        fedcsd.resume(cut, data=blobs(), method=Keeping())
    lost.write_bytes(content)  # nothing was removed meanwhile
    fedcsd.resume(cut, data=blobs(), method=Keeping())
    same(whole, cut)


def test_a_state_lost_in_mid_run_stops_it(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def lose(record: dict[str, Any], _: int) -> None:
        if record["round"] == 3:
            for name in files(path):
                (path / "clients" / name).write_bytes(b"")

    with pytest.raises(fedcsd.RunStopped, match=r"cannot read what client \d keeps.*rounds 1 to 3 are saved"):
        run(path, client_state="disk", on_round=lose)


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

    expected = r"2 MB free and what clients keep will need about [67] MB more.*no round was finished"
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
import resource, sys
import fedcsd, torch
from conftest import blobs
from fedcsd.methods.fedavg import FedAvg

class Large(FedAvg):
    def train(self, client, weights):
        client.state["large"] = torch.full((1 << 20,), float(client.number))
        return client.train(weights, self.loss)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

settings = {"data": blobs(600), "clients": 60, "min_samples": 1, "beta": 100.0, "epochs": 1, "workers": 1}
fedcsd.run(method=FedAvg(), rounds=1, **settings)
before = peak()
fedcsd.run(method=Large(), rounds=2, client_state=sys.argv[1], out=sys.argv[2], checkpoint_every=2, **settings)
print(peak() - before)
"""


@pytest.mark.slow
def test_states_on_disk_are_not_in_memory(tmp_path: Path) -> None:
    """60 clients keep 4 MiB each."""
    grown = {}
    for kind in ("memory", "disk"):
        paths = [*map(str, (Path(__file__).parent, Path(fedcsd.__file__).parent.parent)), *sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-c", PEAK, kind, str(tmp_path / kind)]
        output = subprocess.run(command, env=environment, timeout=150, capture_output=True, text=True)
        grown[kind] = float(output.stdout)
    assert grown["memory"] > 240
    assert grown["disk"] < 80
