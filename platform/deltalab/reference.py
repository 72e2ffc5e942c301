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
    x = _cast(x, state)
    state = _empty(x) if state is None else state.to(x.u.dtype)
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
    """The same function, parallel within chunks of `chunk_size` tokens; from chunk to chunk only the state goes.

    With A_ij the decay from token j to token i, a_i that from the chunk's start, z_i that to its end, and A', a' the
    same up to the state that token i reads, a chunk that starts at S writes the values w_i of

        (I + diag(e) (A' * K K^T)) w = u - diag(e a') K S
        o = scale ((A * R K^T) w + diag(a) R S),   S <- a_C S + K^T diag(z) w

    (Comba, arXiv:2506.02475, Eq. 9-12, with erasure and write kept apart). Both triangular matrices and the inverse
    of the first are made for all chunks at once.
    """
    x = _cast(x, state)
    batch, length = x.k.shape[:2]
    size = min(chunk_size, length)
    r, k, u = (_chunk(tensor, size) for tensor in (x.r, x.k, x.u))
    g = None if x.g is None else _chunk(x.g, size)
    decay = k.new_ones(size, size).tril() if g is None else _decay(g)
    seen = r @ k.mT * decay
    to_end = decay[..., -1, :, None]
    if x.e is not None:
        e = _chunk(x.e, size)[..., None]
        late = transition.reads == "decayed_state"
        between = decay if late else F.pad(decay[..., :-1, :], (0, 0, 1, 0))
        system = e * (k @ k.mT) * between
    if state is None and k.shape[0] == 1:
        # The common case of training on short sequences: no state to read.
        w = u if x.e is None else torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
        return scale * _unchunk(seen @ w, batch, length), (k.mT @ (to_end * w))[0].unflatten(0, (batch, -1))

    from_start = decay[..., :1] if g is None else decay[..., :1] * g[..., :1, None].exp()
    parts = [r, k, u, seen, from_start, to_end]
    if x.e is not None:
        until_read = from_start if late else F.pad(from_start[..., :-1, :], (0, 0, 1, 0), value=1.0)
        eye = torch.eye(size, dtype=k.dtype, device=k.device).expand_as(system)
        parts += [e * until_read, torch.linalg.solve_triangular(system, eye, upper=False, unitriangular=True)]
    state = (_empty(x) if state is None else state.to(x.u.dtype)).flatten(0, 1)
    out = []
    # Unbound at once: the gradient of an index into all chunks is a tensor of all chunks, for each of them.
    each = zip(*(part.expand(*k.shape[:2], -1, -1).unbind() for part in parts), strict=True)
    for r_c, k_c, w, seen_c, start_c, end_c, *erasure in each:
        if erasure:
            erase_c, inverse_c = erasure
            w = inverse_c @ torch.addcmul(w, erase_c, k_c @ state, value=-1)
        out.append(torch.addcmul(seen_c @ w, start_c, r_c @ state))
        state = torch.baddbmm(start_c[:, -1:] * state, k_c.mT, end_c * w)
    return scale * _unchunk(torch.stack(out), batch, length), state.unflatten(0, (batch, -1))


def _empty(x: Operands) -> Tensor:
    return x.u.new_zeros(x.k.shape[0], x.k.shape[2], x.k.shape[3], x.u.shape[3])


def _cast(x: Operands, state: Tensor | None) -> Operands:
    dtype = torch.promote_types(x.u.dtype, torch.float32 if state is None else state.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    return Operands(
        r=x.r.to(dtype),
        k=x.k.to(dtype),
        u=x.u.to(dtype),
        g=None if x.g is None else x.g.to(dtype),
        e=None if x.e is None else x.e.to(dtype),
    )


def _chunk(x: Tensor, size: int) -> Tensor:
    """[B, T, H, ...] to [N, B H, C, ...]. The zeros that fill the last chunk neither decay, erase nor write."""
    missing = -x.shape[1] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    chunks: Tensor = x.unflatten(1, (-1, size))
    return chunks.movedim((1, 3), (0, 2)).flatten(1, 2)


def _unchunk(x: Tensor, batch: int, length: int) -> Tensor:
    """[N, B H, C, V] to [B, T, H, V]."""
    chunks: Tensor = x.unflatten(1, (batch, -1))
    return chunks.movedim((0, 2), (1, 3)).flatten(1, 2)[:, :length]


def _decay(g: Tensor) -> Tensor:
    """exp(g_{j+1} + ... + g_i) for i >= j, else 0; [..., C] to [..., C, C].

    The sums are built up, not subtracted from one another: exact next to g = -1000, and finite at g = -inf.
    """
    size = g.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    below = g[..., :, None].expand(*g.shape, size).masked_fill(~lower.tril(-1), 0.0)
    return below.cumsum(-2).masked_fill(~lower, -torch.inf).exp()
