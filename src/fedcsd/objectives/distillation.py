"""Distances between what two networks say of the same images."""

from torch import Tensor
from torch.nn import functional as F


def soft_cross_entropy(target: Tensor, logits: Tensor, tau: float) -> Tensor:
    """`−Σ_c target_c · log softmax(logits/τ)_c` for each sample: [B, C], [B, C] -> [B]."""
    return -(target * F.log_softmax(logits / tau, dim=1)).sum(1)


def kl_divergence(reference_logits: Tensor, logits: Tensor, tau: float = 1.0) -> Tensor:
    """`KL(softmax(reference/τ) ‖ softmax(logits/τ))` for each sample: [B, C], [B, C] -> [B]."""
    log_p = F.log_softmax(reference_logits / tau, dim=1)
    log_q = F.log_softmax(logits / tau, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def entropy(probabilities: Tensor) -> Tensor:
    """`−Σ_c p_c log p_c` for each sample: [B, C] -> [B]."""
    return -(probabilities * probabilities.clamp_min(1e-30).log()).sum(1)
