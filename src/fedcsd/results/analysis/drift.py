"""Measure drift within a round: the paper's Fig. 1.

From a trained global model each method trains one round of many local epochs. After every epoch the
local models are compared with the model they started from.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from fedcsd.aggregation import Mean
from fedcsd.data.partition import counts_of
from fedcsd.errors import Diverged, RunStopped
from fedcsd.experiments.choices import FROM_PYTHON, Choice, choices_of, method_from
from fedcsd.experiments.experiment import Experiment, config_of
from fedcsd.experiments.machine import backend_for
from fedcsd.experiments.resuming import check_outside
from fedcsd.experiments.running import Run
from fedcsd.experiments.summary import notable
from fedcsd.files import write_whole
from fedcsd.messages import Reply, finite
from fedcsd.methods import Method
from fedcsd.models.network import Outputs
from fedcsd.objectives import kl_divergence
from fedcsd.results.analysis import forgetting
from fedcsd.results.analysis.forgetting import Forgetting, counts
from fedcsd.results.analysis.one_round import NextRound, Report, ready
from fedcsd.results.groups import method_label
from fedcsd.results.style import COLOURS, PAGE, dress, lettered, look, printed, verbatim
from fedcsd.training import Client
from fedcsd.training.workspace import Workspace
from fedcsd.weights import Weights

PAPER = ("fedavg", "feature_distillation", "logit_distillation", "fedcsd")
IMAGES = 10_000  # test images that models are compared on, the first ones
HISTORY = {
    "test_accuracy": "global, test",
    "train_accuracy": "global, train",
    "local_accuracy": "local, test",
    "local_train_accuracy": "local, train",
}
"""measurements of the run's own rounds, with their name in the legend"""


@dataclass(frozen=True)
class Curve:
    """The numbers that one method has after each local epoch; those of local models are means over clients."""

    logit_drift: list[float]
    """KL(global ‖ local) of the logits on test images"""
    feature_drift: list[float]
    """l2 distance of the penultimate features on test images"""
    local_accuracy: list[float]
    """test accuracy of the local models"""
    average_accuracy: list[float]
    """test accuracy of the average of the local models, weighted by samples"""


@dataclass(frozen=True)
class Drift:
    """The numbers of a study, from which the paper's figure is drawn."""

    settings: dict[str, Any]
    """of the federation, those that a reader wants to know"""
    rounds: int
    """that the global model was trained for"""
    accuracy: float
    """of the global model at the start"""
    images: int
    """test images that all was measured on"""
    curves: dict[str, Curve]
    """by method"""
    history: list[dict[str, float]]
    """the run's own rounds: global and local models on test and on training data, as far as recorded"""
    forgetting: Forgetting
    """after the last epoch"""
    warm_up: int = 0
    """rounds that each method had before"""

    def named(self, names: Mapping[str, str]) -> "Drift":
        """Return the study with other names for its methods."""
        after = {names[label]: right for label, right in self.forgetting.after.items()}
        curves = {names[label]: curve for label, curve in self.curves.items()}
        return replace(self, curves=curves, forgetting=replace(self.forgetting, after=after))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return head and cells of a table: each method after the last epoch."""
        head = ["method", "logit drift", "feature drift", "local (%)", "average (%)"]
        return head, [
            [
                label,
                _number(curve.logit_drift[-1]),
                _number(curve.feature_drift[-1]),
                f"{100 * curve.local_accuracy[-1]:.2f}",
                f"{100 * curve.average_accuracy[-1]:.2f}",
            ]
            for label, curve in self.curves.items()
        ]

    @property
    def when(self) -> str:
        """Describe the table."""
        (epochs, *_) = {len(curve.logit_drift) for curve in self.curves.values()}
        model = f"the global model of round {self.rounds}"
        images = f"{self.images} test images, on which {model} has {100 * self.accuracy:.2f} %"
        return f"after {epochs} local epoch{'s' * (epochs > 1)}, on {images}"

    @property
    def alike(self) -> list[str]:
        """Return the methods whose clients trained as FedAvg's, since what they keep is new here."""
        plain = self.curves.get("fedavg")
        return [label for label, curve in self.curves.items() if label != "fedavg" and curve == plain]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Drift":
        curves = {label: Curve(**curve) for label, curve in saved["curves"].items()}
        return cls(**{**saved, "curves": curves, "forgetting": Forgetting(**saved["forgetting"])})


def _number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e6 else f"{value:.2e}"


