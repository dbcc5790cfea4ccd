"""Check by hand how servers aggregate local models, on the toy federation of `helpers/worked.py`."""

from math import sqrt
from typing import Any

import pytest
import torch

from fedcsd.methods.fedadagrad import FedAdagrad
from fedcsd.methods.fedadam import FedAdam
from fedcsd.methods.fedavg import FedAvg
from fedcsd.methods.fedavgm import FedAvgM
from fedcsd.methods.fednova import FedNova
from fedcsd.methods.fedprox import FedProx
from fedcsd.methods.fedyogi import FedYogi
from helpers.worked import doubled, flats, heads, quadratic, toy

TWO_STEPS = {"epochs": 2}  # one batch an epoch: two steps for either client
ONE_AND_TWO = {"batch_size": 2}  # client 1's three samples make two batches, client 0's one makes one


def test_fedavg() -> None:
    # Two steps from w: w/4 + 3t/4; averaged, with p·t = 16/4 − 24/4 = −2: w/4 − 3/2.
    #   round 1: client 0: 0 → 8 → 12, client 1: 0 → −4 → −6; (12 − 18)/4 = −3/2
    #   round 2: −3/8 − 3/2 = −15/8
    # The buffer: a round adds 2 steps · (1·1 + 3·2)/4 = 7/2.
    found = flats(toy(quadratic(FedAvg)(), **TWO_STEPS), 2)
    assert heads(found) == doubled(-1.5, -1.875)
    assert [flat[2] for flat in found] == [3.5, 7.0]


def test_fedprox() -> None:
    # μ = 1/2: a step is w ← w − (w − t)/2 − (w − w_G)/4 = w/4 + t/2 + w_G/4.
    #   round 1, w_G = 0: client 0: 0 → 8 → 2 + 8 = 10, client 1 (−1/2 of it): −5; (10 − 15)/4 = −5/4
    #   round 2, w_G = −5/4: client 0: −5/8 + 8 = 59/8 → 59/32 + 8 − 5/16 = 305/32
    #                        client 1: −5/8 − 4 = −37/8 → −37/32 − 4 − 5/16 = −175/32
    #            (305 − 525)/128 = −55/32
    # The buffer is FedAvg's: the term pulls trainable parameters only.
    found = flats(toy(quadratic(FedProx)(mu=0.5), **TWO_STEPS), 2)
    assert heads(found) == doubled(-1.25, -1.71875)
    assert [flat[2] for flat in found] == [3.5, 7.0]


def test_fedprox_with_momentum_is_momentum_on_the_whole_loss() -> None:
    # Momentum 1/2, three steps from w_G = 0; gradient w − 16 + w/2, v ← v/2 + gradient, w ← w − v/2:
    #   v = −16, w = 8;  v = −8 + (8 − 16 + 4) = −12, w = 14;  v = −6 + (14 − 16 + 7) = −1, w = 29/2
    # client 1: −29/4; (29/2 − 87/4)/4 = −29/16
    found = flats(toy(quadratic(FedProx)(mu=0.5), epochs=3, momentum=0.5), 1)
    assert heads(found) == doubled(-1.8125)


def test_fednova() -> None:
    # Steps and a: (1, 2). Σ p a = 1/4 + 6/4 = 7/4.
    #   round 1: client 0: 8, client 1: −4 → −6; Σ p (w_G − w_k)/a_k = −8/4 + 3/4 · 6/2 = 1/4
    #            w = −7/4 · 1/4 = −7/16
    #   round 2: client 0: (−7/16 + 16)/2 = 249/32, w_G − w_0 = −14/32 − 249/32 = −263/32
    #            client 1: (−7/16 − 8)/2 = −135/32 → −391/64, (w_G − w_1)/2 = (−28 + 391)/128 = 363/128
    #            −263/128 + 1089/512 = 37/512; w = −7/16 − 259/2048 = −1155/2048
    # The buffer is plainly averaged: a round adds (1·1 + 3·(2·2))/4 = 13/4.
    found = flats(toy(quadratic(FedNova)(), **ONE_AND_TWO), 2)
    assert heads(found) == doubled(-0.4375, -0.56396484375)
    assert [flat[2] for flat in found] == [3.25, 6.5]


