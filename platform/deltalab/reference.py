"""Every rule in pure torch, twice: token by token as the equation stands, and chunk by chunk.

`recurrent` is the ground truth that everything else is held to. `chunked` has no loop over tokens and is what
trains on a CPU. Both compute in at least fp32.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.rule import Fit, Operands, State
from deltalab.structure import Transition

DIAGONAL_CHUNK = 16
"""Longest chunk with diagonal decay: decays between its tokens are [C, C, K], so that none is ever above 1."""


def recurrent(transition: Transition, x: Operands, *, scale: float, state: State | None) -> tuple[Tensor, State]:
    """The recurrence of `structure.Transition`, one token at a time.

    x: `Operands` with B, T and H in full. state: [B, H, K, V], or two of them with a fit; None for an empty one.
    Returns o [B, T, H, V] and the next state, both in at least fp32.
    """
    x = _cast(x)
    first, second = _states(x, state)
    fit, steps = x.fit, transition.steps
    out = []
    for t in range(x.r.shape[1]):
        before = first
        for i in range(t * steps, (t + 1) * steps):
            first = _step(transition, x, i, first, x.u[:, i])
        if fit is None:
            out.append(_read(x.r[:, t], first))
            continue
        error = fit.v[:, t] - _read(x.k[:, t], before)
        learned = fit.strength[:, t, :, None] * fit.residual.pseudo_residual(error)
        second = _step(transition, fit.operands(x), t, second, learned)
        out.append(_read(x.r[:, t], before) + _read(fit.r[:, t], second))
    return scale * torch.stack(out, dim=1), first if fit is None else (first, second)


def _step(transition: Transition, x: Operands, t: int, state: Tensor, u: Tensor) -> Tensor:
    """S_t = D_t S_{t-1} + a_t (b_t^T X_{t-1}) + k_t u_t^T, literally."""
    decayed = state
    if x.g is not None:
        g = x.g[:, t]
        decayed = (g[..., None, None] if g.dim() == 2 else g[..., None]).exp() * state
    seen = state if transition.reads == "state" else decayed
    if x.e is not None:
        u = u - x.e[:, t, :, None] * _read(x.k[:, t], seen)
    after = decayed + x.k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
    if x.a is not None and x.b is not None:
        after = after + x.a[:, t].unsqueeze(-1) * _read(x.b[:, t], seen).unsqueeze(-2)
    return after


def _read(vector: Tensor, state: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", vector, state)


def chunked(
    transition: Transition, x: Operands, *, scale: float, state: State | None, chunk_size: int
) -> tuple[Tensor, State]:
    """The same function, parallel within chunks of `chunk_size` tokens and, but for one product each, over them.

    With a fit it is two passes: the first also reads what it would have predicted, the second fits the error.
    """
    x = _cast(x)
    if x.fit is None:
        steps = transition.steps
        r = x.r if steps == 1 else x.r.repeat_interleave(steps, dim=1)
        assert state is None or isinstance(state, Tensor)
        (o,), after = _scan(transition, x, state, chunk_size, after=r)
        return scale * o[:, steps - 1 :: steps], after
    first, second = _states(x, state)
    (base, predicted), first = _scan(transition, x, first, chunk_size, before=(x.r, x.k))
    error = x.fit.residual.pseudo_residual(x.fit.v - predicted)
    fitting = dataclasses.replace(x.fit.operands(x), u=x.fit.strength[..., None] * error)
    (correction,), second = _scan(transition, fitting, second, chunk_size, after=x.fit.r)
    return scale * (base + correction), (first, second)


class _Writes(NamedTuple):
    """What a chunk adds to its state: along `along [.., W, K]`, the values `values - erased @ S [.., W, V]`.

    to_end [.., W, K] and within [.., C, W] (or [.., C, W, K]) are decays from each write to the chunk's end and,
    lower triangular, to each token.
    """

    along: Tensor
    values: Tensor
    erased: Tensor | None
    within: Tensor


def _scan(
    transition: Transition,
    x: Operands,
    state: Tensor | None,
    chunk_size: int,
    *,
    after: Tensor | None = None,
    before: tuple[Tensor, ...] = (),
) -> tuple[list[Tensor], Tensor]:
    """Reads S_{t-1} with each of `before` and S_t with `after`, all [B, T, H, K]; returns these and the last state."""
    length = x.k.shape[1]
    diagonal = transition.decay == "diagonal"
    size = min(chunk_size, length, DIAGONAL_CHUNK if diagonal else length)
    k, u = _chunk(x.k, size), _chunk(x.u, size)
    g = None if x.g is None else _chunk(x.g, size)
    decay = k.new_ones(size, size).tril() if g is None else _decay(g)
    # Decays up to the state before a token: a row later.
    shifted = F.pad(decay.movedim(-1, 0) if diagonal else decay, (0, 0, 1, 0))[..., :-1, :]
    shifted = shifted.movedim(0, -1) if diagonal else shifted
    from_start = _column(decay, diagonal) if g is None else _column(decay, diagonal) * _first(g, diagonal).exp()
    before_start = F.pad(from_start[..., :-1, :], (0, 0, 1, 0), value=1.0)
    late = transition.reads == "decayed_state"
    strict = decay * _strict(size, decay, diagonal) if late else shifted
    until = from_start if late else before_start
    nothing_before = state is None and k.shape[2] == 1
    writes = _writes(x, k, u, size, decay, strict, None if nothing_before else until)

    end = writes.within[..., -1, :, :] if diagonal else writes.within[..., -1, :, None]
    to_end = (end * writes.along).transpose(-1, -2)
    if nothing_before:
        # The common case of training on short sequences: nothing to read, nothing to hand on between chunks.
        written, start = writes.values, None
        last = (to_end @ written).squeeze(2)
    else:
        total = from_start[..., -1, :].expand(*k.shape[:3], k.shape[-1])
        kept = torch.diag_embed(total)
        if writes.erased is not None:
            kept = kept - to_end @ writes.erased
        last = _empty(x) if state is None else state
        starts = []
        for keep, add in zip(kept.unbind(2), (to_end @ writes.values).unbind(2), strict=True):
            starts.append(last)
            last = keep @ last + add
        start = torch.stack(starts, dim=2)
        written = writes.values if writes.erased is None else writes.values - writes.erased @ start

    def read(vector: Tensor, since: Tensor, within: Tensor) -> Tensor:
        chunks = _chunk(vector, size)
        o = _gram(chunks, writes.along, within) @ written
        if start is not None:
            o = o + (since * chunks) @ start
        return o.flatten(2, 3)[:, :, :length].transpose(1, 2)

    wide = writes.within.shape[-2 if diagonal else -1] // size
    early = torch.cat([shifted] * wide, dim=-2 if diagonal else -1)
    reads = [read(vector, before_start, early) for vector in before]
    if after is not None:
        reads.append(read(after, from_start, writes.within))
    return reads, last


def _writes(
    x: Operands, k: Tensor, u: Tensor, size: int, decay: Tensor, strict: Tensor, until: Tensor | None
) -> _Writes:
    """Solves for what is really written, given that every erasure sees the writes before it in its chunk.

    With A' the decays to the state that a token reads and a' the same from the chunk's start: for `tied`

        (I + diag(e) (A' * K K^T)) w = u - diag(e a') K S

    (Comba, arXiv:2506.02475, Eq. 9-12, with erasure and write kept apart), and for `free`, with z_t = b_t^T X,

        (I - A' * B A^T) z = (A' * B K^T) u + diag(a') B S

    until: a', None where S is empty.
    """
    if x.e is not None:
        e = _chunk(x.e, size)[..., None]
        system = e * _gram(k, k, strict)
        right = u if until is None else torch.cat([e * until * k, u], dim=-1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        if until is None:
            return _Writes(k, solved, None, decay)
        erased, values = solved.split([k.shape[-1], u.shape[-1]], dim=-1)
        return _Writes(k, values, erased, decay)
    if x.a is None or x.b is None:
        return _Writes(k, u, None, decay)
    a, b = _chunk(x.a, size), _chunk(x.b, size)
    system = -_gram(b, a, strict)
    right = _gram(b, k, strict) @ u
    right = right if until is None else torch.cat([-until * b, right], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    along = torch.cat([k, a], dim=-2)
    within = torch.cat([decay, decay], dim=-2 if decay.dim() == k.dim() + 1 else -1)
    if until is None:
        return _Writes(along, torch.cat([u, solved], dim=-2), None, within)
    erased, values = solved.split([k.shape[-1], u.shape[-1]], dim=-1)
    return _Writes(along, torch.cat([u, values], dim=-2), torch.cat([torch.zeros_like(k), erased], dim=-2), within)


def _gram(x: Tensor, y: Tensor, decay: Tensor) -> Tensor:
    """x_i^T diag(decay_ij) y_j: [.., C, K], [.., W, K] and [.., C, W] or [.., C, W, K] to [.., C, W]."""
    if decay.dim() == x.dim() + 1:
        return (x.unsqueeze(-2) * y.unsqueeze(-3) * decay).sum(-1)
    return x @ y.transpose(-1, -2) * decay


def _column(decay: Tensor, diagonal: bool) -> Tensor:
    """Decay from the first token: [.., C, 1] or [.., C, K]."""
    return decay[..., :, 0, :] if diagonal else decay[..., :, :1]


def _first(g: Tensor, diagonal: bool) -> Tensor:
    return g[..., :1, :] if diagonal else g[..., :1, None]


def _strict(size: int, like: Tensor, diagonal: bool) -> Tensor:
    lower = like.new_ones(size, size).tril(-1)
    return lower[..., None] if diagonal else lower


def _states(x: Operands, state: State | None) -> tuple[Tensor, Tensor]:
    """The first state, and the second where there is a fit (else again an empty one)."""
    if state is None:
        return _empty(x), _empty(x)
    if isinstance(state, Tensor):
        return state, state
    first, second = state
    return first, second


def _empty(x: Operands) -> Tensor:
    return x.u.new_zeros(x.k.shape[0], x.k.shape[2], x.k.shape[3], x.u.shape[3])


def _cast(x: Operands) -> Operands:
    dtype = torch.promote_types(x.u.dtype, torch.float32)

    def cast(part: "Operands | Fit") -> dict[str, Any]:
        values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
        return {name: value.to(dtype) for name, value in values.items() if isinstance(value, Tensor)}

    fit = None if x.fit is None else dataclasses.replace(x.fit, **cast(x.fit))
    return dataclasses.replace(x, fit=fit, **cast(x))


def _chunk(x: Tensor, size: int) -> Tensor:
    """[B, T, H, ...] to [B, H, N, C, ...]. The zeros that fill the last chunk neither decay, erase nor write."""
    x = x.transpose(1, 2)
    missing = -x.shape[2] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, missing))
    chunks: Tensor = x.unflatten(2, (-1, size))
    return chunks


def _decay(g: Tensor) -> Tensor:
    """exp(g_{j+1} + ... + g_i) for i >= j, else 0; [B, H, N, C] to [.., C, C], or [B, H, N, C, K] to [.., C, C, K].

    The sums are built up, not subtracted from one another: exact next to g = -1000, and finite at g = -inf.
    """
    size = g.shape[3]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    strict = lower.tril(-1)
    if g.dim() == 5:
        lower, strict = lower[..., None], strict[..., None]
    below = g.unsqueeze(4).expand(*g.shape[:4], size, *g.shape[4:]).masked_fill(~strict, 0.0)
    return below.cumsum(3).masked_fill(~lower, -torch.inf).exp()
