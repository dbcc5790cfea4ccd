"""Test the report: its numbers, damaged runs, and names that look like code."""

import base64
import html
import json
import re
import shutil
import urllib.error
import urllib.request
from hashlib import sha256
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcsd as package
from fedcsd.errors import Note, UserError
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.experiments.summary import summarise
from fedcsd.federation.evaluation import LISTED
from fedcsd.federation.rounds import Federation
from fedcsd.results.report.charts import usable
from fedcsd.results.report.collect import collect
from fedcsd.results.report.page import page, plotly_script, safe_json, write_report
from fedcsd.results.report.serve import ReportServer
from helpers.federations import Here, blobs, small
from helpers.program import Fedcsd, FedcsdRun
from helpers.reports import HOSTILE, SMALL, made, record, thirty


def test_each_class_and_client_is_measured() -> None:
    federation = Federation(small(rounds=2), Here(small(rounds=2)))
    found = federation.step()
    data, network = federation.setup.data, federation.setup.network
    network.load(federation.server.weights)
    network.eval()
    right = (network(data.images(data.x_test)).logits.argmax(1) == data.y_test).numpy()
    labels = data.y_test.numpy()
    expected = [right[labels == c].mean() for c in range(data.classes)]
    assert found["class_accuracies"] == pytest.approx(expected, abs=1e-5)
    assert len(found["client_accuracies"]) == 4
    assert np.mean(found["client_accuracies"]) == pytest.approx(found["client_accuracy_mean"], abs=1e-5)


def test_many_clients_are_told_one_by_one_in_the_last_round_only() -> None:
    clients = LISTED + 1
    run = package.run(
        data=blobs(400),
        method="fedavg",
        **{**SMALL, "clients": clients, "min_samples": 1, "rounds": 2, "partition": "iid"},
    )
    assert "client_accuracies" not in run.history[0]
    assert len(run.history[1]["client_accuracies"]) == clients
    assert "class_accuracies" in run.history[0]


def test_a_client_without_test_images_has_no_accuracy() -> None:
    x, y = np.zeros((8, 2), np.float32), np.array([0, 0, 0, 0, 1, 1, 1, 1])
    given = (x, y, x[:4], y[:4])  # nothing of class 1 to test on
    run = package.run(
        data=given,
        method="ditto",
        clients=2,
        min_samples=1,
        rounds=1,
        epochs=1,
        partition={"name": "classes", "per_client": 1},
    )
    found = run.history[0]
    assert sum(a is None or np.isnan(a) for a in found["client_accuracies"]) == 1
    assert np.isnan(found["class_accuracies"][1])
    known = [a for a in found["client_accuracies"] if not np.isnan(a)]
    assert found["client_accuracy_mean"] == pytest.approx(known[0], abs=1e-5)


def test_the_partition_says_its_classes(tmp_path: Path) -> None:
    data = blobs()
    package.run(data=data, method="fedavg", out=tmp_path / "r", **SMALL)
    directory = RunDirectory.open(tmp_path / "r")
    labels, counts = data.y_train.numpy(), directory.counts()
    assert counts is not None
    for row, rows in zip(counts, directory.partition()[0], strict=True):
        assert row.tolist() == [int((labels[rows] == c).sum()) for c in range(data.classes)]


def test_mean_range_and_axes_over_seeds(tmp_path: Path) -> None:
    made(tmp_path / "a", [0.2, 0.5], seed=0)
    made(tmp_path / "b", [0.4, 0.7], seed=1)
    made(tmp_path / "c", [0.1, 0.2], method={"name": "fedprox", "mu": 0.1})
    found = collect([tmp_path])
    assert [m["label"] for m in found["methods"]] == ["fedavg", "fedprox:mu=0.1"]
    y = found["series"]["fedavg"]["y"]["test_accuracy"]
    assert y == {"mean": [30, 60], "low": [20, 50], "high": [40, 70]}
    assert found["series"]["fedavg"]["x"] == {"round": [1, 2], "seconds": [2, 4], "bytes": [2, 4]}
    assert "low" not in found["series"]["fedprox:mu=0.1"]["y"]["test_accuracy"]
    assert found["table"]["cells"][0][:2] == ["fedavg", "60.00 ± 14.14"]
    assert found["table"]["cells"][1][:3] == ["fedprox:mu=0.1", "20.00", "-30.00"]
    assert found["table"]["strong"][0][1]
    assert [line["key"] for line in found["settings"]["differ"]] == ["method.mu"]
    assert found["partitions"] == [{"name": "all runs", "counts": [[5, 0, 1], [0, 7, 2]]}]
    assert found["classes"][0]["final"] == [50, 100, 25]
    assert found["classes"][0]["rounds"] == [1, 2]
    worst = found["clients"][0]
    assert (worst["client"], worst["accuracy"]) == ([1, 0], [10, 90])
    assert [chart["id"] for chart in found["charts"]] == ["accuracy", "cost"]


