"""Every rule in pure torch, twice: token by token as the equation stands, and chunk by chunk.

`recurrent` is the ground truth that everything else is held to. `chunked` has no loop over tokens and is what
trains on a CPU. Both compute in at least fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.rule import Operands
from deltalab.structure import Transition


def recurrent(transition: Transition, x: Operands, *, scale: float, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The recurrence of `structure.Transition`, one token at a time.

    x: `Operands` with B, T and H in full. state: [B, H, K, V], None for an empty one.
    Returns o [B, T, H, V] and the next state, both in at least fp32.
    """
    x = _cast(x)
    if state is None:
        state = _empty(x)
    out = []
    for t in range(x.k.shape[1]):
        k = x.k[:, t]
        decayed = state if x.g is None else x.g[:, t, :, None, None].exp() * state
        u = x.u[:, t]
        if x.e is not None:
            read = state if transition.reads == "state" else decayed
            u = u - x.e[:, t, :, None] * torch.einsum("bhk,bhkv->bhv", k, read)
        state = decayed + k.unsqueeze(-1) * u.unsqueeze(-2)
        out.append(scale * torch.einsum("bhk,bhkv->bhv", x.r[:, t], state))
    return torch.stack(out, dim=1), state


def chunked(
    transition: Transition, x: Operands, *, scale: float, state: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The same function, parallel within chunks of `chunk_size` tokens and, but for one product each, over them.

    With A_ij the decay from token j to token i, a_i that from the chunk's start, and A', a' the same up to the
    state that token i reads, the values w_i that a chunk really writes solve the unit lower triangular system

        (I + diag(e) (A' * K K^T)) w = u - diag(e a') K S

    (Comba, arXiv:2506.02475, Eq. 9-12, with erasure and write kept apart).
    """
    x = _cast(x)
    length = x.k.shape[1]
    size = min(chunk_size, length)
    r, k, u = (_chunk(tensor, size) for tensor in (x.r, x.k, x.u))
    g = None if x.g is None else _chunk(x.g, size)
    decay = k.new_ones(size, size).tril() if g is None else _decay(g)
    to_end = (decay[..., -1, :, None] * k).transpose(-1, -2)
    seen = r @ k.transpose(-1, -2) * decay
    if x.e is not None:
        e = _chunk(x.e, size)[..., None]
        late = transition.reads == "decayed_state"
        between = decay if late else F.pad(decay[..., :-1, :], (0, 0, 1, 0))
        system = (e * (k @ k.transpose(-1, -2)) * between).tril(-1)
    if state is None and k.shape[2] == 1:
        # The common case of training on short sequences: nothing to read, nothing to hand on between chunks.
        written = u if x.e is None else torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
        return scale * _unchunk(seen @ written, length), (to_end @ written).squeeze(2)

    from_start = decay[..., :1] if g is None else decay[..., :1] * g[..., :1, None].exp()
    kept = from_start[..., -1:, :] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    if x.e is None:
        written = u
    else:
        until_read = from_start if late else F.pad(from_start[..., :-1, :], (0, 0, 1, 0), value=1.0)
        right = torch.cat([e * until_read * k, u], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        erased, written = solved.split([k.shape[-1], u.shape[-1]], dim=-1)
        kept = kept - to_end @ erased
    state = _empty(x) if state is None else state
    starts = []
    for keep, add in zip(kept.expand(*k.shape[:3], -1, -1).unbind(2), (to_end @ written).unbind(2), strict=True):
        starts.append(state)
        state = keep @ state + add
    start = torch.stack(starts, dim=2)
    if x.e is not None:
        written = written - erased @ start
    return scale * _unchunk(from_start * (r @ start) + seen @ written, length), state


def _empty(x: Operands) -> Tensor:
    return x.u.new_zeros(x.k.shape[0], x.k.shape[2], x.k.shape[3], x.u.shape[3])


def _cast(x: Operands) -> Operands:
    dtype = torch.promote_types(x.u.dtype, torch.float32)
    return Operands(
        r=x.r.to(dtype),
        k=x.k.to(dtype),
        u=x.u.to(dtype),
        g=None if x.g is None else x.g.to(dtype),
        e=None if x.e is None else x.e.to(dtype),
    )


def _chunk(x: Tensor, size: int) -> Tensor:
    """[B, T, H, ...] to [B, H, N, C, ...]. The zeros that fill the last chunk neither decay, erase nor write."""
    x = x.transpose(1, 2)
    missing = -x.shape[2] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, missing))
    chunks: Tensor = x.unflatten(2, (-1, size))
    return chunks


def _unchunk(x: Tensor, length: int) -> Tensor:
    """[B, H, N, C, V] to [B, T, H, V]."""
    return x.flatten(2, 3)[:, :, :length].transpose(1, 2)


def _decay(g: Tensor) -> Tensor:
    """exp(g_{j+1} + ... + g_i) for i >= j, else 0; [..., C] to [..., C, C].

    The sums are built up, not subtracted from one another: exact next to g = -1000, and finite at g = -inf.
    """
    size = g.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    below = g[..., :, None].expand(*g.shape, size).masked_fill(~lower.tril(-1), 0.0)
    return below.cumsum(-2).masked_fill(~lower, -torch.inf).exp()
