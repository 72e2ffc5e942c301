"""Kernels for a state that decays by a scalar or not at all, and erases along its key or not at all.

Per chunk that starts at S, with G the cumulative log-decay and A_ij = exp(G_i - G_j) (reference._scan says more):

    (I + M) w = beta u - e exp(G') k S,   M_ij = e_i exp(G'_i - G_j) k_i . k_j,  j < i     G' = G or G_{i-1}
    o = scale (exp(G) r S + (A * r k^T) w),   S <- exp(G_C) S + k^T (exp(G_C - G) w)

`prepare` inverts I + M for all chunks at once; `scan` goes through the chunks with the state in registers. It lies
there transposed, [V, K]: then the left operand of every product is in registers already, and the right one is a tile
that was loaded ahead. K is a power of two and V a multiple of BV; r, k, u, .. are descriptors (`chunk.tiles`).
"""

import triton
import triton.language as tl

from deltalab.kernels.chunk import (
    LOG2_E,
    LOWEST,
    apart,
    bounds,
    cumulative_at,
    get_rows,
    locate,
    put_rows,
    put_scalars,
    scalars,
    unit_lower_inverse,
)


@triton.jit
def prepare(
    k, g, e, cumulative, inverse, cu_seqlens, of, first, length, chunks, sequences, H,
    K: tl.constexpr, SIZE: tl.constexpr, LATE: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
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
        step = tl.maximum(scalars(g, row, valid, head, H, SIZE), LOWEST) * LOG2_E
        step = step.to(cumulative.dtype.element_ty)
        sums = tl.cumsum(step, 0)
        put_scalars(cumulative, sums, row, valid, head, H, SIZE)
    if e is not None:
        key = get_rows(k, row, valid, head * K, SIZE, RAGGED)
        system = tl.dot(key, tl.trans(key), input_precision="ieee")
        system *= scalars(e, row, valid, head, H, SIZE)[:, None]
        if g is not None:
            seen = sums if LATE else sums - step
            system *= apart(seen[:, None], sums[None, :], i[:, None], i[None, :], True)
        else:
            system = tl.where(i[:, None] > i[None, :], system, 0.0)
        solved = unit_lower_inverse(system, SIZE, PRECISION)
        inverse.store([(program * H + head) * SIZE, 0], solved.to(inverse.dtype))


@triton.jit
def pseudo_residual(error, clip, LOSS: tl.constexpr):
    """structure.ResidualState, of an error in fp32; tanh by exp of what is not positive, lest it overflow."""
    if LOSS == "huber":
        error = tl.minimum(tl.maximum(error, -clip), clip)
    elif LOSS == "log_cosh":
        small = tl.exp(-2 * tl.abs(error))
        error = tl.where(error < 0, -1.0, 1.0) * (1 - small) / (1 + small)
    return error


@triton.jit
def through_residual(upstream, residual, clip, LOSS: tl.constexpr):
    """The gradient of the error, from that of its pseudo-residual and the pseudo-residual's value."""
    if LOSS == "huber":
        upstream = tl.where(tl.abs(residual) < clip, upstream, 0.0)
    elif LOSS == "log_cosh":
        upstream *= 1 - residual * residual
    return upstream


@triton.jit
def scan(
    r, k, u, e, beta, read, d, cumulative, inverse, target, state, begin_states,
    o, residual, last, states, written,
    cu_seqlens, first, length, chunks, from_chunk, to_chunk, every, segments, scale, clip, H, V,
    K: tl.constexpr, SIZE: tl.constexpr, BV: tl.constexpr, LATE: tl.constexpr, LOSS: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head's block of values through chunks from_chunk to to_chunk.

    Writes what is not None: the output o; `residual` of `target`, which reads what its token has not written yet, as o
    then does; the last state; `states` that chunks start with, transposed, and what they `written`.
    begin_states: [B, segments, H, V, K], the state before every `every`-th chunk; written where o is, else read.
    """
    FIT: tl.constexpr = LOSS is not None
    block, head, sequence = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    slot = sequence * (to_chunk - from_chunk)
    number = sequence * chunks
    if PACKED:
        number = tl.load(first + sequence)
        slot = number
        to_chunk = tl.load(first + sequence + 1) - number
    i, value, key = tl.arange(0, SIZE), block + tl.arange(0, BV), tl.arange(0, K)
    kind = k.dtype
    held = (sequence.to(tl.int64) * H + head) * K * V + key[None, :] * V + value[:, None]
    begun = (sequence.to(tl.int64) * segments * H + head) * K * V + value[:, None] * K + key[None, :]
    if o is None:
        s = tl.load(begin_states + begun + (from_chunk // every).to(tl.int64) * H * K * V)
    elif state is not None:
        s = tl.load(state + held).to(tl.float32)
    else:
        s = tl.zeros([BV, K], tl.float32)
    for chunk in range(from_chunk, to_chunk):
        row, valid = start + chunk * SIZE, length - chunk * SIZE
        if states is not None:
            states.store([((slot + chunk - from_chunk) * H + head) * V + block, 0], s.to(kind))
        elif begin_states is not None:
            if chunk % every == 0:
                tl.store(begin_states + begun + (chunk // every).to(tl.int64) * H * K * V, s)
        k_c = get_rows(k, row, valid, head * K, SIZE, RAGGED)
        if cumulative is not None:
            sums = cumulative_at(cumulative, row, valid, head, H, SIZE, 0)
            earlier = cumulative_at(cumulative, row, valid, head, H, SIZE, 1)
            total = tl.load(cumulative + (row.to(tl.int64) + tl.minimum(valid, SIZE) - 1) * H + head)
        if e is not None or FIT or d is not None:
            k_s = tl.dot(s.to(kind), tl.trans(k_c), input_precision=PRECISION)
        w = tl.trans(get_rows(u, row, valid, head * V + block, SIZE, RAGGED)).to(tl.float32)
        if beta is not None:
            w *= scalars(beta, row, valid, head, H, SIZE)[None, :]
        if e is not None:
            erase = scalars(e, row, valid, head, H, SIZE)
            if cumulative is not None:
                erase *= tl.exp2((sums if LATE else earlier).to(tl.float32))
            solve = inverse.load([((number + chunk) * H + head) * SIZE, 0])
            w = tl.dot((w - erase[None, :] * k_s).to(kind), tl.trans(solve), input_precision=PRECISION)
        if written is not None:
            put_rows(written, tl.trans(w), row, valid, head * V + block, H * V, SIZE, BV, RAGGED)
        if o is not None:
            r_c = get_rows(r, row, valid, head * K, SIZE, RAGGED)
            within = tl.dot(k_c, tl.trans(r_c), input_precision=PRECISION)
            if read is not None:
                strength = scalars(read, row, valid, head, H, SIZE)[None, :]
                within *= strength
            if FIT or d is not None:
                overlap = tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION)
            if d is not None:
                correction = scalars(d, row, valid, head, H, SIZE)[None, :]
                within -= correction * overlap
            if cumulative is not None:
                seen = earlier if FIT else sums
                decay = apart(seen[None, :], sums[:, None], i[None, :], i[:, None], FIT)
            else:
                decay = tl.where(i[None, :] > i[:, None] if FIT else i[None, :] >= i[:, None], 1.0, 0.0)
            within = (within * decay).to(kind)
            out = tl.dot(s.to(kind), tl.trans(r_c), input_precision=PRECISION)
            if read is not None:
                out *= strength
            if d is not None:
                out -= correction * k_s
            if cumulative is not None:
                since = tl.exp2(seen.to(tl.float32))[None, :]
                out *= since
            out += tl.dot(w.to(kind), within, input_precision=PRECISION)
            put_rows(o, tl.trans(out * scale), row, valid, head * V + block, H * V, SIZE, BV, RAGGED)
            if FIT:
                predicted = tl.dot(w.to(kind), (overlap * decay).to(kind), input_precision=PRECISION)
                predicted += k_s * since if cumulative is not None else k_s
                error = tl.trans(get_rows(target, row, valid, head * V + block, SIZE, RAGGED)).to(tl.float32)
                found = pseudo_residual(error - predicted, clip, LOSS)
                put_rows(residual, tl.trans(found), row, valid, head * V + block, H * V, SIZE, BV, RAGGED)
        if cumulative is not None:
            w *= tl.exp2((total - sums).to(tl.float32))[None, :]
            s *= tl.exp2(total.to(tl.float32))
        s += tl.dot(w.to(kind), k_c, input_precision=PRECISION)
    if last is not None:
        tl.store(last + held, s)


@triton.jit
def reverse(
    r, k, e, read, d, cumulative, inverse, d_o, residual, d_residual, d_state, states_after, d_u,
    cu_seqlens, first, length, chunks, from_chunk, to_chunk, scale, clip, H, V,
    K: tl.constexpr, SIZE: tl.constexpr, BV: tl.constexpr, LATE: tl.constexpr, LOSS: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state, d_state [.., V, K], from chunk to_chunk back to from_chunk, a head's block of values.

    Writes the gradient of the state after each chunk, transposed too, and to d_u that of beta u (through the inverse).
    """
    FIT: tl.constexpr = LOSS is not None
    block, head, sequence = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    slot = sequence * (to_chunk - from_chunk)
    number = sequence * chunks
    if PACKED:
        number = tl.load(first + sequence)
        slot = number
        to_chunk = tl.load(first + sequence + 1) - number
    i, value, key = tl.arange(0, SIZE), block + tl.arange(0, BV), tl.arange(0, K)
    kind = k.dtype
    held = d_state + (sequence.to(tl.int64) * H + head) * K * V + value[:, None] * K + key[None, :]
    ds = tl.load(held)
    for back in range(from_chunk, to_chunk):
        chunk = to_chunk - 1 - (back - from_chunk)
        row, valid = start + chunk * SIZE, length - chunk * SIZE
        states_after.store([((slot + chunk - from_chunk) * H + head) * V + block, 0], ds.to(kind))
        k_c = get_rows(k, row, valid, head * K, SIZE, RAGGED)
        r_c = get_rows(r, row, valid, head * K, SIZE, RAGGED)
        do_c = tl.trans(get_rows(d_o, row, valid, head * V + block, SIZE, RAGGED))
        within = tl.dot(r_c, tl.trans(k_c), input_precision=PRECISION) * scale
        if read is not None:
            strength = scalars(read, row, valid, head, H, SIZE)
            within *= strength[:, None]
        if FIT or d is not None:
            overlap = tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION)
        if d is not None:
            correction = scalars(d, row, valid, head, H, SIZE) * scale
            within -= correction[:, None] * overlap
        if cumulative is not None:
            sums = cumulative_at(cumulative, row, valid, head, H, SIZE, 0)
            earlier = cumulative_at(cumulative, row, valid, head, H, SIZE, 1)
            total = tl.load(cumulative + (row.to(tl.int64) + tl.minimum(valid, SIZE) - 1) * H + head)
            seen = earlier if FIT else sums
            decay = apart(seen[:, None], sums[None, :], i[:, None], i[None, :], FIT)
        else:
            decay = tl.where(i[:, None] > i[None, :] if FIT else i[:, None] >= i[None, :], 1.0, 0.0)
        dw = tl.dot(ds.to(kind), tl.trans(k_c), input_precision=PRECISION)
        if cumulative is not None:
            dw *= tl.exp2((total - sums).to(tl.float32))[None, :]
        dw += tl.dot(do_c, (within * decay).to(kind), input_precision=PRECISION)
        if FIT:
            found = tl.trans(get_rows(residual, row, valid, head * V + block, SIZE, RAGGED)).to(tl.float32)
            wrong = tl.trans(get_rows(d_residual, row, valid, head * V + block, SIZE, RAGGED)).to(tl.float32)
            wrong = through_residual(wrong, found, clip, LOSS)
            dw -= tl.dot(wrong.to(kind), (overlap * decay).to(kind), input_precision=PRECISION)
        if e is not None:
            solve = inverse.load([((number + chunk) * H + head) * SIZE, 0])
            dw = tl.dot(dw.to(kind), solve, input_precision=PRECISION)
        put_rows(d_u, tl.trans(dw), row, valid, head * V + block, H * V, SIZE, BV, RAGGED)
        if cumulative is not None:
            ds *= tl.exp2(total.to(tl.float32))
            since = tl.exp2(seen.to(tl.float32))[None, :]
        reads = do_c.to(tl.float32) * scale
        if cumulative is not None:
            reads *= since
        if d is not None or e is not None or FIT:
            along = tl.zeros([BV, SIZE], tl.float32)
            if d is not None:
                along -= correction[None, :] / scale * reads
            if FIT:
                along -= wrong * since if cumulative is not None else wrong
            if e is not None:
                erase = scalars(e, row, valid, head, H, SIZE)
                if cumulative is not None:
                    erase *= tl.exp2((sums if LATE else earlier).to(tl.float32))
                along -= erase[None, :] * dw
            ds += tl.dot(along.to(kind), k_c, input_precision=PRECISION)
        if read is not None:
            reads *= strength[None, :]
        ds += tl.dot(reads.to(kind), r_c, input_precision=PRECISION)
    tl.store(held, ds)
