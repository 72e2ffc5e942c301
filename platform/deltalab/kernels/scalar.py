"""Kernels for a state that decays by a scalar or not at all, and erases along its key or not at all.

Per chunk that starts at S, with G the cumulative log-decay and A_ij = exp(G_i - G_j) (reference._scan says more):

    (I + M) w = beta u - e exp(G') k S,   M_ij = e_i exp(G'_i - G_j) k_i . k_j,  j < i     G' = G or G_{i-1}
    o = scale (exp(G) r S + (A * r k^T) w),   S <- exp(G_C) S + k^T (exp(G_C - G) w)

`prepare` inverts I + M for all chunks at once; `scan` goes through the chunks with the state in registers. It lies
there transposed, [V, K]: then the left operand of every product is in registers already, and the right one is a tile
that was loaded ahead.
"""

import triton
import triton.language as tl

from deltalab.kernels.chunk import (
    LOG2_E,
    LOWEST,
    apart,
    bounds,
    cumulative_at,
    locate,
    read_rows,
    rows,
    scalars,
    unit_lower_inverse,
)


@triton.jit
def prepare(
    k, g, e, cumulative, inverse, cu_seqlens, of, first, length, chunks, sequences, H, K,
    SIZE: tl.constexpr, BK: tl.constexpr, FULL: tl.constexpr, LATE: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per chunk and head: the cumulative log-decay, base 2, and (I + M)^{-1}."""
    program, head = tl.program_id(0), tl.program_id(1)
    sequence, chunk = locate(program, of, first, chunks, PACKED)
    if sequence >= sequences:
        return
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    row, valid = start + chunk * SIZE, length - chunk * SIZE
    i = tl.arange(0, SIZE)
    if g is not None:
        at, there = scalars(g, row, valid, head, H, SIZE)
        step = tl.maximum(tl.load(at, mask=there, other=0.0).to(tl.float32), LOWEST) * LOG2_E
        step = step.to(cumulative.dtype.element_ty)
        sums = tl.cumsum(step, 0)
        at, there = scalars(cumulative, row, valid, head, H, SIZE)
        tl.store(at, sums, mask=there)
    if e is not None:
        column = tl.arange(0, BK)
        at, there = rows(k, row, valid, head, H, column, K, SIZE, FULL)
        key = tl.load(at, mask=there, other=0.0)
        at, there = scalars(e, row, valid, head, H, SIZE)
        erase = tl.load(at, mask=there, other=0.0).to(tl.float32)
        system = tl.dot(key, tl.trans(key), input_precision="ieee") * erase[:, None]
        below = i[:, None] > i[None, :]
        if g is not None:
            seen = sums if LATE else sums - step
            apart = (seen[:, None] - sums[None, :]).to(tl.float32)
            system *= tl.exp2(tl.where(below, apart, 0.0))
        solved = unit_lower_inverse(tl.where(below, system, 0.0), SIZE, PRECISION)
        at = inverse + (program.to(tl.int64) * H + head) * SIZE * SIZE + i[:, None] * SIZE + i[None, :]
        tl.store(at, solved.to(inverse.dtype.element_ty))


@triton.jit
def pseudo_residual(error, clip, LOSS: tl.constexpr):
    """structure.ResidualState, of an error in fp32; tanh by exp, of -2 |x| lest it overflow."""
    if LOSS == "huber":
        error = tl.minimum(tl.maximum(error, -clip), clip)
    elif LOSS == "log_cosh":
        small = tl.exp(-2 * tl.abs(error))
        error = tl.where(error < 0, -1.0, 1.0) * (1 - small) / (1 + small)
    return error


@triton.jit
def slope(residual, clip, LOSS: tl.constexpr):
    """Derivative of the pseudo-residual, from its value."""
    if LOSS == "huber":
        return tl.where(tl.abs(residual) < clip, 1.0, 0.0)
    elif LOSS == "log_cosh":
        return 1 - residual * residual
    else:
        return tl.full(residual.shape, 1.0, tl.float32)


@triton.jit
def scan(
    r, k, u, e, beta, read, d, cumulative, inverse, target, state, begin_states,
    o, residual, last, states, written,
    cu_seqlens, first, length, chunks, from_chunk, to_chunk, every, segments, scale, clip, H, K, V,
    SIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL: tl.constexpr, FULL_V: tl.constexpr,
    LATE: tl.constexpr, STEPS: tl.constexpr, LOSS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head's block of values through chunks from_chunk to to_chunk.

    Writes what is not None: the output o; `residual` of `target`, which reads what its chunk has not written yet, as o
    then does; the last state; `states` that chunks start with, transposed, and what they `written`.
    begin_states: [B, segments, H, V, K], the state before every `every`-th chunk; written where o is, else read.
    """
    FIT: tl.constexpr = LOSS is not None
    value, head, sequence = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    begin = tl.load(first + sequence) if PACKED else sequence * chunks
    if PACKED:
        to_chunk = tl.load(first + sequence + 1) - begin
    key = tl.arange(0, BK)
    i = tl.arange(0, SIZE)
    kind = k.dtype.element_ty
    both = (value < V)[:, None] & (key < K)[None, :]
    transposed = value[:, None] * K + key[None, :]
    held = (sequence.to(tl.int64) * H + head) * K * V
    if o is not None:
        if state is not None:
            s = tl.load(state + held + key[None, :] * V + value[:, None], mask=both, other=0.0).to(tl.float32)
        else:
            s = tl.zeros([BV, BK], tl.float32)
    else:
        at = begin_states + ((sequence.to(tl.int64) * segments + from_chunk // every) * H + head) * K * V
        s = tl.load(at + transposed, mask=both, other=0.0)
    for chunk in range(from_chunk, to_chunk):
        row, valid = start + chunk * SIZE, length - chunk * SIZE
        at, there = rows(k, row, valid, head, H, key, K, SIZE, FULL)
        k_c = tl.load(at, mask=there, other=0.0)
        at, there_u = rows(u, row, valid, head, H, value, V, SIZE, FULL_V)
        u_c = tl.trans(tl.load(at, mask=there_u, other=0.0)).to(tl.float32)
        if states is not None:
            at = states + (((sequence.to(tl.int64) * (to_chunk - from_chunk) if not PACKED else begin.to(tl.int64))
                            + chunk - from_chunk) * H + head) * K * V  # fmt: skip
            tl.store(at + transposed, s.to(states.dtype.element_ty), mask=both)
        elif begin_states is not None:
            if chunk % every == 0:
                at = begin_states + ((sequence.to(tl.int64) * segments + chunk // every) * H + head) * K * V
                tl.store(at + transposed, s, mask=both)
        if cumulative is not None:
            sums = cumulative_at(cumulative, row, valid, head, H, SIZE, 0)
            earlier = cumulative_at(cumulative, row, valid, head, H, SIZE, 1)
            total = tl.load(cumulative + (row + tl.minimum(valid, SIZE) - 1) * H + head)
        w = u_c
        if beta is not None:
            at, there = scalars(beta, row, valid, head, H, SIZE)
            w *= tl.load(at, mask=there, other=0.0).to(tl.float32)[None, :]
        if e is not None or FIT or d is not None:
            k_s = tl.dot(s.to(kind), tl.trans(k_c), input_precision=PRECISION)
        if e is not None:
            at, there = scalars(e, row, valid, head, H, SIZE)
            erase = tl.load(at, mask=there, other=0.0).to(tl.float32)
            if cumulative is not None:
                erase *= tl.exp2((sums if LATE else earlier).to(tl.float32))
            at = inverse + ((begin.to(tl.int64) + chunk) * H + head) * SIZE * SIZE + i[:, None] * SIZE + i[None, :]
            solve = tl.load(at)
            w = tl.dot((w - erase[None, :] * k_s).to(kind), tl.trans(solve), input_precision=PRECISION)
        if written is not None:
            at, there = rows(written, row, valid, head, H, value, V, SIZE, FULL_V)
            tl.store(at, tl.trans(w).to(written.dtype.element_ty), mask=there)
        if o is not None:
            at, there = read_rows(r, start // STEPS, chunk * SIZE, length, head, H, key, K, SIZE, STEPS, FULL)
            r_c = tl.load(at, mask=there, other=0.0)
            out = tl.dot(s.to(kind), tl.trans(r_c), input_precision=PRECISION)
            within = tl.dot(k_c, tl.trans(r_c), input_precision=PRECISION)
            if read is not None:
                at, there = scalars(read, row, valid, head, H, SIZE)
                strength = tl.load(at, mask=there, other=0.0).to(tl.float32)[None, :]
                out *= strength
                within *= strength
            if FIT or d is not None:
                overlap = tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION)
            if d is not None:
                at, there = scalars(d, row, valid, head, H, SIZE)
                correction = tl.load(at, mask=there, other=0.0).to(tl.float32)[None, :]
                out -= correction * k_s
                within -= correction * overlap
            if cumulative is not None:
                seen = earlier if FIT else sums
                decay = apart(seen[None, :], sums[:, None], i[None, :], i[:, None], FIT)
                since = tl.exp2(seen.to(tl.float32))[None, :]
                out *= since
            else:
                decay = tl.where(i[None, :] > i[:, None] if FIT else i[None, :] >= i[:, None], 1.0, 0.0)
            out += tl.dot(w.to(kind), (within * decay).to(kind), input_precision=PRECISION)
            at, there = read_rows(o, start // STEPS, chunk * SIZE, length, head, H, value, V, SIZE, STEPS, FULL_V)
            tl.store(at, tl.trans(out * scale).to(o.dtype.element_ty), mask=there)
            if FIT:
                predicted = tl.dot(w.to(kind), (overlap * decay).to(kind), input_precision=PRECISION)
                predicted += k_s * since if cumulative is not None else k_s
                at, there = rows(target, row, valid, head, H, value, V, SIZE, FULL_V)
                error = tl.trans(tl.load(at, mask=there, other=0.0)).to(tl.float32) - predicted
                at, there = rows(residual, row, valid, head, H, value, V, SIZE, FULL_V)
                found = pseudo_residual(error, clip, LOSS)
                tl.store(at, tl.trans(found).to(residual.dtype.element_ty), mask=there)
        if cumulative is not None:
            w *= tl.exp2((total - sums).to(tl.float32))[None, :]
            s *= tl.exp2(total.to(tl.float32))
        s += tl.dot(w.to(kind), k_c, input_precision=PRECISION)
    if last is not None:
        tl.store(last + held + key[None, :] * V + value[:, None], s, mask=both)


@triton.jit
def reverse(
    r, k, e, read, d, cumulative, inverse, d_o, residual, d_residual, d_last, states_after, d_u, d_state,
    cu_seqlens, first, length, chunks, from_chunk, to_chunk, scale, clip, H, K, V,
    SIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL: tl.constexpr, FULL_V: tl.constexpr,
    LATE: tl.constexpr, STEPS: tl.constexpr, LOSS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state, from chunk to_chunk back to from_chunk, for one head's block of values.

    Starts from d_last [.., V, K] and leaves d_state [.., V, K]; writes the gradient of the state after each chunk,
    transposed too, and to d_u that of beta u (through the inverse).
    """
    FIT: tl.constexpr = LOSS is not None
    value, head, sequence = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    begin = tl.load(first + sequence) if PACKED else sequence * chunks
    if PACKED:
        to_chunk = tl.load(first + sequence + 1) - begin
    key = tl.arange(0, BK)
    i = tl.arange(0, SIZE)
    kind = k.dtype.element_ty
    both = (value < V)[:, None] & (key < K)[None, :]
    held = (sequence.to(tl.int64) * H + head) * K * V + value[:, None] * K + key[None, :]
    ds = tl.load(d_last + held, mask=both, other=0.0)
    for back in range(from_chunk, to_chunk):
        chunk = to_chunk - 1 - (back - from_chunk)
        row, valid = start + chunk * SIZE, length - chunk * SIZE
        at, there = rows(k, row, valid, head, H, key, K, SIZE, FULL)
        k_c = tl.load(at, mask=there, other=0.0)
        at, there = read_rows(r, start // STEPS, chunk * SIZE, length, head, H, key, K, SIZE, STEPS, FULL)
        r_c = tl.load(at, mask=there, other=0.0)
        at, there = read_rows(d_o, start // STEPS, chunk * SIZE, length, head, H, value, V, SIZE, STEPS, FULL_V)
        do_c = tl.trans(tl.load(at, mask=there, other=0.0)).to(tl.float32) * scale
        at = states_after + (((sequence.to(tl.int64) * (to_chunk - from_chunk) if not PACKED else begin.to(tl.int64))
                              + chunk - from_chunk) * H + head) * K * V + value[:, None] * K + key[None, :]  # fmt: skip
        tl.store(at, ds.to(states_after.dtype.element_ty), mask=both)
        within = tl.dot(r_c, tl.trans(k_c), input_precision=PRECISION)
        if read is not None:
            at, there = scalars(read, row, valid, head, H, SIZE)
            strength = tl.load(at, mask=there, other=0.0).to(tl.float32)
            within *= strength[:, None]
        if FIT or d is not None:
            overlap = tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION)
        if d is not None:
            at, there = scalars(d, row, valid, head, H, SIZE)
            correction = tl.load(at, mask=there, other=0.0).to(tl.float32)
            within -= correction[:, None] * overlap
        if cumulative is not None:
            sums = cumulative_at(cumulative, row, valid, head, H, SIZE, 0)
            earlier = cumulative_at(cumulative, row, valid, head, H, SIZE, 1)
            total = tl.load(cumulative + (row + tl.minimum(valid, SIZE) - 1) * H + head)
            seen = earlier if FIT else sums
            decay = apart(seen[:, None], sums[None, :], i[:, None], i[None, :], FIT)
        else:
            decay = tl.where(i[:, None] > i[None, :] if FIT else i[:, None] >= i[None, :], 1.0, 0.0)
        dw = tl.dot(ds.to(kind), tl.trans(k_c), input_precision=PRECISION)
        if cumulative is not None:
            dw *= tl.exp2((total - sums).to(tl.float32))[None, :]
        dw += tl.dot(do_c.to(kind), (within * decay).to(kind), input_precision=PRECISION)
        if FIT:
            at, there = rows(residual, row, valid, head, H, value, V, SIZE, FULL_V)
            found = tl.trans(tl.load(at, mask=there, other=0.0)).to(tl.float32)
            at, there = rows(d_residual, row, valid, head, H, value, V, SIZE, FULL_V)
            d_predicted = -tl.trans(tl.load(at, mask=there, other=0.0)).to(tl.float32) * slope(found, clip, LOSS)
            dw += tl.dot(d_predicted.to(kind), (overlap * decay).to(kind), input_precision=PRECISION)
        if e is not None:
            at = inverse + ((begin.to(tl.int64) + chunk) * H + head) * SIZE * SIZE + i[:, None] * SIZE + i[None, :]
            dw = tl.dot(dw.to(kind), tl.load(at), input_precision=PRECISION)
        at, there = rows(d_u, row, valid, head, H, value, V, SIZE, FULL_V)
        tl.store(at, tl.trans(dw).to(d_u.dtype.element_ty), mask=there)
        if cumulative is not None:
            ds *= tl.exp2(total.to(tl.float32))
            since = tl.exp2(seen.to(tl.float32))[None, :]
            do_c *= since
        if d is not None or e is not None or FIT:
            along = tl.zeros([BV, SIZE], tl.float32)
            if d is not None:
                along -= correction[None, :] * do_c
            if FIT:
                along += d_predicted * since if cumulative is not None else d_predicted
            if e is not None:
                at, there = scalars(e, row, valid, head, H, SIZE)
                erase = tl.load(at, mask=there, other=0.0).to(tl.float32)
                if cumulative is not None:
                    erase *= tl.exp2((sums if LATE else earlier).to(tl.float32))
                along -= erase[None, :] * dw
            ds += tl.dot(along.to(kind), k_c, input_precision=PRECISION)
        if read is not None:
            do_c *= strength[None, :]
        ds += tl.dot(do_c.to(kind), r_c, input_precision=PRECISION)
    tl.store(d_state + held, ds, mask=both)
