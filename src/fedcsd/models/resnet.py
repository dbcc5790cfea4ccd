"""Make residual networks (He et al. 2016) of 18, 34 and 50 layers, for small and for large images."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fedcsd.errors import UserError, unknown

NormName = Literal["batch", "group"]
StemName = Literal["cifar", "imagenet"]
Norm = Callable[[int], nn.Module]

NORMS: dict[str, Norm] = {"batch": nn.BatchNorm2d, "group": partial(nn.GroupNorm, 32)}
SMALLEST: dict[str, int] = {"cifar": 8, "imagenet": 32}  # at these the last stage sees one pixel


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """Make a convolution without bias, since a norm follows; at stride 1 the size stays."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def projection(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    """Make the shortcut of a block: the identity where the shape stays, else a 1×1 convolution and its norm."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(convolution(inputs, outputs, 1, stride), norm(outputs))


class BasicBlock(nn.Module):
    """Add the input to the output of two 3×3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1, self.norm1 = convolution(inputs, width, 3, stride), norm(width)
        self.conv2, self.norm2 = convolution(width, width, 3), norm(width)
        self.shortcut = projection(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, width, H/stride, W/stride]."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """Add the input to the output of three convolutions: 1×1 to few channels, 3×3, 1×1 to four times as many.

    The 3×3 has the stride: on the first 1×1 it would skip three pixels of four.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm):
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.norm1 = convolution(inputs, width, 1), norm(width)
        self.conv2, self.norm2 = convolution(width, width, 3, stride), norm(width)
        self.conv3, self.norm3 = convolution(width, outputs, 1), norm(outputs)
        self.shortcut = projection(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, 4·width, H/stride, W/stride]."""
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        y = self.norm3(self.conv3(y))
        return F.relu(y + self.shortcut(x), inplace=True)


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """Apply a stem, four stages of blocks (all but the first halve the image), the mean over pixels, a classifier."""

    def __init__(
        self,
        block: Block,
        depths: Sequence[int],
        channels: int,
        classes: int,
        norm: Norm,
        stem: str,
    ):
        super().__init__()
        kernel, stride = (3, 1) if stem == "cifar" else (7, 2)
        self.conv, self.norm = convolution(channels, 64, kernel, stride), norm(64)
        self.pool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, 2, padding=1)
        self.stages = nn.Sequential()
        inputs = 64
        for stage, depth in enumerate(depths):
            blocks = nn.Sequential()
            for place in range(depth):
                blocks.append(block(inputs, 64 * 2**stage, 2 if stage > 0 and place == 0 else 1, norm))
                inputs = 64 * 2**stage * block.expansion
            self.stages.append(blocks)
        self.classifier = nn.Linear(inputs, classes)
        for module in self.modules():  # norms start at weight 1 and bias 0 of their own accord
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, C, H, W] to logits [B, classes]; the features are the mean over pixels, 512 or 2048."""
        x = self.pool(F.relu(self.norm(self.conv(x)), inplace=True))
        return self.classifier(self.stages(x).mean((2, 3)))  # type: ignore[no-any-return]


def _resnet(
    name: str, block: Block, depths: Sequence[int], shape: Sequence[int], classes: int, norm: str, stem: str
) -> ResNet:
    """Make a network; a wrong option or too small images raise a UserError."""
    if norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    if stem not in SMALLEST:
        raise unknown("stem", stem, SMALLEST)
    side = min(shape[1:]) if len(shape) == 3 and shape[0] > 0 else 0
    if side < (needed := SMALLEST[stem]):
        advice = 'stem="cifar"' if side >= SMALLEST["cifar"] else "--model mlp"
        raise UserError(
            f"{name} with the {stem} stem needs images of at least {needed}×{needed}, "
            f"these are {'×'.join(map(str, shape))}: use {advice}"
        )
    return ResNet(block, depths, shape[0], classes, NORMS[norm], stem)


def resnet18(
    shape: Sequence[int], classes: int, *, norm: NormName = "batch", stem: StemName = "cifar"
) -> nn.Module:
    """Make ResNet-18 with a 3×3 stem for small images: 11.2 M parameters, 512 features."""
    return _resnet("resnet18", BasicBlock, (2, 2, 2, 2), shape, classes, norm, stem)


def resnet34(
    shape: Sequence[int], classes: int, *, norm: NormName = "batch", stem: StemName = "cifar"
) -> nn.Module:
    """Make ResNet-34 with a 3×3 stem for small images: 21.3 M parameters, 512 features."""
    return _resnet("resnet34", BasicBlock, (3, 4, 6, 3), shape, classes, norm, stem)


def resnet50(
    shape: Sequence[int], classes: int, *, norm: NormName = "batch", stem: StemName = "cifar"
) -> nn.Module:
    """Make ResNet-50 with a 3×3 stem for small images: 23.5 M parameters with ten classes, 2048 features."""
    return _resnet("resnet50", Bottleneck, (3, 4, 6, 3), shape, classes, norm, stem)
