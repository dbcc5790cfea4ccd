"""Run FedAvg in Flower's simulation engine: run_simulation with Ray, the Message API, the strategy FedAvg.

An actor for each core, one thread in each (client_resources num_cpus=1). Actors keep the data mapped and
the network made between calls, and batches are indexed without a DataLoader: nothing of that is Flower's
to pay for. The server tells a node which client it is to be, so that the cohorts are everybody's.
Evaluation is the server's (evaluate_fn), with all cores.
"""

import os
import time
from collections.abc import Iterable
from typing import Any

import torch
from flower_client import client_app
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from workload import accuracy, arguments, read

CORES = len(os.sched_getaffinity(0))


class GivenCohorts(FedAvg):
    """FedAvg that asks the clients of the workload, each under a node of its own."""

    def __init__(self, cohorts: list[list[int]], clients: int):
        super().__init__(fraction_evaluate=0.0, min_available_nodes=clients)
        self.cohorts, self.clients = cohorts, clients

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        nodes = sorted(grid.get_node_ids())
        assert len(nodes) == self.clients
        return [
            Message(
                content=RecordDict({"arrays": arrays, "config": ConfigRecord({"client": number})}),
                message_type=MessageType.TRAIN,
                dst_node_id=nodes[number],
            )
            for number in self.cohorts[server_round - 1]
        ]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Aggregate as FedAvg does, and stop if a client failed, where Flower would go on."""
        replies = list(replies)
        failed = [reply.error.reason for reply in replies if reply.has_error()]
        if failed or len(replies) != len(self.cohorts[server_round - 1]):
            raise RuntimeError(f"{len(failed)} clients failed in round {server_round}: {failed[:1]}")
        return super().aggregate_train(server_round, replies)


def main() -> None:
    folder, rounds, marks = arguments()
    work = read(folder)
    network, (x_test, y_test) = work.network(), work.test()
    server = ServerApp()

    def evaluate(_: int, arrays: ArrayRecord) -> MetricRecord:
        network.load_state_dict(arrays.to_torch_state_dict())
        marks.round(accuracy(network, x_test, y_test))
        return MetricRecord({"accuracy": marks.accuracies[-1]})

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        torch.set_num_threads(CORES)
        while len(list(grid.get_node_ids())) < len(work.parts):
            time.sleep(0.05)
        GivenCohorts(work.cohorts, len(work.parts)).start(
            grid=grid,
            initial_arrays=ArrayRecord(work.weights),
            num_rounds=rounds,
            evaluate_fn=evaluate,
        )

    run_simulation(
        server_app=server,
        client_app=client_app(str(folder)),
        num_supernodes=len(work.parts),
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {
                "num_cpus": CORES,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
                "logging_level": 40,
                "log_to_driver": False,
            },
        },
    )
    marks.write(threads=1, processes=CORES)


if __name__ == "__main__":
    main()
