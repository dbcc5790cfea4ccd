"""Make AlexNet with BatchNorm after every hidden layer, as FedBN and its successors train on Office-Caltech-10."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcsd.errors import UserError

SMALLEST = 63  # the stem and three poolings leave one pixel of it


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, padding: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    ]


def _linear(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]


class SixBySix(nn.Module):
    """Compute `nn.AdaptiveAvgPool2d(6)`, whose own gradient is summed in no fixed order on a GPU."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, C, H, W] to [B, C, 6, 6]."""
        if x.shape[2:] == (7, 7):  # what images of 256×256 come to: windows of 2×2
            return F.avg_pool2d(x, 2, stride=1)
        down, across = (_shares(side, x) for side in x.shape[2:])
        return down @ x @ across.T


def _shares(side: int, like: Tensor, parts: int = 6) -> Tensor:
    """Return the weights [parts, side] with which numbers enter the mean of each part. Parts may overlap."""
    place, part = (torch.arange(n, device=like.device) for n in (side, parts))
    first, last = part * side // parts, ((part + 1) * side - 1) // parts
    inside = (first[:, None] <= place) & (place <= last[:, None])
    return (inside / inside.sum(1, keepdim=True)).to(like.dtype)


class AlexNet(nn.Module):
    """Map images of at least 63×63 to logits."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.features = nn.Sequential(
            *_convolution(channels, 64, 11, 4, 2),
            nn.MaxPool2d(3, 2),
            *_convolution(64, 192, 5, 1, 2),
            nn.MaxPool2d(3, 2),
            *_convolution(192, 384, 3, 1, 1),
            *_convolution(384, 256, 3, 1, 1),
            *_convolution(256, 256, 3, 1, 1),
            nn.MaxPool2d(3, 2),
            SixBySix(),
        )
        self.hidden = nn.Sequential(*_linear(256 * 6 * 6, 4096), *_linear(4096, 4096))
        self.classifier = nn.Linear(4096, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, classes]; the features are the 4096 of the last hidden layer."""
        return self.classifier(self.hidden(self.features(x).flatten(1)))  # type: ignore[no-any-return]


def alexnet(shape: Sequence[int], classes: int) -> nn.Module:
    """Make AlexNet with BatchNorm, for images of about 256×256: 57.1 M parameters, 4096 features."""
    side = min(shape[1:]) if len(shape) == 3 and shape[0] > 0 else 0
    if side < SMALLEST:
        raise UserError(
            f"alexnet needs images of at least {SMALLEST}×{SMALLEST}, "
            f"these are {'×'.join(map(str, shape))}: use --model {'simple_cnn' if side >= 16 else 'mlp'}"
        )
    return AlexNet(shape[0], classes)
