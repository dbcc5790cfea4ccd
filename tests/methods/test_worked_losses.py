"""Compare the losses of all methods with numbers worked out by hand, NumPy, and finite differences."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcsd.methods.confidence_penalty import ConfidencePenalty
from fedcsd.methods.feature_distillation import FeatureDistillation
from fedcsd.methods.fedavg import FedAvg
from fedcsd.methods.fedcsd import FedCSD
from fedcsd.methods.fedgkd import FedGKD
from fedcsd.methods.fedntd import FedNTD
from fedcsd.methods.fedproto import FedProto
from fedcsd.methods.label_smoothing import LabelSmoothing
from fedcsd.methods.logit_distillation import LogitDistillation
from fedcsd.methods.moon import Moon
from fedcsd.models.network import Outputs
from fedcsd.training import Batch

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """A batch in NumPy has logits z and features h of the student and of the frozen networks, and prototypes."""

    z: Array
    h: Array
    y: Array
    teacher_z: Array
    teacher_h: Array
    previous_h: Array
    prototypes: Array
    """of features [C, D]"""
    known: Array
    logit_prototypes: Array
    """FedCSD's [C, C]"""

    @classmethod
    def random(cls, seed: int, samples: int = 5, classes: int = 4, scale: float = 3.0) -> "Case":
        r = np.random.default_rng(seed)
        z, teacher_z = r.normal(size=(2, samples, classes)) * scale
        h, teacher_h, previous_h = r.normal(size=(3, samples, 3))
        y, known = r.integers(0, classes, samples), r.random(classes) < 0.7
        prototypes, logit_prototypes = r.normal(size=(classes, 3)), r.normal(size=(classes, classes))
        return cls(z, h, y, teacher_z, teacher_h, previous_h, prototypes, known, logit_prototypes)

    def take(self, rows: Any) -> "Case":
        each = ("z", "h", "y", "teacher_z", "teacher_h", "previous_h")
        return replace(self, **{name: getattr(self, name)[rows] for name in each})


def loss(method: Any, case: Case, dtype: torch.dtype = torch.float64) -> tuple[float, Array, Array]:
    """Return the method's loss, and its gradients with respect to logits and features."""
    z, h = (torch.tensor(a, dtype=dtype, requires_grad=True) for a in (case.z, case.h))
    tz, th, ph = (torch.tensor(a, dtype=dtype) for a in (case.teacher_z, case.teacher_h, case.previous_h))
    frozen = {"global": Outputs(tz, th), "teacher": Outputs(tz, th), "previous": Outputs(-tz, ph)}
    csd = isinstance(method, FedCSD)
    prototypes = torch.tensor(case.logit_prototypes if csd else case.prototypes, dtype=dtype)
    known = {} if csd else {"known": torch.tensor(case.known)}
    batch = Batch(z, h, torch.tensor(case.y), frozen, {"prototypes": prototypes, **known})
    result = method.loss(batch)
    each = result[0] if isinstance(result, tuple) else result
    assert each.shape == (len(case.y),)
    value = each.mean()
    value.backward()
    gradients = [torch.zeros_like(a) if a.grad is None else a.grad for a in (z, h)]
    return value.item(), gradients[0].numpy(), gradients[1].numpy()


def log_softmax(z: Array) -> Array:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def softmax(z: Array) -> Array:
    return np.exp(log_softmax(z))


def cosine(a: Array, b: Array) -> Array:
    return (a * b).sum(-1) / np.sqrt((a * a).sum(-1) * (b * b).sum(-1))


def cross_entropy(z: Array, y: Array) -> Array:
    return -log_softmax(z)[np.arange(len(y)), y]


def kl(teacher: Array, student: Array, tau: float) -> Array:
    p = softmax(teacher / tau)
    return tau**2 * (p * (log_softmax(teacher / tau) - log_softmax(student / tau))).sum(-1)


