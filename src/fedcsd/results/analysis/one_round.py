"""Train one more round of a run, with any method, and observe its clients."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from fedcsd.experiments.running import Run, load_run
from fedcsd.experiments.runs.run_folder import RunDirectory
from fedcsd.experiments.summary import summarise
from fedcsd.federation.cohort import cohort
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Reply
from fedcsd.methods import Method
from fedcsd.results.analysis.observation import Observed, Observer
from fedcsd.weights import Value, Weights

Report = Callable[[str, int, int], object]
"""Called with the present piece of work, the number of pieces done and of all pieces."""

HERE = {"device": Settings.device, **defaults_where(gpu=True)}  # an analysis runs on a CPU


def latest(path: str | Path) -> Run:
    """Load a run: finished, or else up to its newest complete checkpoint."""
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
    """Refuse a run whose data or model was given from Python and is not given again."""
    for what in ("data", "model"):
        choice = settings[what]
        name = choice if isinstance(choice, str) else choice["name"]
        if name == FROM_PYTHON and given.get(what) is None:
            raise UserError(f"{why}the {what} of this run was {FROM_PYTHON}: analyse it there, with {what}=…")


def ready(run: Run, *, data: Any = None, model: Any = None, **changes: Any) -> Experiment:
    """Return the run's federation, with its last global model as the weights to start from.

    `changes` replace settings of the run. Data and a model that were given from Python are given again.
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


class Chosen(Federation):
    """A federation whose clients are given, not drawn."""

    chosen: Sequence[int] = ()

    def drawn(self) -> Sequence[int]:
        return self.chosen


@dataclass(frozen=True)
class NextRound:
    """The round that follows the last one of a run, for any method.

    A method starts anew from the run's model: its teacher is that model. With `warm_up` it trains so many
    rounds before, of the run's own epochs; what it keeps of them stays, and the run's model comes back.
    """

    start: Experiment
    """from `ready`"""
    rounds: int
    """that the run has"""
    clients: Sequence[int]
    warm_up: int = 0

    @classmethod
    def of(cls, start: Experiment, rounds: int, warm_up: int = 0, also: Iterable[int] = ()) -> "NextRound":
        """Return the next round with its cohort, and with some more clients."""
        if warm_up > rounds:
            raise UserError(
                f"this run has {rounds} round{'s' * (rounds > 1)}: --warm-up may be as many at most"
            )
        return cls(start, rounds, sorted({*cohort(start.settings, rounds), *also}), warm_up)

    def experiment(self, method: Method, epochs: int = 0) -> Experiment:
        """Return the federation with this method and so many local epochs, in which all clients answer.

        A client that is trained together with others cannot be observed: a GPU trains it in a lane.
        """
        settings = self.start.settings
        engine = "graphs" if settings.device == "cuda" and settings.engine != "eager" else settings.engine
        settings = replace(settings, epochs=epochs or settings.epochs, engine=engine, dropout=0.0)
        settings = replace(settings, on_divergence="stop", track_drift=False)
        return replace(self.start, method=method, settings=settings)

    @contextmanager
    def trained(
        self,
        method: Method,
        seen: Callable[[Reply, Mapping[str, Tensor]], object],
        *,
        epochs: int = 0,
        observer: Observer | None = None,
        on_warm_up: Callable[[], object] = lambda: None,
    ) -> Iterator[Federation]:
        """Train the round by a method; `seen` gets each reply and what was observed."""
        kept: tuple[dict[str, Any], dict[str, Value]] | None = None
        if self.warm_up:
            with self._federation(self.experiment(method), self.rounds - self.warm_up) as federation:
                for _ in range(self.warm_up):
                    federation.step()
                    on_warm_up()
                header, values = federation.save()
            kept = header, {**values, "server.weights": self.start.weights}
        observed = self.experiment(Observed(method, seen, observer), epochs)
        with self._federation(observed, self.rounds, kept) as federation:
            federation.step()
            yield federation

    @contextmanager
    def _federation(
        self,
        experiment: Experiment,
        rounds: int,
        kept: tuple[dict[str, Any], dict[str, Value]] | None = None,
    ) -> Iterator[Chosen]:
        with backend_for(experiment) as backend:
            federation = Chosen(experiment, backend)
            if kept:
                federation.load(*kept)
            federation.round, federation.chosen = rounds, self.clients
            yield federation