class Meter:
    """An observer that measures a local model on the first test images."""

    def __init__(self, images: int):
        self.images = images

    def __call__(self, client: Client, start: Weights, now: Weights) -> Mapping[str, Tensor]:
        workspace = client.workspace
        before = workspace.remembered((-2, start.token), lambda: self.outputs(workspace, start))
        after = self.outputs(workspace, now)
        labels = workspace.data.y_test[: self.images]
        right = labels[after.logits.argmax(1) == labels]
        return {
            "weights": now.flat.cpu(),
            "logit_drift": kl_divergence(before.logits, after.logits).mean(dtype=torch.float64).cpu(),
            "feature_drift": (after.features - before.features).norm(dim=1).mean(dtype=torch.float64).cpu(),
            "right": torch.bincount(right, minlength=client.classes).cpu(),
        }

    def outputs(self, workspace: Workspace, weights: Weights) -> Outputs:
        rows = torch.arange(self.images, device=workspace.device)
        return workspace.forward(workspace.frozen("", weights), workspace.data.x_test, rows)


class Gathered:
    """Measurements of one method's clients, and their mean weights after each epoch."""

    def __init__(self, done: Callable[[], object]):
        self.mean, self.done = Mean(), done
        self.seen: dict[int, dict[str, Tensor]] = {}

    def __call__(self, reply: Reply, observed: Mapping[str, Tensor]) -> None:
        if observed:
            self.mean.add(observed["weights"], reply.samples)
            self.seen[reply.client] = {name: v for name, v in observed.items() if name != "weights"}
            self.done()

    def averages(self) -> Iterator[Tensor]:
        """Yield the clients' mean weights after each epoch, one at a time to save memory."""
        assert self.mean.total is not None, "no client was observed"
        for total in self.mean.total:
            yield (total / self.mean.weight).to(self.mean.dtype)

    def over_clients(self, name: str) -> Tensor:
        """Return the mean of a measurement over clients [epochs, ...]."""
        return torch.stack([seen[name].double() for seen in self.seen.values()]).mean(0)


def curve_of(
    following: NextRound, method: Method, epochs: int, images: int, done: Callable[[], object]
) -> tuple[Curve, list[list[int]]]:
    """Train a round by one method.

    Return its curve, and each local model's right test images by class after the last epoch [K][C].
    """
    gathered, like = Gathered(done), following.start.weights.like
    with following.trained(
        method, gathered, epochs=epochs, observer=Meter(images), on_warm_up=done
    ) as federation:
        found = (federation.backend.evaluate(following.rounds, like(flat)) for flat in gathered.averages())
        average = [float(each.correct[:images].mean()) for each in found]
    local = gathered.over_clients("right").sum(1) / images
    logits, features = gathered.over_clients("logit_drift"), gathered.over_clients("feature_drift")
    last = [gathered.seen[client]["right"][-1].tolist() for client in following.clients]
    return Curve(logits.tolist(), features.tolist(), local.tolist(), average), last


def study(
    start: Run,
    *,
    epochs: int,
    methods: str | Mapping[str, Choice] | Sequence[Choice] = PAPER,
    report: Report | None = None,
    images: int = IMAGES,
    warm_up: int = 0,
    data: Any = None,
    model: Any = None,
    **changes: Any,
) -> Drift:
    """Train one round of so many local epochs from the run's last global model, with each method.

    The clients are those of the run's next round, with its batches. See `NextRound` for `warm_up` and
    what a method keeps. `changes` replace settings of the run, such as device or workers. The study
    takes memory for four to six times epochs × the model.
    """
    entries, done = choices_of(methods, {}), 0
    experiment = ready(start, data=data, model=model, **changes)
    following = NextRound.of(experiment, len(start.history), warm_up)
    images = min(images, len(experiment.data.y_test))

    def tell(label: str, more: int = 1) -> None:
        nonlocal done
        done += more
        if report:
            report(label, done, len(entries) * (warm_up + len(following.clients)))

    curves, after = {}, {}
    for label, choice in entries.items():
        tell(label, 0)
        try:
            curves[label], after[label] = curve_of(
                following, method_from(choice), epochs, images, partial(tell, label)
            )
        except Diverged as error:
            raise RunStopped(f"{label}: {error.divergence.message}: try fewer --epochs") from error
    with backend_for(experiment) as backend:
        before = backend.evaluate(following.rounds, experiment.weights).correct[:images]
    history = [{key: r[key] for key in ("round", *HISTORY) if r.get(key) is not None} for r in start.history]
    settings = notable({**config_of(experiment), "epochs": epochs})
    forgotten = forgetting_of(experiment, following.clients, before, after)
    accuracy = float(before.mean())
    return Drift(settings, following.rounds, accuracy, images, curves, history, forgotten, warm_up)


