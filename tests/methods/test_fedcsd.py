"""FedCSD's two halves, its switches, and what makes it equal to something simpler."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fedcsd.aggregation import lerp
from fedcsd.errors import UserError
from fedcsd.experiments.experiment import Experiment
from fedcsd.federation.rounds import Federation
from fedcsd.messages import Request
from fedcsd.methods.fedavg import FedAvg
from fedcsd.methods.fedcsd import FedCSD
from fedcsd.objectives import csd_loss
from fedcsd.training import Batch, Client
from fedcsd.weights import Values, Weights
from helpers.federations import Here, blobs, one_class_net, small


def trained(method: Any, rounds: int = 3, **values: Any) -> Federation:
    experiment = small(method, **values)
    federation = Federation(experiment, Here(experiment))
    for _ in range(rounds):
        federation.step()
    return federation


@pytest.mark.parametrize("factory", [None, one_class_net])
@pytest.mark.parametrize(
    "switches", [{}, {"similarity": False}, {"mask": "none"}, {"target": "uniform"}, {"teacher": "global"}]
)
def test_without_its_term_it_is_fedavg_bit_for_bit(switches: dict[str, Any], factory: Any) -> None:
    plain = trained(FedAvg(), factory=factory, participation=0.75)
    ours = trained(FedCSD(mu=0.0, **switches), factory=factory, participation=0.75)
    assert torch.equal(ours.server.weights.flat, plain.server.weights.flat)
    assert not torch.equal(
        trained(FedCSD(mu=0.1, **switches), factory=factory, participation=0.75).server.weights.flat,
        plain.server.weights.flat,
    )


def test_the_authors_variant_without_its_term_is_fedavg_too() -> None:
    ours = trained(FedCSD(mu=0.0, variant="authors"), factory=one_class_net)
    assert torch.equal(ours.server.weights.flat, trained(FedAvg(), factory=one_class_net).server.weights.flat)
    assert not torch.equal(
        trained(FedCSD(mu=0.1, variant="authors"), factory=one_class_net).server.weights.flat,
        trained(FedCSD(mu=0.1), factory=one_class_net).server.weights.flat,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_authors_variant_trains_clients_smaller_than_a_batch(dtype: torch.dtype) -> None:
    """They have no whole batch to make prototypes of, in whatever precision the model computes."""

    class Net(torch.nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(dtype))

    def factory() -> Net:
        return Net(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)).to(dtype)

    ours = trained(FedCSD(variant="authors"), rounds=1, factory=factory, batch_size=500)
    assert ours.record["train_loss"] > 0


def test_the_teacher_is_the_moving_average_of_the_global_models() -> None:
    experiment = small(FedCSD(alpha=0.7), factory=one_class_net)
    federation = Federation(experiment, Here(experiment))
    teacher = federation.server.weights.flat.double()
    assert torch.equal(federation.server.teacher.flat, federation.server.weights.flat)
    for _ in range(3):
        federation.step()
        teacher = 0.7 * teacher + 0.3 * federation.server.weights.flat.double()
    torch.testing.assert_close(federation.server.teacher.flat, teacher.float(), rtol=1e-5, atol=1e-6)


def test_the_first_round_has_global_prototypes_of_the_initial_model() -> None:
    experiment = small(FedCSD())
    federation = Federation(experiment, Here(experiment))
    federation.step()
    data, network = experiment.data, experiment.network
    network.load(experiment.weights)
    network.eval()
    with torch.no_grad():
        logits = network(data.x_train).logits
    for c in range(data.classes):
        means = [
            logits[rows][data.y_train[rows] == c].mean(0)
            for rows in map(torch.from_numpy, experiment.parts)
            if (data.y_train[rows] == c).any()
        ]
        torch.testing.assert_close(federation.server.prototypes[c], torch.stack(means).mean(0))


def test_classes_of_one_client_and_of_none() -> None:
    """Class 2 is held by client 1 alone and class 3 by nobody: its last prototype stays."""
    data = blobs(classes=4, samples=90)
    labels = data.y_train.numpy()
    rows = [np.flatnonzero(np.isin(labels, (0, 1))), np.flatnonzero(labels == 2)]
    experiment = Experiment(**{**vars(small(FedCSD(mu=0.1), dataset=data, clients=2)), "parts": rows})
    federation = Federation(experiment, Here(experiment))
    federation.server.prototypes = torch.full((4, 4), 5.0)
    record = federation.step()
    assert federation.server.prototypes[3].tolist() == [5.0] * 4
    client = Client(experiment.worker().workspace, 1, 0)
    own = client.outputs(experiment.weights).logits.mean(0)
    torch.testing.assert_close(federation.server.prototypes[2], own)
    assert np.isfinite(record["train_loss"])


def test_clients_tell_which_classes_they_hold_and_not_how_many() -> None:
    experiment = small(FedCSD())
    values = {"weights": experiment.weights, "teacher": experiment.weights}
    reply = experiment.worker().answer(Request(0, "prototypes", values), 0, {})
    assert set(reply.values) == {"prototypes", "held"}
    assert reply["held"].dtype == torch.bool
    held = set(experiment.data.y_train[torch.from_numpy(experiment.parts[0])].tolist())
    assert {c for c in range(3) if reply["held"][c]} == held


class Distillation(FedAvg):
    """Logit distillation from the round's global model, which does not use FedCSD's code."""

    def train(self, client: Client, weights: Weights) -> Values:
        return client.train(weights, self.loss, frozen={"global": weights})

    def loss(self, batch: Batch) -> Tensor:
        target = F.softmax(batch.frozen["global"].logits / 10, 1)
        distance = -(target * F.log_softmax(batch.logits / 10, 1)).sum(1) * 100
        return F.cross_entropy(batch.logits, batch.labels) + 0.01 * distance.mean()


def test_with_all_parts_off_it_is_logit_distillation() -> None:
    base = FedCSD(mu=0.01, tau=10.0, similarity=False, mask="none", teacher="global")
    torch.testing.assert_close(
        trained(base).server.weights.flat, trained(Distillation()).server.weights.flat, rtol=1e-5, atol=1e-6
    )


@given(
    seed=st.integers(0, 500),
    similarity=st.booleans(),
    mask=st.sampled_from(["adaptive", "forcible", "none"]),
    scale=st.sampled_from(["none", "classes"]),
)
def test_the_method_s_loss_is_cross_entropy_and_mu_times_the_objective(
    seed: int, similarity: bool, mask: Any, scale: Any
) -> None:
    scale = scale if similarity else "none"  # a scale without similarity is refused
    g = torch.Generator().manual_seed(seed)
    z, zt, p = (torch.randn(n, 4, generator=g) * 3 for n in (6, 6, 4))
    y = torch.randint(0, 4, (6,), generator=g)
    method = FedCSD(mu=0.3, tau=4.0, similarity=similarity, mask=mask, similarity_scale=scale)
    from fedcsd.models.network import Outputs

    loss, notes = method.loss(Batch(z, z, y, {"teacher": Outputs(zt, zt)}, {"prototypes": p}))
    csd = csd_loss(z, zt, p, y, tau=4.0, similarity=similarity, mask=mask, similarity_scale=scale)
    torch.testing.assert_close(loss, F.cross_entropy(z, y, reduction="none") + 0.3 * csd)
    weight = (F.normalize(z, dim=1) @ F.normalize(p, dim=1).T).softmax(1) * (4 if scale == "classes" else 1)
    q = ((weight * zt if similarity else zt) / 4).double().softmax(1)
    entropy = -(q * q.log()).sum(1) / math.log(4)
    torch.testing.assert_close(notes["target_entropy"].double(), entropy, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "switches",
    [
        {"variant": "authors", "mask": "none"},
        {"similarity_scale": "classes", "similarity": False},
        {"similarity_scale": "classes", "target": "uniform"},
    ],
)
def test_switches_that_would_do_nothing_are_refused(switches: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        FedCSD(**switches)


@pytest.mark.parametrize(
    ("mask", "kept", "wrong_filtered", "right_lost"),
    [("adaptive", -2, 1, 1), ("forcible", -2, 2, 0), ("none", 0, 0, 0)],
)
def test_what_it_measures(mask: Any, kept: int, wrong_filtered: int, right_lost: int) -> None:
    """A teacher sure about all samples but three: wrong by far, wrong by little, and undecided, which counts as
    right for the first class but is not above 1/C."""
    method = FedCSD(mask=mask)
    client = Client(small(method, partition="iid").worker().workspace, 0, 0)
    n, y = client.samples, client.labels
    logits = torch.nn.functional.one_hot(y, 3).float()
    far, near, undecided = *(y != 0).nonzero()[:2, 0].tolist(), int((y == 0).nonzero()[0])
    logits[far, 0], logits[near, 0] = 5.0, 1.1
    logits[undecided] = 0.0
    method.measure(client, logits)
    assert client.notes["teacher_accuracy"] == (n - 2, n)
    assert client.notes["mask_rate"] == (n + kept, n)
    assert client.notes["wrong_filtered"] == (wrong_filtered, 2)
    assert client.notes["right_lost"] == (right_lost, n - 2)


def test_bytes_are_fedavg_s_and_the_prototypes() -> None:
    plain, ours = trained(FedAvg()), trained(FedCSD())
    clients, classes = 4, 3
    assert ours.record["bytes_down"] == plain.record["bytes_down"] + clients * classes * classes * 4
    assert ours.record["bytes_up"] == plain.record["bytes_up"] + clients * (classes * classes * 4 + classes)


def test_a_client_that_was_away_is_sent_the_teacher() -> None:
    experiment = small(FedCSD(), participation=0.5)
    federation = Federation(experiment, Here(experiment))
    size, prototypes = experiment.weights.nbytes, 3 * 3 * 4
    from fedcsd.federation.cohort import cohort

    for t in range(6):
        here, before = (
            set(cohort(experiment.settings, t)),
            set(cohort(experiment.settings, t - 1)) if t else set(),
        )
        record = federation.step()
        away = 0 if t == 0 else len(here - before)
        assert record["bytes_down"] == len(here) * (size + prototypes) + away * size


def test_resume_in_the_middle_is_bit_for_bit() -> None:
    from fedcsd.messages import pack, unpack

    whole = trained(FedCSD(mu=0.1), rounds=4, participation=0.75)
    half = trained(FedCSD(mu=0.1), rounds=2, participation=0.75)
    experiment = small(FedCSD(mu=0.1), participation=0.75)
    again = Federation(experiment, Here(experiment))
    again.load(*unpack(pack(*half.save()), experiment.network.layout))
    for _ in range(2):
        again.step()
    assert torch.equal(again.server.weights.flat, whole.server.weights.flat)
    assert torch.equal(again.server.teacher.flat, whole.server.teacher.flat)
    assert again.record["bytes_down"] == whole.record["bytes_down"]


def test_lerp_of_the_teacher_can_be_made_by_a_client() -> None:
    """A recipe is enough: the same arithmetic on the same two values gives the same bits."""
    federation = trained(FedCSD(), rounds=1)
    before = federation.server.teacher
    federation.step()
    teacher = federation.server.teacher
    assert teacher.recipe is not None
    first, second, t = teacher.recipe
    assert (first, second) == (before.token, federation.server.weights.token)
    assert torch.equal(lerp(before, federation.server.weights, t).flat, teacher.flat)
