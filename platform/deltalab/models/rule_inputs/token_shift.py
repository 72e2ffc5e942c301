"""Tokens beside their neighbours: the learned means of a token and the one before it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deltalab.errors import InputError, unknown
from deltalab.models.settings.limits import whole
from deltalab.models.start import Parameters, Ramp, Started, Zeros, linear
from deltalab.ops.packing import Sequences

EACH = "each"
"""The `ModelSpec.token_shift` by which every gate reads a mean of its own."""

RANK = "rank"
"""The key of a `ModelSpec.token_shift` whose means depend on the token."""


class TokenShift(Started):
    """A learned mean of neighbouring tokens, x_t + m (x_{t-1} - x_t), for each reader of x [B, T, d].

    Each reader has its own m [d], which starts as a ramp over the channels, from 0 to 1. The token before the first is
    zero.

    With a rank r, the mean of reader n depends on the token: m_n + W_n tanh(V_n (x_t + m (x_{t-1} - x_t))) stands in
    the place of m_n, with V_n [r, d], W_n [d, r] that starts at 0, and one m for all readers.

    Args:
        d_model: d.
        readers: The names of the readers.
        rank: r; None for means that are the same for all tokens.

    References:
        Peng et al. 2023, arXiv:2305.13048. With a rank, Peng et al. 2024 (RWKV-6), arXiv:2404.05892.
    """

    def __init__(self, d_model: int, readers: Sequence[str], rank: int | None = None) -> None:
        super().__init__()
        self.share = Parameters(dict.fromkeys(readers, Ramp()), dict.fromkeys(readers, (d_model,)))
        self.readers, self.rank = tuple(readers), rank
        if rank is not None:
            self.mean = self.drawn("mean", Ramp(), d_model)
            self.into = linear(d_model, len(readers) * rank)
            self.out = self.drawn("out", Zeros(), len(readers), rank, d_model)

    def forward(self, x: Tensor, last: Tensor | None, packed: Sequences | None = None) -> dict[str, Tensor]:
        """Computes the mean of each reader.

        Args:
            x: The inputs, [B, T, d].
            last: As in `previous`.
            packed: As in `previous`.
        """
        change = previous(x, last, packed) - x
        if self.rank is None:
            return {name: x + share * change for name, share in self.share.items()}
        inner = self.into(x + self.mean * change).tanh().unflatten(-1, (len(self.readers), self.rank))
        moved = torch.einsum("btnr,nrd->nbtd", inner, self.out.to(inner))
        return {name: x + (self.share[name] + more) * change for name, more in zip(self.readers, moved, strict=True)}


def token_shift_in_full(setting: object) -> bool | str | dict[str, Any]:
    """Returns `ModelSpec.token_shift` in its only form; raises `InputError` if it is no kind of token shift."""
    if isinstance(setting, bool):
        return setting
    if setting == EACH:
        return EACH
    if not isinstance(setting, Mapping):
        raise unknown("token_shift", setting, (EACH, f"{{{RANK}: r}}", "true", "false"), where="model.token_shift")
    for key in setting:
        if key != RANK:
            raise unknown("key", key, [RANK], where="model.token_shift")
    if RANK not in setting:
        raise InputError("model.token_shift: needs rank")
    whole("token_shift.rank", setting[RANK], least=1)
    return {RANK: setting[RANK]}


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
