"""Multi-head latent attention: q, k and v of a layer come through few channels, and a cache may hold these alone."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deltalab.models.start import linear
from deltalab.ops.fused.convolution import Channels
from deltalab.ops.fused.norm import RMSNorm
from deltalab.ops.scan import joined
from deltalab.rule import State


class Latent(nn.Module):
    """The projections of a layer through few channels: c = norm(W_c x), k = W_k c, v = W_v c; q = W_q norm(W_cq x).

    c and W_cq x have `kv_rank` and `q_rank` channels, and norm is an RMS norm with weights. With `shared` S, the last S
    channels of each head's k are W_s x, which all heads share: the channels that carry positions.

    For a rule whose state is k and v themselves, a cache may hold rows [c, W_s x] of r + S channels. Scores and outputs
    are then those of one k and one v that all heads share, because q^T W_k c = (W_k^T q)^T c and
    sum_i p_i W_v c_i = W_v sum_i p_i c_i.

    Differences from the authors' code: rotary positions turn channels i and i + S/2, theirs 2i and 2i + 1, which is the
    same up to the order of the rows of W_s and W_q. There is no YaRN. What surrounds the projections, such as the
    convolution and the output gate, is that of the layer, and no part of theirs.

    Args:
        d_model: d.
        channels: What q, k and v are. A `kv_rank` needs as many heads of k and v as of the rule.
        q_rank: The width of q's latent; None for q = W_q x.
        kv_rank: The width r of c; None for k and v from x.
        shared: S; 0 for none. Without effect if there is no `kv_rank`.
        eps: The number that the norms add to a mean square.

    References:
        DeepSeek-AI 2024 (DeepSeek-V2), arXiv:2405.04434, Eq. 9-19.
    """

    def __init__(
        self, d_model: int, channels: Channels, *, q_rank: int | None, kv_rank: int | None, shared: int, eps: float
    ) -> None:
        super().__init__()
        self.in_features, self.channels, self.rank = d_model, channels, kv_rank
        self.shared = 0 if kv_rank is None else shared
        q_width, k_width, v_width = channels.widths
        self.k_width = k_width - channels.steps * channels.k_heads * self.shared
        self.q: nn.Linear | nn.Sequential = linear(d_model, q_width)
        if q_rank is not None:
            self.q = nn.Sequential(linear(d_model, q_rank), RMSNorm(q_rank, eps), linear(q_rank, q_width, widens=False))
        if kv_rank is None:
            self.kv = linear(d_model, k_width + v_width)
        else:
            self.down = linear(d_model, kv_rank + channels.steps * self.shared)
            self.norm = RMSNorm(kv_rank, eps)
            self.kv = linear(kv_rank, self.k_width + v_width, widens=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Computes q, k and v side by side [B, T, C], and c [B, T, r], which is [B, T, 0] without a `kv_rank`.

        Args:
            x: The inputs, [B, T, d].
        """
        q: Tensor = self.q(x)
        if self.rank is None:
            return torch.cat([q, self.kv(x)], dim=-1), x[..., :0]
        channels = self.channels
        c, shared = self.down(x).split([self.rank, channels.steps * self.shared], dim=-1)
        c = self.norm(c).to(q.dtype)  # a norm may return fp32 under autocast
        k, v = self.kv(c).split([self.k_width, channels.widths[2]], dim=-1)
        k = k.unflatten(-1, (channels.steps, channels.k_heads, channels.key_dim - self.shared))
        shared = shared.unflatten(-1, (channels.steps, 1, self.shared)).expand(*k.shape[:-1], self.shared)
        return torch.cat([q, torch.cat([k, shared], dim=-1).flatten(2), v], dim=-1), c

    def rows(self, c: Tensor, k: Tensor) -> Tensor:
        """Returns what a cache holds of each token, [B, T, 1, r + S].

        Args:
            c: The latents, [B, T, r].
            k: The keys with their positions, [B, T, H, K].
        """
        return torch.cat([c.unsqueeze(2), k[:, :, :1, k.shape[-1] - self.shared :]], dim=-1)

    def queries(self, q: Tensor) -> Tensor:
        """Returns the queries [B, T, H, r + S] of rows, for the queries q [B, T, H, K] of keys."""
        q, turned = q.split([q.shape[-1] - self.shared, self.shared], dim=-1)
        weight = self.kv.weight[: self.k_width].unflatten(0, q.shape[-2:])
        return torch.cat([torch.einsum("bthk,hkr->bthr", q, weight).to(q.dtype), turned], dim=-1)

    def values(self, o: Tensor) -> Tensor:
        """Returns W_v o [B, T, H, V] of each head, for means of latents o [B, T, H, r]."""
        weight = self.kv.weight[self.k_width :].unflatten(0, (o.shape[2], -1))
        return torch.einsum("bthr,hvr->bthv", o, weight).to(o.dtype)

    def state(self, rows: Tensor) -> State:
        """Returns the keys and values [B, 1, n, r + S] and [B, 1, n, r] that rows [B, 1, n, r + S] are."""
        assert self.rank is not None
        return rows, rows[..., : self.rank]


def kept(rows: Tensor, ends: Sequence[int], counts: Sequence[int]) -> tuple[State, tuple[State, ...]]:
    """Returns the last rows of each sequence as `LayerCache` holds states: together, or apart.

    Args:
        rows: The rows of all tokens, [B, T, 1, C].
        ends: The tokens up to the end of each sequence.
        counts: The rows to keep of each sequence.
    """
    rows = rows.transpose(1, 2)
    return joined([(rows[:, :, end - count : end],) for end, count in zip(ends, counts, strict=True)])


def refusal(
    q_rank: int | None,
    kv_rank: int | None,
    rope_dim: int | None,
    *,
    heads: int,
    own_heads: int,
    key_dim: int,
    rope: bool,
    token_shift: object,
) -> str | None:
    """Returns why settings of a layer do not go together; None if they do.

    Args:
        q_rank: As in `RuleLayer`.
        kv_rank: As in `RuleLayer`.
        rope_dim: As in `RuleLayer`.
        heads: The heads of the layer.
        own_heads: The heads that have both a k and a v of their own.
        key_dim: K.
        rope: Whether there are rotary positions.
        token_shift: Whether q, k and v read inputs of their own.
    """
    if rope_dim is not None and not rope and kv_rank is None:
        return "rope_dim has no effect without rope or kv_rank: leave it out"
    if rope_dim is not None and (rope_dim > key_dim or (rope and rope_dim % 2)):
        return f"rope_dim must be at most key_dim {key_dim}, and even if rope turns its pairs, not {rope_dim}"
    if kv_rank is not None and own_heads < heads:
        return f"kv_rank gives each head its own k and v: leave kv_heads and qk_heads (1 in mamba blocks) at {heads}"
    if token_shift and (q_rank is not None or kv_rank is not None):
        return "kv_rank and q_rank do not go with token_shift, which gives q, k and v inputs of their own"
    return None
