"""Every method as a textbook writes it, one function each, from the rules and not from the package.

What a method adds to the local objective is a term of the loss, for autograd to differentiate. It is
slow and says what is meant. Options have the names and meanings of the package's methods.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from helpers.plain import (
    Batch,
    Loss,
    Result,
    State,
    World,
    ce,
    class_means,
    distance,
    dot,
    each,
    kl,
    over_holders,
    uniform_mean,
)
from helpers.reference_fedcsd import fedcsd, fedcsd_authors

__all__ = ["fedcsd", "fedcsd_authors"]  # the rest is here

# Methods that change the local objective alone.


def averaged(world: World, loss_from: Callable[[State], Loss]) -> Result:
    """FedAvg with a local loss that may depend on the round's global weights."""
    w = world.start
    for t, clients in world.rounds():
        loss = loss_from(w)
        w = world.mean({k: world.train(t, k, w, loss) for k in clients})
    return Result(w)


def fedavg(world: World) -> Result:
    return averaged(world, lambda w: ce)


def fedprox(world: World, mu: float) -> Result:
    return averaged(world, lambda w: lambda b: ce(b) + mu / 2 * distance(b.parameters(), w))


def confidence_penalty(world: World, mu: float) -> Result:
    def loss(b: Batch) -> Tensor:
        p = F.softmax(b.z, 1)
        return ce(b) - mu * -(p * p.log()).sum(1).mean()

    return averaged(world, lambda w: loss)


def label_smoothing(world: World, epsilon: float) -> Result:
    def loss(b: Batch) -> Tensor:
        target = (1 - epsilon) * F.one_hot(b.y, b.z.shape[1]).to(b.z.dtype) + epsilon / b.z.shape[1]
        return -(target * F.log_softmax(b.z, 1)).sum(1).mean()

    return averaged(world, lambda w: loss)


def logit_distillation(world: World, mu: float, tau: float) -> Result:
    def loss_from(w: State) -> Loss:
        teacher = world.frozen(w)

        def loss(b: Batch) -> Tensor:
            q = F.softmax(teacher(b.x) / tau, 1)
            return ce(b) + mu * tau**2 * -(q * F.log_softmax(b.z / tau, 1)).sum(1).mean()

        return loss

    return averaged(world, loss_from)


def feature_distillation(world: World, mu: float) -> Result:
    def loss_from(w: State) -> Loss:
        teacher = world.frozen(w)
        return lambda b: ce(b) + mu * ((b.h - teacher.body(b.x)) ** 2).mean()

    return averaged(world, loss_from)


def fedntd(world: World, mu: float, tau: float) -> Result:
    def others(z: Tensor, y: Tensor) -> Tensor:
        """The logits of the C − 1 classes that are not the label."""
        return torch.stack([torch.cat([row[:c], row[c + 1 :]]) for row, c in zip(z, y.tolist(), strict=True)])

    def loss_from(w: State) -> Loss:
        teacher = world.frozen(w)

        def loss(b: Batch) -> Tensor:
            p = F.softmax(others(teacher(b.x), b.y) / tau, 1)
            return ce(b) + mu * tau**2 * kl(p, others(b.z, b.y) / tau)

        return loss

    return averaged(world, loss_from)


def fedgkd(world: World, mu: float, tau: float, window: int) -> Result:
    past: list[State] = []

    def loss_from(w: State) -> Loss:
        past.append(w)
        teacher = world.frozen(uniform_mean(past[-window:]))
        return lambda b: ce(b) + mu * tau**2 * kl(F.softmax(teacher(b.x) / tau, 1), b.z / tau)

    return averaged(world, loss_from)


# Methods that share or keep more than weights.


def moon(world: World, mu: float, tau: float) -> Result:
    w, previous = world.start, {}

    def loss_from(w: State, before: State) -> Loss:
        same, old = world.frozen(w), world.frozen(before)

        def loss(b: Batch) -> Tensor:
            to_global = F.cosine_similarity(b.h, same.body(b.x)) / tau
            to_previous = F.cosine_similarity(b.h, old.body(b.x)) / tau
            return ce(b) + mu * -torch.log(to_global.exp() / (to_global.exp() + to_previous.exp())).mean()

        return loss

    for t, clients in world.rounds():
        local = {k: world.train(t, k, w, loss_from(w, previous[k]) if k in previous else ce) for k in clients}
        previous |= local
        w = world.mean(local)
    return Result(w, {"previous": previous})


