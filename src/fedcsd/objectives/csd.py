"""Compute the loss of FedCSD, class prototype similarity distillation (sections IV-A and IV-B of the paper)."""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcsd.objectives.distillation import kl_divergence, soft_cross_entropy

Mask = Literal["adaptive", "forcible", "none"]
Target = Literal["teacher", "uniform"]
Scale = Literal["none", "classes"]


def similarity_weights(student_logits: Tensor, prototypes: Tensor, scale: Scale = "none") -> Tensor:
    """Compute `δ̂ = softmax_c(cos(z, P_c))` for each sample: [B, C], [C, C] -> [B, C].

    A class without a prototype is a row of zeros and has similarity 0. Scale "classes" multiplies
    by C, so that the mean weight is 1 and the refined logits keep the teacher's size.
    """
    delta = F.normalize(student_logits, dim=1) @ F.normalize(prototypes, dim=1).T
    weights = F.softmax(delta, dim=1)
    return weights * prototypes.shape[0] if scale == "classes" else weights


def soft_label_mask(teacher_logits: Tensor, labels: Tensor, mask: Mask = "adaptive") -> Tensor:
    """Return 1 where the teacher's soft label is kept and 0 where it is filtered: [B, C], [B] -> [B].

    "adaptive": the teacher gives the true class more than 1/C. "forcible": it ranks it first.
    """
    if mask == "none":
        return torch.ones_like(teacher_logits[:, 0])
    if mask == "forcible":
        return (teacher_logits.argmax(1) == labels).to(teacher_logits.dtype)
    # p_y > 1/C without the division, so that a teacher that knows nothing gives exactly "not more".
    odds = (teacher_logits - teacher_logits.amax(1, keepdim=True)).exp()
    true_class = odds.gather(1, labels[:, None])[:, 0]
    return (true_class * teacher_logits.shape[1] > odds.sum(1)).to(teacher_logits.dtype)


def csd_target(
    student_logits: Tensor,
    teacher_logits: Tensor,
    prototypes: Tensor | None,
    *,
    tau: float,
    similarity: bool = True,
    target: Target = "teacher",
    similarity_scale: Scale = "none",
) -> Tensor:
    """Compute the refined soft label `q = softmax(δ̂ ⊙ z_ξ / τ)`: [B, C], [B, C], [C, C] -> [B, C].

    It is a constant for the gradient. Prototypes are needed for the similarity only.
    """
    if target == "uniform":
        return torch.full_like(teacher_logits, 1 / teacher_logits.shape[1])
    refined = teacher_logits.detach()
    if similarity:
        assert prototypes is not None, "similarity needs prototypes"
        refined = similarity_weights(student_logits.detach(), prototypes.detach(), similarity_scale) * refined
    return F.softmax(refined / tau, dim=1)


def csd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    prototypes: Tensor,
    labels: Tensor,
    *,
    tau: float,
    similarity: bool = True,
    mask: Mask = "adaptive",
    target: Target = "teacher",
    similarity_scale: Scale = "none",
) -> Tensor:
    """Compute `M_i · τ² · −Σ_c q_c log softmax(z/τ)_c` for each sample.

    student_logits [B, C], teacher_logits [B, C], prototypes [C, C], labels [B] -> [B]. Masked samples
    are 0. The gradient goes into `student_logits` only, and only through the log-probabilities.
    """
    q = csd_target(
        student_logits,
        teacher_logits,
        prototypes,
        tau=tau,
        similarity=similarity,
        target=target,
        similarity_scale=similarity_scale,
    )
    return masked_distillation(q, student_logits, teacher_logits, labels, tau=tau, mask=mask)


def masked_distillation(
    q: Tensor, student_logits: Tensor, teacher_logits: Tensor, labels: Tensor, *, tau: float, mask: Mask
) -> Tensor:
    """Compute `csd_loss` for a target q [B, C] that is known already: -> [B]."""
    kept = soft_label_mask(teacher_logits.detach(), labels, mask)
    return kept * tau**2 * soft_cross_entropy(q, student_logits, tau)


def authors_csd_loss(
    student_logits: Tensor, teacher_logits: Tensor, prototypes: Tensor, labels: Tensor, *, tau: float
) -> Tensor:
    """Compute the loss of the authors' released code, which differs from the paper's: shapes as `csd_loss`.

    The mask is taken from the refined logits, the loss is the KL divergence, and the gradient also
    flows through the similarity.
    """
    refined = similarity_weights(student_logits, prototypes) * teacher_logits.detach()
    return soft_label_mask(refined.detach(), labels) * tau**2 * kl_divergence(refined, student_logits, tau)
