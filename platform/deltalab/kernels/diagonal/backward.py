"""The last kernel of the diagonal backward: the gradients of a chunk's operands, for all chunks at once.

It goes through the keys in blocks, so that all that a block needs stays in registers.
"""

from typing import no_type_check

import triton
import triton.language as tl

from deltalab.kernels.chunk import bounds, get_rows, locate, put_rows, put_scalars, scalars
from deltalab.kernels.diagonal.forward import (
    decay,
    factor_and_half,
    flat,
    halves,
    log_decays,
    near,
    near_squares,
    read_and_written,
)


@triton.jit
@no_type_check
def _both_ways(x, y, lower, upper, PRECISION: tl.constexpr):
    """Adds x y^T to `lower` and y x^T to `upper`, because transposing the result of a product is slow."""
    lower = tl.dot(x, tl.trans(y), lower, input_precision=PRECISION)
    return lower, tl.dot(y, tl.trans(x), upper, input_precision=PRECISION)


@triton.jit
@no_type_check
def _across(x, pairs, pairs_near, level: tl.constexpr, PRECISION: tl.constexpr):
    """pairs @ x, [blocks, 16, W], over the pairs in different halves of a block of this level."""
    if level < 4:
        found = tl.where(halves(level, 16)[None, :, :], pairs_near, 0.0).to(x.dtype)
        found = tl.dot(found, x, input_precision=PRECISION)
    else:
        SIZE: tl.constexpr = pairs.shape[0]
        found = tl.where(halves(level, SIZE), pairs, 0.0).to(x.dtype)
        found = near(tl.dot(found, flat(x), input_precision=PRECISION))
    return found


