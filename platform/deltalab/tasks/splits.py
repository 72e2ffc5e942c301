"""Assigns sequences to training, validation and test by their content, so that no sequence is in two splits."""

import torch
from torch import Tensor

from deltalab.tasks.randomness import Random

LEAST_CLASSES = 25
"""The least number of classes of sequences. One class is for validation, and one for test."""


def shared_from(base: int) -> int:
    """Returns the fewest digits of a sequence that is assigned to a split.

    All shorter sequences, of which there are few, belong to training.

    Examples:
        >>> [shared_from(base) for base in (2, 5, 6, 60)]
        [10, 4, 4, 2]
    """
    return 2 * _checked(base)


def share_out(digits: Tensor, count: Tensor, base: int, split: str, random: Random) -> Tensor:
    """Replaces the first k digits of each row so that the row belongs to a split.

    The class of a row is sum_j w_j x_j mod base^k over its digits x_j. The weights w are 1, base, ... base^(k-1), and
    then fixed random numbers. k is the smallest number with base^k >= 25. The last class belongs to test, the class
    before it to validation, and all others to training. Rows stay uniform among the sequences of their split and count,
    and each digit stays nearly uniform. Rows of fewer than `shared_from(base)` = 2 k digits stay as they are.

    Args:
        digits: Digits, uniform in [0, base), [B, M].
        count: The number of digits that a row has, [B].
        base: The number of different digits.
        split: The split.
        random: The random numbers.
    """
    checked = _checked(base)
    classes = base**checked
    place = torch.arange(digits.shape[1], device=digits.device)
    weights = Random("held out", digits.device).integers("weights", classes, 1, digits.shape[1])
    rest = torch.where((place >= checked) & (place < count[:, None]), digits * weights, 0).sum(1)
    row_class = random.integers("class", classes - 2, len(digits)) if split == "train" else _CLASS[split] + classes
    first = ((row_class - rest) % classes)[:, None] // base ** place.clamp(max=checked) % base
    return torch.where((place < checked) & (count[:, None] >= 2 * checked), first, digits)


_CLASS = {"validation": -2, "test": -1}


def _checked(base: int) -> int:
    return next(k for k in range(1, LEAST_CLASSES) if base**k >= LEAST_CLASSES)
