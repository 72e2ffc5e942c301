"""The taps of canon layers: causal convolutions of four tokens for each channel, beside the input itself."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError, unknown

CANONS: tuple[Literal["A", "B", "C", "D"], ...] = ("A", "B", "C", "D")
"""The places of canon layers in a block."""

CANON = 4
"""The tokens that a canon layer reads."""


def before_convolution(canon: Tensor, conv: Tensor | None) -> Tensor:
    """Returns the taps of one convolution that equals a canon layer, with a short convolution after it if there is one.

    Args:
        canon: The canon layer's w_0 to w_3, from the token itself to the third before it, [4, C].
        conv: The taps of the convolution, from the oldest token to the token itself, [W, C]; None for none.

    Returns:
        The taps, from the oldest token to the token itself, [4, C] or [W + 3, C].

    Examples:
        >>> before_convolution(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), None).flatten().tolist()
        [4.0, 3.0, 2.0, 2.0]
        >>> canon, conv = torch.tensor([[0.0], [2.0], [0.0], [0.0]]), torch.tensor([[3.0], [1.0]])
        >>> before_convolution(canon, conv).flatten().tolist()
        [0.0, 0.0, 6.0, 5.0, 1.0]
    """
    beside = torch.cat([canon[:1] + 1, canon[1:]])
    if conv is None:
        return beside.flip(0)
    parts = [F.pad(tap * conv, (0, 0, CANON - 1 - back, back)) for back, tap in enumerate(beside)]
    return torch.stack(parts).sum(0)


def places_in_order(setting: object) -> tuple[Literal["A", "B", "C", "D"], ...]:
    """Returns `ModelSpec.canon` in the order of `CANONS`; raises `InputError` if it lists no different places."""
    if not isinstance(setting, list | tuple):
        raise InputError(f"model.canon must be a list of {', '.join(CANONS)}, not {setting!r}")
    for place in map(str, setting):
        if place not in CANONS:
            raise unknown("place", place, CANONS, where="model.canon")
    if len(set(setting)) < len(setting):
        raise InputError(f"model.canon {', '.join(setting)} names a place twice: a block has one of each")
    return tuple(place for place in CANONS if place in setting)
