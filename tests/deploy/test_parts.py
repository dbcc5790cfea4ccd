"""Test the parts of a deployment one by one: messages, checks, a node's disk, the sites' agreement, keys."""

import os
import pickle
import signal
import ssl
import stat
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedcsd.deploy.keys import make_certificates, make_node_key
from fedcsd.deploy.node.answers import packed
from fedcsd.deploy.node.keeper import from_bytes, to_bytes
from fedcsd.deploy.node.store import RUNS, Store, checksum
from fedcsd.deploy.processes import MARK
from fedcsd.deploy.server.checks import Checks
from fedcsd.deploy.server.remote import NodeStates
from fedcsd.deploy.server.session import settings_of
from fedcsd.deploy.server.sites import pooled
from fedcsd.deploy.settings import Deployment, deployment_of
from fedcsd.deploy.wire import HEADER, KINDS, MAIN, Malformed, Parcel, content_of, parcel_of, unpacked
from fedcsd.errors import UserError
from fedcsd.experiments.experiment import prepare
from fedcsd.messages import Request
from fedcsd.weights import Weights
from helpers.program import Fedcsd

ARRAYS = st.dictionaries(
    st.sampled_from([MAIN, "v.teacher", "v.held", "v.x"]),
    hnp.arrays(st.sampled_from(sorted(KINDS)), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0)),
)


@given(ARRAYS, st.booleans())
def test_parcels_arrive_as_they_were_sent(arrays: dict[str, np.ndarray], alone: bool) -> None:
    sent = Parcel({"round": 3, "text": "ü"}, arrays)
    for found in (parcel_of(content_of(sent, alone=alone)), from_bytes(to_bytes(sent))):
        assert found.header == sent.header
        assert found.arrays.keys() == arrays.keys()
        for name, array in arrays.items():
            assert found.arrays[name].dtype == array.dtype
            assert found.arrays[name].tobytes() == array.tobytes()
            assert found.arrays[name].shape == array.shape


def test_with_mods_the_weights_are_the_only_array_of_flower() -> None:
    parcel = Parcel({"samples": 5}, {MAIN: np.ones(3, np.float32), "v.teacher": np.zeros(3, np.float32)})
    content = content_of(parcel, alone=True, clipping_norm=2.0)
    assert [list(record) for record in content.array_records.values()] == [[MAIN]]
    assert len(content.config_records) == len(content.metric_records) == 1
    assert content.config_records[HEADER]["clipping_norm"] == 2.0


