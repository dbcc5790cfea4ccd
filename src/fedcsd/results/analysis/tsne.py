"""Draw features of test images in the plane (t-SNE), and measure how well they separate the classes.

The paper's figure: the global models of FedAvg and of FedCSD, and two local models trained from the
latter, with cross-entropy alone and with the full local loss.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcsd import seeds
from fedcsd.data.partition import counts_of
from fedcsd.errors import UserError, note
from fedcsd.experiments.choices import make_method
from fedcsd.experiments.experiment import Experiment
from fedcsd.experiments.running import Run
from fedcsd.messages import Reply
from fedcsd.methods import Method, methods
from fedcsd.plugins import free
from fedcsd.results.analysis.one_round import NextRound, Report, latest, ready
from fedcsd.results.groups import labels_of
from fedcsd.results.style import COLOURS, COLUMN, PAGE, lettered, printed, verbatim
from fedcsd.weights import Weights

NEIGHBOURS = 10
LARGE = 1e10  # features beyond it are scaled, for squares of them
TITLE = 24  # characters of a line above a panel
LABELLED = 20  # classes whose clouds bear their name
PALETTE = (*COLOURS, "#882255", "#AAAAAA")


@dataclass(frozen=True)
class Cloud:
    """Test images as one model separates them."""

    title: str
    points: NDArray[np.float32]
    """in the plane [N, 2]"""
    labels: NDArray[np.int64]
    """[N]"""
    neighbours: float
    """accuracy of the 10 nearest neighbours in feature space, each image told by the others"""
    silhouette: float
    """mean silhouette of the classes in feature space, from −1 to 1"""

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "neighbours_accuracy": self.neighbours,
            "silhouette": self.silhouette,
            "points": np.round(self.points, 3).tolist(),
            "labels": self.labels.tolist(),
        }


def picture(
    runs: Mapping[str, Run],
    stem: Path,
    *,
    samples: int = 2000,
    client: int | None = None,
    epochs: int = 0,
    warm_up: int = 0,
    report: Report | None = None,
    data: Any = None,
    model: Any = None,
    caption: str = "",
    **changes: Any,
) -> list[Path]:
    """Draw features of test images by each run's last global model, and by a local model of the last run.

    With several runs there is a second local model, trained with cross-entropy alone. The local models
    are those of `client` (by default the one that holds the fewest classes) after `epochs` local epochs
    (by default the run's own) in one more round; see `NextRound` for `warm_up`. Write PNG, SVG and PDF,
    and the numbers as JSON; return the paths.
    """
    _check_same_data(list(runs.values()))
    if not runs:
        raise UserError("t-SNE needs at least one run")
    experiments = {label: ready(run, data=data, model=model, **changes) for label, run in runs.items()}
    *_, last = runs
    shown = {f"{label}\nglobal model": (e, e.weights) for label, e in experiments.items()}
    local = _methods(runs[last], plain=len(runs) > 1)
    rounds, steps, trained = len(runs[last].history), itertools.count(), list[Tensor]()

    def tell(work: str) -> None:
        if report:
            report(work, next(steps), 2 * len(local) + len(runs))

    for name, method in local.items():
        tell(f"training {name}")
        client, weights = _local(experiments[last], method, rounds, client, epochs, warm_up)
        trained.append(weights.flat)
        shown[f"{last}, client {client}\n{name}"] = (experiments[last], weights)
    if len(trained) > 1 and torch.equal(*trained):
        more = "fedcsd tsne --client" + ("" if warm_up else " or --warm-up 1")
        note(f"{last} adds nothing to cross-entropy for client {client} in this round: {more} may show more")
    clouds = []
    for title, (experiment, weights) in shown.items():
        tell(f"t-SNE of {title.replace(chr(10), ', ')}")
        clouds.append(_cloud(title, experiment, weights, samples))
    tell("drawing")
    written = draw(clouds, stem, caption)
    numbers = stem.with_name(stem.name + ".json")
    numbers.write_text(json.dumps([cloud.to_json() for cloud in clouds]) + "\n", encoding="utf-8")
    return [*written, numbers]


def labelled(paths: Sequence[Path]) -> dict[str, Run]:
    """Return the runs in these folders by label."""
    runs: dict[str, Run] = {}
    found = [latest(path) for path in paths]
    for label, run in zip(labels_of([run.settings for run in found]), found, strict=True):
        runs[free(label, runs)] = run
    return runs


def table(saved: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return head and cells of a table of a picture's saved numbers."""
    head = ["features", f"{NEIGHBOURS} nearest (%)", "silhouette"]
    return head, [
        [
            ", ".join(one["title"].split("\n")),
            f"{100 * one['neighbours_accuracy']:.1f}",
            f"{one['silhouette']:.2f}",
        ]
        for one in saved
    ]


def _check_same_data(runs: Sequence[Run]) -> None:
    """Refuse runs of different data or models."""
    for what in ("data", "model"):
        for run in runs:
            first, other = runs[0].settings[what], run.settings[what]
            if first != other:
                raise UserError(
                    f"these runs differ in their {what} ({first} and {other}): "
                    "give runs of the same data and model"
                )


def _methods(run: Run, *, plain: bool) -> dict[str, Method]:
    """Return the methods of the local models, by name."""
    own = make_method(run.settings["method"])
    fedavg = methods.load("fedavg")
    if type(own) is fedavg:
        return {"cross-entropy alone": own}
    found: dict[str, Method] = {"cross-entropy alone": fedavg()} if plain else {}
    return {**found, "full local loss": own}


def _local(
    experiment: Experiment, method: Method, rounds: int, client: int | None, epochs: int, warm_up: int = 0
) -> tuple[int, Weights]:
    """Train one more round by the method; return a client and its local model."""
    held = (counts_of(experiment.data, experiment.parts) > 0).sum(1)
    if client is None:
        drawn = NextRound.of(experiment, rounds, warm_up).clients
        client = min(drawn, key=lambda k: (held[k], -len(experiment.parts[k]), k))
    if not 0 <= client < len(held):
        raise UserError(f"there is no client {client}: choose from 0 to {len(held) - 1}")
    found: dict[int, Weights] = {}

    def seen(reply: Reply, _: Mapping[str, Tensor]) -> None:
        if isinstance(reply.values.get("weights"), Weights):
            found[reply.client] = reply.weights

    with NextRound.of(experiment, rounds, warm_up, [client]).trained(method, seen, epochs=epochs):
        pass
    if client not in found:
        raise UserError(f"{type(method).__name__} sends no local model to the server: there is none to show")
    return client, found[client]


def _cloud(title: str, experiment: Experiment, weights: Weights, samples: int) -> Cloud:
    from sklearn.metrics import silhouette_score
    from sklearn.neighbors import NearestNeighbors

    features, labels = features_of(experiment, weights, samples)
    points = embedded(features, experiment.settings.seed)
    near = NearestNeighbors(n_neighbors=min(NEIGHBOURS, len(labels) - 1)).fit(features)
    votes = labels[near.kneighbors(return_distance=False)]
    told = [np.bincount(some, minlength=experiment.data.classes).argmax() for some in votes]
    many = 1 < len(np.unique(labels)) < len(labels)
    apart = float(silhouette_score(features, labels)) if many else float("nan")
    return Cloud(title, points, labels, float(np.mean(told == labels)), apart)


def features_of(
    experiment: Experiment, weights: Weights, samples: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return a model's features of so many test images, drawn by seed, and their labels: [N, D], [N]."""
    data = experiment.data
    rng = seeds.rng(experiment.settings.seed, "tsne")
    rows = np.sort(rng.permutation(len(data.y_test))[:samples])
    workspace = experiment.worker().workspace
    network = workspace.frozen("", weights.to(workspace.device))
    features = workspace.forward(
        network, workspace.data.x_test, torch.from_numpy(rows).to(workspace.device)
    ).features
    return features.flatten(1).cpu().numpy(), data.y_test.numpy()[rows]


def embedded(features: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Embed features in the plane by t-SNE: [N, D] -> [N, 2].

    One thread computes it: sums of several threads differ in their last bits. Features that are all the
    same become one point, since t-SNE divides by their spread.
    """
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    if not np.isfinite(features).all():
        raise UserError("the features of this model are not finite: there is nothing to draw")
    if not np.ptp(features, axis=0).any():
        note("the features of a model are the same for all images: it is drawn as one point")
        return np.zeros((len(features), 2), np.float32)
    if (largest := np.abs(features).max()) > LARGE:
        features = features / largest
    perplexity = min(30.0, max(2.0, (len(features) - 1) / 3))
    with threadpool_limits(1):
        points: NDArray[np.float32] = TSNE(
            perplexity=perplexity, init="pca", random_state=seed, n_jobs=1
        ).fit_transform(features)
    return points


def draw(clouds: list[Cloud], stem: Path, caption: str = "") -> list[Path]:
    """Draw a panel for each model; colours and numbers mark the classes."""
    written: list[Path] = []
    columns = min(4, len(clouds))
    rows = -(-len(clouds) // columns)
    width = COLUMN if columns < 3 else PAGE
    with printed(width, rows * (width / columns + 0.35), stem, written, caption) as figure:
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(clouds) :]:
            axis.set_visible(False)
        for axis, cloud, letter in zip(axes.flat, clouds, lettered([c.title for c in clouds]), strict=False):
            _panel(axis, cloud, letter)
    return written


def _panel(axis: Any, cloud: Cloud, title: str) -> None:
    from matplotlib import colormaps
    from matplotlib.patheffects import withStroke

    classes = np.unique(cloud.labels)
    palette = (
        PALETTE if classes[-1] < len(PALETTE) else colormaps["turbo"](np.linspace(0, 1, classes[-1] + 1))
    )
    colours = [palette[label] for label in cloud.labels]
    axis.scatter(*cloud.points.T, s=1.6, c=colours, linewidth=0, alpha=0.8, rasterized=True)
    for label in classes if len(classes) <= LABELLED else ():
        middle = np.median(cloud.points[cloud.labels == label], axis=0)
        stroke = [withStroke(linewidth=1.8, foreground="white")]
        axis.text(
            *middle, str(label), fontsize=6, weight="bold", ha="center", va="center", path_effects=stroke
        )
    lines = [part for line in title.split("\n") for part in wrap(line, TITLE, break_on_hyphens=False)]
    axis.set_title(verbatim("\n".join(lines)), loc="left")
    axis.set(xticks=[], yticks=[], aspect="equal", adjustable="datalim")
    axis.spines[:].set_visible(True)
    numbers = f"{NEIGHBOURS}-NN {100 * cloud.neighbours:.1f} %, silhouette {cloud.silhouette:.2f}"
    axis.set_xlabel(numbers)
