"""Check by hand the methods that correct client drift, on the toy federation of `helpers/worked.py`."""

from typing import Any

import pytest

from fedcsd.methods.fedavg import FedAvg
from fedcsd.methods.feddc import FedDC
from fedcsd.methods.feddyn import FedDyn
from fedcsd.methods.scaffold import Scaffold
from helpers.worked import doubled, flats, heads, quadratic, toy

TWO_STEPS = {"epochs": 2}  # one batch an epoch: two steps for either client
ONE_AND_TWO = {"batch_size": 2}  # client 1's three samples make two batches, client 0's one makes one


@pytest.fixture
def without_client_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 0 does not take part in the second round of three."""
    monkeypatch.setattr(
        "fedcsd.federation.rounds.cohort", lambda settings, round: [[0, 1], [1], [0, 1]][round]
    )


def test_scaffold() -> None:
    # Steps (1, 2), lr 1/2: c_0⁺ = c_0 − c + 2 (w_G − w_0), c_1⁺ = c_1 − c + (w_G − w_1).
    # Round 1, c = 0: client 0: 8, client 1: −4 → −6; w = 8/4 − 18/4 = −5/2
    #   c_0 = −16, c_1 = 6 (the mean of its two gradients 8 and 4), c = (−16 + 6)/2 = −5
    # Round 2: client 0: w − 16 + c − c_0 = w − 5: −5/2 → (−5/2 + 5)/2 = 5/4
    #          client 1: w + 8 + c − c_1 = w − 3: −5/2 → 1/4 → 13/8
    #   w = 5/16 + 39/32 = 49/32
    #   c_0 = −16 + 5 − 15/2 = −37/2, c_1 = 6 + 5 − 33/8 = 55/8, c = −5 + (−5/2 + 7/8)/2 = −93/16
    # Round 3: client 0: w − 16 + 203/16 = w − 53/16: 49/32 → (49 + 106)/64 = 155/64
    #          client 1: w + 8 − 203/16 = w − 75/16: 49/32 → 199/64 → (199 + 300)/128 = 499/128
    #   w = 310/512 + 1497/512 = 1807/512
    # The buffer is plainly averaged: a round adds (1 + 3 · 4)/4 = 13/4.
    found = flats(toy(quadratic(Scaffold)(), **ONE_AND_TWO), 3)
    assert heads(found) == doubled(-2.5, 1.53125, 3.529296875)
    assert [flat[2] for flat in found] == [3.25, 6.5, 9.75]


@pytest.mark.usefixtures("without_client_0")
def test_scaffold_without_one_client() -> None:
    # Round 1 as above. Round 2 has client 1 alone: w = 13/8, c_1 = 55/8, and c moves by 1/N of the
    #   change, N = 2: c = −5 + 7/16 = −73/16; c_0 = −16 stays.
    # Round 3: client 0: w − 16 + 183/16 = w − 73/16: 13/8 → (26 + 73)/32 = 99/32
    #          client 1: w + 8 − 183/16 = w − 55/16: 13/8 → 81/32 → (81 + 110)/64 = 191/64
    #   w = 198/256 + 573/256 = 771/256
    found = flats(toy(quadratic(Scaffold)(), **ONE_AND_TWO), 3)
    assert heads(found) == doubled(-2.5, 1.625, 3.01171875)
    assert [flat[2] for flat in found] == [3.25, 7.25, 10.5]


def test_scaffold_with_momentum() -> None:
    # ρ = 9/10, a = (1, 2.9): c_1⁺ = c_1 − c + (w_G − w_1)/1.45.
    # Round 1: client 0: 8; client 1: v = 8, w = −4; v = 7.2 + 4, w = −9.6; w = 2 − 7.2 = −5.2
    #   c_0 = −16, c_1 = 9.6/1.45 = 192/29, c = (−464 + 192)/58 = −136/29
    # Round 2, in 29ths (w_G = −150.8): client 0: −150.8 − 464 + 328 = −286.8, w = −150.8 + 143.4 = −7.4
    #   client 1: −150.8 + 232 − 328 = −246.8, w = −27.4; −27.4 + 232 − 328 = −123.4,
    #             v = −222.12 − 123.4 = −345.52, w = 145.36
    #   w = (−7.4 + 436.08)/4 = 107.17/29
    found = flats(toy(quadratic(Scaffold)(), momentum=0.9, **ONE_AND_TWO), 2)
    assert found[0] == pytest.approx([-5.2, 2.6, 3.25], rel=1e-6)
    assert found[1] == pytest.approx([107.17 / 29, -107.17 / 58, 6.5], rel=1e-5)


def test_feddyn() -> None:
    # α = 1/2: a step is w ← w − (w − t − λ)/2 − (w − w_G)/4 = w/4 + (t + λ)/2 + w_G/4.
    # Round 1, all zero: client 0: 8 → 10, client 1: −5
    #   λ = (−5, 5/2), h = −(1/4)(10 − 5) = −5/4, w = 5/2 + 5/2 = 5
    # Round 2: client 0, t + λ = 11: 5/2 + 11/2 = 8 → 2 + 11/2 + 5/4 = 35/4
    #          client 1, t + λ = −11/2: 5/2 − 11/4 = −1/4 → −1/16 − 11/4 + 5/4 = −25/16
    #   changes 15/4 and −105/16: λ = (−55/8, 185/32), h = −5/4 + 45/64 = −35/64
    #   w = (140 − 25)/32 + 35/32 = 75/16
    # Round 3: client 0, t + λ = 73/8: 75/32 + 73/16 = 221/32 → (221 + 584 + 150)/128 = 955/128
    #          client 1, t + λ = −71/32: 75/32 − 71/64 = 79/64 → (79 − 284 + 300)/256 = 95/256
    #   changes sum to (2005 − 2400)/256: h = −35/64 + 395/1024 = −165/1024
    #   w = 2005/512 + 165/512 = 1085/256
    # The mean is uniform for parameters; the buffer is averaged by samples, a round adds 7/2.
    found = flats(toy(quadratic(FedDyn)(alpha=0.5), **TWO_STEPS), 3)
    assert heads(found) == doubled(5.0, 4.6875, 4.23828125)
    assert [flat[2] for flat in found] == [3.5, 7.0, 10.5]


@pytest.mark.usefixtures("without_client_0")
def test_feddyn_without_one_client() -> None:
    # Round 1 as above. Round 2 has client 1 alone: −25/16, change −105/16, λ_1 = 185/32, λ_0 = −5 stays,
    #   h = −5/4 + (1/4)(105/16) = 25/64 (N = 2), w = −25/16 − 25/32 = −75/32
    # Round 3: client 0, t + λ = 11: −75/64 + 11/2 = 277/64 → (277 + 1408 − 150)/256 = 1535/256
    #          client 1, t + λ = −71/32: −75/64 − 71/64 = −73/32 → (−73 − 142 − 75)/128 = −145/64
    #   changes sum to (1535 − 580)/256 + 75/16 = 2155/256: h = (400 − 2155)/1024 = −1755/1024
    #   w = 955/512 + 1755/512 = 1355/256
    found = flats(toy(quadratic(FedDyn)(alpha=0.5), **TWO_STEPS), 3)
    assert heads(found) == doubled(5.0, -2.34375, 5.29296875)
    assert [flat[2] for flat in found] == [3.5, 7.5, 11.0]


def test_feddc() -> None:
    # Steps (1, 2), lr 1/2, α = 1/2: w ← w/4 + t/2 + (w_G − h_k)/4 − (c − c_k)/2. The server adds the
    # mean drift H of both clients to the plain mean.
    # Round 1: client 0: 8; client 1: −4 → −5; H = (8 − 5)/2 = 3/2, w = 3/2 + 3/2 = 3
    #   h = (8, −5), c_0 = −16, c_1 = 5, c = −11/2
    # Round 2: client 0, c − c_0 = 21/2: 3/4 + 8 + (3 − 8)/4 − 21/4 = 9/4
    #          client 1, c − c_1 = −21/2: w/4 − 4 + (3 + 5)/4 + 21/4 = w/4 + 13/4: 3 → 4 → 17/4
    #   h = (29/4, −15/4), c_0 = −16 + 11/2 + 3/2 = −9, c_1 = 5 + 11/2 − 5/4 = 37/4, c = 1/8
    #   w = 13/4 + (29/4 − 15/4)/2 = 13/4 + 7/4 = 5
    # Round 3: client 0, c − c_0 = 73/8: 5/4 + 8 + (20 − 29)/16 − 73/16 = 33/8
    #          client 1, c − c_1 = −73/8: w/4 − 4 + (20 + 15)/16 + 73/16 = w/4 + 11/4: 5 → 4 → 15/4
    #   w = 63/16 + 7/4 + (63/16 − 5) = 74/16
    # The buffer is plainly averaged, by samples.
    found = flats(toy(quadratic(FedDC)(alpha=0.5), **ONE_AND_TWO), 3)
    assert heads(found) == doubled(3.0, 5.0, 4.625)
    assert [flat[2] for flat in found] == [3.25, 6.5, 9.75]


@pytest.mark.usefixtures("without_client_0")
def test_feddc_without_one_client() -> None:
    # Round 1 as above. Round 2 has client 1 alone, at 17/4; the drift of client 0 stays in the mean:
    #   H = (8 − 15/4)/2 = 17/8, w = 17/4 + 17/8 = 51/8; c_1 = 37/4, c = −11/2 + (37/4 − 5)/2 = −27/8
    # Round 3: client 0, c − c_0 = 101/8: 51/32 + 8 + (51/8 − 8)/4 − 101/16 = 23/8
    #          client 1, c − c_1 = −101/8: w/4 + (−128 + 51 + 30 + 202)/32 = w/4 + 155/32:
    #            51/8 → 103/16 → (103 + 310)/64 = 413/64
    #   mean = (184 + 413)/128, H = 17/8 + 597/128 − 51/8 = 53/128, w = 650/128
    found = flats(toy(quadratic(FedDC)(alpha=0.5), **ONE_AND_TWO), 3)
    assert heads(found) == doubled(3.0, 6.375, 5.078125)


# Different curvatures, 1 and 1/2: the uniform mean of the two losses has its minimum where
# (w − 16) + (w + 8)/2 = 0, at w = 8. Two steps shrink the distance to a client's own target by
# (1/2)² = 1/4 and (3/4)² = 9/16, so FedAvg rests where Σ p_k (1 − r_k)(w − t_k) = 0, with
# 1 − r = (12/16, 7/16). With two samples each: (12 · 16 − 7 · 8)/19 = 136/19. With one and three:
# (12 · 16 − 21 · 8)/33 = 8/11; there the losses' mean by samples has its minimum at
# (16 − 3 · 4)/(1 + 3/2) = 8/5, which is not FedAvg's resting place either.


def rest(method: Any, samples: tuple[int, int], rounds: int = 25, **values: Any) -> list[float]:
    return flats(toy(method, samples, **{**TWO_STEPS, **values}), rounds)[-1][:2]


BENT = (1.0, 0.5)


@pytest.mark.parametrize(("samples", "place"), [((2, 2), 136 / 19), ((1, 3), 8 / 11)])
def test_fedavg_rests_beside_the_optimum(samples: tuple[int, int], place: float) -> None:
    assert rest(quadratic(FedAvg, curvature=BENT)(), samples) == pytest.approx([place, -place / 2], rel=1e-4)


@pytest.mark.parametrize(
    ("cls", "options", "samples"),
    [
        (Scaffold, {}, (2, 2)),
        (Scaffold, {}, (1, 3)),
        (FedDyn, {"alpha": 0.5}, (2, 2)),
        (FedDyn, {"alpha": 0.5}, (1, 3)),
        (FedDC, {"alpha": 0.5}, (2, 2)),
        (FedDC, {"alpha": 0.5}, (1, 3)),
    ],
)
def test_drift_correction_reaches_the_optimum(
    cls: type, options: dict[str, float], samples: tuple[int, int]
) -> None:
    found = rest(quadratic(cls, curvature=BENT)(**options), samples)
    assert found == pytest.approx([8.0, -4.0], rel=1e-4)


def test_the_first_round_of_scaffold_is_fedavg_s() -> None:
    plain, ours = (flats(toy(quadratic(cls)(), **ONE_AND_TWO), 1)[0] for cls in (FedAvg, Scaffold))
    assert ours == plain


def test_the_first_round_of_feddc_goes_twice_as_far() -> None:
    # α = 0: clients at 8 and −6, their plain mean is 1 and so is their mean drift.
    found = flats(toy(quadratic(FedDC)(alpha=0.0), **ONE_AND_TWO), 1)[0]
    assert found == [2.0, -1.0, 3.25]
