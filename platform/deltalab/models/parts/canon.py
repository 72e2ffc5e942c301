"""The taps of canon layers: causal convolutions of four tokens for each channel, beside the input itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

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
