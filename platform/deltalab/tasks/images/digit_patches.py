"""Handwritten digits as patches: the images of `digits`, read as vision models read images."""

from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar

from deltalab.tasks.digits import CLASSES, HELD_OUT, IMAGE_COUNT, IMAGES, PIXELS, images_of
from deltalab.tasks.images.task import ImageTask
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import Batch

SIDE = 8
MIDDLE, SCALE = 8, 4
"""The grey that is 0, and the grey levels that are 1. Both are powers of two, so that pixels are exact."""


@dataclass(frozen=True, kw_only=True)
class DigitPatches(ImageTask):
    """Image classification: 8 x 8 pixels in square patches, and the class is the digit.

    Images and splits are those of task `digits`: 1,197 images for training, 300 for validation and 300 for test. A
    batch draws images with replacement. A pixel g of 0 to 16 is the number (g - 8) / 4.

    The metric is accuracy. `chance` is the accuracy of naming any digit, 1/10.

    Attributes:
        train_images: The images of training, the first of its 1,197. Fewer are sooner known by heart.

    Examples:
        >>> task = DigitPatches()
        >>> task.patches, task.batch("train", 5, seed=0, step=0).inputs.shape
        ((4, 4, 4), torch.Size([5, 16, 4]))
    """

    name: ClassVar[str] = "digit_patches"
    version: ClassVar[int] = 1
    channels: ClassVar[int] = 1

    patch: int = 2
    train_images: int = IMAGE_COUNT - 2 * HELD_OUT

    def __post_init__(self) -> None:
        super().__post_init__()
        most = IMAGE_COUNT - 2 * HELD_OUT
        self.require(CLASSES <= self.train_images <= most, "train_images", f"must be from {CLASSES} to {most:,}")

    @property
    def size(self) -> int:
        return SIDE

    @property
    def classes(self) -> int:
        return CLASSES

    @property
    def train_tokens(self) -> int:
        return self.train_images * self.length

    def fingerprint(self) -> str:
        return sha256(IMAGES.read_bytes()).hexdigest()

    def draw(self, split: str, size: int, random: Random) -> Batch:
        images = images_of(split, random.device)
        count = self.train_images if split == "train" else len(images)
        drawn = images[random.integers("images", count, size)].long()
        pixels = (drawn[:, :PIXELS] - MIDDLE).float() / SCALE
        return self.of_pixels(pixels.view(size, SIDE, SIDE, 1), drawn[:, PIXELS])
