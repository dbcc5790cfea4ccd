"""Test personalised methods tensor by tensor: which are sent, which stay, and which a client uses for itself."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcsd.data import Dataset
from fedcsd.federation.rounds import Federation
from fedcsd.methods.ditto import Ditto
from fedcsd.methods.fedavg import FedAvg
from fedcsd.methods.fedbn import FedBN
from fedcsd.methods.fedper import FedPer
from fedcsd.training import Batch
from fedcsd.weights import Weights
from helpers.worked import doubled, federate, flats, heads, personal, quadratic, toy, trainings

TARGETS = torch.tensor([3.0, -1.0])


def first_logit(cls: type, targets: Tensor = TARGETS) -> Any:
    """Return the method with `1/2 · (z − t)²` of the first logit as its clients' loss; t by label."""

    def loss(self: Any, batch: Batch) -> Tensor:
        return 0.5 * (batch.logits[:, 0] - targets[batch.labels]).square().mean()

    return type(cls.__name__, (cls,), {"loss": loss})


def numbers(values: Any) -> set[float]:
    """Return every number in a reply or a request."""
    found: set[float] = set()
    for value in values.values():
        tensor = value.flat if isinstance(value, Weights) else torch.as_tensor(value)
        found |= set(tensor.double().flatten().tolist())
    return found


def plain(named: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.flatten().tolist() for name, tensor in named.items()}


# FedPer: features a·x with x = 1, logits (b, d)·a·x from a = b = 1, d = 0; client k's gradient is
# (z − t_k)(b, a) for (a, b) with z = a·b, t = (3, −1); one step of lr 1/2, p = (1/4, 3/4).


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
        nn.init.ones_(self.body.weight)
        self.head.weight.data = torch.tensor([[1.0], [0.0]])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def product(cls: type) -> Federation:
    x, y = np.ones((4, 1), dtype=np.float32), np.array([0, 1, 1, 1])
    return federate(first_logit(cls)(), Dataset.of_arrays(x, y, x, y), [[0], [1, 2, 3]], Product)


def test_fedper() -> None:
    # Round 1: client 0: z − t = −2: (a, b) = (2, 2); client 1: z − t = 2: (0, 0); a = 2/4 = 1/2
    # Round 2: client 0, (1/2, 2): z − t = −2: a = 1/2 + 2 = 5/2, b = 2 + 1/2 = 5/2
    #          client 1, (1/2, 0): z − t = 1: a = 1/2, b = −1/4; a = 5/8 + 3/8 = 1
    # Round 3: client 0, (1, 5/2): z − t = −1/2: a = 1 + 5/8, b = 5/2 + 1/4 = 11/4
    #          client 1, (1, −1/4): z − t = 3/4: a = 1 + 3/32, b = −1/4 − 3/8 = −5/8
    #          a = 1 + 5/32 + 9/128 = 157/128
    federation = product(FedPer)
    for a, (b0, b1) in ((0.5, (2, 0)), (1, (2.5, -0.25)), (157 / 128, (2.75, -0.625))):
        federation.step()
        assert plain(federation.server.weights.named()) == {"body.weight": [a], "head.weight": [1, 0]}
        assert plain(personal(federation, 0)) == {"body.weight": [a], "head.weight": [b0, 0]}
        assert plain(personal(federation, 1)) == {"body.weight": [a], "head.weight": [b1, 0]}


def test_fedavg_sends_the_classifier_too() -> None:
    # The same two steps without anything local: b = 2/4 = 1/2.
    federation = product(FedAvg)
    federation.step()
    assert plain(federation.server.weights.named()) == {"body.weight": [0.5], "head.weight": [0.5, 0]}


# FedBN: z = b·u, u = γ·s + β, where s is x less its mean by its deviation: a client's x are m ± 1,
# so s = ±1, with m = (3, 7). From γ = b = 1, β = 0. Client 0 has two samples, client 1 six.
#   dL/db = mean((z − t) u), dL/dγ = b · mean((z − t) s), dL/dβ = b · mean(z − t)
# BatchNorm with an ε too small to be seen and momentum 1/2; its running variance is the unbiased one: 2 and 6/5.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(1, eps=1e-12, momentum=0.5), nn.Linear(1, 2, bias=False)
        self.head.weight.data = torch.tensor([[1.0], [0.0]])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


