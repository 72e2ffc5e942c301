"""Softmax attention as one operator, which `torch.func.vmap` batches; PyTorch takes flash attention where it can."""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Named after this module: an exported model has a copy of it, and PyTorch accepts each operator name only once.
_NAMESPACE = re.sub(r"\W", "_", __name__)
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")
_library.define("attend(Tensor q, Tensor k, Tensor v, int window, float scale) -> Tensor")


def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int = 0, scale: float) -> Tensor:
    """o_t = sum_i softmax_i(scale q_t^T k_i) v_i over i <= t, or over the last `window` of these.

    q [B, H, n, K], k [B, G, N, K], v [B, G, N, V]: the queries are those of the last n keys. Query head h reads key
    head h // (H / G). window: 0 for none; time and memory are then of order n * window.
    Returns [B, H, n, V].
    """
    o: Tensor = _op()(q, k, v, window, scale)
    return o


def _op() -> Any:
    return getattr(torch.ops, _NAMESPACE).attend


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    if (groups := q.shape[1] // k.shape[1]) > 1:
        k, v = (x.unsqueeze(2).expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (k, v))
    if not window or q.shape[2] <= window:
        return _dense(q, k, v, window, scale)
    past = k.shape[2] - q.shape[2]
    first = _dense(q[:, :, :window], k[:, :, : past + window], v[:, :, : past + window], window, scale)
    # The key before these is the last one that only the first block sees.
    rest = _blocks(q[:, :, window:], k[:, :, past + 1 :], v[:, :, past + 1 :], window, scale)
    return torch.cat([first, rest], dim=2)


def _dense(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    past = k.shape[2] - q.shape[2]
    if not past and (not window or window >= q.shape[2]):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    now = past + torch.arange(q.shape[2], device=q.device)[:, None]
    seen = torch.arange(k.shape[2], device=q.device)
    visible = seen <= now
    if window:
        visible &= seen > now - window
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)


def _blocks(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Query t sees keys t ... t + window - 1: blocks of `window` queries, each with its 2 window - 1 keys."""
    batch, heads, count, _ = q.shape
    spare = -count % window
    q, k, v = (F.pad(x, (0, 0, 0, spare)) for x in (q, k, v))
    reach = 2 * window - 1
    q = q.unflatten(2, (-1, window)).flatten(0, 1)
    k, v = (x.unfold(2, reach, window).transpose(-1, -2).flatten(0, 1) for x in (k, v))
    after = torch.arange(reach, device=q.device) - torch.arange(window, device=q.device)[:, None]
    visible = (after >= 0) & (after < window)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    together: Tensor = o.flatten(1, 2).unflatten(0, (batch, heads))
    return together[:, :, :count]


_library.impl("attend", _attend, "CompositeImplicitAutograd")


def _folded(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    # With one head, PyTorch's own batching rule gives the backward of flash attention misaligned tensors.
    size = info.batch_size
    q, k, v = (
        (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
        for x, dim in zip(args[:3], in_dims, strict=False)
    )
    return _op()(q, k, v, *args[3:]).unflatten(0, (size, -1)), 0


torch.library.register_vmap(f"{_NAMESPACE}::attend", _folded, lib=_library)


def sums_between(g: Tensor) -> Tensor:
    """d_{ij} = g_{j+1} + ... + g_i [..., T, T] of g [..., T], -inf for j > i.

    Each is added up by itself: a difference of two long sums would lose the short ones.
    """
    ones = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device)
    later = torch.where(ones.tril(-1), g[..., :, None], 0.0)
    return later.cumsum(-2).masked_fill(~ones.tril(), -torch.inf)


def nothing_seen(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys, the values and the fade of each since it was seen, of no token yet: [B, H, 0, K], V and 1, in fp32."""
    batch, _, heads, _ = k.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    keys, values, since = (v.new_empty(batch, heads, 0, width, dtype=dtype) for width in (k.shape[-1], v.shape[-1], 1))
    return keys, values, since