def test_fednova_with_momentum() -> None:
    # ρ = 9/10: a_0 = 1, a_1 = (2 − 0.9·0.19/0.1)/0.1 = 2.9 (a gradient counts 1 + 0.9, then 1).
    # Σ p a = (1 + 8.7)/4 = 2.425 = 97/40.
    #   round 1: client 0: 8; client 1: v = 8, w = −4; v = 7.2 + 4 = 11.2, w = −9.6
    #            −8/4 + 3/4 · 9.6/2.9 = −2 + 72/29 = 14/29; w = −97/40 · 14/29 = −679/580
    #   round 2: client 0: (w + 16)/2 = 8601/1160, w_G − w_0 = −9959/1160
    #            client 1: g = w + 8 = 3961/580 = v, w ← w − v/2; v = 0.9 v + g/2 = 1.4 g, w ← w − 0.7 g:
    #            w_G − w_1 = 1.2 · 3961/580, by a_1: 12/29 · 3961/580 = 11883/4205
    #            −9959/4640 + 35649/16820, in decimals −2.14633621 + 2.11944114 = −0.02689507
    #            w = −1.17068966 + 2.425 · 0.02689507 = −1.10546912 (−5950077/5382400)
    found = flats(toy(quadratic(FedNova)(), momentum=0.9, **ONE_AND_TWO), 2)
    assert found[0] == pytest.approx([-679 / 580, 679 / 1160, 3.25], rel=1e-5)
    assert found[1] == pytest.approx([-1.10546912, 0.55273456, 6.5], rel=1e-5)


def test_fednova_with_equal_steps_is_fedavg() -> None:
    plain, ours = (flats(toy(quadratic(cls)(), **TWO_STEPS), 2) for cls in (FedAvg, FedNova))
    assert ours == plain


def test_fedavgm() -> None:
    # β = 1/2; the clients' average is w/4 − 3/2, as in FedAvg.
    #   round 1: Δ = 3/2, v = 3/2, w = −3/2
    #   round 2: Δ = −3/2 + 15/8 = 3/8, v = 3/4 + 3/8 = 9/8, w = −21/8
    #   round 3: average −21/32 − 48/32 = −69/32, Δ = −15/32, v = 18/32 − 15/32 = 3/32, w = −87/32
    # The buffer is plainly averaged.
    found = flats(toy(quadratic(FedAvgM)(server_momentum=0.5), **TWO_STEPS), 3)
    assert heads(found) == doubled(-1.5, -2.625, -2.71875)
    assert [flat[2] for flat in found] == [3.5, 7.0, 10.5]


def test_fedavgm_at_its_default() -> None:
    # β = 0.9: v = 3/2, w = −3/2; v = 1.35 + 0.375 = 1.725, w = −3.225
    found = flats(toy(quadratic(FedAvgM)(), **TWO_STEPS), 2)
    assert heads(found) == doubled(-1.5, -3.225)


# One step a round: the average moves halfway to p·t, so Δ = (p·t − w)/2. The targets are scaled so
# that p·t is −8 and 4 (Adam, Yogi) or −16 and 8 (Adagrad).


def test_fedadam() -> None:
    # β1 = 3/4, β2 = 4/5, τ = 1, lr 12; v starts at 1. First weight:
    #   round 1: Δ = −4, m = −1, v = 4/5 + 16/5 = 4, w = −12 · 1/(2 + 1) = −4
    #   round 2: Δ = −2, m = −3/4 − 1/2 = −5/4, v = 16/5 + 4/5 = 4, w = −4 − 12 · 5/4/3 = −9
    # Second weight:
    #   round 1: Δ = 2, m = 1/2, v = 4/5 + 4/5 = 8/5, w = 6/(√1.6 + 1) = 2.6491106
    #   round 2: Δ = 0.6754447, m = 3/8 + 0.1688612 = 0.5438612, v = 32/25 + 0.4562255/5 = 1.3712451,
    #            w = 2.6491106 + 6.5263340/(1.1710018 + 1) = 5.6552535
    method = quadratic(FedAdam, scale=4)(server_lr=12.0, beta1=0.75, beta2=0.8, adaptivity=1.0)
    found = flats(toy(method), 2)
    assert found[0] == pytest.approx([-4, 6 / (sqrt(1.6) + 1), 1.75], rel=1e-6)
    assert found[1] == pytest.approx([-9, 5.6552535, 3.5], rel=1e-6)