def npy(array: np.ndarray) -> bytes:
    buffer = BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def claiming(shape: str) -> bytes:
    """An array of three numbers that says it is of another shape."""
    blob = npy(np.zeros(3, np.float32))
    return blob.replace(b"(3,), ", shape.encode().ljust(6))


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (b"", "format"),
        (b"\x93NUMPY\x01\x00", "format"),
        (pickle.dumps([1, 2]), "format"),
        (npy(np.array([{}], dtype=object)), "not numbers"),
        (npy(np.array(["text"])), "not numbers"),
        (npy(np.zeros(3, ">f4")), "not numbers"),
        (npy(np.zeros(3, np.float32))[:-1], "cut off"),
        (npy(np.zeros(3, np.float32)) + b"x", "cut off"),
        (claiming("(9999999999,),"), "cut off|format"),
        ("text", "not an array"),
    ],
)
def test_bytes_that_are_no_array_are_refused(blob: bytes, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        unpacked(blob, "x")


@pytest.mark.parametrize(
    "content",
    [
        RecordDict({}),
        RecordDict({HEADER: ConfigRecord({})}),
        RecordDict({HEADER: ConfigRecord({"header": "{"})}),
        RecordDict({HEADER: ConfigRecord({"header": "[1]"})}),
        RecordDict({HEADER: ConfigRecord({"header": "[" * 100_000})}),
        RecordDict({HEADER: ArrayRecord([np.zeros(2)])}),
        RecordDict({HEADER: ConfigRecord({"header": "{}", "npy.v.x": "text"})}),
    ],
)
def test_messages_that_are_not_ours_are_refused(content: RecordDict) -> None:
    with pytest.raises(Malformed):
        parcel_of(content)


@pytest.fixture(scope="module")
def checks() -> tuple[Checks, Request, Parcel, int]:
    """A check, a request for training, a right reply to it, and the client's samples."""
    experiment = prepare({"method": "scaffold", "clients": 3, "epochs": 1, "beta": 1.0})
    variate = torch.zeros_like(experiment.weights.parameters)
    request = Request(0, "train", {"weights": experiment.weights, "variate": variate})
    reply = packed(experiment.worker().answer(request, 1, {}))
    return Checks(experiment, Deployment()), request, reply, len(experiment.parts[1])


def test_a_right_reply_passes_as_it_is(checks: tuple[Checks, Request, Parcel, int]) -> None:
    check, request, parcel, samples = checks
    reply = check.reply(parcel, request, 1, samples)
    assert isinstance(reply.weights, Weights)
    assert np.array_equal(reply.weights.flat.numpy(), parcel.arrays[MAIN])
    assert reply.notes["train_loss"] == tuple(parcel.header["notes"]["train_loss"])
    assert reply.state  # SCAFFOLD keeps its variate


def spoiled(parcel: Parcel, **changes: object) -> Parcel:
    header, arrays = dict(parcel.header), dict(parcel.arrays)
    for name, value in changes.items():
        if name in ("weights", "change", "more"):
            arrays[f"v.{name}"] = value  # type: ignore[assignment]
        else:
            header[name] = value
    return Parcel(header, arrays)


def test_wrong_replies_are_refused_with_the_reason(checks: tuple[Checks, Request, Parcel, int]) -> None:
    check, request, right, samples = checks
    weights, change = right.arrays[MAIN], right.arrays["v.change"]
    nan = weights.copy()
    nan[7] = np.nan
    entries = right.header["entries"]
    cases = [
        (spoiled(right, weights=nan), "weights has values that are not finite"),
        (spoiled(right, weights=weights[:-1]), r"weights is \[\d+\] float32, not"),
        (spoiled(right, weights=weights.astype(np.float64)), "float64, not"),
        (spoiled(right, weights=weights * np.float32(1e9)), "from the global ones"),
        (spoiled(right, change=change + np.float32(1e12)), "change has norm"),
        (spoiled(right, change=np.full_like(change, np.inf)), "change has values"),
        (spoiled(right, more=change), "more than it should: v.more"),
        (spoiled(right, samples=samples + 1), "samples"),
        (spoiled(right, samples=True), "samples"),
        (spoiled(right, samples=-5), "samples"),
        (spoiled(right, entries={}), "nothing, not weights"),
        (spoiled(right, entries=None), "nothing"),
        (spoiled(right, entries={**entries, "v.evil": {"number": 1}}), "not weights"),
        (spoiled(right, entries={**entries, "v.weights": {"tensor": "v.none"}}), "missing"),
        (spoiled(right, entries={**entries, "v.weights": 3}), "not described"),
        (spoiled(right, notes={"train_loss": [float("nan"), 1]}), "within reason"),
        (spoiled(right, notes={"train_loss": [1.0, -1]}), "within reason"),
    ]
    for parcel, why in cases:
        with pytest.raises(Malformed, match=why):
            check.reply(parcel, request, 1, samples)


def test_a_measurement_that_the_method_does_not_make_is_left_out(
    checks: tuple[Checks, Request, Parcel, int],
) -> None:
    check, request, right, samples = checks
    notes = {**right.header["notes"], "test_accuracy": [1.0, 1.0]}
    assert "test_accuracy" not in check.reply(spoiled(right, notes=notes), request, 1, samples).notes


def test_the_bound_on_updates_is_the_one_that_is_set(checks: tuple[Checks, Request, Parcel, int]) -> None:
    check, request, right, samples = checks
    start = request.values["weights"].flat.numpy()
    norm = float(np.linalg.norm((right.arrays[MAIN] - start).astype(np.float64)))
    for bound, passes in ((1.01 * norm, True), (0.99 * norm, False)):
        bounded = Checks(check.experiment, Deployment(max_update_norm=bound))
        if passes:
            bounded.reply(right, request, 1, samples)
        else:
            with pytest.raises(Malformed, match="from the global ones"):
                bounded.reply(right, request, 1, samples)


def test_a_node_keeps_the_versions_that_are_needed_and_no_others(tmp_path: Path) -> None:
    layout = prepare({"method": "fedavg"}).network.layout
    store = Store(tmp_path, "run")
    for version in range(1, 6):
        store.keep_state(version, {"x": torch.full((3,), float(version))}, [version - 1, version - 2])
    assert sorted(p.name for p in (tmp_path / "run/states").iterdir()) == [
        f"00000{v}.safetensors" for v in (3, 4, 5)
    ]
    again = Store(tmp_path, "run")  # after a restart
    found = again.state(4, layout)
    assert found is not None
    assert found["x"].tolist() == [4.0] * 3
    assert again.state(1, layout) is None
    (tmp_path / "run/states/000005.safetensors").write_bytes(b"torn")
    assert again.state(5, layout) is None


def test_a_node_forgets_the_oldest_runs(tmp_path: Path) -> None:
    for number in range(RUNS + 4):
        Store(tmp_path, f"run{number}").keep_state(1, {"x": torch.zeros(10)}, [])
    assert len(list(tmp_path.iterdir())) == RUNS
    assert (tmp_path / f"run{RUNS + 3}").is_dir()
    Store(tmp_path, "large", megabytes=0.0001).keep_state(1, {"x": torch.zeros(1000)}, [])
    assert [p.name for p in tmp_path.iterdir()] == ["large"]


def test_a_node_holds_the_weights_of_two_rounds(tmp_path: Path) -> None:
    weights = prepare({"method": "fedavg"}).weights
    store = Store(tmp_path, "run")
    each = [weights.like(weights.flat + k) for k in range(4)]
    for round, some in enumerate(each):
        store.hold(round, [some])
    for place in (store, Store(tmp_path, "run")):
        found = [place.weights(w.token, w.layout, checksum(w.flat)) for w in each]
        assert [f is not None for f in found] == [False, False, True, True]
        assert found[3] is not None
        assert torch.equal(found[3].flat, each[3].flat)
        assert place.weights(each[3].token, weights.layout, 123) is None


def test_the_server_names_the_versions_that_it_may_go_back_to() -> None:
    states = NodeStates()
    states.put(0, {"kept": 1}, 1)
    states.save(1)
    states.put(0, {"kept": 1}, 2)
    before = states.snapshot()
    states.put(0, {"kept": 1}, 3)
    assert states.wanted(0) == (3, [1, 3])
    states.restore(before)
    assert states.wanted(0) == (2, [1, 2])
    saved, _ = states.save(2)
    other = NodeStates()
    other.load(saved, {})
    assert other.wanted(0) == (2, [2])
    states.put(0, {}, 4)
    assert states.wanted(0) == (0, [1, 2])


def test_pixels_are_normalised_as_if_they_lay_together() -> None:
    random = np.random.default_rng(0)
    parts = [random.random((n, 2, 4, 4)) for n in (5, 50, 500)]
    about = [
        {"samples": len(p), "mean": p.mean((0, 2, 3)).tolist(), "std": p.std((0, 2, 3)).tolist()}
        for p in parts
    ]
    whole = np.concatenate(parts)
    found = pooled(about)
    assert np.allclose(found["mean"], whole.mean((0, 2, 3)))
    assert np.allclose(found["std"], whole.std((0, 2, 3)))


def test_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    make_certificates(tmp_path / "c", ["example.org", "10.0.0.1"])
    public = make_node_key(tmp_path / "k" / "site.key")
    for secret in (tmp_path / "c/server.key", tmp_path / "k/site.key"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "c/server.crt", tmp_path / "c/server.key")
    ssl.create_default_context(cafile=str(tmp_path / "c/ca.crt"))
    with pytest.raises(FileExistsError):
        make_node_key(tmp_path / "k" / "site.key")


def test_what_a_user_can_get_wrong_is_one_line(fedcsd: Fedcsd, tmp_path: Path) -> None:
    import socket

    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = str(taken.getsockname()[1])
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    cases = [
        (("deploy", "local", "--nodes", "2", "--port", port), f"port {port} is taken"),
        (("deploy", "local", "--min-clients", "9"), "--min-clients 9 is more than the 4 nodes"),
        (("deploy", "local", "--data", "nonsense"), "unknown data set"),
        (("deploy", "local", "--resume", "nowhere"), "holds no run"),
        (("deploy", "local", "--out", "full"), "holds other files"),
        (("deploy", "init", "full", "--server", "a.org"), "not empty"),
        (("deploy", "init", "new", "--server", "a.org:x"), "--server takes a name"),
        (("deploy", "check", "nowhere.npz"), "the node's data is not there"),
    ]
    for arguments, said in cases:
        result = fedcsd(*arguments)
        assert result.returncode == 2, (arguments, result.stdout, result.stderr)
        assert said in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.glob("runs/*"))
    taken.close()