def test_what_was_recorded_has_a_chart(tmp_path: Path) -> None:
    package.run(data=blobs(), method="fedcsd", out=tmp_path / "r", track_drift=True, holdout=0.3, **SMALL)
    shown = {
        chart["id"]: [m["key"] for m in chart["measures"]] for chart in collect([tmp_path / "r"])["charts"]
    }
    assert list(shown) == ["accuracy", "own", "drift", "mask", "target", "cost"]
    assert {"logit_drift", "feature_drift", "local_accuracy"} <= set(shown["drift"])
    assert {"mask_rate", "wrong_filtered", "right_lost"} <= set(shown["mask"])
    assert "diverged" not in shown["cost"]


def test_runs_that_are_not_as_they_should_be(tmp_path: Path) -> None:
    made(tmp_path / "good", [0.5, 0.6], rounds=9)
    made(tmp_path / "going", [0.5], ended=False, rounds=9, method={"name": "moon"})
    bad = made(tmp_path / "wild", [0.5], ended=False, rounds=9, method={"name": "fedprox"})
    (bad / "diverged.json").write_text(json.dumps({"round": 2, "message": "the loss"}))
    for name, file, text in (
        ("torn", "config.toml", "seed = "),
        ("odd", "summary.json", "{"),
        ("no", "diverged.json", "[]"),
    ):
        (made(tmp_path / name, [0.5], rounds=9) / file).write_text(text)
    gap = made(tmp_path / "gap", [0.1, 0.2, 0.3], rounds=9, method={"name": "scaffold"})
    lines = (gap / "metrics.jsonl").read_text().splitlines()
    (gap / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:20], "3", lines[2], '{"round": 4}']))
    (tmp_path / "gap" / "partition.npz").write_bytes(b"no zip")
    found = collect([tmp_path])
    states = {line[0]: line[6] for line in found["runs"]}
    assert states["good"] == "finished"
    assert states["going"] == "not finished: 1 of 9 rounds"
    assert states["wild"] == "diverged in round 2: the loss"
    assert all(states[name].startswith("damaged: ") for name in ("torn", "odd", "no"))
    assert found["series"]["scaffold"]["y"]["test_accuracy"]["mean"] == [10, None, 30]
    assert any("1 of its rounds cannot be read" in alert for alert in found["alerts"])
    assert found["series"]["fedprox"]["y"]["test_accuracy"]["ends"] == [[0, 50]]
    cells = {line[0]: line[1] for line in found["table"]["cells"]}
    assert cells["moon"] == "50.00 so far"
    assert "diverged (round 2)" in cells.values()
    page(found)


def test_a_seed_that_is_missing_has_no_difference(tmp_path: Path) -> None:
    made(tmp_path / "a0", [0.5])
    made(tmp_path / "b0", [0.6], method={"name": "scaffold"})
    made(tmp_path / "b1", [0.8], method={"name": "scaffold"}, seed=1)
    made(tmp_path / "b2", [0.8], method={"name": "scaffold"}, seed=2, ended=False)
    cells = collect([tmp_path])["table"]["cells"]
    assert cells[1][1:3] == ["70.00 ± 14.14 (1 of 3 not finished)", "+10.00 (1 of 2 seeds)"]


