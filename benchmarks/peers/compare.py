"""Compare fedcsd with other federated simulators at the same work: seconds per round, memory, accuracy.

    python benchmarks/peers/compare.py --workloads W1,W2,W3 --repeats 5 --json results/speed/peers.json
    python benchmarks/peers/compare.py --workloads W2 --only flower,pfl,plain --repeats 1

The contenders, each in an environment of its own that is made the first time (peers/requirements.toml),
and how each is set up; their docstrings say more:
  flower   Flower's simulation engine on Ray: an actor for each core, one thread each; the server evaluates
           with all cores
  pfl      pfl-research: a process for each core (PFL_WORKER_ADDRESSES), one thread each, its own balancing
           of unequal clients, evaluation shared among the processes
  fedlab   FedLab's StandalonePipeline: one process, one thread or all cores', whichever is faster
  plain    a plain PyTorch loop (deepcopy, DataLoader, torch.optim.SGD): threads as for fedlab
  fedcsd   this checkout, Federation and LocalBackend: a lane for each core, one thread each

The work, in files that all read: the same images, clients, network, initial weights and cohorts, FedAvg
weighted by samples, and evaluation on 2,000 test images after every round. The order of batches differs,
so accuracies do: by twenty points and more in W3's first two rounds, little after the default rounds.
  W1  10 clients with label skew (Dirichlet 0.5), 20,000 MNIST images, simple CNN, batches of 64, 2 epochs
  W2  200 clients of 50 MNIST images, 20 in a round, simple CNN, batches of 10, 1 epoch
  W3  pfl-research's CIFAR-10 benchmark: 1,000 clients of 50 images, 50 in a round, its small CNN with
      dropout, batches of 10, lr 0.1, no momentum; made-up images (a noisy pattern for each of ten
      classes) in CIFAR-10's shape, which are learnt within a few rounds
MNIST is read from --data-dir (or FEDCSD_DATA, or fetched); where it cannot be had, made-up images take
its place, and the table says so.

Repetitions are interleaved. A run's first round warms up; its time a round is the median of the others,
and the table has the median of the repetitions with their range. Start-up is the time until the end of
the first round less one ordinary round. Peak memory is that of all processes of a run together, shared
pages counted once. Run it on a machine that does nothing else: before each run it waits a while for
others to be done, and figures taken beside them are marked. Contenders run without a network but
127.0.0.1 where the system allows it (unshare).
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import quiet
import report
from environments import NotInstalled, python_of, versions
from memory import Peak, end

HERE = Path(__file__).resolve().parent
RUNNERS = {
    "flower": "flower.py",
    "pfl": "pfl_research.py",
    "fedlab": "fedlab_serial.py",
    "plain": "plain.py",
    "fedcsd": "ours.py",
}
SEVERAL_PROCESSES = ("flower", "pfl")  # fedcsd sees to its own threads
ROUNDS = {"W1": 3, "W2": 20, "W3": 3}
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONWARNINGS": "ignore",
}


class Failed(Exception):
    """A contender's run has failed; the message is one line."""


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def alone(python: Path) -> list[str]:
    """Return the command prefix that leaves only 127.0.0.1 of the network; empty if there is none."""
    prefix = ["unshare", "--map-root-user", "--net", str(python), str(HERE / "alone.py")]
    try:
        tried = subprocess.run([*prefix, "true"], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return prefix if tried.returncode == 0 else []


def environment_of(name: str, scratch: Path) -> dict[str, str]:
    hidden = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    kept = {key: value for key, value in os.environ.items() if key not in hidden}
    threads = {"OMP_NUM_THREADS": "1"} if name in SEVERAL_PROCESSES else {}
    return {
        **kept,
        **QUIET,
        **threads,
        "FLWR_HOME": str(scratch / "flwr"),
        "RAY_TMPDIR": str(scratch / "ray"),
    }


def run_once(name: str, python: Path, work: Path, rounds: int, limit: float) -> dict[str, Any]:
    """Run one contender; return seconds of each round, start-up, peak memory and accuracy."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        scratch = Path(folder)
        out, log = scratch / "figures.json", scratch / "log"
        command = [
            *alone(python),
            str(python),
            str(HERE / RUNNERS[name]),
            str(work),
            str(rounds + 1),
            str(out),
        ]
        began = time.time()
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                stdout=stream,
                stderr=stream,
                env=environment_of(name, scratch),
                cwd=scratch,
                start_new_session=True,
            )
            watch = Peak(process.pid)
            watch.start()
            try:
                code = process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                raise Failed(f"took longer than {limit:.0f} s") from None
            finally:
                peak = watch.stop()
                end(process.pid)
                process.wait()
        if code or not out.exists():
            raise Failed(last_line(log.read_text(encoding="utf-8", errors="replace"), code))
        told = json.loads(out.read_text(encoding="utf-8"))
    return {
        "seconds": report.round_seconds(told["times"]),
        "start_up": report.start_up(began, told["times"]),
        "peak_bytes": peak,
        "accuracy": told["accuracies"][-1],
        "accuracies": told["accuracies"][1:],
        "processes": told.get("processes", 1),
        "threads": told["threads"],
    }


def last_line(log: str, code: int) -> str:
    """Return the reason of a failure: the last line that names an error, or the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [f"exit status {code}"])[-1][:200]


