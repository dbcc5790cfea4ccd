"""Compute distances between the outputs of two networks for the same images."""

import torch
from torch import Tensor
from torch.nn import functional as F


def soft_cross_entropy(target: Tensor, logits: Tensor, tau: float) -> Tensor:
    """Compute `−Σ_c target_c · log softmax(logits/τ)_c` for each sample: [B, C], [B, C] -> [B]."""
    return -(target * F.log_softmax(logits / tau, dim=1)).sum(1)


def kl_divergence(reference_logits: Tensor, logits: Tensor, tau: float = 1.0) -> Tensor:
    """Compute `KL(softmax(reference/τ) ‖ softmax(logits/τ))` for each sample: [B, C], [B, C] -> [B]."""
    log_p = F.log_softmax(reference_logits / tau, dim=1)
    log_q = F.log_softmax(logits / tau, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(1)


def entropy(probabilities: Tensor) -> Tensor:
    """Compute `−Σ_c p_c log p_c` for each sample: [B, C] -> [B]."""
    return -(probabilities * probabilities.clamp_min(1e-30).log()).sum(1)


def not_true(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logits of all classes but the true one: [B, C], [B] -> [B, C − 1]."""
    others = torch.arange(logits.shape[1] - 1, device=logits.device).expand(len(labels), -1)
    return logits.gather(1, others + (others >= labels[:, None]))


def model_contrastive(features: Tensor, near: Tensor, far: Tensor, tau: float) -> Tensor:
    """Compute MOON's `−log( e^{cos(h, near)/τ} / (e^{cos(h, near)/τ} + e^{cos(h, far)/τ}) )` for each sample:
    three times [B, D] -> [B]."""
    apart = F.cosine_similarity(features, far) - F.cosine_similarity(features, near)
    return F.softplus(apart / tau)