def test_a_seed_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.5, 0.6, 0.7)):
        made(tmp_path / f"c/a{seed}", [accuracy], seed=seed)
        made(tmp_path / f"c/b{seed}", [accuracy + 0.1], seed=seed, method={"name": "scaffold"})
    alone = made(tmp_path / "alone", [0.5], track_drift=True)
    drifted = {**json.loads((alone / "metrics.jsonl").read_text()), "logit_drift": 2.0}
    (alone / "metrics.jsonl").write_text(json.dumps(drifted) + "\n")
    (alone / "summary.json").write_text(json.dumps(summarise([drifted])))
    with pytest.warns(Note, match="left out, for they have the settings and seed of another run: .*c/a0"):
        found = collect([alone, tmp_path / "c"])
    assert [cell[:3] for cell in found["table"]["cells"]] == [
        ["fedavg", "60.00 ± 10.00", ""],
        ["scaffold", "70.00 ± 10.00", "+10.00 ± 0.00"],
    ]
    assert "fedavg, logit drift was measured in 1 of its 3 runs" in found["table"]["notes"]
    assert found["alerts"] == ["a0: left out, for it has the settings and seed of another run"]


@given(st.lists(st.one_of(st.integers(1, 6), st.none(), st.booleans(), st.floats(1, 3)), max_size=12))
def test_every_round_is_there_once(rounds: list[Any]) -> None:
    records = [
        {"round": n, "seconds": 1.0, "bytes_down": 1, "bytes_up": 1, "test_accuracy": 0.5} for n in rounds
    ]
    numbers = [r["round"] for r in usable(records)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert max((n for n in rounds if type(n) is int), default=0) <= len(numbers)


@pytest.mark.slow
@given(
    st.recursive(
        st.text() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.dictionaries(st.text(), inner),
    )
)
def test_data_cannot_leave_its_place(content: Any) -> None:
    text = safe_json(content)
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == content


def test_hostile_names_stay_in_the_data(tmp_path: Path) -> None:
    made(tmp_path / "r", [0.5], data=HOSTILE, method={"name": HOSTILE, HOSTILE: HOSTILE})
    text = page(collect([tmp_path / "r"])).replace(plotly_script(), "")
    assert "owned'</script>" not in text
    assert text.count("<script") == 3
    embedded = re.findall(r'id="data">(.*?)</script>', text, re.S)[0]
    assert HOSTILE in json.dumps(json.loads(embedded), ensure_ascii=False)


def test_only_the_page_s_own_scripts_may_run(tmp_path: Path) -> None:
    text = page(collect([made(tmp_path / "r", [0.5])]))
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="(.*?)"', text)[0])
    allowed = re.findall(r"'sha256-(.*?)'", policy)
    scripts = re.findall(r"<script(?: type=\"text/plain\" id=\"plotly\")?>(.*?)</script>", text, re.S)
    assert [base64.b64encode(sha256(s.encode()).digest()).decode() for s in scripts] == allowed
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert not re.findall(r'(?:src|href)="', text.replace(plotly_script(), ""))


@pytest.mark.slow
def test_thirty_runs_of_a_hundred_rounds_are_small_enough(tmp_path: Path) -> None:
    path = write_report([thirty(tmp_path)], tmp_path / "report.html")
    assert path.stat().st_size < 8_000_000


def test_a_thousand_clients_and_a_hundred_classes(tmp_path: Path) -> None:
    for seed in range(3):
        run = made(tmp_path / f"r{seed}", [0.5], seed=seed)
        counts = np.random.default_rng(seed).integers(0, 50, (1000, 100))
        np.savez_compressed(run / "partition.npz", rows=np.arange(5), sizes=[5], samples=5, counts=counts)
        lines = record(
            1, 0.5, class_accuracies=[0.5] * 100, client_accuracies=np.linspace(0, 1, 1000).tolist()
        )
        (run / "metrics.jsonl").write_text(json.dumps(lines))
    found = collect([tmp_path])
    assert len(found["partitions"]) == 3
    assert len(found["clients"][0]["place"]) <= 1000
    assert len(page(found).encode()) < 8_000_000


def test_the_commands_write_it_and_name_it(fedcsd: Fedcsd, fedcsd_run: FedcsdRun, tmp_path: Path) -> None:
    path = fedcsd_run()
    assert (path / "report.html").is_file()
    again = fedcsd("report", "r", "-o", "new/folder/x.html")
    assert again.stdout.strip() == "report: new/folder/x.html"
    assert fedcsd("run", "--rounds", "1", "--out", "r", "--overwrite").returncode == 0
    compared = fedcsd(
        "compare", "--methods", "fedavg,fedprox", "--rounds", "1", "--epochs", "1", "--out", "c"
    )
    assert "report: c/report.html" in compared.stdout
    assert not list((tmp_path / "c").glob("*/report.html"))
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        (("nowhere",), "nowhere holds no run (it does not exist)"),
        (("empty",), "empty holds no run (it has no config.toml)"),
        (("r", "-o", "c"), "c is a folder: name a file, such as c/report.html"),
        (("r", "-o", "r/config.toml/x.html"), "cannot write to r/config.toml/x.html"),
    ):
        result = fedcsd("report", *arguments)
        assert (result.returncode, result.stderr.count("\n")) == (2, 1)
        assert message in result.stderr