def fedproto(world: World, mu: float) -> Result:
    w, prototypes = world.start, {}

    def loss(b: Batch) -> Tensor:
        known = [(h, prototypes[c]) for h, c in zip(b.h, b.y.tolist(), strict=True) if c in prototypes]
        return ce(b) + mu * sum(((h - p) ** 2).mean() for h, p in known) / len(b.y)

    for t, clients in world.rounds():
        local = {k: world.train(t, k, w, loss) for k in clients}
        means = []
        for k in clients:
            x, y = world.local_data(k)
            means.append(class_means(world.frozen(local[k]).body(x), y))
        prototypes = over_holders(prototypes, means)
        w = world.mean(local)
    return Result(w)


def scaffold(world: World) -> Result:
    w, c, variates = world.start, world.zeros(), defaultdict(world.zeros)

    def loss_from(c: State, c_k: State) -> Loss:
        return lambda b: ce(b) + dot(each(torch.sub, c, c_k), b.parameters())

    for t, clients in world.rounds():
        local = {k: world.train(t, k, w, loss_from(c, variates[k])) for k in clients}
        c = _new_variates(world, w, local, c, variates)
        w = world.mean(local)
    return Result(w, {"variate": dict(variates)})


def _new_variates(
    world: World, w: State, local: dict[int, State], c: State, variates: dict[int, State]
) -> State:
    """Replace the clients' variates; return the server's."""
    change = world.zeros()
    for k, w_k in local.items():
        way = world.effective_steps(k) * world.settings.lr
        new = each(lambda c_k, c, w, w_k, way=way: c_k - c + (w - w_k) / way, variates[k], c, w, w_k)
        change = each(lambda total, new, old: total + new - old, change, new, variates[k])
        variates[k] = new
    return each(lambda c, change: c + change / world.clients, c, change)


def feddyn(world: World, alpha: float) -> Result:
    w, h, multipliers = world.start, world.zeros(), defaultdict(world.zeros)

    def loss_from(w: State, own: State) -> Loss:
        return lambda b: ce(b) - dot(own, b.parameters()) + alpha / 2 * distance(b.parameters(), w)

    for t, clients in world.rounds():
        local = {k: world.train(t, k, w, loss_from(w, multipliers[k])) for k in clients}
        for k in clients:
            multipliers[k] = each(lambda own, w_k, w: own - alpha * (w_k - w), multipliers[k], local[k], w)
            h = each(lambda h, w_k, w: h - alpha / world.clients * (w_k - w), h, local[k], w)
        uniform = world.parameters(uniform_mean(list(local.values())))
        w = {**world.mean(local), **each(lambda mean, h: mean - h / alpha, uniform, h)}
    return Result(w, {"multiplier": dict(multipliers)})


def feddc(world: World, alpha: float) -> Result:
    w, c = world.start, world.zeros()
    variates, drifts = defaultdict(world.zeros), defaultdict(world.zeros)

    def loss_from(w: State, drift: State, c: State, c_k: State) -> Loss:
        def loss(b: Batch) -> Tensor:
            penalty = alpha / 2 * distance(each(torch.add, b.parameters(), drift), w)
            return ce(b) + penalty + dot(each(torch.sub, c, c_k), b.parameters())

        return loss

    for t, clients in world.rounds():
        local = {k: world.train(t, k, w, loss_from(w, drifts[k], c, variates[k])) for k in clients}
        for k in clients:
            drifts[k] = each(lambda h, w_k, w: h + w_k - w, drifts[k], local[k], w)
        c = _new_variates(world, w, local, c, variates)
        # Clients that have not taken part yet have no drift, and count in the mean all the same.
        everyone = [drifts.get(k) or world.zeros() for k in range(world.clients)]
        uniform = world.parameters(uniform_mean(list(local.values())))
        w = {**world.mean(local), **each(torch.add, uniform, uniform_mean(everyone))}
    return Result(w, {"drift": dict(drifts), "variate": dict(variates)})


# Methods that change the server's step.


def fednova(world: World) -> Result:
    w = world.start
    for t, clients in world.rounds():
        p, a = world.shares(clients), {k: world.effective_steps(k) for k in clients}
        local = {k: world.train(t, k, w, ce) for k in clients}
        whole = sum(p[k] * a[k] for k in clients)
        new = world.parameters(w)
        for k in clients:
            step = whole * p[k] / a[k]
            new = each(lambda new, w, w_k, step=step: new - step * (w - w_k), new, w, local[k])
        w = {**world.mean(local), **new}
    return Result(w)


