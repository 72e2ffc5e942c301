"""Tokens beside their neighbours: the learned means of a token and the one before it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deltalab.models.start import Parameters, Ramp
from deltalab.ops.packing import Sequences


class TokenShift(nn.Module):
    """A learned mean of neighbouring tokens, x_t + m (x_{t-1} - x_t), for each reader of x [B, T, d].

    Each reader has its own m [d], which starts as a ramp over the channels, from 0 to 1. The token before the first is
    zero.

    References:
        Peng et al. 2023, arXiv:2305.13048.
    """

    def __init__(self, d_model: int, readers: Sequence[str]) -> None:
        super().__init__()
        self.share = Parameters(dict.fromkeys(readers, Ramp()), dict.fromkeys(readers, (d_model,)))

    def forward(self, x: Tensor, last: Tensor | None, packed: Sequences | None = None) -> dict[str, Tensor]:
        """Computes the mean of each reader.

        Args:
            x: The inputs, [B, T, d].
            last: As in `previous`.
            packed: As in `previous`.
        """
        before = previous(x, last, packed)
        return {name: x + share * (before - x) for name, share in self.share.items()}


def previous(x: Tensor, last: Tensor | None, packed: Sequences | None) -> Tensor:
    """Returns the token before each token of x [B, T, d].

    Args:
        x: The tokens.
        last: The tokens before the first, [B, 1, d], or those of the first sequences if x is packed; None for zeros.
        packed: The sequences that lie in x one after the other.
    """
    if packed is None or last is None:
        inputs = torch.cat([torch.zeros_like(x[:, :1]) if last is None else last.to(x), x], dim=1)
        return shifted(inputs, x.shape[1], 1, packed)
    return previous(x, None, packed).index_copy(1, packed.cu_seqlens[: len(last)], last.to(x).transpose(0, 1))


def shifted(inputs: Tensor, length: int, back: int, packed: Sequences | None) -> Tensor:
    """Returns, for each of the last `length` inputs, the input that stands `back` places before.

    Where that input belongs to another sequence, the value is zero.
    """
    first = inputs.shape[1] - length - back
    earlier = inputs[:, first : first + length]
    return earlier if packed is None else torch.where((packed.place >= back).unsqueeze(-1), earlier, 0)
