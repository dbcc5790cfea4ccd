"""Test the command line: help, results, and one line for every mistake."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedcsd.cli.options import parse_seeds
from fedcsd.errors import UserError
from helpers.program import Fedcsd, FedcsdRun

QUICK = ("--rounds", "2", "--epochs", "1")


def processor_seconds() -> float:
    """Return the CPU seconds of commands that have ended; other tests' work does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_help_is_quick_and_teaches() -> None:
    times = []
    for _ in range(5):
        began = processor_seconds()
        result = subprocess.run([sys.executable, "-m", "fedcsd", "--help"], capture_output=True, text=True)
        times.append(processor_seconds() - began)
    assert min(times) < 0.5
    assert result.returncode == 0
    for word in ("run", "resume", "compare", "list", "show", "digits"):
        assert word in result.stdout


def test_help_does_not_import_torch() -> None:
    code = "import sys; from fedcsd.cli.main import cli; import fedcsd; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "command", ["run", "compare", "resume", "list", "show", "new-method", "drift", "tsne", "plot"]
)
def test_every_command_has_help(fedcsd: Fedcsd, command: str) -> None:
    result = fedcsd(command, "--help")
    assert result.returncode == 0
    assert "fedcsd" in result.stdout


def test_run_show_resume(fedcsd: Fedcsd, tmp_path: Path) -> None:
    federation = ("--method", "fedcsd", "--data", "digits", "--clients", "10", "--beta", "0.1")
    result = fedcsd("run", *federation, *QUICK, "--seed", "0", "--workers", "2", "--out", "runs/first")
    assert result.returncode == 0, result.stderr
    assert "final accuracy" in result.stdout
    assert "round 2/2" in result.stdout
    assert (tmp_path / "runs/first/curves.png").stat().st_size > 10_000
    shown = fedcsd("show", "runs/first")
    assert "best round (not the result)" in shown.stdout
    fewer = fedcsd("resume", "runs/first", "--rounds", "1")
    assert fewer.returncode == 2
    assert fewer.stderr == "error: runs/first has 2 rounds already: --rounds must be at least that\n"
    again = fedcsd("resume", "runs/first")
    assert again.returncode == 0
    assert "is finished: 2 rounds" in again.stdout


def test_settings_from_a_file_options_and_set(fedcsd: Fedcsd, tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(
        'rounds = 9\nepochs = 1\nclients = 5\n[method]\nname = "fedcsd"\nmu = 0.5\ntau = 4\n'
    )
    result = fedcsd(
        "run",
        "experiment.toml",
        "--rounds",
        "3",
        "--set",
        "method.mu=0.01",
        "--set",
        "rounds=1",
        "--out",
        "a",
    )
    assert result.returncode == 0, result.stderr
    config = (tmp_path / "a/config.toml").read_text()
    for line in ("rounds = 1", "clients = 5", "mu = 0.01", "tau = 4.0"):
        assert line in config.splitlines()
    # A run's own config is an experiment: the same result again.
    assert fedcsd("run", "a/config.toml", "--out", "b").returncode == 0
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    # Another method on the command line does not inherit the file's options.
    assert (
        fedcsd("run", "experiment.toml", "--method", "fedavg", "--set", "rounds=1", "--out", "c").returncode
        == 0
    )


def test_runs_without_a_name_are_numbered(fedcsd: Fedcsd, tmp_path: Path) -> None:
    for _ in range(2):
        assert fedcsd("run", "--method", "fedavg", "--rounds", "1", "--epochs", "1").returncode == 0
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"fedavg-digits", "fedavg-digits-2"}


