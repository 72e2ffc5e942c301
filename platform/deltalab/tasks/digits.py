"""Handwritten digits, read pixel by pixel: shows whether a gain on language is also a gain on images."""

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, SPLITS, Batch, Task, one_answer

IMAGES = Path(__file__).with_name("digits.csv.gz")
"""The test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak 1998, UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, licence CC BY 4.0), with 64 pixels and the digit per line. It is the file
sklearn/datasets/data/digits.csv.gz of scikit-learn, unchanged."""

HELD_OUT = 300
"""The images in the validation split, and again in the test split. The other 1,197 images are for training."""

IMAGE_COUNT = 1797

PIXELS, LEVELS, CLASSES = 64, 17, 10


@dataclass(frozen=True, kw_only=True)
class Digits(Task):
    """Sequential image classification: the target at the last of 8 x 8 pixels is the digit.

    Pixels are tokens 0 (white) to 16, row by row. A digit is the token 17 + digit. The 1,797 different images are
    sorted by their SHA-256 and split: 300 for validation, 300 for test, the others for training. A batch draws images
    with replacement.

    The metric is accuracy. `chance` is the accuracy of naming any digit, 1/10.

    Attributes:
        both_ways: Whether the pixels follow a second time, from last to first, so that T is 128 and not 64. A causal
            layer then sees all pixels before it reaches any pixel for the second time, as vision layers do that scan
            in both directions.

    Examples:
        >>> Digits().batch("train", 1, seed=0, step=0).targets[0, -1]
        tensor(17)
    """

    name: ClassVar[str] = "digits"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "accuracy"
    maximize: ClassVar[bool] = True
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    both_ways: bool = False

    @property
    def vocab_size(self) -> int:
        return LEVELS + CLASSES

    @property
    def length(self) -> int:
        return 2 * PIXELS if self.both_ways else PIXELS

    @property
    def train_tokens(self) -> int:
        return (IMAGE_COUNT - 2 * HELD_OUT) * self.length

    @property
    def most_scored(self) -> int:
        return 1

    @property
    def chance(self) -> float:
        return 1 / CLASSES

    def fingerprint(self) -> str:
        return sha256(IMAGES.read_bytes()).hexdigest()

    def draw(self, split: str, size: int, random: Random) -> Batch:
        images = images_of(split, random.device)
        drawn = images[random.integers("images", len(images), size)].long()
        pixels, digits = drawn[:, :PIXELS], drawn[:, PIXELS]
        inputs = torch.cat([pixels, pixels.flip(1)], dim=1) if self.both_ways else pixels.contiguous()
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -1] = LEVELS + digits
        return Batch(inputs, targets)

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return one_answer(batch, logits)


@cache
def images_of(split: str, device: torch.device) -> Tensor:
    """Returns the pixels and the digit of each image of a split, uint8 [N, 65]."""
    lines = np.loadtxt(IMAGES, np.uint8, delimiter=",")
    order = sorted(range(len(lines)), key=lambda i: sha256(lines[i, :PIXELS].tobytes()).digest())
    parts = dict(zip(SPLITS, np.split(lines[order], [-2 * HELD_OUT, -HELD_OUT]), strict=True))
    return torch.tensor(parts[split], device=device)
