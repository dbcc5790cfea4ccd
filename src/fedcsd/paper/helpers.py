"""Start helper processes for `--jobs`: each trains runs of the same plan, on the next GPU if there are several."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

import torch

from fedcsd.errors import RunStopped, UserError, note
from fedcsd.federation.backends import memory
from fedcsd.federation.backends.local import cores, follow_parent
from fedcsd.federation.callbacks import Callbacks
from fedcsd.paper.plan import Filter, PlannedRun
from fedcsd.paper.reproduce import Made, Progress, reproduce
from fedcsd.paper.scales import Choices
from fedcsd.results.terminal import ProgressDisplay


def gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name for name in named.split(",") if name] or [str(n) for n in range(torch.cuda.device_count())]


def shared_out(choices: Choices, jobs: int) -> tuple[Choices, int]:
    """Return the settings with the cores divided among the processes, and their number (0: one for each GPU)."""
    cuda = choices.overrides.get("device") == "cuda"
    jobs = jobs or (max(1, len(gpus())) if cuda else 1)
    if cuda or jobs == 1 or "workers" in choices.overrides:
        return choices, jobs
    return replace(choices, overrides={**choices.overrides, "workers": max(1, cores() // jobs)}), jobs


def on_the_same(jobs: int, gpus: int) -> list[int]:
    """Return for each process the number of processes on its GPU, itself included."""
    return [len(range(number % gpus, jobs, gpus)) if gpus else 1 for number in range(jobs)]


@contextmanager
def helping(jobs: int, names: Sequence[str], choices: Choices, out: Path, only: Filter) -> Iterator[None]:
    """Let jobs − 1 other processes train within this context. Their output is in logs/.

    Ctrl-C reaches them as well. When this process ends in another way, it stops them and waits.
    """
    context, places = multiprocessing.get_context("spawn"), gpus()
    cuda = choices.overrides.get("device") == "cuda"
    sharing = on_the_same(jobs, len(places) if cuda else 0)
    helpers = []
    try:
        with _ctrl_c_held_back(jobs > 1):
            for number in range(1, jobs):
                log = out / "logs" / f"job-{number + 1}.log"
                gpu = places[number % len(places)] if places else ""
                arguments = (jobs, names, choices, out, only, gpu, sharing[number], log)
                process = context.Process(target=_help, args=arguments)
                process.start()
                helpers.append((process, log))
        if sharing[0] > 1:
            memory.share(sharing[0])
        yield
    except BaseException:
        for process, _ in helpers:
            process.terminate()
        raise
    finally:
        for process, log in helpers:
            process.join()
            if process.exitcode == 1:
                note(f"a helping process ended early: see {log}")
        if sharing[0] > 1:
            memory.share(1)


@contextmanager
def _ctrl_c_held_back(hold: bool) -> Iterator[None]:
    """Hold Ctrl-C back to the end of this context. A process that starts within it unblocks the signal itself."""
    if not hold or sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # its start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ShownProgress(Progress):
    """Show the progress of runs and pictures in the terminal or a log, and each table when it is made."""

    def __init__(
        self, terminal: ProgressDisplay, jobs: int, show: Callable[[Made], None] = lambda made: None
    ):
        self.terminal, self.jobs, self.show = terminal, jobs, show

    def start(self, run: PlannedRun, rounds: int, coming: Sequence[PlannedRun]) -> Callbacks:
        def ahead() -> list[float]:
            return [other.seconds_left for other in coming if not other.ended]

        weight = run.seconds / rounds
        return self.terminal.follow(run.label, rounds, weight=weight, ahead=ahead, jobs=self.jobs)

    def wait(self, left: Sequence[PlannedRun]) -> None:
        self.terminal.wait([run.seconds_left for run in left])

    def step(self, what: str, done: int, total: int) -> None:
        self.terminal.step(what, done, total)

    def made(self, made: Made) -> None:
        self.terminal.move_up()
        self.show(made)


def _help(
    jobs: int,
    names: Sequence[str],
    choices: Choices,
    out: Path,
    only: Filter,
    gpu: str,
    sharing: int,
    log: Path,
) -> None:
    """Train as a helper process until no run is left."""
    follow_parent()
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA is first used
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", buffering=1, encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        status = 0
        try:
            if sys.platform != "win32":
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if sharing > 1:
                memory.share(sharing)
            with ProgressDisplay() as terminal:
                reproduce(
                    names, choices, out, only=only, tables=False, progress=ShownProgress(terminal, jobs)
                )
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        except (UserError, RunStopped) as error:
            print(error, flush=True)
            status = 1
    sys.exit(status)
