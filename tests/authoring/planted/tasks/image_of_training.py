"""Planted bug: all splits draw from the same images."""

from typing import ClassVar

from deltalab.tasks import Batch, Random
from deltalab.tasks.images.shapes import Shapes


class ImageOfTraining(Shapes):
    name: ClassVar[str] = "planted_image_of_training"
    example: ClassVar[dict[str, object]] = {"side": 16, "train_examples": None}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        rows = random.integers("images", 600, size)
        return super().draw(split, size, Random("images", random.device, rows))