def test_fedyogi() -> None:
    # β1 = β2 = 1/2, τ = 1, lr 4; v starts at 1. First weight:
    #   round 1: Δ = −4, m = −2, Δ² = 16 > v: v = 1 + 8 = 9, w = −4 · 2/(3 + 1) = −2
    #   round 2: Δ = −3, m = −1 − 3/2 = −5/2, Δ² = 9 = v: v = 9, w = −2 − 4 · 5/2/4 = −9/2
    # Second weight:
    #   round 1: Δ = 2, m = 1, Δ² = 4 > v: v = 1 + 2 = 3, w = 4/(√3 + 1) = 2(√3 − 1)
    #   round 2: Δ = 2 − (√3 − 1) = 3 − √3, m = 1/2 + (3 − √3)/2 = 2 − √3/2,
    #            Δ² = 12 − 6√3 = 1.61 < v: v = 3 − (6 − 3√3) = 3√3 − 3 = 2.1961524,
    #            w = 1.4641016 + 4 · 1.1339746/(1.4819421 + 1) = 3.2916622
    method = quadratic(FedYogi, scale=4)(server_lr=4.0, beta1=0.5, beta2=0.5, adaptivity=1.0)
    found = flats(toy(method), 2)
    assert found[0] == pytest.approx([-2, 2 * (sqrt(3) - 1), 1.75], rel=1e-6)
    assert found[1] == pytest.approx([-4.5, 3.2916622, 3.5], rel=1e-6)


def test_fedadagrad() -> None:
    # β1 = 1/2, τ = 6, lr 4; v starts at 36. First weight:
    #   round 1: Δ = −8, m = −4, v = 36 + 64 = 100, w = −16/(10 + 6) = −1
    #   round 2: Δ = −15/2, m = −2 − 15/4 = −23/4, v = 100 + 225/4 = (25/2)², w = −1 − 23/(37/2) = −83/37
    # Second weight:
    #   round 1: Δ = 4, m = 2, v = 36 + 16 = 52, w = 8/(√52 + 6) = 0.6055513
    #   round 2: Δ = 3.6972244, m = 1 + 1.8486122 = 2.8486122, v = 52 + 13.6694680 = 65.6694680,
    #            w = 0.6055513 + 11.3944488/(8.1036701 + 6) = 1.4134591
    method = quadratic(FedAdagrad, scale=8)(server_lr=4.0, beta1=0.5, adaptivity=6.0)
    found = flats(toy(method), 2)
    assert found[0] == pytest.approx([-1, 8 / (sqrt(52) + 6), 1.75], rel=1e-6)
    assert found[1] == pytest.approx([-83 / 37, 1.4134591, 3.5], rel=1e-6)


@pytest.mark.parametrize("cls", [FedAdam, FedYogi, FedAdagrad])
def test_a_weight_that_no_client_moves_stays(cls: type) -> None:
    # Δ = 0: m = 0, and v ≥ 0 is no reason to move, nor to divide zero by zero.
    found = flats(toy(quadratic(cls, scale=0)()), 3)
    assert not heads(found).any()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedprox", {"mu": 0.001}),
        ("fedavgm", {"server_momentum": 0.9}),
        ("moon", {"mu": 1.0, "tau": 0.5}),
        ("fedgkd", {"mu": 0.01, "tau": 1.0, "window": 5}),
        ("fedproto", {"mu": 1.0}),
        ("logit_distillation", {"mu": 0.001, "tau": 10.0}),
        ("feature_distillation", {"mu": 0.01}),
        ("feddyn", {"alpha": 0.01}),
        ("feddc", {"alpha": 0.01}),
        ("fedntd", {"mu": 1.0, "tau": 1.0}),
        ("fedadam", {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "adaptivity": 0.001}),
        ("fedyogi", {"server_lr": 0.01, "beta1": 0.9, "beta2": 0.99, "adaptivity": 0.001}),
        ("fedadagrad", {"server_lr": 0.1, "beta1": 0.0, "adaptivity": 0.001}),
        ("ditto", {"mu": 0.1}),
        ("confidence_penalty", {"mu": 0.1}),
        ("label_smoothing", {"epsilon": 0.1}),
        *[(name, {}) for name in ("fedavg", "fednova", "scaffold", "fedbn", "fedper")],
    ],
)
def test_options_and_their_defaults(name: str, options: dict[str, Any]) -> None:
    from fedcsd.config.options import plain
    from fedcsd.experiments.choices import make_method

    assert plain(make_method({"name": name})) == options


def test_the_buffer_is_averaged_over_the_cohort_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    # Round 1 has both clients, round 2 client 1 alone: 13/4, then 13/4 + 2 · 2.
    monkeypatch.setattr("fedcsd.federation.rounds.cohort", lambda settings, round: [[0, 1], [1]][round])
    for cls in (FedAvg, FedProx, FedNova, FedAvgM, FedAdam, FedYogi, FedAdagrad):
        federation = toy(quadratic(cls)(), **ONE_AND_TWO)
        assert [flat[2] for flat in flats(federation, 2)] == [3.25, 7.25]
        assert torch.equal(federation.server.weights.others, torch.tensor([7.25]))
