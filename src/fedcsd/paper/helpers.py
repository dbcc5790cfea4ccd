"""Other processes that train runs of the same plan, each on the next GPU where there are several."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import torch

from fedcsd.errors import RunStopped, UserError, note
from fedcsd.federation.backends import memory
from fedcsd.federation.backends.local import cores, follow_parent
from fedcsd.paper.plan import Filter, Planned
from fedcsd.paper.reproduce import reproduce
from fedcsd.paper.scales import Choices
from fedcsd.results.terminal import ProgressDisplay, RunProgress


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [name for name in named.split(",") if name] or [str(n) for n in range(torch.cuda.device_count())]


def shared_out(choices: Choices, jobs: int) -> tuple[Choices, int]:
    """How many processes there are to be (0: one for each GPU), and the settings with the cores dealt out."""
    cuda = choices.overrides.get("device") == "cuda"
    jobs = jobs or (max(1, len(gpus())) if cuda else 1)
    if cuda or jobs == 1 or "workers" in choices.overrides:
        return choices, jobs
    return replace(choices, overrides={**choices.overrides, "workers": max(1, cores() // jobs)}), jobs


def on_the_same(jobs: int, gpus: int) -> list[int]:
    """Of each process how many there are on its GPU, itself included."""
    return [len(range(number % gpus, jobs, gpus)) if gpus else 1 for number in range(jobs)]


@contextmanager
def helping(jobs: int, names: Sequence[str], choices: Choices, out: Path, only: Filter) -> Iterator[None]:
    """While this lasts, jobs − 1 other processes train too. What each says is in logs/.

    Ctrl-C reaches them as well; whatever else ends this process asks them to stop and waits for it.
    """
    context, places = multiprocessing.get_context("spawn"), gpus()
    cuda = choices.overrides.get("device") == "cuda"
    sharing = on_the_same(jobs, len(places) if cuda else 0)
    helpers = []
    try:
        with interrupts_held_back(jobs > 1):
            for number in range(2, jobs + 1):
                log = out / "logs" / f"job-{number}.log"
                gpu = places[(number - 1) % len(places)] if places else ""
                arguments = (names, choices, out, only, gpu, sharing[number - 1], log)
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
def interrupts_held_back(hold: bool) -> Iterator[None]:
    """Ctrl-C waits until this is over. In a process that is started meanwhile it waits until that lets it in."""
    if not hold or sys.platform == "win32":
        yield
        return
    resource_tracker.ensure_running()  # which would let it in
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def followed(progress: ProgressDisplay, run: Planned, rounds: int, coming: Sequence[Planned]) -> RunProgress:
    """Progress of a run of a process that knows of its own work alone."""
    return progress.follow(run.label, rounds)


def _help(
    names: Sequence[str], choices: Choices, out: Path, only: Filter, gpu: str, processes: int, log: Path
) -> None:
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
            if processes > 1:
                memory.share(processes)
            with ProgressDisplay() as progress:
                reproduce(names, choices, out, only=only, tables=False, on_start=partial(followed, progress))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        except (UserError, RunStopped) as error:
            print(error, flush=True)
            status = 1
    sys.exit(status)
