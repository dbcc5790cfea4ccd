"""Make the simple CNN of the paper (from MOON): two 5×5 convolutions and three linear layers."""

from collections.abc import Sequence

from torch import nn

from fedcsd.errors import UserError
from fedcsd.models.layers import Chain, ConvPool, Dense


class SimpleCNN(Chain):
    """Map images [B, C, H, W] to logits [B, classes]; the features are the 84 of `fc2`."""

    conv1: ConvPool
    conv2: ConvPool
    fc1: Dense
    fc2: Dense
    classifier: Dense

    def __init__(self, shape: Sequence[int], classes: int):
        if len(shape) != 3 or min(shape[1:]) < 16:
            raise UserError(
                f"simple_cnn needs images of at least 16×16, these are {'×'.join(map(str, shape))}: use --model mlp"
            )
        channels, height, width = shape
        side_h, side_w = ((((side - 4) // 2) - 4) // 2 for side in (height, width))
        super().__init__(
            conv1=ConvPool(channels, 6, 5),
            conv2=ConvPool(6, 16, 5),
            fc1=Dense(16 * side_h * side_w, 120),
            fc2=Dense(120, 84),
            classifier=Dense(84, classes, relu=False),
        )


def simple_cnn(shape: Sequence[int], classes: int) -> nn.Module:
    """Make conv5×5-6, pool, conv5×5-16, pool, 120, 84, classes (28×28 images: 44,426 parameters for ten classes)."""
    return SimpleCNN(shape, classes)
