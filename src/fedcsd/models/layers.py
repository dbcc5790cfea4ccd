"""Layers that are PyTorch's own in all but speed."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fedcsd.kernels import convolution
from fedcsd.kernels.build import library
from fedcsd.kernels.chain import Link


class ConvPool(nn.Conv2d):
    """A convolution, then 2×2 max-pooling, then ReLU: relu(max_pool(conv(x))).

    An `nn.Conv2d` as to arguments, parameters, their names and initial values; on a CPU it is several times
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
        """This layer as `kernels.chain` has it; None if it is not one for it."""
        if not self._simple:
            return None
        return Link(self.weight, self.bias, (int(self.padding[0]), self.pool, self.relu))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C, H, W] to [B, O, p, r]."""
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
    """A linear layer, then ReLU: relu(linear(x)). `relu=False` leaves the ReLU out."""

    def __init__(self, *arguments: Any, relu: bool = True, **options: Any):
        super().__init__(*arguments, **options)
        self.relu = relu

    @property
    def link(self) -> Link | None:
        return Link(self.weight, self.bias, (0, 1, self.relu))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, C] to [B, O]."""
        x = super().forward(x)
        return F.relu(x) if self.relu else x

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, relu={self.relu}"


class Chain(nn.Module):
    """A model of named layers one after another, the last a `Dense`; images are flattened before the first of these.

    Where the kernels suit all layers, a CPU goes through the whole model in one call each way (see
    `fedcsd.kernels.chain`), which is what small batches need.
    """

    def __init__(self, **layers: ConvPool | Dense):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        library()

    def forward(self, x: Tensor) -> Tensor:
        """x [B, …] to [B, O]."""
        for layer in self.children():
            x = layer(x.flatten(1) if isinstance(layer, Dense) else x)
        return x

    def links(self) -> list[Link] | None:
        """The layers as `kernels.chain` has them; None if something else happens on the way."""
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
