"""Assigns sequences to training, validation and test by their content, so that none is in two splits."""

import torch
from torch import Tensor

from deltalab.tasks.randomness import Random

LEAST_CLASSES = 25


def shared_from(base: int) -> int:
    """The fewest digits of a sequence that is assigned to a split. All shorter ones, which are few, are training's.

    >>> [shared_from(base) for base in (2, 5, 6, 60)]
    [10, 4, 4, 2]
    """
    return 2 * _checked(base)


def share_out(digits: Tensor, count: Tensor, base: int, split: str, random: Random) -> Tensor:
    """Replaces the first k of each row of `digits [B, M]`, uniform in [0, base), such that the row is of `split`.

    A row's class is sum_j w_j x_j mod base^k over its `count [B]` digits x, with w = 1, base, ... base^(k-1) and
    then fixed random weights; k is the smallest with base^k >= 25. The last class is test's, the one before it
    validation's, all others are training's. Rows stay uniform among the sequences of their split and count, and each
    digit stays nearly uniform. Rows of fewer than `shared_from(base)` = 2 k digits are left as they are.
    """
    checked = _checked(base)
    classes = base**checked
    place = torch.arange(digits.shape[1], device=digits.device)
    weights = Random("held out", digits.device).integers("weights", classes, 1, digits.shape[1])
    rest = torch.where((place >= checked) & (place < count[:, None]), digits * weights, 0).sum(1)
    wanted = random.integers("class", classes - 2, len(digits)) if split == "train" else _CLASS[split] + classes
    first = ((wanted - rest) % classes)[:, None] // base ** place.clamp(max=checked) % base
    return torch.where((place < checked) & (count[:, None] >= 2 * checked), first, digits)


_CLASS = {"validation": -2, "test": -1}


def _checked(base: int) -> int:
    return next(k for k in range(1, LEAST_CLASSES) if base**k >= LEAST_CLASSES)