def not_true(z: Array, y: Array) -> Array:
    return np.stack([np.delete(row, label) for row, label in zip(z, y, strict=True)])


def csd(c: Case, at: Case) -> Array:
    """Compute FedCSD's term with τ = 4; its target is made from the logits of `at` and is a constant."""
    delta = softmax(cosine(at.z[:, None, :], c.logit_prototypes[None]))
    kept = softmax(c.teacher_z)[np.arange(len(c.y)), c.y] > 1 / c.z.shape[1]
    return kept * 16 * -(softmax(delta * c.teacher_z / 4) * log_softmax(c.z / 4)).sum(1)


def entropy(z: Array) -> Array:
    return -(softmax(z) * log_softmax(z)).sum(1)


def smooth(z: Array, y: Array, epsilon: float) -> Array:
    target = (1 - epsilon) * np.eye(z.shape[1])[y] + epsilon / z.shape[1]
    return -(target * log_softmax(z)).sum(1)


Terms = Callable[[Case, Case], Array]
LOSSES: list[tuple[Any, Terms]] = [
    (FedAvg(), lambda c, at: np.zeros(len(c.y))),
    (
        Moon(mu=0.7, tau=0.25),
        lambda c, at: 0.7 * np.log1p(np.exp((cosine(c.h, c.previous_h) - cosine(c.h, c.teacher_h)) / 0.25)),
    ),
    (FedGKD(mu=0.3, tau=2.0), lambda c, at: 0.3 * kl(c.teacher_z, c.z, 2.0)),
    (
        FedProto(mu=0.6),
        lambda c, at: 0.6 * c.known[c.y] * ((c.h - c.prototypes[c.y]) ** 2).mean(1),
    ),
    (
        LogitDistillation(mu=0.3, tau=3.0),
        lambda c, at: 0.3 * 9 * -(softmax(c.teacher_z / 3) * log_softmax(c.z / 3)).sum(1),
    ),
    (FeatureDistillation(mu=0.4), lambda c, at: 0.4 * ((c.h - c.teacher_h) ** 2).mean(1)),
    (
        FedNTD(mu=0.5, tau=2.0),
        lambda c, at: 0.5 * kl(not_true(c.teacher_z, c.y), not_true(c.z, c.y), 2.0),
    ),
    (ConfidencePenalty(mu=0.2), lambda c, at: -0.2 * entropy(c.z)),
    (LabelSmoothing(epsilon=0.3), lambda c, at: smooth(c.z, c.y, 0.3) - cross_entropy(c.z, c.y)),
    (FedCSD(mu=0.3, tau=4.0), lambda c, at: 0.3 * csd(c, at)),
]
NAMES = [type(method).__name__ for method, _ in LOSSES]
each_loss = pytest.mark.parametrize(("method", "term"), LOSSES, ids=NAMES)
each_method = pytest.mark.parametrize("method", [m for m, _ in LOSSES], ids=NAMES)
seeds = st.integers(0, 10_000)


@each_loss
@settings(max_examples=10)
@given(seed=seeds)
def test_value_and_gradient(method: Any, term: Terms, seed: int) -> None:
    case = Case.random(seed)

    def mean(c: Case) -> float:
        return float((cross_entropy(c.z, c.y) + term(c, case)).mean())

    value, *gradients = loss(method, case)
    assert value == pytest.approx(mean(case), rel=1e-9)
    for name, gradient in zip(("z", "h"), gradients, strict=True):
        array = getattr(case, name)
        for place in np.ndindex(array.shape):
            step = np.zeros_like(array)
            step[place] = 1e-5
            up, down = (mean(replace(case, **{name: array + sign * step})) for sign in (1, -1))
            assert gradient[place] == pytest.approx((up - down) / 2e-5, abs=1e-6)


