"""Kill a run with SIGKILL at random moments, resume it each time, and compare with an undisturbed run.

    python benchmarks/kill_and_resume.py --kills 20
    python benchmarks/kill_and_resume.py --method moon --client-state disk

Prints how many kills hit which stage and whether the final model is the same byte for byte.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 60
RUN = ("run", "--rounds", str(ROUNDS), "--epochs", "2", "--workers", "2", "--participation", "0.6")


def fedcsd(folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "fedcsd", *arguments], cwd=folder, stdout=subprocess.DEVNULL
    )


def rounds_done(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def kill_until_done(folder: Path, run: tuple[str, ...], kills: int, seed: int) -> int:
    """Run `whole` undisturbed; run `killed` with this many kills, some while it starts and most
    while it trains, each followed by a resume. Returns how many kills there were."""
    assert fedcsd(folder, *run, "--out", "whole").wait() == 0
    moments, killed, done = random.Random(seed), folder / "killed", 0
    while True:
        started = (killed / "config.toml").exists()
        process = fedcsd(folder, *(("resume", "killed") if started else (*run, "--out", "killed")))
        if done == kills:
            assert process.wait() == 0
            return done
        before = rounds_done(killed)
        if moments.random() < 0.3:
            time.sleep(moments.uniform(0.05, 2.0))
        else:
            more = moments.randint(1, max(1, ROUNDS // (2 * kills)))
            while process.poll() is None and rounds_done(killed) < before + more:
                time.sleep(0.001)
            time.sleep(moments.uniform(0, 0.1))
        if process.poll() is not None:
            return done
        process.send_signal(signal.SIGKILL)
        process.wait()
        done += 1
        print(f"kill {done}: round {rounds_done(killed)} of {ROUNDS}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", default="fedcsd:mu=0.01")
    parser.add_argument("--client-state", default="memory", choices=["memory", "disk"])
    arguments = parser.parse_args()
    run = (*RUN, "--method", arguments.method, "--client-state", arguments.client_state)
    with tempfile.TemporaryDirectory() as name:
        kills = kill_until_done(Path(name), run, arguments.kills, arguments.seed)
        whole, killed = (
            (Path(name) / each / "model.safetensors").read_bytes() for each in ("whole", "killed")
        )
    same = whole == killed
    print(f"{kills} kills, {kills} resumes, final model byte-identical: {same}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
