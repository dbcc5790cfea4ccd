"""A trained run as the start of an analysis, and one more round from there that can be looked into."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcsd.config import Settings
from fedcsd.config.settings import defaults_where
from fedcsd.errors import UserError, no_run
from fedcsd.experiments.choices import FROM_PYTHON
from fedcsd.experiments.experiment import Experiment, prepare
from fedcsd.experiments.machine import backend_for
from fedcsd.experiments.resuming import check_outside
from fedcsd.experiments.run_folder import RunDirectory
from fedcsd.experiments.running import Run, load_run
from fedcsd.experiments.summary import summarise
from fedcsd.federation.cohort import cohort
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Reply
from fedcsd.methods import Method
from fedcsd.results.analysis.observation import Observed, Observer
from fedcsd.weights import Value, Weights

Report = Callable[[str, int, int], object]
"""Told what is at work, and how many of how many pieces of work are done."""

HERE = {"device": Settings.device, **defaults_where(gpu=True)}  # an analysis runs on a CPU


def latest(path: str | Path) -> Run:
    """A run as far as it is: finished, or else up to its newest complete checkpoint."""
    path = Path(path).expanduser()
    if not (path / "config.toml").is_file():
        raise no_run(path, to_train=False)
    directory = RunDirectory.open(path)
    if directory.summary is not None:
        return load_run(path)
    _refuse_python(directory.settings, {}, f"{path} is not finished, and ")
    experiment = prepare(
        {**directory.settings, **HERE, "method": {"name": "fedavg"}}, parts=directory.partition()
    )
    saved = directory.latest(experiment.network.layout)
    if saved is None:
        raise UserError(f"{path} has no checkpoint yet: there is no model to look at")
    header, values = saved
    weights = values["server.weights"]
    assert isinstance(weights, Weights)
    experiment.network.load(weights)
    state = {name: tensor.detach().clone() for name, tensor in experiment.network.module.state_dict().items()}
    history = [record for record in directory.history() if record["round"] <= header["round"]]
    return Run(directory.settings, history, summarise(history), state, path)


def _refuse_python(settings: Mapping[str, Any], given: Mapping[str, Any], why: str = "") -> None:
    """What was given from Python has to be given again."""
    for what in ("data", "model"):
        choice = settings[what]
        name = choice if isinstance(choice, str) else choice["name"]
        if name == FROM_PYTHON and given.get(what) is None:
            raise UserError(f"{why}the {what} of this run was {FROM_PYTHON}: analyse it there, with {what}=…")


def ready(run: Run, *, data: Any = None, model: Any = None, **changes: Any) -> Experiment:
    """The run's federation, with its last global model as the weights to start from.

    `changes` are settings in place of the run's own; data and model that were given from Python must be
    given again.
    """
    if not run.weights:
        run = latest(run.path) if run.path else run
    if not run.weights:
        raise UserError("this run diverged and left no model to look at")
    _refuse_python(run.settings, {"data": data, "model": model})
    directory = RunDirectory.open(run.path) if run.path else None
    parts = directory.partition() if directory else None
    if directory and data is None:
        check_outside(directory.path, run.settings, ["method", *["model"] * bool(model)])
    changes = {key: value for key, value in changes.items() if value is not None}
    if changes.get("device") == "cpu":
        changes = {**HERE, **changes}
    values = {**run.settings, **changes, "method": {"name": "fedavg"}}
    experiment = prepare(values, parts=parts, data=data, model=model)
    layout = experiment.network.layout
    facts = directory.config["facts"] if directory else {}
    for what, here in (("data", experiment.data), ("model", layout)):
        if facts.get(what, here.fingerprint()) != here.fingerprint():
            raise UserError(f"the {what} is not the {what} that {run.path} was trained with: restore it")
    flat = torch.cat([run.weights[name].reshape(-1) for name in layout.names])
    return replace(experiment, weights=Weights(layout, flat))


def observable(experiment: Experiment, method: Method, epochs: int) -> Experiment:
    """The same federation with this method and so many local epochs, where all clients answer.

    A GPU that trains clients stacked as one cannot show one of them, so that it takes them in lanes.
    """
    settings = experiment.settings
    engine = "graphs" if settings.device == "cuda" and settings.engine != "eager" else settings.engine
    settings = replace(settings, epochs=epochs, engine=engine, dropout=0.0, on_divergence="stop")
    settings = replace(settings, track_drift=False)
    return replace(experiment, method=method, settings=settings)


def cohort_of(experiment: Experiment, rounds: int, also: Iterable[int] = ()) -> list[int]:
    """The clients of the round after so many rounds, and some more."""
    return sorted({*cohort(experiment.settings, rounds), *also})


class Chosen(Federation):
    """A federation whose next round has these clients."""

    chosen: Sequence[int] = ()

    def drawn(self) -> Sequence[int]:
        return self.chosen


Kept = tuple[dict[str, Any], dict[str, Value]]
"""What a method and its clients keep of earlier rounds, as `Federation.save` gives it."""


def warmed_up(
    experiment: Experiment, rounds: int, clients: Sequence[int], times: int, done: Callable[[], object]
) -> Kept | None:
    """What is kept of so many rounds from the experiment's weights, and these weights again."""
    if not times:
        return None
    if times > rounds:
        raise UserError(f"this run has {rounds} round{'s' * (rounds > 1)}: --warm-up may be as many at most")
    with backend_for(experiment) as backend:
        federation = Chosen(experiment, backend)
        federation.round, federation.chosen = rounds - times, clients
        for _ in range(times):
            federation.step()
            done()
        header, values = federation.save()
    return header, {**values, "server.weights": experiment.weights}


@contextmanager
def next_round(
    experiment: Experiment,
    rounds: int,
    clients: Sequence[int],
    seen: Callable[[Reply, Mapping[str, Tensor]], object],
    observer: Observer | None = None,
    kept: Kept | None = None,
) -> Iterator[Federation]:
    """Do the method's round after so many rounds; `seen` gets every reply and what was observed.

    Without anything kept the method starts anew from the experiment's weights, so that its teacher is the
    model it starts from.
    """
    experiment = replace(experiment, method=Observed(experiment.method, seen, observer))
    with backend_for(experiment) as backend:
        federation = Chosen(experiment, backend)
        if kept:
            federation.load(*kept)
        federation.round, federation.chosen = rounds, clients
        federation.step()
        yield federation