@each_method
@settings(max_examples=10)
@given(seed=seeds)
def test_samples_do_not_see_each_other(method: Any, seed: int) -> None:
    case = Case.random(seed)
    n = len(case.y)
    value, *gradients = loss(method, case)
    alone = [loss(method, case.take([i])) for i in range(n)]
    assert value == pytest.approx(np.mean([one[0] for one in alone]), rel=1e-9)
    order = np.random.default_rng(seed).permutation(n)
    mixed = loss(method, case.take(order))
    assert mixed[0] == pytest.approx(value, rel=1e-9)
    for which, gradient in enumerate(gradients, 1):
        np.testing.assert_allclose(gradient, np.concatenate([o[which] for o in alone]) / n, atol=1e-12)
        np.testing.assert_allclose(mixed[which], gradient[order], atol=1e-12)


@each_method
@settings(max_examples=20)
@given(seed=seeds)
def test_extreme_logits_and_features_are_finite(method: Any, seed: int) -> None:
    case = Case.random(seed)
    r = np.random.default_rng(seed)
    wild = {
        name: r.choice([-1e4, 0.0, 1e4], getattr(case, name).shape)
        for name in ("z", "teacher_z", "h", "teacher_h", "previous_h", "prototypes", "logit_prototypes")
    }
    for found in loss(method, replace(case, **wild), torch.float32):
        assert np.isfinite(found).all()


OFF = [
    (FedGKD, {"mu": 0.0}),
    (Moon, {"mu": 0.0}),
    (FedProto, {"mu": 0.0}),
    (LogitDistillation, {"mu": 0.0}),
    (FeatureDistillation, {"mu": 0.0}),
    (FedNTD, {"mu": 0.0}),
    (ConfidencePenalty, {"mu": 0.0}),
    (LabelSmoothing, {"epsilon": 0.0}),
    (FedCSD, {"mu": 0.0}),
]


@pytest.mark.parametrize(("cls", "options"), OFF, ids=[cls.__name__ for cls, _ in OFF])
@settings(max_examples=10)
@given(seed=seeds)
def test_without_its_coefficient_it_is_cross_entropy(cls: Any, options: dict[str, float], seed: int) -> None:
    case = Case.random(seed)
    value, *gradients = loss(cls(**options), case)
    plain, *plain_gradients = loss(FedAvg(), case)
    assert value == plain
    for gradient, expected in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_array_equal(gradient, expected)


def term_of(method: Any, case: Case) -> float:
    return loss(method, case)[0] - float(cross_entropy(case.z, case.y).mean())


@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("cls", [FedGKD, FedNTD])
@settings(max_examples=20)
@given(seed=seeds, shift=st.floats(-50, 50))
def test_divergences_are_not_negative_and_zero_for_equals(
    cls: Any, tau: float, seed: int, shift: float
) -> None:
    case, method = Case.random(seed), cls(mu=1.0, tau=tau)
    assert term_of(method, case) > 0
    equal = replace(case, teacher_z=case.z + shift)
    assert term_of(method, equal) == pytest.approx(0, abs=1e-10)
    _, gradient, _ = loss(method, equal)
    np.testing.assert_allclose(gradient, loss(FedAvg(), equal)[1], atol=1e-10)


@settings(max_examples=20)
@given(seed=seeds, ours=st.floats(-1e3, 1e3), theirs=st.floats(-1e3, 1e3))
def test_fedntd_ignores_the_true_class_of_both(seed: int, ours: float, theirs: float) -> None:
    case, method = Case.random(seed), FedNTD(mu=1.0, tau=2.0)
    rows = np.arange(len(case.y))
    z, teacher_z = case.z.copy(), case.teacher_z.copy()
    z[rows, case.y], teacher_z[rows, case.y] = ours, theirs
    other = replace(case, z=z, teacher_z=teacher_z)
    assert term_of(method, other) == pytest.approx(term_of(method, case), abs=1e-9)
    gradient = loss(method, case)[1] - loss(FedAvg(), case)[1]
    np.testing.assert_allclose(gradient[rows, case.y], 0, atol=1e-12)