def test_a_process_of_flowers_ends_with_the_launcher_whatever_it_waits_for() -> None:
    launcher = subprocess.Popen(["sleep", "60"])
    code = """
import signal, time
from fedcsd.deploy.processes import end_with_launcher
signal.signal(signal.SIGINT, lambda *_: time.sleep(60))  # as Flower, which tells a SuperLink that is gone
end_with_launcher()
print("up", flush=True)
time.sleep(60)
"""
    environment = {**os.environ, MARK: f"{launcher.pid} x"}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == b"up\n"
        launcher.kill()
        launcher.wait()
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(timeout=20) == -signal.SIGKILL


def test_help_says_that_clients_in_trouble_are_left_out(fedcsd: Fedcsd) -> None:
    assert settings_of({})["on_divergence"] == "skip"
    shown = " ".join(fedcsd("deploy", "local", "--help").stdout.replace("│", "").split())
    assert "leave that client out of the round (default: skip)" in shown


def test_time_limits_need_a_number_of_answers() -> None:
    with pytest.raises(UserError, match="needs --min-clients"):
        deployment_of({"round_timeout": 5.0})


def test_own_data_may_be_missing_for_personal_models(checks: tuple[Checks, Request, Parcel, int]) -> None:
    check, request, _, samples = checks
    asked = Request(0, "test_personal", {"weights": request.values["weights"]}, "personal")
    parcel = Parcel({"samples": samples, "entries": {"v.accuracy": {"number": float("nan")}}, "notes": {}})
    assert np.isnan(check.reply(parcel, asked, 1, samples)["accuracy"])
