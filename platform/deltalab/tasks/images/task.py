"""The base class of tasks of images: square patches, one class for each image, and its measures."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.task import IGNORE, Batch, Task, one_answer


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """Classification of square images, which are cut into square patches.

    A subclass has the properties `size` and `channels`, and it defines `classes` and `draw`.

    Attributes:
        patch: The pixels of a patch in each direction. Divides `size`.
    """

    metric: ClassVar[str] = "accuracy"
    maximize: ClassVar[bool] = True
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    channels: ClassVar[int]

    patch: int

    @property
    def size(self) -> int:
        """The pixels of an image in each direction."""
        raise NotImplementedError

    @property
    def classes(self) -> int:
        """The number of classes."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.patch >= 1 and self.size % self.patch == 0
        self.require(fits, "patch", f"must divide the {self.size} pixels of an image")

    @property
    def vocab_size(self) -> int:
        return self.classes

    @property
    def length(self) -> int:
        return (self.size // self.patch) ** 2

    @property
    def patches(self) -> tuple[int, int, int]:
        side = self.size // self.patch
        return side, side, self.patch**2 * self.channels

    @property
    def most_scored(self) -> int:
        return 1

    @property
    def chance(self) -> float:
        return 1 / self.classes

    def of_pixels(self, pixels: Tensor, labels: Tensor) -> Batch:
        """Makes a batch.

        Args:
            pixels: The images, float32 [B, size, size, channels], of about unit scale.
            labels: Their classes, int64 [B].
        """
        side = self.size // self.patch
        cut = pixels.unflatten(2, (side, self.patch)).unflatten(1, (side, self.patch))  # [B, side, p, side, p, C]
        inputs = cut.transpose(2, 3).reshape(len(pixels), self.length, -1)
        targets = torch.full((len(labels), self.length), IGNORE, device=labels.device)
        targets[:, -1] = labels
        return Batch(inputs, targets)

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return one_answer(batch, logits)
