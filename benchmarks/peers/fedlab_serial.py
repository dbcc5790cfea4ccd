"""Run FedAvg in FedLab's standalone simulation: StandalonePipeline, SyncServerHandler, SGDSerialClientTrainer.

One process, with one thread or all cores', whichever is faster here. FedLab's own trainer has neither momentum nor
weight decay and its handler averages without weights, so the places that it offers for such things are
overridden: a new optimizer for each client, the number of samples with each upload, a weighted mean, and
the clients of the round. Its loop, its serialization and its exchange are as they are. FedLab imports
torchvision for data sets that are not used here; an empty module stands for it.
"""

import logging
import sys
from types import ModuleType
from typing import Any

import torch

vision = ModuleType("torchvision")
vision.transforms = ModuleType("torchvision.transforms")  # type: ignore[attr-defined]
sys.modules.setdefault("torchvision", vision)

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils import Aggregators, SerializationTool
from torch import Tensor
from workload import Batches, Marks, Work, accuracy, arguments, choose_threads, read


class Data:
    """A data set that has what FedLab needs."""

    def __init__(self, work: Work):
        self.work = work

    def get_dataloader(self, number: int, batch_size: int) -> Batches:
        return Batches(*self.work.client(number), batch_size)


class Trainer(SGDSerialClientTrainer):
    def __init__(self, work: Work):
        super().__init__(work.network(), len(work.parts))
        self.work = work
        self.setup_dataset(Data(work))
        self.setup_optim(work.settings.epochs, work.settings.batch_size, work.settings.lr)

    def train(self, model_parameters: Tensor, train_loader: Batches) -> list[Tensor]:
        self.optimizer = self.work.optimizer(self._model)
        trained: list[Tensor] = super().train(model_parameters, train_loader)
        return [*trained, torch.tensor(float(len(train_loader.y)))]


class Server(SyncServerHandler):
    def __init__(self, work: Work, rounds: int):
        super().__init__(work.network(), rounds, len(work.cohorts[0]) / len(work.parts))
        self.work = work

    @property
    def num_clients_per_round(self) -> int:
        return len(self.work.cohorts[self.round])

    def sample_clients(self) -> list[int]:
        return self.work.cohorts[self.round]

    def global_update(self, buffer: list[list[Tensor]]) -> None:
        mean = Aggregators.fedavg_aggregate([p for p, _ in buffer], torch.stack([n for _, n in buffer]))
        SerializationTool.deserialize_model(self._model, mean)


class Pipeline(StandalonePipeline):
    def __init__(self, server: Server, trainer: Trainer, work: Work, marks: Marks):
        super().__init__(server, trainer)
        self.test, self.marks = work.test(), marks

    def evaluate(self) -> None:
        self.marks.round(accuracy(self.handler.model, *self.test))


def main() -> None:
    logging.disable(logging.INFO)
    folder, rounds, marks = arguments()
    work = read(folder)
    threads = choose_threads(work)
    pipeline: Any = Pipeline(Server(work, rounds), Trainer(work), work, marks)
    pipeline.evaluate()
    pipeline.main()
    marks.write(threads=threads)


if __name__ == "__main__":
    main()
