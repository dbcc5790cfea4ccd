"""Test the parts of the comparison with other simulators that need none of them installed."""

import json
import subprocess
import sys
import time

import memory
import numpy as np
import pytest
import quiet
import report
import torch
import workload
from make_workloads import even, images, make
from ours import experiment_of
from workload import NETWORKS, Batches, Settings

from fedcsd.models.simple_cnn import simple_cnn

SETTINGS = Settings("simple_cnn", "made-up patterns", 10, 1, 0.05, 0.9, 1e-5)


@pytest.fixture
def work(tmp_path):
    make(tmp_path, SETTINGS, images(200, (1, 28, 28)), even, 20, 4, 3)
    return workload.read(tmp_path)


def test_a_workload_comes_back_as_it_was_written(work, tmp_path):
    assert work.settings == SETTINGS
    assert [len(rows) for rows in work.parts] == [10] * 20
    assert sorted(torch.cat(work.parts).tolist()) == list(range(200))
    assert [len(set(some)) for some in work.cohorts] == [4] * 3
    x, y = work.client(3)
    assert x.shape == (10, 1, 28, 28)
    assert torch.equal(y, images(200, (1, 28, 28)).y_train[work.parts[3]])
    for name, tensor in work.network().state_dict().items():
        assert torch.equal(tensor, work.weights[name])
    with np.load(tmp_path / "weights.npz", allow_pickle=False) as stored:
        assert set(stored.files) == set(work.weights)


def test_fedcsd_gets_the_same_weights_images_and_cohorts(work):
    experiment = experiment_of(work)
    for name, tensor in experiment.weights.named().items():
        assert torch.equal(tensor, work.weights[name])
    rows = torch.from_numpy(experiment.parts[3])
    assert torch.equal(experiment.data.images(experiment.data.x_train[rows]), work.client(3)[0])
    assert (experiment.settings.lr, experiment.settings.batch_size) == (0.05, 10)


def test_the_network_is_the_same_function_as_ours():
    theirs, ours = NETWORKS["simple_cnn"](1, 10), simple_cnn((1, 28, 28), 10)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 1, 28, 28)
    torch.testing.assert_close(theirs(x), ours(x))


def test_the_cnn_of_pfl_has_its_size():
    assert sum(p.numel() for p in NETWORKS["dropout_cnn"](3, 10).parameters()) == 1_626_442


def test_batches_hold_every_sample_once():
    x = torch.arange(23)
    batches = list(Batches(x, x, 10))
    assert [len(y) for _, y in batches] == [10, 10, 3]
    assert sorted(torch.cat([y for _, y in batches]).tolist()) == list(range(23))


def test_memory_counts_children_and_can_end_them():
    # A parent that holds little and a child that holds 64 MiB.
    child = "import time; held = bytearray(b'1') * (64 << 20); print('ready', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        watch = memory.Peak(process.pid)
        watch.start()
        deadline = time.monotonic() + 20  # the machine may be busy
        while watch.peak < 64 << 20 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert 64 << 20 <= watch.stop() < 200 << 20
        assert len(watch.seen) == 2
    finally:
        memory.end(process.pid)
        process.wait()
        process.stdout.close()
    assert all(memory.pss(pid) == 0 for pid in watch.seen)


def run(seconds: float, accuracy: float = 0.9, others: float = 0.0) -> dict[str, object]:
    return {
        "seconds": [seconds, seconds, 9 * seconds],
        "start_up": 1.0,
        "peak_bytes": 100 << 20,
        "accuracy": accuracy,
        "threads": 1,
        "others_busy": others,
    }


def test_figures_are_medians_and_ratios():
    found = report.figures(
        {
            "flower": [run(4.0)],
            "pfl": [run(1.0), run(2.0), run(30.0)],
            "plain": [run(8.0)],
            "fedcsd": [run(1.0, 0.8)],
        }
    )
    assert found["pfl"]["seconds"] == 2
    assert found["pfl"]["seconds_range"] == [1, 30]
    assert found["fedcsd"]["to_plain"] == 1 / 8
    assert found["fedcsd"]["to_fastest_peer"] == 1 / 2  # fedcsd and the plain loop are not peers
    assert [name for name in found if found[name]["accuracy_differs"]] == ["fedcsd"]
    json.dumps(found)


def test_the_first_round_and_the_start_are_not_counted():
    assert report.round_seconds([10, 15, 17, 20]) == [2, 3]
    assert report.start_up(3.0, [10, 15, 17, 19]) == 10


def test_the_table_tells_of_failures_doubtful_accuracy_and_a_busy_machine():
    found = report.figures({"plain": [run(8.0)], "fedcsd": [run(1.0, 0.8, others=1.5)]})
    text = report.table("W", found, {"pfl": "not installed: no such version"}, ["pfl", "plain", "fedcsd"])
    assert "pfl  failed: not installed: no such version" in text
    assert "80.0% (80.0 to 80.0) !" in text
    assert "NOT TO BE RELIED ON" in text
    assert "1.5 cores) around runs of fedcsd" in text
    calm = report.figures({"plain": [run(8.0)]})
    assert "NOT TO BE" not in report.table("W", calm, {}, ["plain"])


def test_ticks_of_the_machine():
    assert quiet.jiffies("cpu  10 0 5 80 5 0 0 0 0 0\ncpu0 1 2 3\n") == (100, 85)
