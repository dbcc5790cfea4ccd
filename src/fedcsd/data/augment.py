"""Shift, mirror and rotate images at random, a whole batch at a time.

Crop, flip and rotation only determine the source of each pixel, so together they are one look-up.
Random numbers are an argument: the change is a pure function of (images, numbers) on their device,
without a loop over samples and without waiting for the device.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedcsd.errors import UserError


@dataclass(frozen=True)
class Augmentation:
    """Crop, then flip, then rotate the raw images, before they are standardised.

    RandomCrop, RandomHorizontalFlip and RandomRotation of torchvision do the same.
    """

    crop: int = 0
    """pixels of zeros to pad with before the old size is cut out at random"""
    flip: bool = False
    """swap left and right in half of the images"""
    rotate: float = 0.0
    """most degrees of a rotation about the centre; nearest pixel, zeros outside"""

    def __post_init__(self) -> None:
        if self.crop < 0 or not 0 <= self.rotate < math.inf:
            raise UserError(f"crop and rotate must be 0 or more; they are {self.crop} and {self.rotate}")

    @property
    def active(self) -> bool:
        """Tell if it changes anything."""
        return bool(self.crop or self.flip or self.rotate)

    def draw(self, batch: int, generator: torch.Generator) -> Tensor:
        """Draw the random numbers of a batch: [batch, 4] float32, uniform in [0, 1), on the CPU.

        The columns are the crop's row, the crop's column, the flip (below 1/2: yes) and the angle
        (from −rotate to +rotate). All four are always drawn, so that switching one off leaves the
        others as they are.
        """
        return torch.rand(batch, 4, generator=generator, dtype=torch.float32, device="cpu")

    def __call__(self, images: Tensor, numbers: Tensor) -> Tensor:
        """Change images [B, C, H, W] of any type by the numbers [B, 4]; both are on one device."""
        if not self.active:
            return images
        sources = self._sources(numbers, *images.shape[2:]).unsqueeze(1).expand(-1, images.shape[1], -1)
        return F.pad(images.flatten(2), (0, 1)).gather(2, sources).view(images.shape)

    def _sources(self, numbers: Tensor, height: int, width: int) -> Tensor:
        """Return the source of each pixel [B, H·W]: an index into the flattened image, or H·W for zero.

        It goes back from the result: unrotate, unflip, uncrop. Numbers of a sample are computed in
        float64, so that sines and cosines of different devices agree after rounding to float32, and
        cos 90° is 0. Coordinates are float32, by separate products and sums, which every device rounds
        alike, and become whole by ⌊x + 1/2⌋. So the CPU and a GPU choose the same pixels, and
        quarter turns are exact.
        """
        vertical, horizontal, mirror, turn = numbers.double()[:, :, None, None].unbind(1)
        row = torch.arange(height, dtype=torch.float32, device=numbers.device).view(-1, 1)
        column = torch.arange(width, dtype=torch.float32, device=numbers.device)
        if self.rotate:
            angle = (2 * turn - 1) * math.radians(self.rotate)
            cos, sin = angle.cos().float(), angle.sin().float()
            y, x = row - (height - 1) / 2, column - (width - 1) / 2
            row = (cos * y + height / 2 + sin * x).floor()
            column = (cos * x + width / 2 - sin * y).floor()

        down = (vertical * (2 * self.crop + 1)).floor() - self.crop
        right = (horizontal * (2 * self.crop + 1)).floor() - self.crop
        flipped = (mirror < 0.5).double() if self.flip else torch.zeros_like(mirror)
        sign = 1 - 2 * flipped
        # beyond the flipped image, or where the crop put padding
        outside = _outside(row, down, height) | _outside(column, sign * right, width)
        start = down * width + right + flipped * (width - 1)
        place = row.int() * width + column.int() * sign.int() + start.int()
        return place.masked_fill(outside, height * width).long().flatten(1)


def _outside(position: Tensor, shift: Tensor, size: int) -> Tensor:
    """Tell if `position` or `position + shift` lies outside 0 to `size` − 1."""
    least, most = (-shift).clamp(min=0), size - 1 - shift.clamp(min=0)
    return (position < least.float()) | (position > most.float())


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": Augmentation(),
    "cifar": Augmentation(crop=4, flip=True, rotate=15.0),
    "office": Augmentation(flip=True, rotate=30.0),
}
