"""Test the fused convolution on a GPU, alone and stacked."""

import math

import pytest
import torch
from torch import Tensor

from fedcsd.kernels import convolution

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("batch", "channels", "side", "planes", "kernel", "padding", "pool", "relu"),
    [
        (5, 1, 12, 6, 5, 0, 2, True),
        (8, 3, 9, 7, 3, 1, 2, True),
        (16, 6, 12, 16, 5, 0, 2, True),
        (4, 2, 7, 4, 3, 0, 1, False),
        (64, 1, 28, 6, 5, 0, 2, True),
        (1, 4, 8, 8, 5, 2, 2, False),
    ],
)
def test_the_fused_convolution(
    batch: int, channels: int, side: int, planes: int, kernel: int, padding: int, pool: int, relu: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(3, batch, channels, side, side + 1), (3, planes, channels, kernel, kernel), (3, planes)]
    stacked = [torch.randint(-4, 5, shape).float() for shape in shapes]  # whole numbers: ties are common

    def one(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return convolution(x, w, b, padding=padding, pool=pool, relu=relu).square().sum()

    gradients = torch.func.grad(one, argnums=(0, 1, 2))
    there = torch.vmap(gradients)(*(t.cuda() for t in stacked))
    for k in range(3):
        expected = gradients(*(t[k].double() for t in stacked))
        alone = gradients(*(t[k].cuda() for t in stacked))
        for mine, yours, alike in zip(alone, expected, there, strict=True):
            torch.testing.assert_close(mine.cpu().double(), yours, rtol=1e-5, atol=1e-3)
            torch.testing.assert_close(alike[k], mine, rtol=1e-5, atol=1e-3)
        assert one(*(t[k].cuda() for t in stacked)).isfinite()
    x = stacked[0][0].cuda()
    x[0, 0, 2, 2] = math.nan
    assert convolution(x, *(t[0].cuda() for t in stacked[1:]), padding=padding, pool=pool).isnan().any()
