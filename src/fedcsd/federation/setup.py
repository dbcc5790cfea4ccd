"""The parts that a federation is made of."""

from dataclasses import dataclass

import torch

from fedcsd.config import Settings
from fedcsd.data import Dataset
from fedcsd.data.partition import Rows
from fedcsd.methods import Method
from fedcsd.models import Factory
from fedcsd.models.network import Network
from fedcsd.training.worker import Worker
from fedcsd.training.workspace import Workspace
from fedcsd.weights import Weights


@dataclass(frozen=True)
class Setup:
    """All that a federation is made of, checked and ready to train."""

    settings: Settings
    method: Method
    data: Dataset
    parts: list[Rows]
    """training rows of each client"""
    held: list[Rows]
    """rows that each client holds out to be tested on; empty without --holdout"""
    factory: Factory
    network: Network
    """a copy of the model in this process, for its layout and to save the result"""
    weights: Weights
    """initial weights of the global model"""

    @property
    def features(self) -> int:
        """Return the size of the model's penultimate features."""
        self.network.eval()
        with torch.no_grad():
            return self.network(self.data.example()).features.shape[1]

    def worker(self) -> Worker:
        """Return a worker with the data of all clients."""
        parts, held = ([torch.from_numpy(rows) for rows in some] for some in (self.parts, self.held))
        return Worker(Workspace(self.settings, self.data, parts, held, self.factory), self.method)