@settings(max_examples=20)
@given(seed=seeds)
def test_fedntd_is_the_divergence_of_renormalised_probabilities(seed: int) -> None:
    case = Case.random(seed)
    p, q = softmax(case.teacher_z), softmax(case.z)
    total = 0.0
    for i, y in enumerate(case.y):
        for c in range(4):
            if c != y:
                a, b = p[i, c] / (1 - p[i, y]), q[i, c] / (1 - q[i, y])
                total += a * log(a / b)
    assert term_of(FedNTD(mu=1.0, tau=1.0), case) == pytest.approx(total / 5, rel=1e-6, abs=1e-9)


@settings(max_examples=20)
@given(seed=seeds, tau=st.floats(0.05, 10), length=st.floats(0.01, 100))
def test_moon_at_equal_global_and_previous_features_is_log_two(seed: int, tau: float, length: float) -> None:
    case = Case.random(seed)
    case = replace(case, previous_h=length * case.teacher_h)  # a cosine knows no length
    assert term_of(Moon(mu=1.0, tau=tau), case) == pytest.approx(log(2), rel=1e-9)


def test_moon_s_features_may_be_zero() -> None:
    case = Case.random(0)
    for name in ("h", "teacher_h", "previous_h"):
        for found in loss(Moon(), replace(case, **{name: np.zeros_like(case.h)}), torch.float32):
            assert np.isfinite(found).all()


# By hand. Logits are logarithms, so that probabilities are fractions.


def one(z: list[float], y: int, teacher_z: list[float] | None = None, **values: Any) -> Case:
    case = Case.random(0, samples=1, classes=len(z))
    teacher = case.teacher_z if teacher_z is None else np.array([teacher_z])
    return replace(case, z=np.array([z]), y=np.array([y]), teacher_z=teacher, **values)


def both(first: Case, second: Case) -> Case:
    each = ("z", "h", "y", "teacher_z", "teacher_h", "previous_h")
    return replace(first, **{n: np.concatenate([getattr(first, n), getattr(second, n)]) for n in each})


def test_logit_distillation_and_fedgkd_by_hand() -> None:
    # τ = 2, z = (2 log 3, 0): softmax(z) = (9/10, 1/10), softmax(z/2) = (3/4, 1/4); teacher (1/2, 1/2).
    # CE = log 10/9. Cross-entropy to the teacher: (log 4/3 + log 4)/2 = (log 16/3)/2, by τ²/2: log 16/3.
    # KL of the teacher to it: less log 2, (log 4/3)/2, by τ²/2: log 4/3.
    case = one([2 * log(3), 0], 0, [0, 0])
    assert loss(LogitDistillation(mu=0.5, tau=2.0), case)[0] == pytest.approx(log(160 / 27))
    value, gradient, _ = loss(FedGKD(mu=0.5, tau=2.0), case)
    assert value == pytest.approx(log(40 / 27))
    # Gradient: CE (−1/10, 1/10), the term μτ (q − q_teacher) = (1/4, −1/4).
    np.testing.assert_allclose(gradient, [[0.15, -0.15]])


def test_fedntd_by_hand() -> None:
    # z = (log 10, 2 log 3, 0), y = 0: p_y = 10/(10 + 9 + 1) = 1/2; not true at τ = 2: (3/4, 1/4) against
    # the teacher's (1/2, 1/2): KL = (log 4/3)/2, by μτ² = 2: log 4/3. In all log 2 + log 4/3.
    case = one([log(10), 2 * log(3), 0], 0, [-7, 5, 5])
    assert loss(FedNTD(mu=0.5, tau=2.0), case)[0] == pytest.approx(log(8 / 3))


