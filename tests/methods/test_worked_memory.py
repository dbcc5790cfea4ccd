"""Check by hand which models and prototypes a loss is given: teachers, the round's global model,
a client's previous model, global prototypes. Losses are replaced by quadratics (see `worked.py`)."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedcsd.data import Dataset
from fedcsd.methods.feature_distillation import FeatureDistillation
from fedcsd.methods.fedcsd import FedCSD
from fedcsd.methods.fedgkd import FedGKD
from fedcsd.methods.fedntd import FedNTD
from fedcsd.methods.fedproto import FedProto
from fedcsd.methods.logit_distillation import LogitDistillation
from fedcsd.methods.moon import Moon
from fedcsd.training import Batch
from helpers.worked import Toy, doubled, federate, flats, heads, quadratic, towards, toy

TWO_STEPS = {"epochs": 2}


@pytest.mark.parametrize("cls", [LogitDistillation, FeatureDistillation, FedNTD])
def test_the_global_network_is_the_round_s(cls: type) -> None:
    # Pulled to it by (w − w_G)/2, a client does what FedProx with μ = 1/2 does: −5/4, −55/32.
    found = flats(toy(quadratic(cls, more=towards("global"))(), **TWO_STEPS), 2)
    assert heads(found) == doubled(-1.25, -1.71875)
    assert [flat[2] for flat in found] == [3.5, 7.0]


def test_moon_s_global_network_is_the_round_s() -> None:
    # In the first round there is no contrastive term, and whether the loss is given a global network
    # then is nobody's business; so the pull is left out there: −3/2 as in FedAvg.
    # Round 2, w_G = −3/2: a step is w/4 + t/2 + w_G/4; averaged, p·t = −2:
    #   −3/4 − 1 = −7/4 → −7/16 − 1 − 3/8 = −29/16
    def pull(batch: Batch) -> Tensor:
        return towards("global" if "previous" in batch.frozen else "nothing")(batch)

    found = flats(toy(quadratic(Moon, more=pull)(), **TWO_STEPS), 2)
    assert heads(found) == doubled(-1.5, -1.8125)


def test_moon_s_previous_network_is_the_client_s_last_one() -> None:
    # Pulled to it by (w − w_previous)/2: a step is w/4 + t/2 + w_previous/4.
    #   round 1 has none: client 0: 12, client 1: −6; w = −3/2
    #   round 2: client 0: −3/8 + 8 + 3 = 85/8 → 85/32 + 11 = 437/32
    #            client 1: −3/8 − 4 − 3/2 = −47/8 → −47/32 − 11/2 = −223/32
    #            w = (437 − 669)/128 = −29/16
    found = flats(toy(quadratic(Moon, more=towards("previous"))(), **TWO_STEPS), 2)
    assert heads(found) == doubled(-1.5, -1.8125)


def test_moon_s_client_keeps_its_model_while_it_sits_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # Round 1 as above; round 2 has client 0 alone: w = 437/32.
    # Round 3: client 0, previous 437/32: 437/64 + 8 = 949/64 → (949 + 2048 + 874)/256 = 3871/256
    #          client 1, previous −6 of round 1: 437/128 − 11/2 = −267/128 → −267/512 − 11/2 = −3083/512
    #          w = (7742 − 9249)/2048 = −1507/2048
    monkeypatch.setattr(
        "fedcsd.federation.rounds.cohort", lambda settings, round: [[0, 1], [0], [0, 1]][round]
    )
    found = flats(toy(quadratic(Moon, more=towards("previous"))(), **TWO_STEPS), 3)
    assert heads(found) == doubled(-1.5, 13.65625, -0.73583984375)


def test_fedgkd_s_teacher_is_the_mean_of_the_last_global_models() -> None:
    # Window 2, pulled by (w − T)/2; averaged over clients a step is w/4 − 1 + T/4.
    #   round 1: T = 0: −1 → −5/4
    #   round 2: T = (0 − 5/4)/2 = −5/8: −10/32 − 1 − 5/32 = −47/32 → (−47 − 128 − 20)/128 = −195/128
    #   round 3: T = (−5/4 − 195/128)/2 = −355/256:
    #            (−390 − 1024 − 355)/1024 = −1769/1024 → (−1769 − 4096 − 1420)/4096 = −7285/4096
    found = flats(toy(quadratic(FedGKD, more=towards("teacher"))(window=2), **TWO_STEPS), 3)
    assert heads(found) == doubled(-1.25, -1.5234375, -1.778564453125)


def test_fedgkd_with_a_window_of_one_has_the_round_s_global_model() -> None:
    found = flats(toy(quadratic(FedGKD, more=towards("teacher"))(window=1), **TWO_STEPS), 2)
    assert heads(found) == doubled(-1.25, -1.71875)  # FedProx's


def test_fedgkd_s_mean_is_over_as_many_models_as_there_are() -> None:
    # Window 5 in rounds 1 to 3: T = 0, −5/8, (0 − 5/4 − 195/128)/3 = −355/384.
    #   round 3: −390/1024 − 1 − 355/1536 = (−1170 − 3072 − 710)/3072 = −4952/3072 = −619/384
    #            → −619/1536 − 1 − 355/1536 = −2510/1536 = −1255/768
    found = flats(toy(quadratic(FedGKD, more=towards("teacher"))(), **TWO_STEPS), 3)
    assert heads(found)[:2] == doubled(-1.25, -1.5234375)
    assert found[2][:2] == pytest.approx([-1255 / 768, 1255 / 1536], rel=1e-6)


class Loud(Toy):
    """A model that adds its buffer to its logits outside of training, as frozen networks do."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits if self.training else logits + self.seen


