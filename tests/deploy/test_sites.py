"""Test sites with data of their own: the server sees none of it and reaches the weights of a simulation."""

import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet as pq

from fedcsd.deploy.node.answers import Node
from fedcsd.deploy.wire import Parcel
from fedcsd.errors import RunStopped, UserError
from fedcsd.experiments import running as jobs
from fedcsd.experiments.experiment import prepare
from fedcsd.experiments.runs.run_folder import RunDirectory
from helpers.loop import LoopGrid, deployed, of_sites
from helpers.program import Fedcsd

pytestmark = pytest.mark.slow

SIZES = {"berlin": 40, "aachen": 25, "celle": 60}


def clouds(samples: int, classes: list[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Write points around one centre for each class."""
    random = np.random.default_rng(seed)
    y = np.array([classes[i % len(classes)] for i in range(samples)])
    return (np.eye(6)[y] * 3 + random.normal(size=(samples, 6))).astype(np.float32), y


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, str]:
    """Write tables of numbers for three sites, none of which has all classes."""
    found = {}
    for k, (name, samples) in enumerate(SIZES.items()):
        x, y = clouds(samples + 10, [k, k + 1], k)
        path = tmp_path / f"{name}.npz"
        np.savez(path, x_train=x[:samples], y_train=y[:samples], x_test=x[samples:], y_test=y[samples:])
        found[name] = str(path)
    return found


@pytest.mark.parametrize("method", ["fedcsd", "scaffold"])
def test_weights_are_those_of_a_simulation_with_the_same_clients(
    method: str, tables: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = deployed(
        of_sites(tmp_path, tables),
        out,
        method=method,
        clients=3,
        mode="sites",
        data_options="classes=4",
        rounds=3,
    )
    arrays = {name: np.load(tables[name]) for name in sorted(tables)}
    whole = [
        np.concatenate([a[key] for a in arrays.values()])
        for key in ("x_train", "y_train", "x_test", "y_test")
    ]
    starts = np.cumsum([0, *(len(a["y_train"]) for a in arrays.values())])
    parts = [np.arange(a, b) for a, b in pairwise(starts)]
    values = {"method": method, "epochs": 1, "rounds": 3, "workers": 1}
    experiment = prepare(values, data=whole, parts=(parts, []))
    simulated = jobs.train(jobs.Job(experiment, {}))
    assert all(torch.equal(run.weights[k], simulated.weights[k]) for k in run.weights)
    for here, there in zip(run.history, simulated.history, strict=True):
        assert here["test_accuracy"] == pytest.approx(there["test_accuracy"])
        assert here["test_loss"] == pytest.approx(there["test_loss"], rel=1e-6)


def test_nothing_of_the_samples_is_in_what_the_server_is_told(tables: dict[str, str], tmp_path: Path) -> None:
    told: list[Parcel] = []

    def listen(request: Parcel, reply: Parcel, node: int) -> Parcel:
        told.append(reply)
        return reply

    values = {"method": "fedavg", "clients": 3, "mode": "sites", "data_options": "classes=4"}
    deployed(of_sites(tmp_path, tables, listen), tmp_path / "run", **values)
    assert {name for reply in told for name in reply.arrays} == {"v.weights"}
    first = told[0].header
    assert first.keys() <= {"name", "version", "samples", "test", "classes", "shape", "dtype", "mean", "std"}


def pictures(name: str, samples: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(len(name))
    return random.integers(0, 256, (samples, 8, 8, 3)).astype(np.uint8), np.arange(samples) % 2


def test_sites_may_have_their_data_in_different_ways(tmp_path: Path) -> None:
    x, y = pictures("npz", 30)
    np.savez(tmp_path / "a.npz", x_train=x[:20], y_train=y[:20], x_test=x[20:], y_test=y[20:], classes=3)
    x, y = pictures("folder", 24)
    for i, (image, label) in enumerate(zip(x, y, strict=True)):
        path = tmp_path / "b" / ("cat", "dog")[label] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    encoded = []
    for image in pictures("parquet", 25)[0]:
        Image.fromarray(image).save(tmp_path / "one.png")
        encoded.append({"bytes": (tmp_path / "one.png").read_bytes()})
    table = pa.table({"image": encoded, "label": [2] * 25})
    pq.write_table(table, tmp_path / "c.parquet")
    grid = of_sites(
        tmp_path, {"a": str(tmp_path / "a.npz"), "b": str(tmp_path / "b"), "c": str(tmp_path / "c.parquet")}
    )
    grid.nodes[101].config["data-options"] = "classes=cat,dog,ox"
    grid.nodes[102].config["data-options"] = "classes=3"
    run = deployed(grid, tmp_path / "run", method="fedcsd", clients=3, mode="sites")
    sites = [grid.nodes[100 + k].assignments for k in range(3)]
    data = [next(iter(places.values())).worker.workspace.data for places in sites]
    pixels = np.concatenate([d.x_train.numpy().transpose(0, 2, 3, 1).reshape(-1, 3) for d in data]) / 255
    # All sites see the same picture as the same numbers: normalised by what all of them have.
    for d in data:
        assert d.classes == 3
        assert d.scale is not None
        assert np.allclose(1 / (255 * d.scale.numpy().ravel()), pixels.std(0), rtol=0.02)
    assert run.history[-1]["clients"] == 3
    assert RunDirectory(tmp_path / "run").config["deploy"]["agreed"]["names"] == ["a", "b", "c"]


def test_a_run_over_sites_is_taken_up(tables: dict[str, str], tmp_path: Path) -> None:
    values = {"method": "moon", "clients": 3, "mode": "sites", "data_options": "classes=4", "rounds": 4}
    whole = deployed(of_sites(tmp_path / "w", tables), tmp_path / "whole", **values)

    def die(request: Parcel, reply: Parcel, node: int) -> Parcel:
        if request.header.get("round") == 2 and node == 101:
            raise KeyboardInterrupt
        return reply

    with pytest.raises(KeyboardInterrupt):
        deployed(of_sites(tmp_path / "c", tables, die), tmp_path / "cut", **values)
    # Other nodes, as after a restart, with the same disks; one site has changed its data since.
    again = of_sites(tmp_path / "c", tables)
    run = deployed(again, tmp_path / "cut", **values, resume=True)
    assert all(torch.equal(run.weights[k], whole.weights[k]) for k in run.weights)


def test_a_site_that_changed_its_data_or_is_new_is_not_let_in(tables: dict[str, str], tmp_path: Path) -> None:
    values = {
        "method": "fedavg",
        "clients": 3,
        "mode": "sites",
        "data_options": "classes=4",
        "join_timeout": 0.5,
    }
    deployed(of_sites(tmp_path, tables), tmp_path / "run", **values, rounds=1)
    x, y = clouds(90, [0, 1], 5)
    np.savez(tables["aachen"], x_train=x[:80], y_train=y[:80], x_test=x[80:], y_test=y[80:])
    with (
        pytest.warns(UserWarning, match="has 80 samples and had 25"),
        pytest.raises(RunStopped, match="2 of 3"),
    ):
        deployed(of_sites(tmp_path, tables), tmp_path / "run", **{**values, "rounds": 2}, resume=True)


def test_sites_that_do_not_fit_together_are_told(tables: dict[str, str], tmp_path: Path) -> None:
    x = np.zeros((20, 7), np.float32)
    np.savez(
        tables["celle"], x_train=x[:10], y_train=np.arange(10) % 2, x_test=x[10:], y_test=np.arange(10) % 2
    )
    grid = of_sites(tmp_path, tables)
    with pytest.raises(UserError, match=r"the sites' images differ .*celle: \[7\]"):
        deployed(grid, tmp_path / "run", clients=3, mode="sites", data_options="classes=4")


@pytest.mark.parametrize(
    "lie",
    [
        {"samples": 10**12},
        {"samples": -1},
        {"shape": [10**9, 10**9, 3]},
        {"shape": "no"},
        {"shape": [-6]},
        {"classes": 10**9},
        {"classes": "2"},
        {"dtype": "torch.complex64"},
        {"mean": [1.0, 2.0, 3.0], "std": [1.0]},
        {"mean": ["x"], "std": [1.0]},
        {"mean": [10**400], "std": [1.0]},
        {"test": None},
        {"name": None},
    ],
)
def test_a_site_that_says_nonsense_of_itself_is_not_let_in(
    lie: dict[str, object], tables: dict[str, str], tmp_path: Path
) -> None:
    def change(request: Parcel, reply: Parcel, node: int) -> Parcel:
        reply.header |= lie if node == 102 else {}
        return reply

    grid = of_sites(tmp_path, tables, change)
    values = {"clients": 3, "mode": "sites", "data_options": "classes=4", "join_timeout": 0.3}
    with pytest.warns(UserWarning, match="not let in"), pytest.raises(RunStopped, match="2 of 3 sites"):
        deployed(grid, tmp_path / "run", **values)


def test_a_second_site_of_the_same_name_waits_outside_until_it_has_another(
    tables: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid, names = of_sites(tmp_path, tables), sorted(tables)
    right = grid.nodes[101]
    grid.nodes[101] = Node({**right.config, "site": grid.nodes[100].name}, tmp_path)

    def put_right() -> None:
        grid.online = grid.online - {101}
        time.sleep(2)
        grid.nodes[101], grid.online = right, grid.online | {101}

    later = threading.Timer(2, put_right)
    later.start()
    with pytest.warns(UserWarning, match="another site has that name already"):
        run = deployed(
            grid, tmp_path / "run", method="fedavg", clients=3, mode="sites", data_options="classes=4"
        )
    later.join()
    assert run.settings["clients"] == 3
    said = capsys.readouterr().out
    assert "2 of 3 sites are there (" in said
    assert RunDirectory.open(tmp_path / "run").config["deploy"]["agreed"]["names"] == names


def test_a_node_says_what_its_config_lacks(tmp_path: Path) -> None:
    for config, said in (
        ({}, "names no site"),
        ({"site": "a"}, "names no data"),
        ({"site": "a", "data": "/none"}, "not there"),
    ):
        reply = Node(config, tmp_path).answer(Parcel({"kind": "join", "mode": "sites", "config": {}}))
        assert said in reply.header["error"]


def test_a_folder_of_one_class_is_enough_where_all_are_named(tmp_path: Path, fedcsd: Fedcsd) -> None:
    for i in range(5):
        path = tmp_path / "site/dog" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pictures("x", 1)[0][0]).save(path)
    said = fedcsd("deploy", "check", "site", "--options", "classes=cat,dog")
    assert said.returncode == 0, said.stderr
    assert "classes" in said.stdout
    said = fedcsd("deploy", "check", "site", "--options", "classes=cat,cow")
    assert said.returncode == 2
    assert "folder dog, which is none of the classes cat, cow" in said.stderr


def test_the_loop_of_partitions_needs_no_names(tmp_path: Path) -> None:
    assert [node.name for node in LoopGrid(tmp_path, 2).nodes.values()] == ["0", "1"]
