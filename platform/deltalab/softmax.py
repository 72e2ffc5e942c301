"""Softmax attention as one operator that `torch.func.vmap` batches. PyTorch runs flash attention if it can."""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# The namespace has this module's name. An exported model holds a copy of this module, under another name, and PyTorch
# lets a name be defined only once.
_NAMESPACE = re.sub(r"\W", "_", __name__)
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")
_library.define("attend(Tensor q, Tensor k, Tensor v, int window, float scale, bool causal) -> Tensor")


def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int = 0, scale: float, causal: bool = True) -> Tensor:
    """Computes softmax attention, with a window if there is one.

        o_t = sum_i softmax_i(scale q_t^T k_i) v_i

    The sum is over i <= t, or over the last `window` of these i; if it is not causal, over all i. Query head h reads
    key head h // (H / G).

    Args:
        q: The queries of the last n of the N tokens, [B, H, n, K].
        k: Keys, [B, G, N, K].
        v: Values, [B, G, N, V].
        window: The number of tokens that a query sees; 0 for all. With a window, time and memory are of order
            n * window.
        scale: The factor of the logits.
        causal: Whether a query sees no later token. If it is false, there is no window.

    Returns:
        o [B, H, n, V].
    """
    o: Tensor = _op()(q, k, v, window, scale, causal)
    return o


def _op() -> Any:
    return getattr(torch.ops, _NAMESPACE).attend


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, causal: bool) -> Tensor:
    if (groups := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
    if not causal:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    if not window or q.shape[2] <= window:
        return _dense(q, k, v, window, scale)
    past = k.shape[2] - q.shape[2]
    first = _dense(q[:, :, :window], k[:, :, : past + window], v[:, :, : past + window], window, scale)
    # Keys up to `past` are visible to the first block alone.
    rest = _blocks(q[:, :, window:], k[:, :, past + 1 :], v[:, :, past + 1 :], window, scale)
    return torch.cat([first, rest], dim=2)


def _dense(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    past = k.shape[2] - q.shape[2]
    if not past and (not window or window >= q.shape[2]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if q.is_cuda and not window and q.shape[2] > 1:
        # The kernels of a GPU align this mask without writing it: 32k queries of 64k tokens would take 2 GiB.
        from torch.nn.attention.bias import causal_lower_right  # loads torch._dynamo, which takes seconds

        mask = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    query_place = past + torch.arange(q.shape[2], device=q.device)[:, None]
    key_place = torch.arange(k.shape[2], device=q.device)
    visible = key_place <= query_place
    if window:
        visible &= key_place > query_place - window
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)


def _blocks(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Computes attention in which query t sees the keys t ... t + window - 1.

    A block holds `window` queries and the 2 window - 1 keys that they see.
    """
    batch, heads, count, _ = q.shape
    spare = -count % window
    q, k, v = (F.pad(x, (0, 0, 0, spare)) for x in (q, k, v))
    reach = 2 * window - 1
    q = q.unflatten(2, (-1, window)).flatten(0, 1)
    k, v = (x.unfold(2, reach, window).transpose(-1, -2).flatten(0, 1) for x in (k, v))
    after = torch.arange(reach, device=q.device) - torch.arange(window, device=q.device)[:, None]
    visible = (after >= 0) & (after < window)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    joined: Tensor = o.flatten(1, 2).unflatten(0, (batch, heads))
    return joined[:, :, :count]


_library.impl("attend", _attend, "CompositeImplicitAutograd")


def _folded(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    # Fold here: with one head, PyTorch's own batching rule gives the backward of flash attention misaligned tensors.
    size = info.batch_size
    q, k, v = (
        (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        for x, dim in zip(args[:3], in_dims, strict=False)
    )
    return _op()(q, k, v, *args[3:]).unflatten(0, (size, -1)), 0


torch.library.register_vmap(f"{_NAMESPACE}::attend", _folded, lib=_library)


def sums_between(g: Tensor) -> Tensor:
    """Returns the sums d_{ij} = g_{j+1} + ... + g_i [..., T, T] of g [..., T], and -inf for j > i.

    Each sum is added up by itself, because a difference of two long sums would lose the short sums.
    """
    ones = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device)
    later = torch.where(ones.tril(-1), g[..., :, None], 0.0)
    return later.cumsum(-2).masked_fill(~ones.tril(), -torch.inf)


def nothing_seen(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the empty memory of an attention that fades, in at least fp32.

    Args:
        k: Keys, [B, T, H, K]. Only their shape, dtype and device matter.
        v: Values, [B, T, H, V]. Only their shape, dtype and device matter.

    Returns:
        The keys [B, H, 0, K], the values [B, H, 0, V], and the fade of each key since its token, [B, H, 0, 1].
    """
    batch, _, heads, _ = k.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    keys, values, since = (v.new_empty(batch, heads, 0, width, dtype=dtype) for width in (k.shape[-1], v.shape[-1], 1))
    return keys, values, since


def remembered(state: tuple[Tensor, ...], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns all keys and values, those of the state before those of new tokens, [B, H, N, K] and [B, H, N, V].

    Args:
        state: The keys and values before, [B, H, n, K] and [B, H, n, V], such as `nothing_seen`.
        k: New keys, [B, T, H, K].
        v: New values, [B, T, H, V].
    """
    keys, values = (
        torch.cat([past, new.to(past.dtype).transpose(1, 2)], dim=2) for past, new in zip(state, (k, v), strict=True)
    )
    return keys, values


def block_means(x: Tensor, size: int) -> Tensor:
    """Returns the mean of each whole block of `size` tokens of x [B, H, N, K], as [B, H, N // size, K]."""
    whole = x.shape[2] // size
    means: Tensor = x[:, :, : whole * size].unflatten(2, (whole, size)).mean(3)
    return means


def strongest(score: Tensor, count: int) -> Tensor:
    """Marks the `count` largest numbers in the last dimension of `score`. Of equal ones the first is marked.

    A score of -inf is never marked, so that fewer than `count` may be.
    """
    rank = score.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    return (rank < count) & (score > -torch.inf)


def attend_to_blocks(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, *, size: int, scale: float) -> Tensor:
    """Computes causal softmax attention to the tokens of chosen blocks. All logits are computed, and then masked.

    Args:
        q: The queries of the last n of the N tokens, [B, H, n, K].
        k: Keys, [B, H, N, K].
        v: Values, [B, H, N, V].
        chosen: Whether a query sees a block, [B, H, n, M] for the M blocks that hold the N tokens. A query sees its own
            block, or the output is not a number.
        size: The tokens of a block.
        scale: The factor of the logits.

    Returns:
        o [B, H, n, V].
    """
    places = torch.arange(k.shape[2], device=k.device)
    visible = chosen[..., None].expand(*chosen.shape, size).flatten(-2)[..., : len(places)]
    visible = visible & (places <= places[-q.shape[2] :, None])
    o: Tensor = (scale * q @ k.mT).masked_fill(~visible, -torch.inf).softmax(-1) @ v
    return o
