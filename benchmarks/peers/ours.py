"""Run FedAvg in fedcsd: Federation and LocalBackend, a lane with one thread for each core."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from workload import IMAGES, NETWORKS, Work, arguments, read

from fedcsd.data import Dataset
from fedcsd.experiments.experiment import Experiment, prepare
from fedcsd.federation.backends.local import LocalBackend, cores
from fedcsd.federation.cohort import cohort
from fedcsd.federation.rounds import Federation
from fedcsd.methods.fedavg import FedAvg


def experiment_of(work: Work) -> Experiment:
    """Return the workload as an experiment of fedcsd with the same rows, weights and cohorts."""
    s, arrays = work.settings, work.arrays
    data = Dataset.of_arrays(*(arrays[name] for name in IMAGES), name=s.data, classes=s.classes)
    data = replace(data, scale=arrays["scale"], shift=arrays["shift"])
    shape, clients = data.shape, len(work.parts)
    values: dict[str, Any] = {
        "data": "given from Python",
        "batch_size": s.batch_size,
        "epochs": s.epochs,
        "lr": s.lr,
        "momentum": s.momentum,
        "weight_decay": s.weight_decay,
        "participation": len(work.cohorts[0]) / clients,
    }

    def model() -> nn.Module:
        return NETWORKS[s.network](shape[0], s.classes)

    given = {"model": "simple_cnn"} if s.network == "simple_cnn" else {}
    made = prepare(
        values | given,
        method=FedAvg(),
        data=data,
        model=None if given else model,
        parts=([part.numpy() for part in work.parts], []),
    )
    layout = made.network.layout
    flat = torch.cat([work.weights[name].reshape(-1) for name in layout.names])
    for number, drawn in enumerate(work.cohorts):
        assert cohort(made.settings, number) == drawn, "the workload's cohorts are not fedcsd's"
    return replace(made, weights=made.weights.like(flat))


def main() -> None:
    folder, rounds, marks = arguments()
    experiment = experiment_of(read(Path(folder)))
    backend = LocalBackend(experiment.worker(), experiment.network.layout, cores())
    federation = Federation(experiment, backend)
    marks.round(0.0)
    for _ in range(rounds):
        marks.round(federation.step()["test_accuracy"])
    backend.close()
    marks.write(threads=1, processes=cores())


if __name__ == "__main__":
    main()
