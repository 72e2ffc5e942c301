"""Generated colour images, whose class depends on a shape and a colour together."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.images.task import ImageTask
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import Batch

SHAPES = 5
"""A disc, a square, a diamond, a cross and a ring."""
COLOURS = ((224, 64, 64), (64, 208, 64), (64, 96, 232), (216, 200, 48), (192, 64, 200))
RADIUS = 5, 10
"""The least and the greatest radius of a figure in 32 pixels."""
GREY = 96
"""The greatest grey of the background."""
LEVELS = 256
THOUSAND = 1000


@dataclass(frozen=True, kw_only=True)
class Shapes(ImageTask):
    """Image classification: the class of a figure is (shape + colour) mod 5, so that neither alone tells it.

    An image has one figure of a random place and size on a grey ground, and every pixel has noise. Shapes are a disc, a
    square, a diamond, a cross and a ring; colours are red, green, blue, yellow and purple. Labels are wrong at the rate
    `label_noise`: they are then any class, each equally likely. No model that generalizes exceeds the accuracy
    `ceiling`, while one that learns its training images by heart does, in training.

    The metric is accuracy. `chance` is the accuracy of naming any class, 1/5.

    Attributes:
        side: The pixels of an image in each direction, at least 16.
        noise: The greatest change of a pixel by noise, uniform from -noise to noise, in 256 levels.
        label_noise: The share of images whose label is drawn anew, in steps of 0.001.
        train_examples: The images that a seed trains on; None if every image is new.

    Examples:
        >>> task = Shapes()
        >>> task.batch("train", 2, seed=0, step=0).inputs.shape, task.ceiling
        (torch.Size([2, 64, 48]), 0.92)
    """

    name: ClassVar[str] = "shapes"
    version: ClassVar[int] = 1
    channels: ClassVar[int] = 3

    patch: int = 4
    side: int = 32
    noise: int = 48
    label_noise: float = 0.1
    train_examples: int | None = 2000

    def __post_init__(self) -> None:
        self.require(type(self.side) is int and 16 <= self.side <= 256, "side", "must be from 16 to 256")
        super().__post_init__()
        self.require(0 <= self.noise < LEVELS, "noise", f"must be from 0 to {LEVELS - 1}")
        thousandths = THOUSAND * self.label_noise
        fits = 0 <= self.label_noise < 1 and abs(thousandths - round(thousandths)) < 1e-6
        self.require(fits, "label_noise", "must be at least 0 and below 1, in steps of 0.001")
        enough = self.train_examples is None or self.train_examples >= SHAPES
        self.require(enough, "train_examples", f"must be at least {SHAPES}, or null")

    @property
    def size(self) -> int:
        return self.side

    @property
    def classes(self) -> int:
        return SHAPES

    @property
    def ceiling(self) -> float:
        """The accuracy of a model that knows the class of every figure."""
        return round(1 - self.label_noise * (1 - 1 / SHAPES), 6)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        shape, colour = (random.integers(name, SHAPES, size) for name in ("shape", "colour"))
        least, most = (radius * self.side // 32 for radius in RADIUS)
        radius = least + random.integers("radius", most - least + 1, size)
        room = self.side - 2 * radius
        place = radius[:, None] + random.integers("place", room[:, None], size, 2)
        figure = self._figure(shape, place, radius)[..., None]
        # Choose by masks and not by an index, which a GPU could not run in a graph of all runs.
        palette = torch.stack([torch.stack([(colour == i) * part for part in of]) for i, of in enumerate(COLOURS)])
        ink = palette.sum(0).T[:, None, None]
        ground = random.integers("ground", GREY + 1, size)[:, None, None, None]
        change = random.integers("noise", 2 * self.noise + 1, size, self.side, self.side, 3) - self.noise
        pixels = (torch.where(figure, ink, ground) + change).clamp(0, LEVELS - 1)
        wrong = random.integers("wrong", THOUSAND, size) < round(THOUSAND * self.label_noise)
        labels = torch.where(wrong, random.integers("label", SHAPES, size), (shape + colour) % SHAPES)
        return self.of_pixels((pixels - LEVELS // 2).float() / (LEVELS // 4), labels)

    def _figure(self, shape: Tensor, place: Tensor, radius: Tensor) -> Tensor:
        """Returns the pixels that a figure covers, bool [B, side, side].

        Args:
            shape: The number of its shape, [B].
            place: The row and the column of its middle, [B, 2].
            radius: Its radius in pixels, [B].
        """
        pixel = torch.arange(self.side, device=shape.device)
        down = (pixel - place[:, :1]).abs()[:, :, None]
        across = (pixel - place[:, 1:]).abs()[:, None, :]
        r, square = radius[:, None, None], down**2 + across**2
        wide, near = torch.maximum(down, across), torch.minimum(down, across)
        forms = (
            square <= r**2,
            5 * wide <= 4 * r,
            down + across <= r,
            (wide <= r) & (3 * near <= r),
            (square <= r**2) & (4 * square >= r**2),
        )
        covered = torch.zeros_like(square, dtype=torch.bool)
        for number, form in enumerate(forms):
            covered = covered | (form & (shape == number)[:, None, None])
        return covered
