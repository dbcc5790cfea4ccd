"""Where a run's clients are, and where what they keep lies: on this machine, unless it is told otherwise."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from fedcsd.experiments.experiment import Experiment
from fedcsd.federation.backends.device import DeviceBackend
from fedcsd.federation.backends.local import LocalBackend, cores
from fedcsd.federation.backends.protocol import Backend
from fedcsd.federation.cohort import cohort
from fedcsd.federation.states import States, client_states

Place = Callable[[Experiment, Path | None], AbstractContextManager[tuple[Backend, States]]]
"""Of an experiment and its run directory: the backend and the clients' states, for as long as it trains."""


@contextmanager
def here(experiment: Experiment, run: Path | None) -> Iterator[tuple[Backend, States]]:
    """Clients on this machine's cores or GPU."""
    layout = experiment.network.layout
    with backend_for(experiment) as backend, client_states(experiment.settings, layout, run) as states:
        yield backend, states


@contextmanager
def backend_for(experiment: Experiment) -> Iterator[Backend]:
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


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM, a scheduler's way of asking, ends a run like Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
