"""Compute losses and prototypes: pure functions on tensors, with their shapes in the docstrings.

Networks, clients and settings do not belong here.
"""

from fedcsd.objectives.csd import (
    authors_csd_loss,
    csd_loss,
    csd_target,
    masked_distillation,
    similarity_weights,
    soft_label_mask,
)
from fedcsd.objectives.distillation import (
    entropy,
    kl_divergence,
    model_contrastive,
    not_true,
    soft_cross_entropy,
)
from fedcsd.objectives.prototypes import HolderMean, average_over_holders, class_prototypes

__all__ = [
    "HolderMean",
    "authors_csd_loss",
    "average_over_holders",
    "class_prototypes",
    "csd_loss",
    "csd_target",
    "entropy",
    "kl_divergence",
    "masked_distillation",
    "model_contrastive",
    "not_true",
    "similarity_weights",
    "soft_cross_entropy",
    "soft_label_mask",
]