INITIAL = {"norm.weight": [1], "norm.bias": [0], "norm.running_mean": [0], "norm.running_var": [1]}


def normed(cls: type) -> Federation:
    x = np.array([2, 4, 6, 8, 6, 8, 6, 8], dtype=np.float32)[:, None]
    y = np.array([0, 0, 1, 1, 1, 1, 1, 1])
    data = Dataset.of_arrays(x, y, x, y)
    method = first_logit(cls, torch.tensor([1.0, -2.0]))()
    return federate(method, data, [[0, 1], [2, 3, 4, 5, 6, 7]], Normed)


def test_fedbn() -> None:
    # Round 1: z − t = s − t: dL/db = 1, dL/dγ = 1, dL/dβ = −t: b = γ = 1/2, β = t/2 = (1/2, −1)
    #   running means m/2, variances 1/2 + 2/2 = 3/2 and 1/2 + 3/5 = 11/10
    # Round 2: u = (s + t)/2, z = (s + t)/4, z − t = (s − 3t)/4
    #   dL/db = (1 − 3t²)/8 = (−1/4, −11/8): b = (5/8, 19/16), averaged 10/64 + 57/64 = 67/64
    #   dL/dγ = 1/8: γ = 7/16; dL/dβ = −3t/8: β = t/2 + 3t/16 = 11t/16
    #   running means 3m/4, variances 3/4 + 1 = 7/4 and 11/20 + 12/20 = 23/20
    federation = normed(FedBN)
    expected = [
        (0.5, (0.5, 0.5, 1.5, 1.5), (0.5, -1.0, 3.5, 1.1)),
        (67 / 64, (0.4375, 0.6875, 2.25, 1.75), (0.4375, -1.375, 5.25, 1.15)),
    ]
    for b, *own in expected:
        federation.step()
        named = plain(federation.server.weights.named())
        assert named.pop("head.weight") == pytest.approx([b, 0], rel=1e-6)
        assert named == INITIAL
        for client in (0, 1):
            named = personal(federation, client)
            assert named["head.weight"].flatten().tolist() == pytest.approx([b, 0], rel=1e-6)
            assert [named[n].item() for n in INITIAL] == pytest.approx(own[client], rel=1e-6)


@pytest.mark.parametrize(
    ("cls", "make", "rounds", "stays", "sent"),
    [
        (FedPer, product, 3, ["head.weight"], (13 / 8, 35 / 32)),
        (FedBN, normed, 2, list(INITIAL), (5 / 8, 19 / 16)),
    ],
)
def test_what_stays_is_in_no_reply_and_costs_nothing(
    cls: type, make: Any, rounds: int, stays: list[str], sent: tuple[float, float]
) -> None:
    """All numbers of that round are different, so that none can be sent unseen."""
    federation, plainly = make(cls), make(FedAvg)
    for _ in range(rounds):
        federation.step()
        plainly.step()
    for reply in trainings(federation)[-2:]:
        own = plain(personal(federation, reply.client))
        local = {number for name in stays for number in own[name]} - {0.0}
        seen = numbers(reply.values)
        assert any(number == pytest.approx(sent[reply.client], rel=1e-6) for number in seen)
        assert local
        assert not seen & local
    kept = sum(federation.server.weights.named()[name].nbytes for name in stays)
    assert federation.record["bytes_up"] <= plainly.record["bytes_up"] - 2 * kept


