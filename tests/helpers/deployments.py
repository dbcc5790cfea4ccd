"""Simulate a deployed run's settings, and compare the weights."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fedcsd.config.toml import FACTS
from fedcsd.experiments import running as jobs
from fedcsd.experiments.experiment import Experiment
from fedcsd.experiments.machine import this_machine
from fedcsd.federation.backends.protocol import Backend
from fedcsd.federation.evaluation import Evaluation
from fedcsd.federation.states import States
from fedcsd.messages import Reply, Request
from fedcsd.weights import Values, Weights

Absent = set[tuple[int, str, int]]
"""(round, function, client) of the answers that do not count; rounds from 1."""


class Without(Backend):
    """A backend on which some answers are missing."""

    def __init__(self, backend: Backend, absent: Absent):
        self.backend, self.absent, self.server_device = backend, absent, backend.server_device

    def ask(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        for reply in self.backend.ask(request, clients, states):
            gone = (request.round + 1, request.function, reply.client) in self.absent
            yield Reply(reply.client, absent="gone") if gone else reply

    def evaluate(self, round: int, weights: Weights) -> Evaluation:
        return self.backend.evaluate(round, weights)


def simulated(run: Path, absent: Absent | None = None) -> dict[str, Tensor]:
    """The weights that the simulator comes to with a deployed run's settings."""
    config = tomllib.loads((run / "config.toml").read_text())
    job = jobs.begin({key: value for key, value in config.items() if key not in FACTS})
    job = replace(
        job, experiment=replace(job.experiment, settings=replace(job.experiment.settings, workers=1))
    )

    @contextmanager
    def host(experiment: Experiment, folder: Path | None) -> Iterator[tuple[Backend, States]]:
        with this_machine(experiment, folder) as (backend, states):
            yield Without(backend, absent or set()), states

    return jobs.train(job, host=host).weights


def same_bits(run: Path, weights: Mapping[str, Tensor]) -> bool:
    found = load_file(run / "model.safetensors")
    return found.keys() == weights.keys() and all(torch.equal(found[k], weights[k]) for k in found)


def settings(**more: Any) -> dict[str, Any]:
    return {"data": "digits", "rounds": 2, "epochs": 1, "join_timeout": 100.0, **more}
