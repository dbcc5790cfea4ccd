"""Layers that are PyTorch's own in all but speed."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fedcsd.kernels import convolution
from fedcsd.kernels.build import library


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
