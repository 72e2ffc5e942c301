"""The recurrence in pure PyTorch, in two forms: token by token as the equation stands, and chunk by chunk.

`recurrent` is the ground truth that every other form is compared with. `chunked` has no loop over tokens and trains on
a CPU. Both compute in at least fp32.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalab.ops.vmap import Stacked
from deltalab.rule import Fit, Operands, State
from deltalab.structure import Transition

DIAGONAL_CHUNK = 16
"""The longest chunk with diagonal decay. Its decays between tokens are formed, [C, C, K], so that none exceeds 1."""


def recurrent(transition: Transition, operands: Operands, *, scale: float, state: State | None) -> tuple[Tensor, State]:
    """Computes the recurrence of `structure.Transition`, one token at a time.

    The caller applies `Operands.output` and the carry.

    Args:
        transition: The transition of the state.
        operands: The operands with B, T and H in full.
        scale: The factor of the output.
        state: One state [B, H, K, V] in a tuple, two with a fit, or None for an empty state.

    Returns:
        o [B, T, H, V] and the next state, both in at least fp32.
    """
    operands = _cast(operands, state)
    value, operands = operands.u, operands.resolved()
    first, second = _states(operands, state)
    fit, steps = operands.fit, transition.steps
    fitting = operands if fit is None else fit.operands(operands)
    out = []
    for t in range(operands.r.shape[1]):
        before = first
        for i in range(t * steps, (t + 1) * steps):
            first = _step(transition, operands, i, first, operands.u[:, i])
        if fit is None and transition.output == "before":
            o = _read(operands.r[:, t], before)
            out.append(o if operands.bonus is None else o + operands.bonus[:, t, :, None] * value[:, t])
            continue
        if fit is None:
            out.append(_read(operands.r[:, t], first))
            continue
        error = fit.v[:, t] - _read(operands.k[:, t], before)
        learned = fit.strength[:, t, :, None] * fit.residual.pseudo_residual(error)
        second = _step(transition, fitting, t, second, learned)
        out.append(_read(operands.r[:, t], before) + _read(fitting.r[:, t], second))
    return scale * torch.stack(out, dim=1), (first,) if fit is None else (first, second)


def _step(transition: Transition, operands: Operands, t: int, state: Tensor, u: Tensor) -> Tensor:
    """Computes the state after one step, S_t, as the equation of `Transition` states it."""
    decayed = state
    if operands.g is not None:
        g = operands.g[:, t]
        alpha = g.exp() if operands.sign is None else g.exp().copysign(operands.sign[:, t])
        decayed = (alpha[..., None, None] if g.dim() == 2 else alpha[..., None]) * state
    seen = state if transition.reads == "state" else decayed
    if operands.e is not None:
        u = u - operands.e[:, t, :, None] * _read(operands.k[:, t], seen)
    after = decayed + operands.k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
    if operands.a is not None and operands.b is not None:
        after = after + operands.a[:, t].unsqueeze(-1) * _read(operands.b[:, t], seen).unsqueeze(-2)
    return after


def _read(vector: Tensor, state: Tensor) -> Tensor:
    """Reads a state with a vector r: S^T r."""
    return torch.einsum("bhk,bhkv->bhv", vector, state)


def chunked(
    transition: Transition, operands: Operands, *, scale: float, state: State | None, chunk_size: int
) -> tuple[Tensor, State]:
    """Computes `recurrent`, parallel within chunks of `chunk_size` tokens; only the state passes from chunk to chunk.

    With a fit there are two passes. The first pass also reads its own predictions, and the second pass fits their
    error. It takes neither signs nor an output before the write: `ops.lowering` removes both.
    """
    operands = _cast(operands, state).resolved()
    if operands.fit is None:
        steps = transition.steps
        r = operands.r if steps == 1 else operands.r.repeat_interleave(steps, dim=1)
        (o,), last = _scan(transition, operands, None if state is None else state[0], chunk_size, after=r)
        return scale * o[:, steps - 1 :: steps], (last,)
    first, second = _states(operands, state)
    (base, predicted), first = _scan(transition, operands, first, chunk_size, before=(operands.r, operands.k))
    error = operands.fit.residual.pseudo_residual(operands.fit.v - predicted)
    fitting = dataclasses.replace(operands.fit.operands(operands), u=error).resolved()
    (corrections,), second = _scan(transition, fitting, second, chunk_size, after=operands.fit.r)
    return scale * (base + corrections), (first, second)


def _scan(
    transition: Transition,
    operands: Operands,
    state: Tensor | None,
    chunk_size: int,
    *,
    after: Tensor | None = None,
    before: tuple[Tensor, ...] = (),
) -> tuple[list[Tensor], Tensor]:
    """Reads S_{t-1} with each of `before` and S_t with `after`, all [B, T, H, K]; returns the reads and the last state.

    Notation: A_ij = decay from token j to i; a_i = decay from the chunk's start to i; A', a' = the same, up to the
    state that token i's low rank reads. In the products K K^T, B A^T and B K^T, the rows of K, A and B are k, a and b.
    For a chunk with initial state S, the written values w solve:

        tied: (I + diag(e) (A' * K K^T)) w = u - diag(e a') K S;      w is written along k
        free: (I - A' * B A^T) w = (A' * B K^T) u + diag(a') B S;     w is written along a, and u along k

    (Comba, arXiv:2506.02475, Eq. 9-12, with erasure and write kept apart). The system is solved for all chunks at once,
    for any S; then a loop over chunks carries the state.
    """
    batch, tokens = operands.k.shape[:2]
    diagonal = transition.decay == "diagonal"
    size = min(chunk_size, tokens, DIAGONAL_CHUNK if diagonal else tokens)
    k, u = into_chunks(operands.k, size), into_chunks(operands.u, size)
    decay, from_start, ends = _Decay(k.new_ones(size, size).tril()), k.new_ones(size, 1), k.new_ones(size, 1)
    if operands.g is not None:
        g = into_chunks(operands.g if diagonal else operands.g[..., None], size)
        sums = g.cumsum(-2)
        steps = g.detach().mT if diagonal else g.detach()[..., 0]
        decay, from_start = _Decay(decays(steps), sums), sums.exp()
        ends = F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2).exp()
    earlier, before_start = decay, from_start
    late = transition.reads == "decayed_state"
    if before or not (late or transition.low_rank == "none"):
        # Decays up to the state before a token are those of the row above.
        earlier, before_start = decay.earlier(), F.pad(from_start, (0, 0, 1, 0), value=1.0)[..., :-1, :]
    seen, seen_start = (decay, from_start) if late else (earlier, before_start)

    along, system, erase, right, rows_per_token = k, None, None, u, 1
    if operands.e is not None:
        erased = into_chunks(operands.e, size)[..., None] * k
        system, erase = _gram(erased, k, seen), -seen_start * erased
    elif operands.a is not None and operands.b is not None:
        a, b = into_chunks(operands.a, size), into_chunks(operands.b, size)
        system, erase, right = _gram(-b, a, seen), seen_start * b, _gram(b, k, seen).tril(-1) @ u
        along, ends, rows_per_token = torch.cat([k, a], dim=-2), torch.cat([ends, ends], dim=-2), 2
    reads = [(vector, before_start, earlier) for vector in before]
    if after is not None:
        reads.append((after, from_start, decay))
    chunks = [into_chunks(vector, size) for vector, _, _ in reads]
    grams = [_gram(r, along, within) for r, (_, _, within) in zip(chunks, reads, strict=True)]
    along_end = along * ends

    if state is None and k.shape[0] == 1:
        # Training on short sequences: one chunk, and no state to read.
        w = right if system is None else _solve(system, right)
        w = w if rows_per_token == 1 else torch.cat([u, w], dim=-2)
        last = (along_end.mT @ w)[0].unflatten(0, (batch, -1))
        return [from_chunks(gram @ w, batch, tokens) for gram in grams], last

    # Unbind all chunks at once: indexing one by one would make a gradient as large as all chunks for each of them.
    parts = [u, along_end, from_start[..., -1, :, None].expand(*k.shape[:2], -1, -1)]
    if system is not None and erase is not None:
        parts += _solve(system, torch.cat([right, erase], dim=-1)).split([u.shape[-1], k.shape[-1]], dim=-1)
    for r, gram, (_, since, _) in zip(chunks, grams, reads, strict=True):
        parts += [since * r, gram]
    s = (_empty(operands) if state is None else state.to(operands.u.dtype)).flatten(0, 1)
    out: list[list[Tensor]] = [[] for _ in reads]
    for w, along_c, kept_c, *rest in zip(*(part.unbind() for part in parts), strict=True):
        if system is not None:
            right_c, erase_c, *rest = rest
            written = torch.baddbmm(right_c, erase_c, s)
            w = written if rows_per_token == 1 else torch.cat([w, written], dim=-2)
        for outputs, r_c, gram_c in zip(out, rest[::2], rest[1::2], strict=True):
            outputs.append(torch.baddbmm(gram_c @ w, r_c, s))
        s = torch.baddbmm(kept_c * s, along_c.mT, w)
    return [from_chunks(torch.stack(outputs), batch, tokens) for outputs in out], s.unflatten(0, (batch, -1))


class _Decay(NamedTuple):
    """The decay from token j to token i of a chunk, exp(sums_i - sums_j), or 0 if i does not see j.

    Attributes:
        within: The decays [.., C, C], or [.., K, C, C] if each channel has a decay of its own, without a gradient.
        sums: [.., C, 1 or K], or None if nothing decays. The sums only carry the gradient: their values are inaccurate
            where g is large, and may be -inf.
        rows_later: Whether row i of `within` belongs to sums_{i-1}.
    """

    within: Tensor
    sums: Tensor | None = None
    rows_later: bool = False

    def earlier(self) -> "_Decay":
        """The decay up to the token before i."""
        return _Decay(F.pad(self.within, (0, 0, 1, 0))[..., :-1, :], self.sums, rows_later=True)


def _gram(x: Tensor, y: Tensor, decay: _Decay) -> Tensor:
    """Computes x_i^T diag(exp(sums_i - sums_j)) y_j, [.., C, n C], for x [.., C, K] and y [.., n C, K].

    y has n rows for each token.
    """
    within = decay.within
    if within.dim() <= x.dim():
        within = within.expand(*x.shape[:-2], -1, -1)
    gram: Tensor = _Gram.apply(x, y, within, decay.sums, decay.rows_later)  # type: ignore[no-untyped-call]
    return gram


def _solve(system: Tensor, right: Tensor) -> Tensor:
    """Solves (I + L) x = `right` for x, where L is the part of `system` below its diagonal."""
    solved: Tensor = _Solve.apply(system, right)  # type: ignore[no-untyped-call]
    return solved


class _Gram(Stacked):
    """Decayed products of pairs of tokens.

    The gradient of a decay follows from those of x and y, d sums_i = x_i dx_i - y_i dy_i, summed over the channels that
    share the decay. So no further pass over pairs of tokens is needed.
    """

    @staticmethod
    def forward(x: Tensor, y: Tensor, within: Tensor, sums: Tensor | None, rows_later: bool) -> Tensor:
        scalar = within.dim() == x.dim()
        pairs = x @ y.mT if scalar else x.mT.unsqueeze(-1) * y.mT.unsqueeze(-2)
        gram = _decayed(pairs, within)
        return gram if scalar else gram.sum(-3)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, _, ctx.rows_later = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        x, y, within = ctx.saved_tensors
        scalar = within.dim() == x.dim()
        if scalar:
            d = _decayed(d, within)
            d_x, d_y = d @ y, d.mT @ x
        else:
            d = _decayed(d.unsqueeze(-3), within)
            d_x, d_y = (d * y.mT.unsqueeze(-2)).sum(-1).mT, (d * x.mT.unsqueeze(-1)).sum(-2).mT
        if not ctx.needs_input_grad[3]:
            return d_x, d_y, None, None, None
        rows, columns = ((z * d_z).sum(-1, keepdim=True) if scalar else z * d_z for z, d_z in ((x, d_x), (y, d_y)))
        if ctx.rows_later:
            rows = F.pad(rows[..., 1:, :], (0, 0, 0, 1))
        return d_x, d_y, None, rows - columns.unflatten(-2, (-1, x.shape[-2])).sum(-3), None


def _decayed(pairs: Tensor, within: Tensor) -> Tensor:
    """Multiplies each of the n blocks [.., C, C] of pairs [.., C, n C] by within [.., C, C]."""
    blocks: Tensor = pairs.unflatten(-1, (-1, within.shape[-1]))
    return (blocks * within.unsqueeze(-2)).flatten(-2)


class _Solve(Stacked):
    """Solves X (I + L)^T = right^T from the right: PyTorch takes half the time if rows stay rows."""

    @staticmethod
    def forward(system: Tensor, right: Tensor) -> Tensor:
        rows: Tensor = torch.linalg.solve_triangular(system.mT, right.mT, upper=True, left=False, unitriangular=True)
        return rows.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        system, solved = ctx.saved_tensors
        d_right = torch.linalg.solve_triangular(system, d.mT, upper=False, left=False, unitriangular=True).mT
        return (-d_right @ solved.mT).tril_(-1), d_right


def _states(operands: Operands, state: State | None) -> tuple[Tensor, Tensor]:
    """Returns the first and the second state. Without a fit, the second state is not used."""
    if state is None:
        return _empty(operands), _empty(operands)
    return state[0].to(operands.u.dtype), state[-1].to(operands.u.dtype)


def _empty(operands: Operands) -> Tensor:
    """An empty state."""
    return operands.u.new_zeros(operands.k.shape[0], operands.k.shape[2], operands.k.shape[3], operands.u.shape[3])


def _cast(operands: Operands, state: State | None) -> Operands:
    """Casts the operands to the widest of the dtypes of u and the state and fp32."""
    dtype = torch.promote_types(operands.u.dtype, torch.float32)
    for tensor in state or ():
        dtype = torch.promote_types(dtype, tensor.dtype)

    def cast(part: "Operands | Fit") -> dict[str, Any]:
        values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
        return {name: value.to(dtype) for name, value in values.items() if isinstance(value, Tensor)}

    fit = None if operands.fit is None else dataclasses.replace(operands.fit, **cast(operands.fit))
    return dataclasses.replace(operands, fit=fit, **cast(operands))


def into_chunks(x: Tensor, size: int) -> Tensor:
    """Cuts [B, T, H, ...] into N chunks [N, B H, C, ...]. Zeros fill the last chunk, and neither decay nor write."""
    missing = -x.shape[1] % size
    if missing:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing))
    chunks: Tensor = x.unflatten(1, (-1, size))
    return chunks.movedim((1, 3), (0, 2)).flatten(1, 2)


def from_chunks(x: Tensor, batch: int, length: int) -> Tensor:
    """Joins chunks [N, B H, C, V] as [B, T, H, V]."""
    chunks: Tensor = x.unflatten(1, (batch, -1))
    return chunks.movedim((0, 2), (1, 3)).flatten(1, 2)[:, :length]


def decays(g: Tensor) -> Tensor:
    """Computes exp(g_{j+1} + ... + g_i) for i >= j, else 0, [.., C, C] for g [.., C].

    Each sum is added up by itself and is no difference of two sums, so that it is exact beside g = -1000 and finite at
    g = -inf.
    """
    below = g.unsqueeze(-1).expand(*g.shape, g.shape[-1]).tril(-1)
    return below.cumsum(-2).exp().tril()
