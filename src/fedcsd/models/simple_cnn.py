"""The simple CNN of the paper (from MOON): two 5×5 convolutions and three linear layers."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from fedcsd.errors import UserError
from fedcsd.models.layers import ConvPool


class SimpleCNN(nn.Module):
    def __init__(self, shape: Sequence[int], classes: int):
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 16:
            raise UserError(
                f"simple_cnn needs images of at least 16×16, these are {'×'.join(map(str, shape))}: use --model mlp"
            )
        channels, height, width = shape
        side_h, side_w = ((((side - 4) // 2) - 4) // 2 for side in (height, width))
        self.conv1 = ConvPool(channels, 6, 5)
        self.conv2 = ConvPool(6, 16, 5)
        self.fc1 = nn.Linear(16 * side_h * side_w, 120)
        self.fc2 = nn.Linear(120, 84)
        self.classifier = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [B, C, H, W] to logits [B, classes]; the features are the 84 of `fc2`."""
        x = self.conv2(self.conv1(x))  # each with its pooling and ReLU
        x = F.relu(self.fc1(x.flatten(1)))
        x = F.relu(self.fc2(x))
        return self.classifier(x)  # type: ignore[no-any-return]


def simple_cnn(shape: Sequence[int], classes: int) -> nn.Module:
    """conv5×5-6, pool, conv5×5-16, pool, 120, 84, classes (28×28 images: 44,426 parameters for ten classes)."""
    return SimpleCNN(shape, classes)