def install(names: list[str], venvs: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The contenders' interpreters, and why there is none for the others."""
    ready: dict[str, Path] = {}
    failures: dict[str, str] = {}
    for name in names:
        say(f"environment of {name} …")
        try:
            ready[name] = python_of(name, venvs)
        except NotInstalled as error:
            failures[name] = f"not installed: {error}"
            say(f"  {failures[name]}")
    return ready, failures


def measure(
    workload: str, folder: Path, ready: dict[str, Path], arguments: argparse.Namespace, rounds: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Run all repetitions of one workload in turn; leave out a contender that fails."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ready}
    failures: dict[str, str] = {}
    cores = len(os.sched_getaffinity(0))
    for repetition in range(1, arguments.repeats + 1):
        for name, python in ready.items():
            if name in failures:
                continue
            before = quiet.wait(cores, arguments.patience)
            try:
                run = run_once(name, python, folder, rounds, arguments.limit)
            except Failed as error:
                failures[name] = str(error)
                say(f"{workload} {repetition}/{arguments.repeats} {name:>7}: failed: {error}")
                continue
            run["others_busy"] = max(before, quiet.busy_cores(cores))
            runs[name].append(run)
            figure = report.summary([run])
            say(
                f"{workload} {repetition}/{arguments.repeats} {name:>7}: {figure['seconds']:.3f} s a round, "
                f"{100 * run['accuracy']:.1f}%, {run['peak_bytes'] / 2**20:,.0f} MiB"
                + (
                    f" (others used {run['others_busy']:.1f} cores)"
                    if run["others_busy"] > quiet.BUSY
                    else ""
                )
            )
    return runs, failures


def facts(ready: dict[str, Path]) -> dict[str, Any]:
    return {
        "machine": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: versions(python) for name, python in ready.items()},
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default="W1,W2,W3")
    parser.add_argument("--only", default=",".join(RUNNERS), help="these contenders, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--rounds", default="", help="measured rounds of every workload, or of each: 3,20,3 (the default)"
    )
    parser.add_argument("--venvs", type=Path, default=Path(".peers"), help="where the environments are kept")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("FEDCSD_DATA"))
    parser.add_argument("--limit", type=float, default=900, help="seconds that one run may take")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for a quiet machine")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    arguments.workloads = arguments.workloads.split(",")
    arguments.only = arguments.only.split(",")
    for given, known in ((arguments.workloads, ROUNDS), (arguments.only, RUNNERS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"there is no {unknown[0]}; there are {', '.join(known)}")
    numbers = [int(number) for number in arguments.rounds.split(",") if number]
    if len(numbers) not in (0, 1, len(arguments.workloads)) or any(n < 1 for n in numbers):
        parser.error("--rounds takes one number, or one for each workload, each at least 1")
    each = numbers * len(arguments.workloads) if len(numbers) == 1 else numbers
    arguments.rounds = dict(zip(arguments.workloads, each, strict=True)) if each else ROUNDS
    return arguments


def main() -> None:
    arguments = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended on the way out
    from make_workloads import WORKLOADS

    ready, not_installed = install(arguments.only, arguments.venvs.resolve())
    result: dict[str, Any] = {"facts": facts(ready), "not_installed": not_installed, "workloads": {}}
    folder = Path(tempfile.mkdtemp(prefix="peers-work-"))
    try:
        for workload in arguments.workloads:
            rounds = arguments.rounds[workload]
            WORKLOADS[workload](folder / workload, rounds + 1, arguments.data_dir)
            told = json.loads((folder / workload / "workload.json").read_text(encoding="utf-8"))
            runs, failures = measure(workload, folder / workload, ready, arguments, rounds)
            failures |= not_installed
            found = report.figures(runs)
            what = (WORKLOADS[workload].__doc__ or "").partition("\n")[0]
            title = f"\n{workload}: {what} Images: {told['settings']['data']}; {rounds} rounds"
            print(report.table(title, found, failures, list(RUNNERS)), flush=True)
            result["workloads"][workload] = {
                "settings": told["settings"],
                "rounds": rounds,
                "figures": found,
                "failures": failures,
                "runs": runs,
            }
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
