"""Planted bug: there are only 40 images in each split."""

from typing import ClassVar

from deltalab.tasks import Batch, Random
from deltalab.tasks.images.shapes import Shapes


class ImageOfFew(Shapes):
    name: ClassVar[str] = "planted_image_of_few"
    example: ClassVar[dict[str, object]] = {"side": 16, "train_examples": None}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        rows = random.integers("few", 40, size)
        return super().draw(split, size, Random(split, random.device, rows))