@triton.jit
@no_type_check
def _summed(x, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """sum_{j >= i} x_jc in fp32. A KIND of 16 bits takes x in two parts, because its terms cancel."""
    N: tl.constexpr = x.shape[0]
    chosen = tl.arange(0, N)[:, None] <= tl.arange(0, N)[None, :]
    if PRECISION == "ieee":
        total = tl.dot(chosen.to(tl.float32), x, input_precision="ieee")
    else:
        high = x.to(KIND)
        chosen = chosen.to(KIND)
        total = tl.dot(chosen, (x - high.to(tl.float32)).to(KIND))
        total = tl.dot(chosen, high, total)
    return total


@triton.jit
@no_type_check
def gradients(
    r, k, u, g, e, a, b, beta, read, d, kept, written, d_seen, states, states_after, d_o, d_u,
    d_r, d_k, new_d_u, d_g, d_e, d_a, d_b, d_beta, d_read, d_d,
    cu_seqlens, of, first, length, from_chunk, span, sequences, total, scale, H, K: tl.constexpr, V: tl.constexpr,
    SIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LATE: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one chunk and head. d_u: if tied, of beta u before and of u after.

    What is read or erased at i grows with G_i, and what is written at j shrinks with G_j. So the gradient of G is each
    vector times its own gradient, and the gradient of g is the sum of that from the last token on.
    """
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    kind: tl.constexpr = k.dtype
    OWN: tl.constexpr = LATE or written is None
    # Programs that run at a time take heads of the same tokens, which lie side by side.
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        program, head = index // H, index % H
        sequence, chunk = locate(program, of, first, span, PACKED)
        chunk += from_chunk
        start, tokens = bounds(tl.minimum(sequence, sequences - 1), cu_seqlens, length, PACKED)
        # Chunks beyond the last one, which packed sequences may leave, have no row.
        tokens = tl.where(sequence < sequences, tokens, 0)
        row, valid = start + chunk * SIZE, tokens - chunk * SIZE
        slot = program * H + head
        here = slot * SIZE

        d_p, d_p_t = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
        if written is not None:
            d_m, d_m_t = d_p, d_p
        if a is not None:
            d_q, d_q_t, d_n, d_n_t = d_p, d_p, d_p, d_p
        for block in tl.static_range(0, V, BV):
            do = get_rows(d_o, row, valid, head * V + block, SIZE, RAGGED)
            if written is not None:
                w = written.load([here, block])
            v = get_rows(u, row, valid, head * V + block, SIZE, RAGGED) if e is None else w
            d_p, d_p_t = _both_ways(do, v, d_p, d_p_t, PRECISION)
            if written is not None:
                if a is not None:
                    seen = d_seen.load([here, block])
                    d_q, d_q_t = _both_ways(do, w, d_q, d_q_t, PRECISION)
                    d_n, d_n_t = _both_ways(seen, v, d_n, d_n_t, PRECISION)
                else:
                    # The gradient of -e k S, which the system needs as well.
                    seen = get_rows(d_u, row, valid, head * V + block, SIZE, RAGGED)
                d_m, d_m_t = _both_ways(seen, w, d_m, d_m_t, PRECISION)
        p_here = tl.sum(tl.where(i == j, d_p, 0.0), 1)[:, None]
        d_p = tl.where(i > j, d_p, d_p_t)
        p_near = near_squares(d_p, SIZE)
        if written is not None:
            d_m = tl.where(i > j, d_m, d_m_t)
            if e is not None:
                erase = scalars(e, row, valid, head, H, SIZE)
                d_m = -d_m
            m_near = near_squares(d_m, SIZE)
        if a is not None:
            q_here = tl.sum(tl.where(i == j, d_q, 0.0), 1)[:, None]
            # d_q: readers against adders, and adders against readers. d_n: erasers against writers, and the reverse.
            d_q, d_n = tl.where(i > j, d_q, d_n_t), tl.where(i > j, d_n, d_q_t)
            q_near, n_near = near_squares(d_q, SIZE), near_squares(d_n, SIZE)
        if e is not None:
            d_erase = tl.zeros([SIZE], tl.float32)
        if beta is not None:
            strength = scalars(beta, row, valid, head, H, SIZE)[:, None]
            d_strength = tl.zeros([SIZE], tl.float32)
        if read is not None:
            d_factor = tl.zeros([SIZE], tl.float32)
        if d is not None:
            d_correction = tl.zeros([SIZE], tl.float32)

        for key in range(0, K, BK):
            column = head * K + key
            from_read, from_write = tl.zeros([SIZE, BK], tl.float32), tl.zeros([SIZE, BK], tl.float32)
            ended = tl.zeros([BK, BK], tl.float32)
            if written is not None:
                from_erase = tl.zeros([SIZE, BK], tl.float32)
            if a is not None:
                from_add = tl.zeros([SIZE, BK], tl.float32)
            for block in tl.static_range(0, V, BV):
                before, after = states.load([slot * V + block, key]), states_after.load([slot * V + block, key])
                # Only its diagonal is needed; a product costs less than sums in registers.
                ended = tl.dot(tl.trans(before), after, ended, input_precision=PRECISION)
                if V > BV:
                    do = get_rows(d_o, row, valid, head * V + block, SIZE, RAGGED)
                from_read = tl.dot(do, before, from_read, input_precision=PRECISION)
                if V > BV and written is not None:
                    w = written.load([here, block])
                if a is not None:
                    from_add = tl.dot(w, after, from_add, input_precision=PRECISION)
                    if V > BV:
                        seen = d_seen.load([here, block])
                elif written is not None and V > BV:
                    seen = get_rows(d_u, row, valid, head * V + block, SIZE, RAGGED)
                if written is not None:
                    from_erase = tl.dot(seen, before, from_erase, input_precision=PRECISION)
                if V > BV:
                    v = get_rows(u, row, valid, head * V + block, SIZE, RAGGED) if e is None else w
                from_write = tl.dot(v, after, from_write, input_precision=PRECISION)
            ends = tl.load(kept + slot.to(tl.int64) * K + key + tl.arange(0, BK))
            diagonal = tl.arange(0, BK)[:, None] == tl.arange(0, BK)[None, :]
            d_end = ends * tl.sum(tl.where(diagonal, ended, 0.0), 0)

            g_c = log_decays(g, row, valid, column, PRECISION, SIZE, RAGGED)
            g_near = near(g_c)
            reader, writer = read_and_written(r, k, e, beta, read, d, row, valid, head, H, column, scale, SIZE, RAGGED)
            reader, writer = near(reader), near(writer)
            if not OWN:
                reader *= tl.exp2(g_near.to(tl.float32))
            since, until = near(decay(j <= i if OWN else j < i, g_c)), near(decay(j > i, g_c))
            d_reader, d_writer = near(from_read) * since, near(from_write) * until
            d_end += tl.sum(flat(writer * d_writer), 0)
            if OWN:
                # What a token reads of itself cancels in the gradient of g.
                d_reader += near(p_here) * writer
                d_writer += near(p_here) * reader
            if written is not None:
                if a is not None:
                    eraser = near(get_rows(b, row, valid, column, SIZE, RAGGED).to(tl.float32))
                else:
                    eraser = near(erase[:, None]) * writer
                d_eraser = near(from_erase) * (since if a is not None else -since)
            if a is not None:
                adder = near(get_rows(a, row, valid, column, SIZE, RAGGED).to(tl.float32))
                d_adder = near(from_add) * until
                d_end += tl.sum(flat(adder * d_adder), 0)
                if OWN:
                    d_reader += near(q_here) * adder
                    d_adder += near(q_here) * reader
            for level in tl.static_range(7):
                if 1 << level < SIZE:
                    factor, behind = factor_and_half(g_c, g_near, level, OWN)
                    x = (tl.where(behind, reader, writer) * factor).to(kind)
                    dx = _across(x, d_p, p_near, level, PRECISION)
                    if a is not None:
                        y = (tl.where(behind, eraser, adder) * factor).to(kind)
                        dx += _across(y, d_q, q_near, level, PRECISION)
                    d_reader = tl.where(behind, d_reader + dx * factor, d_reader)
                    d_writer = tl.where(behind, d_writer, d_writer + dx * factor)
                    if a is not None:
                        dy = _across(y, d_m, m_near, level, PRECISION)
                        dy += _across(x, d_n, n_near, level, PRECISION)
                        d_eraser = tl.where(behind, d_eraser + dy * factor, d_eraser)
                        d_adder = tl.where(behind, d_adder, d_adder + dy * factor)
                    if e is not None:
                        y = (tl.where(behind, eraser, writer) * factor).to(kind)
                        dy = _across(y, d_m, m_near, level, PRECISION)
                        d_eraser = tl.where(behind, d_eraser + dy * factor, d_eraser)
                        d_writer = tl.where(behind, d_writer, d_writer + dy * factor)
            # Without LATE, an eraser sees the state before its own g.
            d_decay = reader * d_reader - writer * d_writer
            if written is not None:
                from_eraser = eraser * d_eraser
                d_decay += from_eraser
            if a is not None:
                d_decay -= adder * d_adder
            dg = _summed(flat(d_decay), kind, PRECISION) + d_end[None, :]
            if written is not None and not LATE:
                dg -= flat(from_eraser)
            put_rows(d_g, dg, row, valid, column, H * K, SIZE, BK, RAGGED)

            d_reader, d_writer = flat(d_reader), flat(d_writer)
            if not OWN:
                reader, writer = read_and_written(
                    r, k, e, beta, read, d, row, valid, head, H, column, scale, SIZE, RAGGED
                )  # fmt: skip
                d_reader = tl.exp2(g_c.to(tl.float32)) * d_reader + p_here * writer
                d_writer += p_here * reader
                if a is not None:
                    d_reader += q_here * flat(adder)
                    put_rows(d_a, flat(d_adder) + q_here * reader, row, valid, column, H * K, SIZE, BK, RAGGED)
            elif a is not None:
                put_rows(d_a, flat(d_adder), row, valid, column, H * K, SIZE, BK, RAGGED)
            d_reader *= scale
            if e is not None or beta is not None or d is not None:
                along = get_rows(k, row, valid, column, SIZE, RAGGED).to(tl.float32)
            if e is not None:
                d_eraser = flat(d_eraser)
                d_erase += tl.sum(along * d_eraser, 1)
                d_writer += erase[:, None] * d_eraser
            elif beta is not None:
                d_strength += tl.sum(along * d_writer, 1)
                d_writer *= strength
            if b is not None:
                put_rows(d_b, flat(d_eraser), row, valid, column, H * K, SIZE, BK, RAGGED)
            if d is not None:
                d_correction -= tl.sum(along * d_reader, 1)
                d_writer -= scalars(d, row, valid, head, H, SIZE)[:, None] * d_reader
            if read is not None:
                d_factor += tl.sum(get_rows(r, row, valid, column, SIZE, RAGGED).to(tl.float32) * d_reader, 1)
                d_reader *= scalars(read, row, valid, head, H, SIZE)[:, None]
            put_rows(d_r, d_reader, row, valid, column, H * K, SIZE, BK, RAGGED)
            put_rows(d_k, d_writer, row, valid, column, H * K, SIZE, BK, RAGGED)
        if e is not None:
            put_scalars(d_e, d_erase, row, valid, head, H, SIZE)
        if read is not None:
            put_scalars(d_read, d_factor, row, valid, head, H, SIZE)
        if d is not None:
            put_scalars(d_d, d_correction, row, valid, head, H, SIZE)
        if e is not None and beta is not None:
            for block in range(0, V, BV):
                u_c = get_rows(u, row, valid, head * V + block, SIZE, RAGGED).to(tl.float32)
                du = get_rows(d_u, row, valid, head * V + block, SIZE, RAGGED).to(tl.float32)
                d_strength += tl.sum(du * u_c, 1)
                put_rows(new_d_u, strength * du, row, valid, head * V + block, H * V, SIZE, BV, RAGGED)
        if beta is not None:
            put_scalars(d_beta, d_strength, row, valid, head, H, SIZE)