@pytest.mark.parametrize(("cls", "make"), [(FedPer, product), (FedBN, normed)])
def test_a_newcomer_starts_from_the_initial_local_part(
    cls: type, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedcsd.federation.rounds.cohort", lambda settings, round: [[0], [0, 1]][round])
    federation = make(cls)
    federation.step()
    glob = plain(federation.server.weights.named())
    assert plain(personal(federation, 1)) == glob
    if cls is FedPer:  # trained by client 0 alone: a = 2; the classifier is the initial one
        assert glob == {"body.weight": [2], "head.weight": [1, 0]}
        # client 1 from (2, 1): z − t = 3: b = 1 − 3 = −2
        federation.step()
        assert plain(personal(federation, 1))["head.weight"] == [-2, 0]
    else:
        assert glob.pop("head.weight") == pytest.approx([0.5, 0], rel=1e-6)
        assert glob == INITIAL
        # client 1 from b = 1/2, γ = 1, β = 0: z − t = s/2 + 2: dL/dγ = 1/4, dL/dβ = 1
        federation.step()
        named = plain(personal(federation, 1))
        found = [named[name][0] for name in ("norm.weight", "norm.bias", "norm.running_mean")]
        assert found == pytest.approx([0.875, -0.5, 3.5], rel=1e-6)


def test_a_client_that_sits_out_keeps_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedcsd.federation.rounds.cohort", lambda settings, round: [[0, 1], [0]][round])
    federation = product(FedPer)
    federation.step()
    federation.step()  # a = 5/2 of client 0; client 1 still has b = 0
    assert plain(personal(federation, 1)) == {"body.weight": [2.5], "head.weight": [0, 0]}


# Ditto on the toy federation of `worked.py`.


def test_ditto() -> None:
    # μ = 1/2, two steps: v ← v/4 + t/2 + w_G/4, beside FedAvg's w_G = 0, −3/2, −15/8.
    #   round 1: v = (10, −5) as in FedProx
    #   round 2: v_0: 5/2 + 8 − 3/8 = 81/8 → (81 + 256 − 12)/32 = 325/32
    #            v_1: −5/4 − 4 − 3/8 = −45/8 → (−45 − 128 − 12)/32 = −185/32
    # The personal model's buffer is its own: two steps of s a round.
    federation = toy(quadratic(Ditto)(mu=0.5), epochs=2)
    for w, own in ((-1.5, (10.0, -5.0)), (-1.875, (10.15625, -5.78125))):
        assert heads(flats(federation, 1)) == doubled(w)
        for client, v in enumerate(own):
            named = plain(personal(federation, client))
            assert named == {"head.weight": [v, -v / 2], "seen": [2.0 * (client + 1) * federation.round]}


def test_ditto_of_a_latecomer(monkeypatch: pytest.MonkeyPatch) -> None:
    # Round 1 has client 0 alone: w_G = 12. Client 1, away, would use the global model.
    # Round 2: client 1's personal model starts from w_G = 12: 3 − 4 + 3 = 2 → 1/2 − 4 + 3 = −1/2,
    #          its buffer from client 0's 2: 2 + 4 = 6
    monkeypatch.setattr("fedcsd.federation.rounds.cohort", lambda settings, round: [[0], [0, 1]][round])
    federation = toy(quadratic(Ditto)(mu=0.5), epochs=2)
    federation.step()
    assert plain(personal(federation, 1)) == {"head.weight": [12, -6], "seen": [2]}
    federation.step()
    assert plain(personal(federation, 1)) == {"head.weight": [-0.5, 0.25], "seen": [6]}


@pytest.mark.parametrize("mu", [0.0, 0.1, 3.0])
def test_ditto_s_global_model_is_fedavg_s(mu: float) -> None:
    from helpers.federations import Here, one_class_net, small

    found = []
    for method in (FedAvg(), Ditto(mu=mu)):
        experiment = small(method, factory=one_class_net, participation=0.75)
        federation = Federation(experiment, Here(experiment))
        for _ in range(3):
            federation.step()
        found.append(federation.server.weights.flat)
    assert torch.equal(*found)


def test_ditto_sends_what_fedavg_sends() -> None:
    plainly, ours = (toy(quadratic(cls)(), epochs=2) for cls in (FedAvg, Ditto))
    for federation in (plainly, ours):
        flats(federation, 2)
    for key in ("bytes_up", "bytes_down"):
        assert ours.record[key] == plainly.record[key]
    for mine, reply in zip(trainings(ours), trainings(plainly), strict=True):
        assert numbers(mine.values) == numbers(reply.values)