def test_moon_by_hand() -> None:
    # z = 0 of two classes: CE = log 2. Sample 1: cosines 1 and 0 at τ = 1/2: log(1 + e^−2).
    # Sample 2: cosines 3/5 and −4/5: log(1 + e^(−14/5)). μ = 3.
    first = one(
        [0, 0], 0, h=np.array([[2.0, 0]]), teacher_h=np.array([[5.0, 0]]), previous_h=np.array([[0, 1.0]])
    )
    second = one(
        [0, 0], 1, h=np.array([[3.0, 4]]), teacher_h=np.array([[1.0, 0]]), previous_h=np.array([[0, -2.0]])
    )
    expected = log(2) + 3 * (log(1 + exp(-2)) + log(1 + exp(-2.8))) / 2
    assert loss(Moon(mu=3.0), both(first, second))[0] == pytest.approx(expected)


def test_fedproto_and_feature_distillation_by_hand() -> None:
    # Features (1, 2) of class 0 and (5, 5) of class 1; only class 0 has a prototype, (3, −2):
    # (4 + 16)/2 = 10, and the mean over both samples 5; μ = 1/2: 5/2. CE = log 2.
    h = np.array([[1.0, 2], [5, 5]])
    case = both(one([0, 0], 0, h=h[:1]), one([0, 0], 1, h=h[1:]))
    prototypes = np.array([[3.0, -2], [100, 100]])
    case = replace(case, prototypes=prototypes, known=np.array([True, False]))
    value, _, gradient = loss(FedProto(mu=0.5), case)
    assert value == pytest.approx(log(2) + 2.5)
    # Gradient: μ · 2 (h − P)/D/B = (h − P)/4 for sample 1, nothing for sample 2.
    np.testing.assert_allclose(gradient, [[-0.5, 1], [0, 0]])
    # Distilled from features (1, 0) and (4, 7): (0 + 4 + 1 + 4)/4 = 9/4; μ = 1/2: 9/8.
    case = replace(case, teacher_h=np.array([[1.0, 0], [4, 7]]))
    assert loss(FeatureDistillation(mu=0.5), case)[0] == pytest.approx(log(2) + 1.125)


def test_confidence_penalty_and_label_smoothing_by_hand() -> None:
    # z = (log 3, 0), y = 1: p = (3/4, 1/4), CE = log 4, entropy 3/4 log 4/3 + 1/4 log 4 = log 4 − 3/4 log 3.
    case = one([log(3), 0], 1)
    assert loss(ConfidencePenalty(mu=0.5), case)[0] == pytest.approx(log(2) + 0.375 * log(3))
    # ε = 1/2 of two classes: target (1/4, 3/4): 1/4 log 4/3 + 3/4 log 4 = log 4 − 1/4 log 3;
    # gradient p − target = (1/2, −1/2).
    value, gradient, _ = loss(LabelSmoothing(epsilon=0.5), case)
    assert value == pytest.approx(log(4) - 0.25 * log(3))
    np.testing.assert_allclose(gradient, [[0.5, -0.5]])


def test_fedcsd_by_hand() -> None:
    # z = (log 3, 0), y = 0: CE = log 4/3. Prototypes (1, 0) and (2, 0): both cosines are 1, so δ = 1/2 and
    # the teacher's (2 log 3, 0) becomes (log 3, 0): target (3/4, 1/4) at τ = 1; kept, since 9/10 > 1/2.
    # Term: 3/4 log 4/3 + 1/4 log 4 = log 4 − 3/4 log 3; μ = 1.
    case = one([log(3), 0], 0, [2 * log(3), 0], logit_prototypes=np.array([[1.0, 0], [2, 0]]))
    assert loss(FedCSD(mu=1.0, tau=1.0), case)[0] == pytest.approx(log(16 / 3) - 0.75 * log(3))
    masked = replace(case, y=np.array([1]))  # there the teacher gives 1/10
    assert loss(FedCSD(mu=1.0, tau=1.0), masked)[0] == pytest.approx(log(4))
