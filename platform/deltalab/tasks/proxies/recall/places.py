"""Where the parts of a sequence stand."""

from functools import cache

import torch
from torch import Tensor

from deltalab.tasks.randomness import Random


def power_slots(random: Random, slots: int, power: float, size: int, count: int) -> Tensor:
    """Draws `count` different slots in each row, one by one, slot i with the weight (i + 1)^(power - 1).

    The first exponential clocks to ring have the law of drawing without replacement.

    Examples:
        >>> power_slots(Random("a", torch.device("cpu")), 5, 1.0, 2, 3)
        tensor([[3, 1, 2],
                [0, 2, 3]])
    """
    arrival = random.exponential("slots", size, slots) * _patience(slots, power, random.device)
    return arrival.sort(dim=1, stable=True).indices[:, :count]


@cache
def _patience(slots: int, power: float, device: torch.device) -> Tensor:
    # Use Python's pow: torch's differs between devices in the last bit.
    return torch.tensor([(i + 1) ** (1 - power) for i in range(slots)], dtype=torch.float64, device=device)


def spread(random: Random, length: int, width: int, size: int, count: int) -> Tensor:
    """Draws where `count` parts of `width` tokens begin in each row of `length` tokens, in order and apart.

    All ways to set them are equally likely.

    Examples:
        >>> spread(Random("a", torch.device("cpu")), 12, 3, 2, 3)
        tensor([[0, 3, 6],
                [0, 4, 7]])
    """
    places = random.distinct("places", length - count * (width - 1), size, count).sort(dim=1).values
    return places + (width - 1) * torch.arange(count, device=random.device)
