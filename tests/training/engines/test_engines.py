"""Clients stacked as one train as they do one by one, for every method and whatever their sizes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedcsd.errors import UserError
from fedcsd.experiments.experiment import Experiment
from fedcsd.federation.backends.device import DeviceBackend, engine_for
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Request
from fedcsd.methods import Method, methods
from fedcsd.methods.fedavg import FedAvg
from fedcsd.models.network import Network
from fedcsd.training.engines.graphs import Steps
from fedcsd.training.engines.stacked import Schedule, Stacked
from fedcsd.training.optimizer import Sgd
from fedcsd.training.task import Batch, Task, identity
from helpers.engines import Enclosed, Wrong, assigning, close, experiment, pictures, trained
from helpers.federations import blobs, small


@pytest.mark.slow
@pytest.mark.parametrize("name", methods.names)
def test_stacked_clients_train_as_they_do_one_by_one(name: str) -> None:
    method = methods.load(name)()
    close(trained(experiment(method), "eager"), trained(experiment(method), "stacked"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "label_smoothing", "fedcsd", "fedgkd", "feature_distillation"]
)
def test_augmented_images_are_the_same_ones(name: str) -> None:
    method = methods.load(name)()
    prepared = [experiment(method, augment="cifar") for _ in range(2)]
    close(trained(prepared[0], "eager", 2), trained(prepared[1], "stacked", 2))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 40),
    epochs=st.integers(1, 3),
    clients=st.integers(1, 9),
    momentum=st.sampled_from([0.0, 0.9]),
    decay=st.sampled_from([0.0, 0.1]),
)
def test_any_sizes_of_clients_and_batches(
    batch: int, epochs: int, clients: int, momentum: float, decay: float
) -> None:
    values = {
        "batch_size": batch,
        "epochs": epochs,
        "clients": clients,
        "momentum": momentum,
        "weight_decay": decay,
        "participation": 1.0,
        "model": "mlp",
        "lr": 0.001,  # at 0.05 some of these diverge
    }
    prepared = [experiment(FedAvg(), blobs(), **values) for _ in range(2)]
    one, other = trained(prepared[0], "eager", 2), trained(prepared[1], "stacked", 2)
    # Many small steps let the rounding of single numbers grow; a mistake would move them all.
    way = (one.server.weights.flat - prepared[0].weights.flat).norm()
    assert (one.server.weights.flat - other.server.weights.flat).norm() < 1e-3 * way


def test_more_clients_than_are_stacked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcsd.federation.backends.group.WIDEST", 2)
    prepared = [experiment(FedAvg(), participation=1.0) for _ in range(2)]
    close(trained(prepared[0], "eager", 2), trained(prepared[1], "stacked", 2))


class Mixing(FedAvg):
    """A method whose loss is one number a sample but uses the whole batch, which cannot be stacked."""

    def loss(self, batch: Batch) -> Tensor:
        return batch.cross_entropy + batch.logits.mean(0).square().sum()


class Caught(Exception):
    """An exception that carries the task of a client that should have trained."""


class Catch:
    def train(self, task: Task) -> Any:
        raise Caught(task)


def task_of(prepared: Experiment, client: int) -> Task:
    worker = prepared.worker()
    with pytest.raises(Caught) as caught:
        worker.answer(Request(0, "train", {"weights": prepared.weights}), client, {}, engine=Catch())
    return caught.value.args[0]


def test_a_schedule_goes_through_every_sample_once_an_epoch() -> None:
    prepared = experiment(FedAvg())
    tasks = [task_of(prepared, client) for client in range(6)]
    tasks.sort(key=lambda task: -task.samples)
    schedule = Schedule.of(tasks)
    start = 0
    for k, task in enumerate(tasks):
        assert schedule.steps[k] == 2 * -(-task.samples // 16)
        real = [
            schedule.order[k, t, : schedule.counts[k, t]].tolist() for t in range(schedule.order.shape[1])
        ]
        assert [len(some) for some in real if some] == 2 * (
            [16] * (task.samples // 16) + [task.samples % 16] * (task.samples % 16 > 0)
        )
        epoch = [place for some in real[: schedule.steps[k] // 2] for place in some]
        assert sorted(epoch) == list(range(start, start + task.samples))
        start += task.samples
    program = Stacked([task.samples for task in tasks], 6)._program(schedule.steps)
    done = 0
    for rows, times in program:
        assert rows >= sum(steps > done for steps in schedule.steps)
        done += times
    assert done == schedule.steps[0]


class Mean(FedAvg):
    """A method that gives the mean of the loss, which cannot leave samples out."""

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(batch.logits, batch.labels)


@pytest.mark.parametrize(
    ("method", "values", "why"),
    [
        (Mean(), {}, "a number for each sample"),
        (Mixing(), {}, "depends on the other samples of its batch"),
        (Enclosed(), {}, "another function for every client"),
        (methods.load("moon")(), {"augment": "cifar"}, "must look at every batch"),
    ],
    ids=["mean", "mixing", "closure", "augmented teachers of their own"],
)
def test_what_cannot_be_stacked_is_told_why(method: Method, values: dict[str, Any], why: str) -> None:
    with pytest.raises(
        UserError, match=f"--engine stacked cannot train these clients: .*{why}.*--engine graphs"
    ):
        trained(experiment(method, **values), "stacked", 2)


def with_dropout(shape: Any, classes: int) -> nn.Module:
    layers = nn.Linear(256, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, classes)
    return nn.Sequential(nn.Flatten(), *layers)


def test_a_model_that_draws_is_not_stacked() -> None:
    with pytest.raises(UserError, match="draws random numbers"):
        trained(small(FedAvg(), dataset=pictures(), factory=with_dropout), "stacked")


def test_the_engine_follows_from_sizes() -> None:
    def network(factory: Any = None, **values: Any) -> Network:
        return small(FedAvg(), dataset=pictures(), factory=factory, **values).network

    cnn = network(model="simple_cnn")
    assert [engine_for(clients, cnn) for clients in (4, 5, 100)] == ["graphs", "stacked", "stacked"]
    assert engine_for(100, network(with_dropout)) == "graphs"
    assert engine_for(100, network(model="resnet18")) == "graphs"


def test_a_mistake_of_a_stacked_client_is_told_with_its_place() -> None:
    with pytest.raises(Exception, match="client 3 failed: KeyError"):
        trained(experiment(Wrong(), participation=1.0), "stacked", 1)


def test_a_stacked_client_that_diverges_does_not_harm_the_others() -> None:
    data = pictures()
    data.x_train[:20] = 255
    prepared = experiment(FedAvg(), data, lr=1e30, on_divergence="skip")
    replies = list(
        DeviceBackend(prepared.worker(), "stacked").ask(
            Request(0, "train", {"weights": prepared.weights}, "train"), range(6), {}
        )
    )
    assert all("no longer finite" in reply.problem for reply in replies)


def test_when_two_functions_are_the_same() -> None:
    method = FedAvg()
    factor, tensor = 2.0, torch.ones(1)

    def make(constant: float):
        return lambda w, g: g.mul_(constant)

    assert identity(method.loss, method) == identity(method.loss, method) is not None
    assert identity(FedAvg().loss, method) is None
    assert identity(make(2.0), method) == identity(make(2.0), method) is not None
    assert identity(make(2.0), method) != identity(make(3.0), method)
    assert identity(lambda w, g: g.mul_(factor), method) is not None
    assert identity(lambda w, g: g.mul_(tensor), method) is None
    assert identity(nn.Linear(1, 1), method) is None
    assert identity(lambda w, g, by=tensor: g.mul_(by), method) is None


def test_what_no_longer_stacks_goes_on_in_lanes() -> None:
    """MOON has no teacher in its first round, and one for each client in the second."""

    class Lanes:
        def run(self, request: Request, clients: Any, state: Any) -> Any:
            return (backend.worker.answer(request, k, state(k)) for k in clients)

    prepared = experiment(methods.load("moon")(), augment="cifar", participation=1.0)
    backend = DeviceBackend(prepared.worker(), "stacked")
    backend.lanes = Lanes()
    federation = Federation(prepared, backend)
    federation.step()
    assert backend.engine == "stacked"
    federation.step()
    assert backend.engine == "graphs"
    close(
        federation,
        trained(experiment(methods.load("moon")(), augment="cifar", participation=1.0), "eager", 2),
    )


def test_a_model_that_changes_its_buffers_is_not_stacked() -> None:
    with pytest.raises(UserError, match="changes its buffers"):
        trained(assigning(), "stacked")


def test_a_recorded_step_finds_assigned_buffers_where_they_stay() -> None:
    prepared = assigning()
    task = task_of(prepared, 0)
    steps = Steps(task, task.samples)
    steps.load(task)
    for _ in range(3):
        steps.step(16)
    module: Any = steps.network.module
    assert set(module.read) == {(module.mean.data_ptr(), module.count.data_ptr())}
    assert int(module.count) == 3


def test_bfloat16_copies_follow_the_flat_vector_and_bring_gradients_back() -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 8, 3),
        nn.Conv2d(8, 8, 1),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Flatten(),
        nn.Linear(8 * 4, 5),
    ]
    half = Network(nn.Sequential(*layers), torch.randn(2, 3, 8, 8), bf16=True)
    starts = np.cumsum([0, *(p.numel() for p in half.trained)])
    half.flat.copy_(torch.randn(len(half.flat)))
    half.refresh()
    for p, start in zip(half.trained, starts, strict=False):
        assert p.dtype == (torch.bfloat16 if p.dim() > 1 else torch.float32)
        assert torch.equal(p, half.flat[start : start + p.numel()].view(p.shape).to(p.dtype))

    places = torch.arange(len(half.gradient), dtype=torch.float32)
    assert half.rounded is not None
    for form in (torch.contiguous_format, torch.channels_last):
        gradients = [
            (places[start : start + p.numel()].view(p.shape) % 256).to(p.dtype)
            for p, start in zip(half.trained, starts, strict=False)
        ]
        gradients = [g.contiguous(memory_format=form) if g.dim() == 4 else g for g in gradients]
        half.gradient.fill_(-1)
        half.rounded.gather([*gradients[:-1], None])
        expected = places % 256
        expected[starts[-2] :] = 0
        assert torch.equal(half.gradient, expected)


def test_the_fused_optimizer_takes_the_same_steps() -> None:
    settings_ = experiment(FedAvg(), momentum=0.9, weight_decay=0.01).settings
    start = torch.randn(1000)
    one, other = (Sgd(start.clone(), torch.zeros(1000), settings_) for _ in range(2))
    for each, step in ((one, lambda sgd: sgd.step(None, {})), (other, lambda sgd: sgd._fused())):
        for number in range(4):
            each.gradient.copy_(torch.sin(start + number))
            step(each)
    torch.testing.assert_close(one.parameters, other.parameters)
