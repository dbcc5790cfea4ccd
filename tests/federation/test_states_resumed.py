"""Test clients' states after kills, after lost files, and after a move from memory to disk and back."""

from pathlib import Path
from typing import Any

import pytest

import fedcsd
from fedcsd.errors import UserError
from fedcsd.experiments.resuming import continued
from fedcsd.experiments.running import train
from fedcsd.experiments.runs import run_folder as runs
from fedcsd.experiments.runs.recorded import Change
from fedcsd.federation.states import DiskStates
from helpers.federations import blobs
from helpers.program import in_process
from helpers.runs import same, stop_after
from helpers.states import Keeping, files, named, run


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
    assert runs.RunDirectory.open(cut).changes == [Change(2, "setting", "client_state", before, after)]
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


KILLED = """
import os, signal, sys
from pathlib import Path
import fedcsd
from fedcsd.experiments.runs import checkpoints
from fedcsd.federation import states
from helpers.federations import blobs
from helpers.states import SETTINGS, Keeping

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
    states.flush = die_at(states.flush)
elif place == "checkpoint":  # the states are flushed, the checkpoint is not written
    checkpoints.Checkpoints.save = die_at(checkpoints.Checkpoints.save)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "at"), [("state", 2), ("state", 15), ("flush", 14), ("checkpoint", 3), ("sweep", 3)]
)
def test_killed_anywhere_and_resumed_is_the_same_run(
    tmp_path: Path, whole: Path, place: str, at: int
) -> None:
    cut = tmp_path / "cut"
    assert in_process(KILLED, place, at, cut).returncode == -9
    assert 0 <= runs.RunDirectory.open(cut).checkpoints.rounds_saved < 6
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
    job = continued(path, given={"data": blobs(), "method": Keeping()}, changes={"rounds": 7})
    assert files(path) == {*newest, *older, "notes.safetensors"}
    assert job is not None
    train(job)
    assert files(path) == set.union(*named(path), {"notes.safetensors"})


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
    """A lost file is made anew with another learning rate: it must not look complete again."""
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(cut, client_state="disk", checkpoint_every=2, on_round=stop_after(4))
    newest, older = named(cut)
    spoil(cut / "clients" / min(newest - older), "missing")
    with pytest.raises(KeyboardInterrupt):
        fedcsd.resume(cut, data=blobs(), method=Keeping(), lr=0.1, checkpoint_every=5, on_round=stop_after(3))
    assert runs.RunDirectory.open(cut).checkpoints.rounds_saved == 3


def test_a_state_that_no_checkpoint_can_do_without(tmp_path: Path, whole: Path) -> None:
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(cut, client_state="disk", on_round=stop_after(4))
    lost = cut / "clients" / min(set.intersection(*named(cut)))
    content = lost.read_bytes()
    spoil(lost, "torn")
    with pytest.raises(
        UserError, match=rf"{lost.name} is missing or damaged.*restore it, or remove .*cut and start again"
    ):
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

    with pytest.raises(
        fedcsd.RunStopped, match=r"cannot read the state of client \d.*rounds 1 to 3 are saved"
    ):
        run(path, client_state="disk", on_round=lose)