def test_fedgkd_s_teacher_has_the_mean_of_the_buffers_too() -> None:
    # Window 2, nothing pulls: FedAvg's w = 0, −3/2, −15/8 and buffers 0, 7/2, 7. The teacher says w + buffer:
    #   round 2: −3/4 + 7/4 = 1, 3/8 + 7/4 = 17/8; round 3: −27/16 + 21/4 = 57/16, 27/32 + 21/4 = 195/32
    said: list[list[float]] = []

    def listen(batch: Batch) -> Tensor:
        said.append(batch.frozen["teacher"].logits[0].tolist())
        return batch.logits.sum() * 0

    method = quadratic(FedGKD, more=listen)(window=2)
    flats(toy(method, factory=Loud, classifier="head", **TWO_STEPS), 3)
    assert said[0] == [0, 0]
    assert said[4] == pytest.approx([1, 17 / 8], rel=1e-6)
    assert said[8] == pytest.approx([57 / 16, 195 / 32], rel=1e-6)


def test_fedcsd_s_teacher_is_the_moving_average_of_the_global_models() -> None:
    # α = 3/4, pulled by (w − T)/2, T ← 3T/4 + w/4 at the end of a round.
    #   round 1: T = 0: −1 → −5/4; T = −5/16, its buffer (7/2)/4 = 7/8
    #   round 2: −20/64 − 1 − 5/64 = −89/64 → (−89 − 256 − 20)/256 = −365/256
    #            T = (−240 − 365)/1024 = −605/1024, its buffer 21/32 + 7/4 = 77/32
    #   round 3: (−1460 − 4096 − 605)/4096 = −6161/4096 → (−6161 − 16384 − 2420)/16384 = −24965/16384
    federation = toy(quadratic(FedCSD, more=towards("teacher"))(alpha=0.75), **TWO_STEPS)
    assert federation.server.teacher.flat.tolist() == [0, 0, 0]
    teachers, found = [], []
    for _ in range(3):
        found += flats(federation, 1)
        teachers.append(federation.server.teacher.flat.tolist())
    assert heads(found) == doubled(-1.25, -1.42578125, -1.52374267578125)
    assert heads(teachers[:2]) == doubled(-0.3125, -0.5908203125)
    assert [teacher[2] for teacher in teachers[:2]] == [0.875, 2.40625]


# FedProto: features a·x, from a = 0. Client 0 holds x = 1 of class 0; client 1 holds x = 2 and 4 of
# class 0 and x = 6 of class 1; nobody holds class 2.


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 3, bias=False)
        nn.init.zeros_(self.body.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        return self.head(features + 1 if self.training else features)  # prototypes are of eval mode


class Rising(FedProto):
    """The gradient of a is minus the mean of x (1 + P_y), where P_y is 0 if there is no such prototype."""

    def loss(self, batch: Batch) -> Tensor:
        height = torch.ones(len(batch.labels))
        if "prototypes" in batch.given:
            known = batch.given["known"][batch.labels]
            height = height + torch.where(known, batch.given["prototypes"][batch.labels, 0], 0.0)
        return -(batch.features[:, 0] * height).mean()


def test_fedproto_s_prototypes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Round 1, no prototypes, lr 1/2: a_0 = 1/2, a_1 = 4/2 = 2; class means of the new features:
    #   client 0: 1/2 of class 0; client 1: 2·3 = 6 of class 0, 12 of class 1
    #   P = ((1/2 + 6)/2, 12) = (13/4, 12) (by samples class 0 would be 25/6); a = 1/8 + 3/2 = 13/8
    # Round 2: a_0 = 13/8 + (17/4)/2 = 15/4
    #          a_1 = 13/8 + ((2 + 4)·17/4 + 6·13)/3/2 = 13/8 + 69/4 = 151/8
    #   P = ((15/4 + 453/8)/2, 453/4) = (483/16, 453/4); a = 30/32 + 453/32 = 483/32
    # Round 3 has client 0 alone: a = 483/32 + (1 + 483/16)/2 = 483/32 + 499/32 = 491/16
    #   P_0 = 491/16, P_1 stays
    # Round 4 has client 1 alone: (6·(1 + 491/16) + 6·(1 + 453/4))/3 = 507/8 + 457/2 = 2335/8;
    #   a = 491/16 + 2335/16 = 2826/16 = 1413/8
    monkeypatch.setattr("fedcsd.federation.rounds.cohort", lambda s, round: [[0, 1], [0, 1], [0], [1]][round])
    x, y = np.array([[1], [2], [4], [6]], dtype=np.float32), np.array([0, 0, 0, 1])
    data = Dataset.of_arrays(x, y, x, y, classes=3)
    federation = federate(Rising(), data, [[0], [1, 2, 3]], Scale)
    prototypes: list[Any] = []
    scales = []
    for _ in range(4):
        scales.append(flats(federation, 1)[0][0])
        known = federation.server.known.tolist()
        prototypes.append(
            [
                p if k else None
                for p, k in zip(federation.server.prototypes[:, 0].tolist(), known, strict=True)
            ]
        )
    assert scales == [1.625, 15.09375, 30.6875, 176.625]
    assert prototypes[:3] == [[3.25, 12.0, None], [30.1875, 113.25, None], [30.6875, 113.25, None]]
