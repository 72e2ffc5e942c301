"""The features q, k and v of a rule layer: short convolution, SiLU and unit norm of x's projections, or one kernel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalab.ops.backends import automatic
from deltalab.ops.fused.products import products
from deltalab.ops.packing import Sequences
from deltalab.ops.vmap import Stacked

WIDEST = 8
"""The widest convolution that the kernel takes, which holds it in registers."""

LEAST_NORM = 1e-6
"""The least norm that q and k are divided by."""

APART = 2**24
"""With so many numbers, the first of `fused`'s other products is computed alone: the kernel would copy it twice."""

ALIGNED = 8
"""A product's columns are a multiple of this number, so that in 16 bits each row begins at a multiple of 16 bytes."""


FEATURES: dict[str, tuple[Literal["unit", "silu", "raw"], bool]] = {
    "unit": ("unit", True),
    "unit_qk": ("unit", False),
    "silu": ("silu", True),
    "silu_qk": ("silu", False),
    "raw": ("raw", False),
}
"""Maps each choice of a layer's `features` to `UpdateRule.features` and `UpdateRule.silu_of_v`."""


@dataclass(frozen=True)
class Channels:
    """The channels of one token, side by side: q of all heads, k of all heads for each of n steps, then v likewise.

    Attributes:
        heads: Heads of the rule.
        qk_heads: Heads of q and k. Groups of heads share them (grouped values).
        key_dim: K.
        value_dim: V.
        steps: Keys and values of a token.
        features: As in `UpdateRule`.
        silu_of_v: As in `UpdateRule`.
        kv_heads: Heads of k and v (grouped queries), or None for `heads`.
    """

    heads: int
    qk_heads: int
    key_dim: int
    value_dim: int
    steps: int
    features: Literal["unit", "silu", "raw"]
    silu_of_v: bool = True
    kv_heads: int | None = None

    @property
    def k_heads(self) -> int:
        """Heads of k."""
        return min(self.qk_heads, self.v_heads)

    @property
    def v_heads(self) -> int:
        """Heads of v."""
        return self.kv_heads or self.heads

    @property
    def activated(self) -> int:
        """How many of q, k and v get SiLU: 0 is none, 2 is q and k, 3 is all."""
        return 0 if self.features == "raw" else 3 if self.silu_of_v else 2

    @property
    def widths(self) -> tuple[int, int, int]:
        """Channels of q, k and v."""
        keys = self.steps * self.k_heads * self.key_dim
        return self.qk_heads * self.key_dim, keys, self.steps * self.v_heads * self.value_dim

    @property
    def total(self) -> int:
        """Channels of q, k and v together."""
        return sum(self.widths)

    def split(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views [B, T, width] each as q [B, T, heads, K], k [B, n T, heads, K] and v [B, n T, heads, V]."""
        q = q.unflatten(-1, (self.qk_heads, self.key_dim))
        k = k.unflatten(-1, (self.steps, self.k_heads, self.key_dim)).flatten(1, 2)
        v = v.unflatten(-1, (self.steps, self.v_heads, self.value_dim)).flatten(1, 2)
        return q, k, v


def features(
    qkv: Tensor,
    taps: Tensor | None,
    past: Tensor | None,
    channels: Channels,
    packed: Sequences | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes q, k and v from their projections.

    Args:
        qkv: The projections [B, T, C].
        taps: The convolution's weights [W, C]; None for no convolution.
        past: qkv of the W - 1 tokens before, [B, W - 1, C]; None for zeros.
        channels: What the C channels are.
        packed: The sequences in the row, if B = 1 and there is no past.
        bias: The convolution's bias [C]; None for none. Needs taps.

    Returns:
        q, k and v in the shapes of `Channels.split`, and the past for the tokens that follow, which is [N, W - 1, C] if
        sequences are packed.
    """
    tail = tail_of(qkv, past, 0 if taps is None else taps.shape[0] - 1, packed)
    taps, bias = (None if weights is None else weights.to(qkv.dtype) for weights in (taps, bias))
    if taps is None and channels.features == "raw":
        parts = qkv.split(channels.widths, dim=-1)
    else:
        x = qkv if past is None else torch.cat([past, qkv], dim=1)
        parts = _ConvolvedAndNormed.apply(x, taps, bias, channels, packed)[:3]  # type: ignore[no-untyped-call]
        if past is not None:
            parts = [part[:, past.shape[1] :] for part in parts]
    q, k, v = channels.split(*parts)
    return q, k, v, tail


def fuses(x: Tensor, taps: Tensor | None, channels: Channels) -> bool:
    """Whether `fused` takes x, and has something to do beyond the projection."""
    width = 0 if taps is None else taps.shape[0]
    idle = channels.features == "raw" and not width
    takes = width <= WIDEST and x.dtype != torch.float64
    return not idle and takes and automatic(x.device.type).convolve is not None


def fused(
    x: Tensor,
    weight: Tensor,
    others: Sequence[Tensor],
    taps: Tensor | None,
    past: Tensor | None,
    channels: Channels,
    packed: Sequences | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], list[Tensor]]:
    """Computes `features` of the projection of x, and other products of x, by one product and one kernel.

    The first of the other products is computed alone if it is large (see `APART`).

    Args:
        x: [B, T, d].
        weight: [C, d].
        others: The matrices of the other products, [.., d] each.
        taps: As in `features`.
        past: As in `features`.
        channels: As in `features`.
        packed: As in `features`.

    Returns:
        What `features` returns, and the other products: the first one in the dtype of the product, the rest in fp32.
    """
    sizes = [weights.shape[0] for weights in others]
    separate = bool(sizes) and x.shape[:-1].numel() * sizes[0] >= APART
    together = [weight, *others[separate:]]
    spare = -sum(weights.shape[0] for weights in together) % ALIGNED if len(sizes) > 1 else 0
    if spare:
        together.append(weight.new_zeros(spare, weight.shape[1]))
    matrix = torch.cat(together) if len(together) > 1 else weight
    product, *alone = products(x, matrix, others[0]) if separate else (F.linear(x, matrix),)
    past = None if taps is None else past
    tail = tail_of(product[..., : weight.shape[0]], past, 0 if taps is None else taps.shape[0] - 1, packed)
    place = None if packed is None or taps is None else packed.place[None]
    convolve = automatic(x.device.type).convolve
    assert convolve is not None
    q, k, v, first, rest = convolve(
        product[None], None if taps is None else taps[None], None if past is None else past[None],
        [*channels.widths, 0 if separate else sum(sizes[:1]), sum(sizes[1:]) + spare],
        channels.key_dim, channels.activated, channels.features == "unit", place,
    )  # fmt: skip
    split = [] if len(sizes) < 2 else rest.squeeze(0).split([*sizes[1:], spare], dim=-1)[:-1]
    if sizes and not separate:
        alone = [first.squeeze(0)]
    return (*channels.split(q.squeeze(0), k.squeeze(0), v.squeeze(0)), tail), [*alone, *split]


