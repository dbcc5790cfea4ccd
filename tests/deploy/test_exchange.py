"""Test runs through Flower's messages: every method has the same bits, and late or refused answers do not count."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcsd.deploy.wire import Parcel
from fedcsd.errors import RunStopped, UserError
from fedcsd.experiments.resuming import continued
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.methods import methods
from helpers.deployments import same_bits, simulated
from helpers.loop import LoopGrid, deployed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("method", methods.names)
def test_every_method_comes_to_the_simulators_weights(method: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    deployed(LoopGrid(tmp_path, 3), out, method=method, participation=0.7, rounds=3)
    assert same_bits(out, simulated(out))


def test_a_model_with_batch_norm_and_held_out_data(tmp_path: Path) -> None:
    out = tmp_path / "run"
    data = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3)).astype(np.uint8)
    np.savez(
        tmp_path / "d.npz",
        x_train=data[:30],
        y_train=np.arange(30) % 3,
        x_test=data[30:],
        y_test=np.arange(10) % 3,
    )
    values = {
        "data": str(tmp_path / "d.npz"),
        "model": "helpers.loop:with_norm",
        "holdout": 0.2,
        "track_drift": True,
    }
    deployed(LoopGrid(tmp_path, 2), out, method="fedcsd", partition="iid", rounds=2, **values)
    assert same_bits(out, simulated(out))
    assert RunDirectory(out).history()[-1]["logit_drift"] > 0


def test_the_teacher_is_sent_once_and_then_made_at_the_client(tmp_path: Path) -> None:
    grid = LoopGrid(tmp_path, 2)
    deployed(grid, tmp_path / "run", method="fedcsd", rounds=4)
    sent = [sorted(p.arrays) for node, p in grid.seen if node == 100 and p.header["kind"] == "ask"]
    prototypes = sent[::2]
    assert prototypes == [["v.weights"]] * 4  # in the first round it is the teacher as well
    assert sent[1::2] == [["v.prototypes"]] * 4
    records = RunDirectory(tmp_path / "run").history()
    without = LoopGrid(tmp_path / "other", 2)
    deployed(without, tmp_path / "other-run", method="fedcsd", rounds=4, client_teacher=False)
    more = RunDirectory(tmp_path / "other-run").history()
    size = 4 * sum(np.prod(t.shape) for t in simulated(tmp_path / "run").values())
    assert more[-1]["bytes_down"] - records[-1]["bytes_down"] == pytest.approx(2 * size, rel=0.02)
    assert same_bits(tmp_path / "run", simulated(tmp_path / "other-run"))


def test_a_client_that_missed_a_round_is_sent_the_teacher(tmp_path: Path) -> None:
    grid = LoopGrid(tmp_path, 3)
    deployed(grid, tmp_path / "run", method="fedcsd", rounds=6, participation=0.67, seed=1)
    rounds: dict[int, list[int]] = {}
    for node, parcel in grid.seen:
        if parcel.header.get("function") == "prototypes":
            last = rounds.setdefault(node, [])
            fresh = bool(last) and last[-1] != parcel.header["round"] - 1
            if last:
                assert ("v.teacher" in parcel.arrays) == fresh
            last.append(parcel.header["round"])
    assert any(len(some) < 6 for some in rounds.values())


def test_a_node_that_lost_its_disk_is_sent_everything_again(tmp_path: Path) -> None:
    grid = LoopGrid(tmp_path, 2)

    def forget(request: Parcel, reply: Parcel, node: int) -> Parcel:
        if request.header.get("function") == "train" and request.header["round"] == 0 and node == 100:
            for place in grid.nodes[100].assignments.values():
                shutil.rmtree(place.store.folder)
                place.store.__init__(place.store.runs, place.store.folder.name)  # type: ignore[misc]
        return reply

    grid.change = forget
    deployed(grid, tmp_path / "run", method="fedcsd", rounds=2)
    assert same_bits(tmp_path / "run", simulated(tmp_path / "run"))


def test_late_answers_are_dropped_counted_and_leave_no_trace(tmp_path: Path) -> None:
    kept: list[tuple[str, Parcel]] = []
    grid = LoopGrid(tmp_path, 3)

    def delay(request: Parcel, reply: Parcel, node: int) -> Parcel | None:
        late = request.header.get("round") == 1 and request.header["kind"] == "ask" and node == 102
        kept.extend([(f"m{len(grid.seen) - 1}", reply)] * late)
        return None if late else reply

    grid.change = delay
    out = tmp_path / "run"
    deployed(grid, out, method="scaffold", rounds=3, min_clients=2, round_timeout=0.5)
    history = RunDirectory(out).history()
    assert [r["missing"] for r in history] == [0, 1, 0]
    assert kept
    # The node has trained and kept its new variate, but the next round starts from the one that counts.
    assert same_bits(out, simulated(out, {(2, "train", 2)}))


def test_a_bad_answer_is_refused_named_and_does_not_count(tmp_path: Path) -> None:
    def spoil(request: Parcel, reply: Parcel, node: int) -> Parcel:
        if request.header.get("function") == "train" and node == 101:
            reply.arrays["v.weights"] = reply.arrays["v.weights"] * np.float32(np.inf)
        return reply

    out = tmp_path / "run"
    deployed(LoopGrid(tmp_path, 3, spoil), out, method="fedavg")
    history = RunDirectory(out).history()
    assert [r["refused"] for r in history] == [1, 1]
    assert "client 1 (1) is refused: weights has values that are not finite" in history[0]["refusals"][0]
    assert same_bits(out, simulated(out, {(1, "train", 1), (2, "train", 1)}))


def test_a_run_without_any_usable_answer_stops_and_says_why(tmp_path: Path) -> None:
    def spoil(request: Parcel, reply: Parcel, node: int) -> Parcel:
        return reply if request.header["kind"] == "join" else Parcel({"error": "the disk is full"})

    with pytest.raises(RunStopped, match=r"0 of 2 answers can be used: client .* the disk is full"):
        deployed(LoopGrid(tmp_path, 2, spoil), tmp_path / "run", method="fedavg")


def test_a_killed_server_goes_on_with_the_states_that_its_nodes_have(tmp_path: Path) -> None:
    grid, out = LoopGrid(tmp_path, 3), tmp_path / "run"

    def die(request: Parcel, reply: Parcel, node: int) -> Parcel:
        if request.header.get("round") == 2 and node == 101:
            raise KeyboardInterrupt
        return reply

    grid.change = die
    with pytest.raises(KeyboardInterrupt):
        deployed(grid, out, method="scaffold", rounds=4)
    with pytest.raises(UserError, match="is trained over Flower: go on with flwr run"):
        continued(out)
    grid.change = None
    deployed(grid, out, method="scaffold", rounds=4, resume=True)
    assert same_bits(out, simulated(out))


def test_nodes_with_other_data_are_not_let_in(tmp_path: Path) -> None:
    def other(request: Parcel, reply: Parcel, node: int) -> Parcel:
        if node == 101:
            reply.header["samples"] = 10**6
        return reply

    with pytest.warns(UserWarning, match="not let in"), pytest.raises(RunStopped, match="1 of 2 nodes"):
        deployed(LoopGrid(tmp_path, 2, other), tmp_path / "run", method="fedavg", join_timeout=0.5)


def test_prototypes_can_be_hidden(tmp_path: Path) -> None:
    grid = LoopGrid(tmp_path, 2)
    seen: list[Parcel] = []

    def look(request: Parcel, reply: Parcel, node: int) -> Parcel:
        if request.header.get("function") == "prototypes":
            seen.append(reply)
        return reply

    grid.change = look
    deployed(
        grid,
        tmp_path / "run",
        method="fedcsd",
        rounds=1,
        beta=0.1,
        prototype_min_count=60,
        prototype_noise=0.5,
    )
    for k, reply in enumerate(seen):
        site = next(iter(grid.nodes[100 + k].assignments.values())).worker.workspace
        counts = torch.bincount(site.data.y_train[site.parts[k]], minlength=10)
        assert reply.arrays["v.held"].tolist() == (counts >= 60).tolist()
        hidden = reply.arrays["v.prototypes"][~reply.arrays["v.held"]]
        assert 0.3 < hidden.std() < 0.7  # noise alone: nothing of the class is in it