def test_a_comparison_s_page_has_its_labels_order_and_table(tmp_path: Path) -> None:
    methods = {"ours": package.FedCSD(mu=0.5), "base": "fedavg"}
    compared = package.compare(methods, [0, 1], data=blobs(), out=tmp_path / "c", **SMALL)
    shutil.copytree(tmp_path / "c" / "base-seed1", tmp_path / "c" / "left-over")
    found = collect([tmp_path / "c"])
    assert [m["label"] for m in found["methods"]] == ["ours", "base"]
    assert [cell[1] for cell in found["table"]["cells"]] == [row.accuracy for row in compared.rows]
    assert len(found["runs"]) == 4


def test_a_run_that_diverges_has_a_report(fedcsd: Fedcsd, tmp_path: Path) -> None:
    result = fedcsd("run", "--method", "fedavg", "--lr", "40", "--rounds", "9", "--out", "r")
    assert result.returncode == 1
    assert "report: r/report.html" in result.stdout
    assert "diverged in round" in collect([tmp_path / "r"])["alerts"][0]


def test_a_folder_of_damaged_runs_is_one_line(tmp_path: Path) -> None:
    (made(tmp_path / "r", [0.5]) / "config.toml").write_text("seed = ")
    with pytest.raises(UserError, match="damaged"):
        collect([tmp_path])


def ask(url: str, **headers: str) -> tuple[int, str, bytes]:
    request = urllib.request.Request(url, headers={k.replace("_", "-"): v for k, v in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers.get("ETag", ""), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, "", b""


def test_the_live_page(tmp_path: Path) -> None:
    run = tmp_path / "r"
    server = ReportServer([run])
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        status, version, content = ask(server.url + "data.json")
        assert (status, json.loads(content)["progress"]["runs"]) == (200, 0)  # waiting
        assert ask(server.url)[0] == 200
        made(run, [0.5, 0.6], ended=False, rounds=10)
        status, newer, content = ask(server.url + "data.json", If_None_Match=version)
        progress = json.loads(content)["progress"]
        assert newer != version
        assert (progress["done"], progress["rounds"], progress["left"], progress["over"]) == (
            2,
            10,
            16,
            False,
        )
        assert ask(server.url + "data.json", If_None_Match=newer)[0] == 304
        (run / "summary.json").write_text(
            json.dumps(
                {"final_accuracy": 0.6, "seconds": 4.0, "bytes_up": 1, "bytes_down": 1, "best_accuracy": 0.6}
            )
        )
        assert json.loads(ask(server.url + "data.json")[2])["progress"]["over"]
        assert ask(server.url, Host="evil.example")[0] == 403
        assert ask(server.url, Host=f"localhost:{server.server_port}")[0] == 200
        for path in ("config.toml", "../config.toml", "data.json?x", "r/config.toml"):
            assert ask(server.url + path)[0] == 404
        assert server.server_address[0] == "127.0.0.1"
    finally:
        server.shutdown()
        server.server_close()
