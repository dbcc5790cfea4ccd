"""Open the backend and the client states of an experiment on this machine; check its GPU; handle SIGTERM."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from fedcsd.errors import UserError
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.backends.local import LocalBackend, cores
from fedcsd.federation.backends.protocol import Backend
from fedcsd.federation.cohort import cohort
from fedcsd.federation.setup import Setup
from fedcsd.federation.states import States, client_states

Host = Callable[[Setup, Path | None], AbstractContextManager[tuple[Backend, States]]]
"""Opens the backend and the client states of an experiment with its run's folder, until the training ends."""


@contextmanager
def this_machine(experiment: Setup, run: Path | None) -> Iterator[tuple[Backend, States]]:
    """Train the clients on this machine's cores or GPU."""
    layout = experiment.network.layout
    with backend_for(experiment) as backend, client_states(experiment.settings, layout, run) as states:
        yield backend, states


@contextmanager
def backend_for(experiment: Setup) -> Iterator[Backend]:
    """Open the backend of an experiment's device, and close it at the end."""
    settings, worker = experiment.settings, experiment.worker()
    if settings.device == "cpu":
        lanes = min(settings.workers or cores(), len(cohort(settings, 0)))
        backend: Backend = LocalBackend(worker, experiment.network.layout, lanes)
    else:
        backend = DeviceBackend(worker, settings.engine, settings.workers)
    try:
        yield backend
    finally:
        backend.close()


def require_cuda() -> None:
    """Refuse a machine on which PyTorch cannot use a GPU, and name the part that is missing."""
    if torch.version.cuda is None and torch.version.hip is None:
        raise UserError(
            f"this PyTorch ({torch.__version__}) was built without CUDA: install one that was "
            "(pip install torch, see docs/gpu.md), or use --device cpu"
        )
    if not torch.cuda.is_available():
        raise UserError("PyTorch finds no CUDA device here: see if nvidia-smi does, or use --device cpu")


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """End a run on SIGTERM, which schedulers send, as on Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
