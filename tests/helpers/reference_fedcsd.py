"""FedCSD as a textbook writes it, with its parts and controls, and the authors' released code."""

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcsd import seeds
from helpers.plain import Batch, Loss, Result, World, ce, class_means, each, over_holders, training


def fedcsd(
    world: World,
    mu: float,
    tau: float,
    alpha: float,
    similarity: bool = True,
    mask: str = "adaptive",
    teacher: str = "average",
    target: str = "teacher",
    similarity_scale: str = "none",
) -> Result:
    w, w_teacher, prototypes, classes = world.start, world.start, {}, world.data.classes

    def kept(z: Tensor, y: Tensor) -> Tensor:
        if mask == "forcible":
            return z.argmax(1) == y
        return (F.softmax(z, 1)[torch.arange(len(y)), y] > 1 / classes) | (mask == "none")

    def loss_from(t: int, net: nn.Module, prototypes: dict[int, Tensor]) -> Loss:
        def loss(b: Batch) -> Tensor:
            z = net(b.x)
            weights = _similarity(b.z.detach(), prototypes) if similarity else torch.ones_like(z)
            q = F.softmax((classes if similarity_scale == "classes" else 1) * weights * z / tau, 1)
            q = torch.full_like(z, 1 / classes) if target == "uniform" else q
            world.measure(t, "target_entropy", -(q * q.log()).sum(1) / math.log(classes))
            return ce(b) + mu * (kept(z, b.y) * tau**2 * -(q * F.log_softmax(b.z / tau, 1)).sum(1)).mean()

        return loss

    for t, clients in world.rounds():
        net = world.frozen(w if teacher == "global" else w_teacher)
        local = [(net(x), y) for x, y in map(world.local_data, clients)]
        prototypes = over_holders(prototypes, [class_means(z, y) for z, y in local])
        for z, y in local:
            right, filtered = z.argmax(1) == y, ~kept(z, y)
            world.measure(t, "teacher_accuracy", right)
            world.measure(t, "mask_rate", ~filtered)
            world.measure(t, "wrong_filtered", filtered[~right])
            world.measure(t, "right_lost", filtered[right])
        loss = loss_from(t, net, prototypes)
        w = world.mean({k: world.train(t, k, w, loss) for k in clients})
        w_teacher = each(lambda old, new: alpha * old + (1 - alpha) * new, w_teacher, w)
    return Result(w)


def _similarity(z: Tensor, prototypes: dict[int, Tensor]) -> Tensor:
    """Compute `softmax_c(cos(z, P_c))`; the cosine is 0 for a class without a prototype."""
    none = torch.zeros(z.shape[1], dtype=z.dtype)
    rows = torch.stack([prototypes.get(c, none) for c in range(z.shape[1])])
    return F.softmax(F.cosine_similarity(z[:, None], rows[None], dim=2), 1)


def fedcsd_authors(world: World, mu: float, tau: float, alpha: float) -> Result:
    """The authors' released code, as docs/methods/fedcsd.md tells it."""
    w, w_teacher = world.start, world.start

    def loss_from(net: nn.Module, own: dict[int, Tensor]) -> Loss:
        def loss(b: Batch) -> Tensor:
            refined = _similarity(b.z, own) * training(net, b.x)(b.x).detach()
            p = F.softmax(refined / tau, 1)
            mask = F.softmax(refined, 1)[torch.arange(len(b.y)), b.y] > 1 / world.data.classes
            far = (p * (p.log() - F.log_softmax(b.z / tau, 1))).sum(1)
            return (1 - mu) * ce(b) + mu * tau**2 * (mask * far).mean()

        return loss

    def own_prototypes(t: int, k: int, net: nn.Module) -> dict[int, Tensor]:
        images, y = world.images(t, k, 0, "prototypes"), world.local_data(k)[1]
        order = seeds.rng(world.settings.seed, "prototypes", t, k, 0).permutation(len(y))
        size = world.settings.batch_size
        whole = [order[at : at + size] for at in range(0, len(y) - size + 1, size)]
        if not whole:
            return {}
        z = torch.cat([training(net, images[rows])(images[rows]).detach() for rows in whole])
        return class_means(z, y[np.concatenate(whole)])

    for t, clients in world.rounds():
        local = {}
        for k in clients:
            own = own_prototypes(t, k, world.net(w_teacher))
            local[k] = world.train(t, k, w, loss_from(world.net(w_teacher), own))
        w = world.mean(local)
        w_teacher = each(lambda old, new: alpha * old + (1 - alpha) * new, w_teacher, w)
    return Result(w)
