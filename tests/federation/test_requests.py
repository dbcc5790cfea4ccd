"""Requests have kinds: who is sent them, and what is read from the replies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedcsd.aggregation import weighted_mean
from fedcsd.federation.cohort import Participants
from fedcsd.federation.evaluation import Evaluation
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Kind, Reply, Request
from fedcsd.methods import Ask, Method, Server, methods
from fedcsd.methods.fedavg import FedAvg
from fedcsd.training import Client
from fedcsd.weights import Values, Weights
from helpers.federations import Here, small


class Noting(Here):
    """Notes requests and the clients they go to; replies of `absent` clients do not come."""

    def __init__(self, experiment: Any, absent: int = -1):
        super().__init__(experiment)
        self.sent: list[tuple[str, Kind, list[int]]] = []
        self.absent = absent

    def ask(self, request: Request, clients: Sequence[int], states: Mapping[int, Values]) -> Iterator[Reply]:
        self.sent.append((request.function, request.kind, sorted(clients)))
        for reply in super().ask(request, clients, states):
            yield Reply(reply.client, absent="gone") if reply.client == self.absent else reply

    def counts(self) -> dict[str, Any]:
        return {"bytes_up": 7, "lost_states": 1}


@dataclass(frozen=True)
class TwoQuestions(FedAvg):
    """Asks for a count, then trains in a function of another name."""

    trains = ("fit",)

    def round(self, server: Server, ask: Ask) -> None:
        server.total = sum(reply["n"] for reply in ask(self.count))
        server.weights = weighted_mean(ask(self.fit, weights=server.weights))

    def count(self, client: Client) -> Values:
        return {"n": client.samples}

    def fit(self, client: Client, weights: Weights) -> Values:
        return client.train(weights, self.loss)


def test_a_request_has_the_kind_that_the_method_declares() -> None:
    experiment = small(TwoQuestions())
    federation = Federation(experiment, Noting(experiment))
    federation.step()
    assert federation.backend.sent == [("count", "query", [0, 1, 2, 3]), ("fit", "train", [0, 1, 2, 3])]


def test_personal_models_are_asked_for_by_a_kind_of_their_own() -> None:
    experiment = small(methods.load("ditto")())
    federation = Federation(experiment, Noting(experiment))
    federation.step()
    assert [sent[:2] for sent in federation.backend.sent] == [
        ("train", "train"),
        ("test_personal", "personal"),
    ]


def test_a_client_without_an_answer_is_asked_nothing_more_in_this_round() -> None:
    experiment = small(TwoQuestions())
    federation = Federation(experiment, Noting(experiment, absent=2))
    record = federation.step()
    assert [clients for *_, clients in federation.backend.sent] == [[0, 1, 2, 3], [0, 1, 3]]
    assert (record["failed"], record["clients"]) == (1, 3)
    assert federation.ledger.last_round.tolist() == [0, 0, -1, 0]


def test_a_backend_s_counts_go_over_those_of_the_federation() -> None:
    experiment = small(TwoQuestions())
    record = Federation(experiment, Noting(experiment)).step()
    assert (record["bytes_up"], record["lost_states"]) == (7, 1)
    assert record["bytes_down"] == 4 * experiment.weights.nbytes


def test_failing_clients_leave_a_cohort_in_the_order_of_dealing() -> None:
    participants = Participants(drawn=[0, 1, 2, 3], failing={1, 9}, sizes=[5, 8, 5, 9])
    assert participants.clients == [3, 1, 0, 2]
    assert (participants.failed, participants.present) == ({1}, [3, 0, 2])
    participants.diverged.add(3)
    assert participants.present == [0, 2]


def test_the_loss_of_an_evaluation_is_over_test_images_alone() -> None:
    def block(correct: list[bool], loss: float) -> Reply:
        return Reply(0, len(correct), {"correct": torch.tensor(correct)}, {"loss": (loss, len(correct))})

    found = Evaluation.of_blocks([block([True, False], 3.0), block([True], 1.5), block([False], 50.0)], 3)
    assert (found.loss, found.correct.tolist()) == (1.5, [True, False, True, False])


def test_images_that_clients_counted_themselves_are_weighted_by_their_number() -> None:
    experiment = small(TwoQuestions())
    federation = Federation(experiment, Here(experiment))
    record = federation.tests.record(Evaluation(0.5, counts=[(1, 2), (6, 6), (0, 0)]), last=False)
    assert record["test_accuracy"] == 7 / 8
    assert record["client_accuracy_mean"] == 0.75


@pytest.mark.parametrize("name", methods.names)
def test_every_method_declares_functions_that_it_has(name: str) -> None:
    method: Method = methods.load(name)()
    assert method.trains
    assert all(callable(getattr(method, function)) for function in method.trains)
    assert method.personalised == (name in ("ditto", "fedbn", "fedper"))
    layout = small().network.layout
    local = method.local(replace(layout, norms=frozenset(layout.names[:1])))
    assert (local is not None and bool(local.any())) == (name in ("fedbn", "fedper"))
