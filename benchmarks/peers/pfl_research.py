"""Run FedAvg in pfl-research: SimulatedBackend and FederatedAveraging, in one process for each core.

The processes find one another as its documentation says, by PFL_WORKER_ADDRESSES and PFL_WORKER_RANK
(torch.distributed with gloo); one thread in each. Where clients are of unequal size, pfl's own scheduler
balances them (user_id_to_weight); evaluation is shared among the processes too. pfl does not evaluate
after its first round, which is the one to warm up, and does not shuffle: a client's images are shuffled
each time it takes part.
"""

import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from workload import Marks, Work, arguments, read

PROCESSES = len(os.sched_getaffinity(0))


def with_loss(network: Any) -> Any:
    """A module with the `loss` and `metrics` that pfl needs."""
    from pfl.metrics import Weighted

    def loss(x: Tensor, y: Tensor) -> Tensor:
        network.train()
        return F.cross_entropy(network(x), y)

    @torch.no_grad()
    def metrics(x: Tensor, y: Tensor) -> dict[str, Any]:
        network.eval()
        return {"accuracy": Weighted(int((network(x).argmax(1) == y).sum()), len(y))}

    network.loss, network.metrics = loss, metrics
    return network


def users(work: Work) -> Any:
    """Return the clients in the order of the cohorts."""
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset

    order: Iterator[int] = cycle([number for cohort in work.cohorts for number in cohort])

    def user(number: int) -> Any:
        x, y = work.client(number)
        shuffled = torch.randperm(len(y))
        return Dataset((x[shuffled], y[shuffled]), user_id=str(number))

    sizes = {number: len(rows) for number, rows in enumerate(work.parts)}
    unequal = len(set(sizes.values())) > 1
    return FederatedDataset(user, lambda: next(order), sizes if unequal else None)


def marking(marks: Marks) -> Any:
    """A callback that comes after the evaluation."""
    from pfl.callback.base import TrainingProcessCallback

    class Marking(TrainingProcessCallback):
        def on_train_begin(self, *, model: Any) -> Any:
            marks.round(0.0)
            return super().on_train_begin(model=model)

        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> Any:
            named = {str(name): value for name, value in aggregate_metrics.to_simple_dict().items()}
            marks.round(named.get("Central val | accuracy", 0.0))
            return super().after_central_iteration(
                aggregate_metrics, model, central_iteration=central_iteration
            )

    return Marking()


def train() -> None:
    """Train as one of the processes."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.central_evaluation import CentralEvaluationCallback
    from pfl.data.dataset import Dataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)
    folder, rounds, marks = arguments()
    work = read(folder)
    s, network = work.settings, with_loss(work.network())
    model = PyTorchModel(
        model=network,
        local_optimizer_create=partial(torch.optim.SGD, momentum=s.momentum, weight_decay=s.weight_decay),
        central_optimizer=torch.optim.SGD(network.parameters(), 1.0),
    )
    data = users(work)
    evaluation = NNEvalHyperParams(local_batch_size=500)
    FederatedAveraging().run(
        # Only the central evaluation is wanted, so that of clients before and after training is put off.
        algorithm_params=NNAlgorithmParams(rounds, rounds + 1, len(work.cohorts[0]), 0),
        backend=SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_learning_rate=s.lr, local_num_epochs=s.epochs, local_batch_size=s.batch_size
        ),
        model_eval_params=evaluation,
        callbacks=[CentralEvaluationCallback(Dataset(work.test()), evaluation), marking(marks)],
        send_metrics_to_platform=False,
    )
    if os.environ["PFL_WORKER_RANK"] == "0":
        marks.write(threads=1, processes=PROCESSES)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    if "PFL_WORKER_RANK" in os.environ:
        train()
        return
    addresses = ",".join(f"127.0.0.1:{free_port()}" for _ in range(PROCESSES))
    shared = {"PFL_WORKER_ADDRESSES": addresses, "PFL_PYTORCH_DEVICE": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env={**os.environ, **shared, "PFL_WORKER_RANK": str(rank)}
        )
        for rank in range(PROCESSES)
    ]
    codes = [process.wait() for process in processes]
    sys.exit(max(abs(code) for code in codes))


if __name__ == "__main__":
    random.seed(0)
    main()
