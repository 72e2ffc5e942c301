"""Rules that are a causal convolution as long as the sequence, with a filter that is a function of the lag (Hyena).

Decoding keeps all inputs of the past: the state grows with every token, as that of attention does.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.rule import State, UpdateRule

BLOCK = 32
"""Tokens that are convolved by a matrix product. Longer lags are convolved by FFT."""


@dataclass(frozen=True)
class Convolved:
    """The parts of y_t = sum_i h_{t-i} x_i for every token.

    Attributes:
        kept: What the state keeps of every token, [B, T, H, width] for each of `LongConvolution.widths`.
        x: Makes the input x [B, H, N, C] from what was kept of all N tokens so far, [B, H, N, width] each.
        taps: Makes the filter h [N, H, C] or [N, H, 1] for the lags 0 ... N - 1, given N.
        output: Makes o [B, T, H, V], without the scale, from y [B, T, H, C].
    """

    kept: State
    x: Callable[..., Tensor]
    taps: Callable[[int], Tensor]
    output: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LongConvolution(UpdateRule):
    """A rule that convolves over all tokens so far.

        y_t = sum_{i <= t} h_{t-i} x_i
        o_t = scale output(y_t)

    The state is what x is made of, for all n tokens so far, [B, H, n, width] each.
    """

    def widths(self, key_dim: int, value_dim: int) -> tuple[int, ...]:
        """Returns the widths of the state's tensors, (V,) by default."""
        return (value_dim,)

    @abstractmethod
    def convolved(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]) -> Convolved:
        """Returns the input, the filter and the output of the convolution.

        Args:
            q: Queries in at least fp32, [B, T, H, K].
            k: Keys in at least fp32, [B, T, H, K].
            v: Values in at least fp32, [B, T, H, V].
            gates: Each gate by its symbol, in the shape of its `per`.
        """

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        widths = self.widths(k.shape[-1], v.shape[-1])
        return tuple(v.new_zeros(v.shape[0], v.shape[2], 0, width, dtype=dtype) for width in widths)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        q, k, v = (x.to(state[0].dtype) for x in (q, k, v))
        parts = self.convolved(q, k, v, {name: x.to(q.dtype) for name, x in gates.items()})
        state = tuple(
            torch.cat([past, new.transpose(1, 2)], dim=2) for past, new in zip(state, parts.kept, strict=True)
        )
        x, new = parts.x(*state), q.shape[1]
        taps = parts.taps(x.shape[2]).transpose(0, 1)
        y = (taps.flip(1) * x).sum(2, keepdim=True) if new == 1 else convolve(x, taps)[:, :, -new:]
        return scale * parts.output(y.transpose(1, 2)), state


def convolve(x: Tensor, taps: Tensor) -> Tensor:
    """Returns y_t = sum_{i <= t} h_{t-i} x_i, in O(T log^2 T).

    The first half of a stretch of tokens reaches its second half by an FFT, and so on within both halves. One FFT over
    all tokens would be faster, but its rounding errors would let every output depend on later tokens.

    Args:
        x: The input, [B, H, T, C].
        taps: h, [H, T, C], or [H, T, 1] if it is the same for all channels.
    """
    length, size = x.shape[2], BLOCK
    stretch = BLOCK
    while stretch < length:
        stretch *= 2
    x, h = (F.pad(part.mT, (0, stretch - length)) for part in (x, taps))  # [B, H, C, T] and [H, C, T]
    lag = torch.arange(BLOCK, device=x.device) - torch.arange(BLOCK, device=x.device)[:, None]
    within = h[..., lag.clamp_min(0)] * (lag >= 0)
    y = torch.einsum("bhcni,hcij->bhcnj", x.unflatten(-1, (-1, BLOCK)), within).flatten(-2)
    while size < stretch:
        first = x.unflatten(-1, (-1, 2, size))[..., 0, :]
        product = torch.fft.rfft(first, n=2 * size) * torch.fft.rfft(h[..., None, : 2 * size])
        later = torch.fft.irfft(product, n=2 * size)[..., size:]
        y = y + torch.stack([torch.zeros_like(later), later], dim=-2).flatten(-3)
        size *= 2
    return y[..., :length].mT
