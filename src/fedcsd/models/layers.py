"""Compute the layers of PyTorch faster on a CPU."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fedcsd.kernels import convolution
from fedcsd.kernels.build import library
from fedcsd.kernels.chain import Link


class ConvPool(nn.Conv2d):
    """Compute relu(max_pool(conv(x))): a convolution, 2×2 max-pooling, ReLU.

    Arguments, parameters, their names and initial values are those of `nn.Conv2d`. On a CPU it is several times
    faster where channels are few (see `fedcsd.kernels.convolution`). `pool=1` and `relu=False` leave these out.
    """

    def __init__(self, *arguments: Any, pool: int = 2, relu: bool = True, **options: Any):
        super().__init__(*arguments, **options)
        if pool not in (1, 2):
            raise ValueError(f"pool is {pool}: it can be 1 or 2")
        self.pool, self.relu = pool, relu
        self._simple = (
            self.stride == self.dilation == (1, 1)
            and self.groups == 1
            and self.padding_mode == "zeros"
            and isinstance(self.padding, tuple)
            and self.padding[0] == self.padding[1]
            and self.kernel_size[0] == self.kernel_size[1]
        )
        library()  # made before worker processes are

    @property
    def link(self) -> Link | None:
        """Return this layer for `kernels.chain`, or None if that cannot compute it."""
        if not self._simple:
            return None
        return Link(self.weight, self.bias, (int(self.padding[0]), self.pool, self.relu))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, C, H, W] to [B, O, p, r]."""
        if self._simple:
            return convolution(
                x, self.weight, self.bias, padding=int(self.padding[0]), pool=self.pool, relu=self.relu
            )
        x = super().forward(x)
        x = F.max_pool2d(x, 2) if self.pool == 2 else x
        return F.relu(x) if self.relu else x

    def extra_repr(self) -> str:
        of_conv = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{of_conv}, pool={self.pool}, relu={self.relu}"


class Dense(nn.Linear):
    """Compute relu(linear(x)); `relu=False` leaves the ReLU out."""

    def __init__(self, *arguments: Any, relu: bool = True, **options: Any):
        super().__init__(*arguments, **options)
        self.relu = relu

    @property
    def link(self) -> Link | None:
        """Return this layer for `kernels.chain`."""
        return Link(self.weight, self.bias, (0, 1, self.relu))

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, C] to [B, O]."""
        x = super().forward(x)
        return F.relu(x) if self.relu else x

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, relu={self.relu}"


class Chain(nn.Module):
    """Apply named layers one after another; the last is a `Dense`, and images are flattened before the first one.

    Where the kernels suit all layers, a CPU computes the whole model in one call each way (see
    `fedcsd.kernels.chain`), which small batches need.
    """

    def __init__(self, **layers: ConvPool | Dense):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        library()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, …] to [B, O]."""
        for layer in self.children():
            x = layer(x.flatten(1) if isinstance(layer, Dense) else x)
        return x

    def links(self) -> list[Link] | None:
        """Return the layers for `kernels.chain`, or None if the model does anything else."""
        layers = list(self.children())
        if type(self).forward is not Chain.forward or len(layers) < 2 or not isinstance(layers[-1], Dense):
            return None
        found: list[Link] = []
        for layer in layers:
            known = isinstance(layer, (ConvPool, Dense)) and layer.link
            if not known or layer._forward_hooks or layer._forward_pre_hooks:
                return None
            found.append(known)
        return found