def tail_of(x: Tensor, past: Tensor | None, count: int, packed: Sequences | None) -> Tensor:
    """The last `count` tokens of the past followed by x [B, T, C], or of each sequence if x is packed.

    A past of None is zeros.
    """
    if packed is not None:
        return packed.last(x, count)
    missing = count - x.shape[1]
    if missing <= 0:
        return x[:, x.shape[1] - count :]
    past = x.new_zeros(x.shape[0], missing, x.shape[-1]) if past is None else past[:, -missing:]
    return torch.cat([past, x], dim=1)


class _ConvolvedAndNormed(Stacked):
    """Convolution, SiLU and unit norm of x [.., B, T, C], whose backward writes one gradient for q, k and v together.

    Returns q, k and v, [.., B, T, width] each, and what the backward needs, which has no gradient: y, the input of
    SiLU, and with unit norm also the unit vectors of q and k side by side, and their norms.
    """

    @staticmethod
    def forward(
        x: Tensor, taps: Tensor | None, bias: Tensor | None, channels: Channels, packed: Sequences | None
    ) -> tuple[Tensor, ...]:
        y = x.view_as(x) if taps is None else _convolved(x, taps, packed)
        if bias is not None:
            y += bias[..., None, None, :]
        z = _activated(y, channels, F.silu)
        if channels.features != "unit":
            return *z.split(channels.widths, dim=-1), y
        *keys, values = channels.widths
        qk, v = z.split([sum(keys), values], dim=-1)
        z = qk.unflatten(-1, (-1, channels.key_dim))
        # torch.linalg.norm takes twice as long on a CPU.
        wide_qk = z.to(torch.promote_types(z.dtype, torch.float32))
        norm = (wide_qk * wide_qk).sum(-1, keepdim=True).sqrt_().clamp_(min=LEAST_NORM)
        units = (z / norm).to(z.dtype).flatten(-2)
        return *units.split(keys, dim=-1), v, y, units, norm

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Tensor, Tensor | None, Tensor | None, Channels, Sequences | None],
        output: tuple[Tensor, ...],
    ) -> None:
        x, taps, bias, ctx.channels, ctx.packed = inputs
        ctx.biased = bias is not None
        ctx.mark_non_differentiable(*output[3:])
        ctx.set_materialize_grads(False)  # or PyTorch would allocate zeros for the gradient of y
        ctx.save_for_backward(x, taps, *output[3:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, taps, y, *divided = ctx.saved_tensors
        channels = ctx.channels
        parts = zip(grads, y.split(channels.widths, dim=-1), strict=False)
        d_z = torch.cat([torch.zeros_like(part) if d is None else d for d, part in parts], dim=-1)
        if divided:
            units, norm = divided
            d, unit = (z.unflatten(-1, (-1, channels.key_dim)) for z in (d_z[..., : units.shape[-1]], units))
            along = (unit * d).sum(-1, keepdim=True, dtype=norm.dtype) * (norm > LEAST_NORM)
            d.addcmul_(unit, along.to(d.dtype), value=-1).div_(norm)
        d_y = _activated(d_z, channels, torch.ops.aten.silu_backward, y)
        d_x, d_taps = (d_y, None) if taps is None else _convolved_backward(x, taps, d_y, ctx.packed)
        return d_x, d_taps, d_y.sum((-3, -2)) if ctx.biased else None, None, None


def _activated(x: Tensor, channels: Channels, function: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """Applies function(x, *others) to those of q, k and v in x [.., C] that get SiLU."""
    if channels.activated == 0:
        return x
    if channels.activated == 3:
        return function(x, *others)
    *keys, values = channels.widths
    (qk, v), *rest = (z.split([sum(keys), values], dim=-1) for z in (x, *others))
    return torch.cat([function(qk, *(z[0] for z in rest)), v], dim=-1)


def _convolved(x: Tensor, taps: Tensor, packed: Sequences | None) -> Tensor:
    """Computes y_t = sum_j w_j x_{t-j}, j from 0 to W - 1, for x [.., B, T, C]; w_0 is the last of taps [.., W, C].

    Only tokens of t's own sequence count if x is packed.
    """
    last, *others = _from_last(taps)
    y = x * last
    for j, weight in enumerate(others[: x.shape[-2] - 1], 1):
        y[..., j:, :].addcmul_(x[..., :-j, :] if packed is None else packed.reached(x[..., :-j, :], j), weight)
    return y


def _convolved_backward(x: Tensor, taps: Tensor, d_y: Tensor, packed: Sequences | None) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the taps."""
    last, *others = _from_last(taps)
    d_x, d_taps = d_y * last, torch.zeros_like(taps)
    for j in range(min(taps.shape[-2], x.shape[-2])):
        length = x.shape[-2] - j
        later = d_y[..., j:, :] if packed is None else packed.reached(d_y[..., j:, :], j)
        if j:
            d_x[..., :length, :].addcmul_(later, others[j - 1])
        d_taps[..., -1 - j, :] = (x[..., :length, :] * later).sum((-3, -2))
    return d_x, d_taps


def _from_last(taps: Tensor) -> tuple[Tensor, ...]:
    """The W weights of taps [.., W, C], from the last to the first, [.., 1, 1, C] each."""
    return taps.flip(-2)[..., None, None, :].unbind(-4)