def forgetting_of(
    experiment: Experiment,
    clients: Sequence[int],
    before: NDArray[np.bool_],
    after: dict[str, list[list[int]]],
) -> Forgetting:
    """Count right test images by class, before local training and after it."""
    data = experiment.data
    labels = data.y_test[: len(before)].numpy()
    held = counts_of(data, [experiment.parts[k] for k in clients]) > 0
    images = counts(np.ones(len(labels), dtype=bool), labels, data.classes)
    return Forgetting(list(clients), held.tolist(), images, counts(before, labels, data.classes), after)


def methods_for(run: Run) -> dict[str, Choice]:
    """Return the paper's methods, and the run's own with its options."""
    chosen: dict[str, Choice] = {name: name for name in PAPER}
    own = run.settings["method"]
    label = method_label(own)
    if FROM_PYTHON in own["name"] or label in chosen:
        return chosen
    if run.path:
        check_outside(run.path, run.settings)
    return {name: choice for name, choice in chosen.items() if name != own["name"]} | {label: own}


def draw(study: Drift, stem: Path, caption: str = "") -> list[Path]:
    """Draw the four panels of the paper's figure, as PNG, SVG and PDF.

    Panel c has two scales: the average of the local models above, the local models below.
    """
    written: list[Path] = []
    lines = -(-len(study.curves) // 3)  # of the legend; two have room
    with printed(PAGE, 2.15 + 0.13 * max(0, lines - 2), stem, written, caption) as figure:
        axes = figure.subplot_mosaic([["a", "b", "c", "d"], ["a", "b", "e", "d"]])
        for index, (label, curve) in enumerate(study.curves.items()):
            for panel, before, values, factor in (
                ("a", 0.0, curve.logit_drift, 1),
                ("b", 0.0, curve.feature_drift, 1),
                ("c", study.accuracy, curve.average_accuracy, 100),
                ("e", study.accuracy, curve.local_accuracy, 100),
            ):
                shown = [factor * value for value in (before, *values)]
                axes[panel].plot(range(len(shown)), shown, label=verbatim(label), **look(index))
        titles = lettered(["logits", "features", "accuracy in the round", "accuracy over rounds"])
        dress(axes["a"], titles[0], xlabel="local epoch", ylabel="KL(global ‖ local)", ylim=(0, None))
        dress(axes["b"], titles[1], xlabel="local epoch", ylabel="$\\ell_2$ distance", ylim=(0, None))
        dress(axes["c"], titles[2], ylabel="average (%)")
        dress(axes["e"], xlabel="local epoch", ylabel="local (%)")
        _over_rounds(axes["d"], study, titles[3])
        axes["c"].tick_params(labelbottom=False)
        for axis in axes.values():
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        methods, models = axes["a"].get_legend_handles_labels(), axes["d"].get_legend_handles_labels()
        figure.legend(*methods, loc="outside lower left", ncols=3, handlelength=3)
        figure.legend(*models, loc="outside lower right", ncols=2, handlelength=3)
    return written


def _over_rounds(axis: Axes, study: Drift, title: str) -> None:
    """Draw panel d: global and local models on test data and on local training data."""
    for key, name in HISTORY.items():
        # On training data the global model is the one that the round started from.
        before = key == "train_accuracy"
        points = [(r["round"] - before, 100 * r[key]) for r in study.history if key in r]
        if points:
            local, train = name.startswith("local"), name.endswith("train")
            colour = COLOURS[5] if local else COLOURS[6]
            axis.plot(*zip(*points, strict=True), color=colour, linestyle="--" if train else "-", label=name)
    dress(axis, title, xlabel="round", ylabel="accuracy (%)")


def write(study: Drift, folder: Path) -> list[Path]:
    """Write both pictures of a study, and its numbers as JSON; return the paths."""
    numbers = folder / "drift.json"
    written = [
        *draw(study, folder / "drift"),
        *forgetting.draw(study.forgetting, folder / "forgetting"),
        numbers,
    ]
    write_whole(numbers, (json.dumps(finite(study.to_json())) + "\n").encode())
    return written
