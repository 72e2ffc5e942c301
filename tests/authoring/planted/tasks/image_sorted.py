"""Planted bug: the images of a batch stand in the order of their classes."""

from typing import ClassVar

from deltalab.tasks import Batch, Random
from deltalab.tasks.images.shapes import Shapes


class ImageSorted(Shapes):
    name: ClassVar[str] = "planted_image_sorted"
    example: ClassVar[dict[str, object]] = {"side": 16, "train_examples": None}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        order = batch.targets[:, -1].argsort()
        return Batch(batch.inputs[order], batch.targets[order])