def fedavgm(world: World, server_momentum: float) -> Result:
    w, v = world.start, world.zeros()
    for t, clients in world.rounds():
        mean = world.mean({k: world.train(t, k, w, ce) for k in clients})
        v = each(lambda v, w, mean: server_momentum * v + (w - mean), v, w, mean)
        w = {**mean, **each(torch.sub, w, v)}
    return Result(w)


def _adaptive(world: World, lr: float, beta1: float, tau: float, second: Callable[..., Tensor]) -> Result:
    """Follow algorithm 2 of Reddi et al. 2021; `second` computes the new v from the old one and Δ²."""
    w, m = world.start, world.zeros()
    v = each(lambda zero: zero + tau**2, world.zeros())
    for t, clients in world.rounds():
        mean = world.mean({k: world.train(t, k, w, ce) for k in clients})
        delta = world.parameters(each(torch.sub, mean, w))
        m = each(lambda m, d: beta1 * m + (1 - beta1) * d, m, delta)
        v = each(lambda v, d: second(v, d**2), v, delta)
        w = {**mean, **each(lambda w, m, v: w + lr * m / (v.sqrt() + tau), w, m, v)}
    return Result(w)


def fedadam(world: World, server_lr: float, beta1: float, beta2: float, adaptivity: float) -> Result:
    return _adaptive(world, server_lr, beta1, adaptivity, lambda v, d2: beta2 * v + (1 - beta2) * d2)


def fedyogi(world: World, server_lr: float, beta1: float, beta2: float, adaptivity: float) -> Result:
    return _adaptive(
        world, server_lr, beta1, adaptivity, lambda v, d2: v - (1 - beta2) * d2 * torch.sign(v - d2)
    )


def fedadagrad(world: World, server_lr: float, beta1: float, adaptivity: float) -> Result:
    return _adaptive(world, server_lr, beta1, adaptivity, lambda v, d2: v + d2)


# Methods with models of the clients' own.


def _kept_at_home(world: World, home: Callable[[str], bool]) -> Result:
    """Average all tensors but those that stay with the client; the server keeps their initial values."""
    w, kept = world.start, {}
    for t, clients in world.rounds():
        local = {k: world.train(t, k, {**w, **kept.get(k, {})}, ce) for k in clients}
        kept |= {k: {name: w_k[name] for name in w_k if home(name)} for k, w_k in local.items()}
        w = {name: w[name] if home(name) else tensor for name, tensor in world.mean(local).items()}
    return Result(w, {"local": kept}, {k: {**w, **kept.get(k, {})} for k in range(world.clients)})


def fedbn(world: World) -> Result:
    norms = [name for name, layer in world.model.named_modules() if isinstance(layer, nn.BatchNorm1d)]
    return _kept_at_home(world, lambda name: name.rpartition(".")[0] in norms)


def fedper(world: World) -> Result:
    return _kept_at_home(world, lambda name: name.startswith("head."))


def ditto(world: World, mu: float) -> Result:
    w, personal = world.start, {}

    def loss_from(w: State) -> Loss:
        return lambda b: ce(b) + mu / 2 * distance(b.parameters(), w)

    for t, clients in world.rounds():
        local = {k: world.train(t, k, w, ce) for k in clients}
        for k in clients:
            personal[k] = world.train(t, k, personal.get(k, w), loss_from(w), "batches 1")
        w = world.mean(local)
    return Result(w, {"personal": personal}, {k: personal.get(k, w) for k in range(world.clients)})


OPTIONS: dict[str, dict[str, Any]] = {
    "confidence_penalty": {"mu": 0.3},
    "ditto": {"mu": 0.5},
    "fedadagrad": {"server_lr": 0.1, "beta1": 0.3, "adaptivity": 0.05},
    "fedadam": {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "adaptivity": 0.05},
    "fedavg": {},
    "fedavgm": {"server_momentum": 0.7},
    "fedbn": {},
    "fedcsd": {"mu": 0.1, "tau": 4.0, "alpha": 0.6},
    "feddc": {"alpha": 0.2},
    "feddyn": {"alpha": 0.2},
    "fedgkd": {"mu": 0.5, "tau": 2.0, "window": 3},
    "fednova": {},
    "fedntd": {"mu": 0.5, "tau": 2.0},
    "fedper": {},
    "fedproto": {"mu": 1.0},
    "fedprox": {"mu": 0.5},
    "fedyogi": {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "adaptivity": 0.05},
    "feature_distillation": {"mu": 1.0},
    "label_smoothing": {"epsilon": 0.2},
    "logit_distillation": {"mu": 0.1, "tau": 3.0},
    "moon": {"mu": 1.0, "tau": 0.5},
    "scaffold": {},
}
"""Strong enough that a method's term matters."""


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)