def test_compare_goes_on_where_it_was_cut_off(
    fedcsd: Fedcsd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (
        "compare",
        "--methods",
        "fedavg,fedcsd:mu=0.05",
        "--seeds",
        "0,1",
        *QUICK,
        "--track-drift",
        "--out",
        "c",
    )
    first = fedcsd(*command)
    assert first.returncode == 0, first.stderr
    assert "±" in first.stdout
    assert "vs fedavg" in first.stdout
    assert "logit drift" in first.stdout
    table = (tmp_path / "c/comparison.md").read_text()
    for name in ("summary.json", "model.safetensors"):  # as if it had been cut off in the last run
        (tmp_path / "c/fedcsd-mu=0.05-seed1" / name).unlink()
    (tmp_path / "c/comparison.md").unlink()
    second = fedcsd(*command)
    assert second.returncode == 0, second.stderr
    assert (tmp_path / "c/comparison.md").read_text() == table
    assert fedcsd("show", "c").stdout in second.stdout
    other = fedcsd(*command, "--lr", "0.5")
    assert other.returncode == 2
    assert "lr is 0.01 there and 0.5 here" in other.stderr
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    plain = fedcsd("show", "c")
    assert plain.returncode == 0, plain.stderr
    assert " ? " in plain.stdout  # for ±


def test_compare_takes_options_and_seed_from_a_file(fedcsd: Fedcsd, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(
        'seed = 3\nrounds = 1\nepochs = 1\n[method]\nname = "fedcsd"\nmu = 0.5\n'
    )
    result = fedcsd(
        "compare", "e.toml", "--methods", "fedavg,fedcsd,fedcsd:mu=0.1", "--set", "method.tau=4", "--out", "c"
    )
    assert result.returncode == 0, result.stderr
    config = (tmp_path / "c/fedcsd-seed3/config.toml").read_text()
    assert "mu = 0.5" in config
    assert "tau = 4.0" in config
    own = (tmp_path / "c/fedcsd-mu=0.1-seed3/config.toml").read_text()
    assert "mu = 0.1" in own  # what --methods says of one method goes first
    assert fedcsd("compare", "e.toml", "--methods", "fedcsd", "--seeds", "1", "--out", "d").returncode == 0
    assert (tmp_path / "d/fedcsd-seed1").exists()  # what is said here goes over the file


def test_compare_refuses_its_options_in_a_file(fedcsd: Fedcsd, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text('seeds = [0, 1]\nout = "c"\n')
    result = fedcsd("compare", "e.toml", "--methods", "fedavg")
    assert result.returncode == 2
    assert result.stderr == "error: seeds is no setting: give it as --seeds\n"


def test_a_comparison_that_is_cut_off_can_be_shown(fedcsd: Fedcsd, tmp_path: Path) -> None:
    fedcsd("run", "--method", "fedavg", *QUICK, "--out", "c/fedavg-seed0")
    shown = fedcsd("show", "c")
    assert shown.returncode == 0, shown.stderr
    assert "2 of 2" in shown.stdout
    assert "the same command again goes on with it" in shown.stdout


def test_names_with_brackets_are_shown_as_they_are(fedcsd: Fedcsd) -> None:
    result = fedcsd("run", *QUICK, "--out", "runs/a[b] [/red] c")
    assert result.returncode == 0, result.stderr
    assert "runs/a[b] [/red] c/curves.png" in result.stdout


def test_runs_are_resumed_from_anywhere(fedcsd: Fedcsd, tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (100, 8, 8)), np.arange(100) % 3
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert (
        fedcsd("run", "--data", "mine.npz", "--clients", "3", "--beta", "5", *QUICK, "--out", "r").returncode
        == 0
    )
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-m", "fedcsd", "resume", "../r", "--rounds", "3"]
    assert subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True).returncode == 0


@pytest.mark.parametrize("what", ["methods", "datasets", "models", "partitions"])
def test_list(fedcsd: Fedcsd, what: str) -> None:
    result = fedcsd("list", what)
    assert result.returncode == 0
    expected = {"methods": "fedcsd", "datasets": "digits", "models": "simple_cnn", "partitions": "dirichlet"}[
        what
    ]
    assert expected in result.stdout


def test_list_of_one_method_says_what_its_options_mean(fedcsd: Fedcsd) -> None:
    result = fedcsd("list", "methods", "fedcsd")
    assert "Rethinking Client Drift" in result.stdout
    assert "weight of the distillation term" in result.stdout
    assert "fedcsd:m1" in result.stdout


def test_seeds_may_be_a_range() -> None:
    assert parse_seeds("0-2, 7, 9-9") == (0, 1, 2, 7, 9)
    with pytest.raises(UserError, match="--seeds takes whole numbers such as 0,1,2 or 0-2, not '0,5-3'"):
        parse_seeds("0,5-3")


def test_a_comparison_is_no_run(fedcsd: Fedcsd) -> None:
    fedcsd("compare", "--methods", "fedavg", "--rounds", "1", "--epochs", "1", "--out", "c")
    said = fedcsd("resume", "c")
    assert said.returncode == 2
    assert (
        "c holds a comparison: name one of its runs, such as c/fedavg-seed0; the same `fedcsd compare`"
        in said.stderr
    )
    looked = fedcsd("drift", "c").stderr
    assert looked == "error: c holds a comparison: name one of its runs, such as c/fedavg-seed0\n"


BAD = [
    (("list", "methods", "fedcds"), "unknown method 'fedcds': did you mean fedcsd?"),
    (("list", "models", "mlp"), "takes no name: leave mlp out"),
    (("run", "--method", "fedcds"), "unknown method 'fedcds': did you mean fedcsd?"),
    (("run", "--data", "digit"), "unknown data set 'digit': did you mean digits?"),
    (("run", "--model", "mlpp"), "unknown model 'mlpp': did you mean mlp?"),
    (("run", "--partition", "dirichle"), "unknown partition 'dirichle': did you mean dirichlet?"),
    (("run", "--set", "method.taw=1"), "'taw' is no option of fedcsd: did you mean tau?"),
    (("compare", "--methods", "fedavg,fedprox:zz=1"), "'zz' is no option of fedprox: choose from mu"),
    (("run", "--set", "nonsense=3"), "data, data_dir, device"),
    (("run", "--set", "mehtod=fedavg"), "unknown setting 'mehtod': did you mean method?"),
    (("run", "--set", "round=3"), "unknown setting 'round': did you mean rounds"),
    (
        ("run", "--set", "method.mask=adaptiv"),
        "unknown value of method.mask 'adaptiv': did you mean adaptive?",
    ),
    (("run", "--method", "fedavg", "--set", "method.mu=1"), "fedavg has no options, but mu is given"),
    (("run", "--bta", "0.1"), "--beta"),
    (("rnu",), "run"),
    (("run", "--mu", "0.1"), "mu is an option of the method: --set method.mu=…"),
    (("run", "--set", "mu=0.1"), "mu is an option of the method: --set method.mu=…"),
    (("run", "--set", "method.rounds=3"), "rounds is a setting, not an option of fedcsd"),
    (("run", "--method", ""), "unknown method ''"),
    (("run", "--set", "method.variant=authors", "--set", "method.mask=none"), "has no switches"),
    (("compare", "--methods", "fedcsd:mu"), "mu is an option of fedcsd: give it a value, fedcsd:mu=…"),
    (
        ("compare", "--methods", "fedavg,fedcsd:unifrom"),
        "unknown preset 'unifrom' of fedcsd: did you mean uniform?",
    ),
    (("run", "--method", "fedavg:m1"), "fedavg has no presets, but 'm1' is given"),
    (("run", "--method", "nothing.py:Mine"), "there is no file"),
    (("run", "--method", "nothing.here:Mine"), "nothing.here cannot be imported"),
    (("new-method", "my-method.py"), "call it my_method.py"),
    (("new-method", "."), ". is a folder: name a file, such as my_method.py"),
    (("new-method", ".."), "name a file, such as ../my_method.py"),
    (("new-method", "file.txt"), "its name must end in .py"),
    (("new-method", "mine.py", "--name", "1st"), "is no name for a class"),
    (("new-method", "fed_avg.py"), "FedAvg is the name of something else"),
    (("new-method", "nowhere/mine.py"), "cannot write to nowhere/mine.py: No such file or directory"),
    (("compare", "--methods", "fedavg,fedcsd", "--set", "method.taau=4"), "has an option 'taau'"),
    (("run", "--out", "x" * 300), "File name too long: choose another --out"),
    (("list", "method"), "did you mean methods?"),
    (("run", "--rounds", "0"), "rounds must be at least 1, not 0"),
    (("run", "--participation", "1.5"), "participation must be more than 0 and at most 1, not 1.5"),
    (("run", "--set", "lr=nan"), "lr must be a finite number, not nan"),
    (("run", "--set", "method.mu=-1"), "method.mu must be at least 0, not -1"),
    (("run", "--set", "clients=2.5"), "clients must be a whole number, not 2.5"),
    (("run", "--set", "track_drift=3"), "track_drift must be true or false, not 3"),
    (("run", "--set", "rounds"), "--set takes KEY=VALUE"),
    (("run", "--clients", "500"), "lower --clients or --min-samples"),
    (("run", "--clients", "100", "--beta", "0.001"), "raise --beta"),
    (("run", "--model", "simple_cnn"), "needs images of at least 16×16"),
    (("run", "nothing.toml"), "there is no file nothing.toml"),
    (("run", "--data", "nothing.npz"), "there is no file or folder nothing.npz"),
    (("resume", "nothing"), "nothing holds no run"),
    (("show", "nothing"), "nothing holds no run (it does not exist)"),
    (("compare", "--methods", "fedavg,fedcds"), "did you mean fedcsd?"),
    (("compare", "--methods", "fedavg", "--seeds", "0,x"), "--seeds takes whole numbers"),
    (("compare", "--methods", "fedavg", "--seeds", "0-x"), "--seeds takes whole numbers"),
    (("compare", "--methods", "fedavg", "--seeds", "0-3,2"), "--seeds needs different whole numbers"),
    (
        ("compare", "--methods", "fedavg", "--seeds", "3-1"),
        "--seeds takes whole numbers such as 0,1,2 or 0-2, not '3-1'",
    ),
    (("run", "--method", "fedavg,fedcsd"), "is more than one method: fedcsd compare --methods fedavg,fedcsd"),
    (("compare", "--methods", "fedavg,fedavg"), "names fedavg twice"),
    (("compare", "--methods", "fedavg", "--seeds", "1,1"), "--seeds needs different whole numbers"),
    (("compare", "--methods", "fedavg", "--seeds", "0,-1"), "different whole numbers from 0 on"),
    (
        ("compare", "--methods", "fedavg", "--seeds", "0,1", "--set", "seed=3"),
        "--set seed=3 beside --seeds: name all seeds in --seeds alone",
    ),
    (
        ("compare", "--methods", "fedavg", "--set", "method.name=fedcsd"),
        "name all methods in --methods alone",
    ),
    (
        ("partition", "--plot", "file.txt/x/p.png"),
        "cannot write to file.txt/x/p.png: Not a directory: choose another --plot",
    ),
    (("reproduce", "--dry-run"), "--dry-run needs a name, such as: fedcsd reproduce table1"),
    (("reproduce", "--scale", "paper"), "--scale needs a name"),
    (("compare", "--methods", "fedavg", "--set", "seeds=0"), "seeds is no setting: give it as --seeds"),
    (("compare", "--methods", "fedavg", "--set", "methods=a"), "methods is no setting: give it as --methods"),
    (("compare", "--methods", "fedavg", "--set", "overwrite=true"), "give it as --overwrite"),
    (("run", "--set", "out=a"), "out is no setting: give it as --out"),
    (("reproduce", "table1", "--set", "seeds=0"), "seeds is no setting: give it as --seeds"),
    (("run", "--out", "file.txt/run"), "choose another --out"),
    (("run", "--out", "/proc/run"), "cannot write to /proc/run"),
    (("run", "--out", "file.txt"), "is a file: choose another --out"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), BAD, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_mistakes_get_one_line_and_status_2(
    fedcsd: Fedcsd, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file.txt").touch()
    result = fedcsd(*arguments)
    assert result.returncode == 2, result.stdout + result.stderr
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert {p.name for p in tmp_path.iterdir()} == {"file.txt"}  # nothing half-written is left behind


def test_what_is_no_file_of_settings(fedcsd: Fedcsd, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.toml").touch()
    (tmp_path / "empty").mkdir()
    np.savez(tmp_path / "mine.npz", x=np.arange(1000))
    for given, said in {
        "r": "r is a folder, not a file of settings: give r/config.toml",
        "empty": "empty is a folder, not a file of settings",
        "mine.npz": "mine.npz is no file of settings; if it is data, give it as --data mine.npz",
    }.items():
        assert fedcsd("run", given).stderr == f"error: {said}\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(fedcsd: Fedcsd, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    result = fedcsd("run", "--out", "locked/run")
    assert result.returncode == 2
    assert "Permission denied" in result.stderr


def test_divergence_ends_the_run_with_advice(fedcsd: Fedcsd) -> None:
    result = fedcsd("run", "--lr", "1e9", "--out", "run")
    assert result.returncode == 1
    assert "the loss is no longer finite" in result.stderr
    assert "lower the learning rate" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_what_a_user_should_know_is_one_plain_line_said_once(fedcsd: Fedcsd) -> None:
    result = fedcsd("compare", "--methods", "fedavg,fedbn", "--seeds", "0,1", *QUICK, "--out", "c")
    assert result.returncode == 0, result.stderr
    assert result.stderr == "note: this model has no BatchNorm: fedbn is the same as fedavg here\n"


def test_debug_shows_the_traceback(fedcsd: Fedcsd) -> None:
    assert "Traceback" in fedcsd("run", "--data", "nothing.npz", "--debug").stderr


def test_ctrl_c_again_while_the_program_ends_is_silent() -> None:
    code = """
import atexit, os, signal, time
from fedcsd.cli import main as cli
def interrupt(*_, **__): raise KeyboardInterrupt("what is saved")
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(20)))
cli.cli.main = interrupt
cli.main([])"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15)
    assert result.stderr == "interrupted: what is saved\n"
    assert result.returncode == -signal.SIGINT


def test_own_data_from_npz(fedcsd_run: FedcsdRun, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    y = random.integers(0, 3, 300)
    x = (random.integers(0, 100, (300, 20, 20)) + 50 * y[:, None, None]).astype(np.uint8)
    np.savez(tmp_path / "mine.npz", x_train=x[:200], y_train=y[:200], x_test=x[200:], y_test=y[200:])
    run = fedcsd_run("--data", "mine.npz", "--clients", "3", "--beta", "1", rounds=3, epochs=2)
    assert 'model = "simple_cnn"' in (run / "config.toml").read_text()
