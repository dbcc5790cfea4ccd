"""Compare the local training loop with plain PyTorch, and with a federation worked out by hand."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import fedcsd
from fedcsd import seeds
from fedcsd.config import Settings
from fedcsd.data import Dataset
from fedcsd.errors import Diverged
from fedcsd.experiments.experiment import Experiment
from fedcsd.federation.cohort import cohort
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Request
from fedcsd.methods.fedavg import FedAvg
from fedcsd.models.network import Network
from fedcsd.training import Batch, Client
from fedcsd.training.task import batches
from helpers.federations import Here, blobs, one_class_net, small


def plain_fedavg(experiment: Experiment, rounds: int) -> dict[str, torch.Tensor]:
    """FedAvg as one writes it from scratch: deepcopy, torch.optim.SGD, an average of state dicts."""
    settings, data = experiment.settings, experiment.data
    model = experiment.network.module
    for t in range(rounds):
        states = []
        for k, rows in enumerate(experiment.parts):
            local = copy.deepcopy(model)
            local.train()
            sgd = torch.optim.SGD(
                local.parameters(),
                lr=settings.lr,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
            )
            for epoch in range(settings.epochs):
                order = seeds.rng(settings.seed, "batches", t, k, epoch).permutation(len(rows))
                for start in range(0, len(rows), settings.batch_size):
                    some = rows[order[start : start + settings.batch_size]]
                    sgd.zero_grad()
                    F.cross_entropy(local(data.x_train[some]), data.y_train[some]).backward()
                    sgd.step()
            states.append((len(rows), local.state_dict()))
        total = sum(n for n, _ in states)
        mean = {
            name: sum(n * s[name].double() for n, s in sorted(states, key=lambda pair: -pair[0])) / total
            for name in states[0][1]
        }
        model = copy.deepcopy(model)
        model.load_state_dict({name: tensor.float() for name, tensor in mean.items()})
    return model.state_dict()


def test_fedavg_equals_a_plain_pytorch_loop() -> None:
    experiment = small(FedAvg(), lr=0.1, rounds=3)
    federation = Federation(experiment, Here(experiment))
    expected = plain_fedavg(experiment, rounds=3)
    for _ in range(3):
        federation.step()
    for name, tensor in federation.server.weights.named().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-7)


def zero_model() -> nn.Module:
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    return nn.Sequential(model)


def test_two_clients_worked_by_hand() -> None:
    # From zero both classes have probability 1/2. Client 0 holds (x = 1, class 0): its gradient is
    # (-1/2, 1/2). Client 1 holds three times (x = 2, class 1): (1, -1). One step of lr 0.1 each, then
    # the average by samples: ((0.05, -0.05) + 3 (-0.1, 0.1)) / 4.
    x, y = np.array([[1.0], [2], [2], [2]], dtype=np.float32), np.array([0, 1, 1, 1])
    data = Dataset.of_arrays(x, y, x, y)
    experiment = small(
        FedAvg(),
        dataset=data,
        factory=zero_model,
        clients=2,
        epochs=1,
        lr=0.1,
        weight_decay=0.0,
        min_samples=1,
    )
    experiment = Experiment(**{**vars(experiment), "parts": [np.array([0]), np.array([1, 2, 3])]})
    federation = Federation(experiment, Here(experiment))
    record = federation.step()
    assert federation.server.weights.flat.tolist() == pytest.approx([-0.0625, 0.0625])
    assert record["train_loss"] == pytest.approx(np.log(2))
    assert record["test_accuracy"] == 0.75  # three of four
    assert record["bytes_down"] == 2 * 2 * 4
    assert record["bytes_up"] == 2 * (2 * 4 + 8)  # the weights and the number of steps


def test_a_sample_left_over_joins_a_batch_where_there_is_batch_norm() -> None:
    # 33 samples in batches of 16 leave one over; 1 sample is a client of its own; two epochs.
    for factory, sizes in ((one_class_net, [[16, 17], [1]]), (None, [[16, 16, 1], [1]])):
        seen: list[int] = []

        class Seen(FedAvg):
            def loss(self, batch: Batch) -> torch.Tensor:
                seen.append(len(batch.labels))  # noqa: B023
                return super().loss(batch)

        experiment = small(Seen(), **({"factory": factory} if factory else {}))
        parts = [np.arange(33), np.array([40])]
        experiment = Experiment(**{**vars(experiment), "parts": parts})
        worker = experiment.worker()
        for k, expected in enumerate(sizes):
            seen.clear()
            reply = worker.answer(Request(0, "train", {"weights": experiment.weights}), k, {})
            assert not reply.problem
            assert seen == 2 * expected
            assert reply["steps"] == len(seen)
            assert not torch.equal(reply.weights.parameters, experiment.weights.parameters)


@given(samples=st.integers(1, 500), batch=st.integers(1, 70), norms=st.booleans())
def test_an_epoch_is_cut_into_batches(samples: int, batch: int, norms: bool) -> None:
    network = Network(one_class_net() if norms else nn.Linear(6, 3), torch.zeros(2, 6))
    sizes = [len(part) for part in batches(torch.arange(samples), batch, network)]
    assert sum(sizes) == samples
    assert sizes == [batch] * (len(sizes) - 1) + sizes[-1:]
    assert 1 <= sizes[-1] <= batch + norms
    if norms and batch > 1 and samples > 1:
        assert 1 not in sizes


def test_batch_norm_statistics_are_averaged_and_integers_are_not() -> None:
    experiment = small(FedAvg(), factory=one_class_net, epochs=1)
    federation = Federation(experiment, Here(experiment))
    worker, request = experiment.worker(), Request(0, "train", {"weights": experiment.weights})
    replies = [worker.answer(request, k, {}) for k in range(4)]
    federation.step()
    total = sum(r.samples for r in replies)
    means = sum(r.samples * r.weights.named()["1.running_mean"].double() for r in replies) / total
    torch.testing.assert_close(federation.server.weights.named()["1.running_mean"], means.float())
    assert "1.num_batches_tracked" not in federation.server.weights.named()


def test_training_depends_on_seed_round_and_client_only() -> None:
    experiment = small(FedAvg(), factory=one_class_net)
    request = Request(3, "train", {"weights": experiment.weights})
    worker = experiment.worker()
    first = worker.answer(request, 2, {}).weights.flat
    worker.answer(Request(3, "train", {"weights": experiment.weights}), 1, {})
    torch.manual_seed(99)
    assert torch.equal(worker.answer(request, 2, {}).weights.flat, first)
    assert torch.equal(experiment.worker().answer(request, 2, {}).weights.flat, first)
    other = worker.answer(Request(4, "train", {"weights": experiment.weights}), 2, {})
    assert not torch.equal(other.weights.flat, first)


def test_frozen_outputs_are_looked_up_by_row() -> None:
    """A loss is given a frozen network's outputs on the batch's own images."""
    experiment = small(FedAvg())
    worker = experiment.worker()
    client = Client(worker.workspace, 0, 0)
    seen = []

    def loss(batch):
        seen.append(
            (batch.labels.clone(), batch.frozen["teacher"].logits.clone(), batch.logits.detach().clone())
        )
        return batch.logits.sum() * 0

    client.train(experiment.weights, loss, frozen={"teacher": experiment.weights})
    assert len(seen) == 2 * -(-client.samples // 16)
    for _, teacher, student in seen:  # the loss is constant, so the student stays what the teacher is
        torch.testing.assert_close(teacher, student)


def test_the_gradient_hook_changes_the_step() -> None:
    experiment = small(FedAvg(), lr=0.1, momentum=0.0, weight_decay=0.0, epochs=1, batch_size=1000)
    client = Client(experiment.worker().workspace, 0, 0)

    def zero_loss(batch):
        return batch.logits.sum() * 0

    result = client.train(experiment.weights, zero_loss, gradient=lambda w, g: g.add_(1.0))
    moved = result["weights"].flat - experiment.weights.flat
    torch.testing.assert_close(moved, torch.full_like(moved, -0.1))


def test_divergence_is_reported_not_raised() -> None:
    experiment = small(FedAvg(), lr=1e30)
    reply = experiment.worker().answer(Request(0, "train", {"weights": experiment.weights}), 0, {})
    assert "no longer finite" in reply.problem
    federation = Federation(experiment, Here(experiment))
    with pytest.raises(Diverged, match=r"round 1, client \d.*--lr, now 1e\+30"):
        federation.step()


def test_a_skipped_client_is_left_out_and_counted() -> None:
    data = blobs()
    data.x_train[:10] = 1e30  # finite, but not for long
    experiment = small(FedAvg(), dataset=data, clients=2, on_divergence="skip")
    experiment = Experiment(**{**vars(experiment), "parts": [np.arange(10), np.arange(10, 120)]})
    federation = Federation(experiment, Here(experiment))
    record = federation.step()
    assert (record["clients"], record["diverged"]) == (1, 1)
    alone = experiment.worker().answer(Request(0, "train", {"weights": experiment.weights}), 1, {})
    assert torch.equal(federation.server.weights.flat, alone.weights.flat)


def test_a_failed_round_leaves_the_federation_as_it_was() -> None:
    experiment = small(fedcsd.FedCSD())
    federation = Federation(experiment, Here(experiment))
    federation.step()
    header, before = federation.save()

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    federation.backend.evaluate = broken
    with pytest.raises(KeyboardInterrupt):
        federation.step()
    assert federation.save()[0] == header
    assert all(a is b for a, b in zip(federation.save()[1].values(), before.values(), strict=True))


def test_cohorts_are_a_function_of_seed_and_round() -> None:
    settings = Settings(clients=100, participation=0.1)
    assert len(cohort(settings, 0)) == 10
    assert cohort(settings, 5) == cohort(settings, 5) != cohort(settings, 6)
    assert cohort(Settings(clients=7), 3) == list(range(7))
    assert len(cohort(Settings(clients=3, participation=0.01), 0)) == 1
    seen = {k for t in range(200) for k in cohort(settings, t)}
    assert len(seen) == 100


def test_drift_is_measured_against_the_round_s_start() -> None:
    experiment = small(FedAvg(), track_drift=True)
    worker = experiment.worker()
    reply = worker.answer(Request(0, "train", {"weights": experiment.weights}), 0, {})
    workspace = worker.workspace
    network = workspace.frozen("check", experiment.weights)
    start = workspace.forward(network, experiment.data.x_test, workspace.probe_rows)
    network.load(reply.weights)
    end = workspace.forward(network, experiment.data.x_test, workspace.probe_rows)
    p, q = torch.softmax(start.logits.double(), 1), torch.softmax(end.logits.double(), 1)
    total, count = reply.notes["logit_drift"]
    assert total / count == pytest.approx(float((p * (p / q).log()).sum(1).mean()), rel=1e-4)
    total, count = reply.notes["feature_drift"]
    assert total / count == pytest.approx(float((end.features - start.features).norm(dim=1).mean()), rel=1e-5)


def test_a_workspace_is_the_only_place_with_networks() -> None:
    """One student and one frozen copy are enough for any number of clients."""
    experiment = small(fedcsd.FedCSD(), clients=10)
    worker = experiment.worker()
    request = {"weights": experiment.weights, "teacher": experiment.weights, "prototypes": torch.zeros(3, 3)}
    for k in range(10):
        worker.answer(Request(0, "train", request), k, {})
    assert len(worker.workspace._networks) == 2
