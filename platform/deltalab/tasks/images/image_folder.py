"""Images of a user's folder, with one folder for each class."""

import os
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from deltalab.tasks.images.pixels import CHANNELS, Pixels, pixels_of
from deltalab.tasks.images.task import ImageTask
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import Batch

MIDDLE, SCALE = 128, 64
"""The level that is 0, and the levels that are 1."""
SHIFT = 8
"""An augmented image is moved by up to 1 / SHIFT of its side."""


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageTask):
    """Image classification: images of a folder that has one folder for each class, such as ImageNet's `train`.

    An image is cut to the square in its middle and resized to `side` pixels. Different images are sorted by their
    SHA-256 and split: a tenth for validation, a tenth for test, the others for training. A batch draws with
    replacement. A level c of 0 to 255 is the number (c - 128) / 64.

    The metric is accuracy. `chance` is the accuracy of naming the class that training has most of.

    Attributes:
        folder: The folder. Its images are decoded once; the cache takes side x side x 3 bytes for each.
        side: The pixels of an image in each direction.
        augment: Whether images of training are mirrored at random, and moved by up to an eighth of `side`.

    Raises:
        InputError: `pixels_of` says when.
    """

    name: ClassVar[str] = "image_folder"
    version: ClassVar[int] = 1
    channels: ClassVar[int] = CHANNELS

    folder: str
    patch: int = 4
    side: int = 32
    augment: bool = False

    def __post_init__(self) -> None:
        self.require(type(self.side) is int and 8 <= self.side <= 512, "side", "must be from 8 to 512")
        super().__post_init__()
        self.require(self.folder.strip() != "" and "\0" not in self.folder, "folder", "must name a folder")
        self._pixels  # noqa: B018  # What is wrong with the folder is said when the task is made.

    @property
    def size(self) -> int:
        return self.side

    @property
    def classes(self) -> int:
        return len(self._pixels.classes)

    @property
    def chance(self) -> float:
        labels = self._pixels.labels[self._pixels.members["train"]]
        return float(labels.bincount().max() / len(labels))

    @property
    def train_tokens(self) -> int:
        return len(self._pixels.members["train"]) * self.length

    @cached_property
    def _path(self) -> str:
        # Resolve once, so that a task in a worker process keeps its folder, also if the process has another one.
        return os.path.abspath(os.path.expanduser(self.folder))

    @property
    def _pixels(self) -> Pixels:
        return pixels_of(self._path, self.side)

    def fingerprint(self) -> str:
        return self._pixels.fingerprint

    def fed_by_cpu(self, device: torch.device) -> bool:
        return not self._pixels.fits(device)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        count = len(self._pixels.members[split])
        levels, labels = self._pixels.of(split, random.integers("images", count, size))
        if self.augment and split == "train":
            most = self.side // SHIFT
            moved = random.integers("place", 2 * most + 1, size, 2) - most
            pixel = torch.arange(self.side, device=random.device)
            rows, columns = ((pixel + moved[:, i : i + 1]).clamp(0, self.side - 1) for i in range(2))
            mirrored = random.integers("mirror", 2, size, 1) == 1
            columns = torch.where(mirrored, columns.flip(1), columns)
            image = torch.arange(size, device=random.device)[:, None, None]
            levels = levels[image, rows[:, :, None], columns[:, None, :]]
        return self.of_pixels((levels.float() - MIDDLE) / SCALE, labels)
