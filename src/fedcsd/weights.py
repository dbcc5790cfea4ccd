"""A flat vector with names holds the weights of a model.

Weights are the trainable parameters followed by every other floating-point tensor of the model
(frozen parameters, BatchNorm's running statistics): all of it is averaged. Integer buffers such as
`num_batches_tracked` are not weights: they stay with the model and start anew in each local training.
"""

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcsd.errors import UserError


def float_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point buffers that belong to the model's saved state."""
    saved = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in saved and buffer.is_floating_point():
            yield name, buffer


@dataclass(frozen=True)
class Layout:
    """The place of each named tensor in the flat vector, of which the first `trainable` numbers are trained."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    trainable: int
    norms: frozenset[str] = frozenset()
    """names of what belongs to BatchNorm layers: scales, shifts and running statistics"""
    classifier: frozenset[str] = frozenset()
    """names of what belongs to the classifier"""

    @classmethod
    def of(cls, module: nn.Module, classifier: nn.Module | None = None) -> "Layout":
        parameters = list(module.named_parameters())
        trained = [(n, p) for n, p in parameters if p.requires_grad]
        frozen = [(n, p) for n, p in parameters if not p.requires_grad]
        tensors = [*trained, *frozen, *float_buffers(module)]
        dtypes = {str(t.dtype) for _, t in tensors}
        if not trained:
            raise UserError("the model has no trainable parameters")
        if len(dtypes) > 1:
            mixed = ", ".join(sorted(dtypes))
            raise UserError(
                f"the model mixes {mixed}: give it one floating-point type, for example with .float()"
            )
        names = [n for n, _ in tensors]
        return cls(
            names=tuple(names),
            shapes=tuple(tuple(t.shape) for _, t in tensors),
            trainable=sum(p.numel() for _, p in trained),
            norms=_inside(module, names, lambda m: isinstance(m, _BatchNorm)),
            classifier=_inside(module, names, lambda m: m is classifier),
        )

    @property
    def size(self) -> int:
        return sum(prod(shape) for shape in self.shapes)

    def fingerprint(self) -> str:
        """Return a digest that tells models apart."""
        return blake2b(repr((self.names, self.shapes, self.trainable)).encode(), digest_size=8).hexdigest()

    def mask(self, names: Container[str]) -> Tensor:
        """Return true for the numbers of the flat vector that belong to these names [size]."""
        sizes = torch.tensor([prod(shape) for shape in self.shapes])
        return torch.tensor([name in names for name in self.names]).repeat_interleave(sizes)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of the flat vector [size], by name and in shape."""
        views, start = {}, 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            stop = start + prod(shape)
            views[name] = flat[start:stop].view(shape)
            start = stop
        return views


def _inside(module: nn.Module, names: Sequence[str], wanted: Callable[[nn.Module], bool]) -> frozenset[str]:
    """Return the names that belong to the wanted parts of a model."""
    prefixes = tuple(f"{path}." if path else "" for path, part in module.named_modules() if wanted(part))
    return frozenset(name for name in names if name.startswith(prefixes))


def _new_token() -> int:
    """Return a number that no other process returns either: workers make weights of their own."""
    return int.from_bytes(os.urandom(6), "little") + 1


@dataclass(frozen=True, eq=False)
class Weights:
    """A model's tensors as one flat vector, which is never changed in place: arithmetic makes new weights."""

    layout: Layout
    flat: Tensor
    token: int = 0
    """identifies the value, so that it is not sent or computed twice"""
    recipe: tuple[int, int, float] | None = None
    """tokens of two other values and t, if this is `lerp(first, second, t)`; a client that holds both makes it"""

    def __post_init__(self) -> None:
        if not self.token:
            object.__setattr__(self, "token", _new_token())

    @property
    def parameters(self) -> Tensor:
        """Return the trainable part, flat; regularisers and control variates act on it."""
        return self.flat[: self.layout.trainable]

    @property
    def others(self) -> Tensor:
        """Return the part that is averaged but not trained, flat."""
        return self.flat[self.layout.trainable :]

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def named(self) -> dict[str, Tensor]:
        return self.layout.split(self.flat)

    def to(self, device: torch.device | str, *, copy: bool = False) -> "Weights":
        """Return the same weights, by token too, on a device."""
        flat = self.flat.to(device, copy=copy)
        return self if flat is self.flat else replace(self, flat=flat)

    def like(self, flat: Tensor) -> "Weights":
        """Return new weights of the same layout."""
        _check_shape("like", flat, self.flat, "all numbers, as weights.flat has them")
        return Weights(self.layout, flat)

    def with_parameters(self, parameters: Tensor) -> "Weights":
        """Return new weights with these trainable parameters; the rest stays."""
        _check_shape("with_parameters", parameters, self.parameters, "those of weights.parameters")
        return self.like(torch.cat([parameters.to(self.flat.dtype), self.others]))

    def replaced(self, mask: Tensor, values: Tensor) -> "Weights":
        """Return new weights with these values where the mask [size] is true; the rest stays."""
        flat = self.flat.clone()
        flat[mask] = values.to(flat.dtype)
        return self.like(flat)


def _check_shape(function: str, given: Tensor, wanted: Tensor, what: str) -> None:
    if not isinstance(given, Tensor) or given.shape != wanted.shape:
        found = list(given.shape) if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise ValueError(f"{function} takes a tensor {list(wanted.shape)}, {what}; it was given {found}")


Value = Weights | Tensor | int | float
Values = Mapping[str, Any]
"""named values that travel or are kept; typed loosely, so that a method can use what it put there"""


def nbytes(value: Value) -> int:
    """Return the bytes of a value when it is sent."""
    return value.nbytes if isinstance(value, (Weights, Tensor)) else 8


def moved(values: Values, device: torch.device | str, *, copy: bool = False) -> dict[str, Any]:
    """Return the values with their weights and tensors, or copies of them, on a device."""
    tensors = {n: v.to(device, copy=copy) for n, v in values.items() if isinstance(v, (Weights, Tensor))}
    return {**values, **tensors}
