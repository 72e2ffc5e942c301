"""The last kernel of the diagonal backward: the gradients of a chunk's operands, for all chunks at once.

The kernel goes through the keys in blocks, so that all that a block needs stays in registers.
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
    """Computes pairs @ x, [blocks, 16, W], over the pairs in different halves of a block of this level."""
    if level < 4:
        product = tl.where(halves(level, 16)[None, :, :], pairs_near, 0.0).to(x.dtype)
        product = tl.dot(product, x, input_precision=PRECISION)
    else:
        BT: tl.constexpr = pairs.shape[0]
        product = tl.where(halves(level, BT), pairs, 0.0).to(x.dtype)
        product = near(tl.dot(product, flat(x), input_precision=PRECISION))
    return product


@triton.jit
@no_type_check
def _summed(x, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Computes sum_{j >= i} x_jc in fp32. A DTYPE of 16 bits takes x in two parts, because the terms cancel."""
    N: tl.constexpr = x.shape[0]
    chosen = tl.arange(0, N)[:, None] <= tl.arange(0, N)[None, :]
    if PRECISION == "ieee":
        total = tl.dot(chosen.to(tl.float32), x, input_precision="ieee")
    else:
        high = x.to(DTYPE)
        chosen = chosen.to(DTYPE)
        total = tl.dot(chosen, (x - high.to(tl.float32)).to(DTYPE))
        total = tl.dot(chosen, high, total)
    return total


@triton.jit
@no_type_check
def gradients(
    r, k, u, g, e, a, b, beta, read, d, kept, written, d_seen, states, states_after, d_o, d_u,
    d_r, d_k, new_d_u, d_g, d_e, d_a, d_b, d_beta, d_read, d_d,
    cu_seqlens, chunk_sequences, first_chunks, length, from_chunk, span, sequences, total, scale, H,
    K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, LATE: tl.constexpr,
    EARLY: tl.constexpr, EXACT: tl.constexpr, PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one chunk and head.

    If the low rank is tied, `d_u` and `new_d_u` are one tensor, which holds the gradient of beta u before the kernel
    and the gradient of u after. What is read or erased at i grows with G_i, and what is written at j shrinks with G_j.
    So the gradient of G is each vector times its own gradient, and the gradient of g is the sum of these products from
    the last token on. If EXACT, both tokens of a pair enter it by their rounded vectors, so that they cancel in tokens
    before the pair. It costs registers.
    """
    i, j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    dtype: tl.constexpr = k.dtype
    OWN: tl.constexpr = (LATE or written is None) and not EARLY
    # Programs that run at a time take heads of the same tokens, which lie side by side.
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        program, head = index // H, index % H
        sequence, chunk = locate(program, chunk_sequences, first_chunks, span, PACKED)
        chunk += from_chunk
        start, tokens = bounds(tl.minimum(sequence, sequences - 1), cu_seqlens, length, PACKED)
        # Chunks beyond the last one, which packed sequences may leave, have no row.
        tokens = tl.where(sequence < sequences, tokens, 0)
        row, valid = start + chunk * BT, tokens - chunk * BT
        slot = program * H + head
        slot_row = slot * BT

        d_p, d_p_t = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
        if written is not None:
            d_m, d_m_t = d_p, d_p
        if a is not None:
            d_q, d_q_t, d_n, d_n_t = d_p, d_p, d_p, d_p
        for block in tl.static_range(0, V, BV):
            do = get_rows(d_o, row, valid, head * V + block, BT, RAGGED)
            if written is not None:
                w = written.load([slot_row, block])
            write_c = get_rows(u, row, valid, head * V + block, BT, RAGGED) if e is None else w
            d_p, d_p_t = _both_ways(do, write_c, d_p, d_p_t, PRECISION)
            if written is not None:
                if a is not None:
                    d_seen_c = d_seen.load([slot_row, block])
                    d_q, d_q_t = _both_ways(do, w, d_q, d_q_t, PRECISION)
                    d_n, d_n_t = _both_ways(d_seen_c, write_c, d_n, d_n_t, PRECISION)
                else:
                    # The gradient of -e k S, which the system needs as well.
                    d_seen_c = get_rows(d_u, row, valid, head * V + block, BT, RAGGED)
                d_m, d_m_t = _both_ways(d_seen_c, w, d_m, d_m_t, PRECISION)
        p_here = tl.sum(tl.where(i == j, d_p, 0.0), 1)[:, None]
        d_p = tl.where(i > j, d_p, d_p_t)
        p_near = near_squares(d_p, BT)
        if written is not None:
            d_m = tl.where(i > j, d_m, d_m_t)
            if e is not None:
                e_c = scalars(e, row, valid, head, H, BT)
                d_m = -d_m
            m_near = near_squares(d_m, BT)
        if a is not None:
            q_here = tl.sum(tl.where(i == j, d_q, 0.0), 1)[:, None]
            # d_q: readers against adders, and adders against readers. d_n: erasers against writers, and the reverse.
            d_q, d_n = tl.where(i > j, d_q, d_n_t), tl.where(i > j, d_n, d_q_t)
            q_near, n_near = near_squares(d_q, BT), near_squares(d_n, BT)
        if e is not None:
            d_e_c = tl.zeros([BT], tl.float32)
        if beta is not None:
            beta_c = scalars(beta, row, valid, head, H, BT)[:, None]
            d_beta_c = tl.zeros([BT], tl.float32)
        if read is not None:
            d_read_c = tl.zeros([BT], tl.float32)
        if d is not None:
            d_d_c = tl.zeros([BT], tl.float32)

        for key in range(0, K, BK):
            column = head * K + key
            from_read, from_write = tl.zeros([BT, BK], tl.float32), tl.zeros([BT, BK], tl.float32)
            ended = tl.zeros([BK, BK], tl.float32)
            if written is not None:
                from_erase = tl.zeros([BT, BK], tl.float32)
            if a is not None:
                from_add = tl.zeros([BT, BK], tl.float32)
            for block in tl.static_range(0, V, BV):
                before, after = states.load([slot * V + block, key]), states_after.load([slot * V + block, key])
                # Only the diagonal of `ended` is needed; a product costs less than sums in registers.
                ended = tl.dot(tl.trans(before), after, ended, input_precision=PRECISION)
                if V > BV:
                    do = get_rows(d_o, row, valid, head * V + block, BT, RAGGED)
                from_read = tl.dot(do, before, from_read, input_precision=PRECISION)
                if V > BV and written is not None:
                    w = written.load([slot_row, block])
                if a is not None:
                    from_add = tl.dot(w, after, from_add, input_precision=PRECISION)
                    if V > BV:
                        d_seen_c = d_seen.load([slot_row, block])
                elif written is not None and V > BV:
                    d_seen_c = get_rows(d_u, row, valid, head * V + block, BT, RAGGED)
                if written is not None:
                    from_erase = tl.dot(d_seen_c, before, from_erase, input_precision=PRECISION)
                if V > BV:
                    write_c = get_rows(u, row, valid, head * V + block, BT, RAGGED) if e is None else w
                from_write = tl.dot(write_c, after, from_write, input_precision=PRECISION)
            ends = tl.load(kept + slot.to(tl.int64) * K + key + tl.arange(0, BK))
            diagonal = tl.arange(0, BK)[:, None] == tl.arange(0, BK)[None, :]
            d_end = ends * tl.sum(tl.where(diagonal, ended, 0.0), 0)

            g_c = log_decays(g, row, valid, column, PRECISION, BT, RAGGED)
            g_near = near(g_c)
            reader, writer = read_and_written(r, k, e, beta, read, d, row, valid, head, H, column, scale, BT, RAGGED)
            reader, writer = near(reader), near(writer)
            if not OWN and not EARLY:
                reader *= tl.exp2(g_near.to(tl.float32))
            since, until = near(decay(j <= i if OWN else j < i, g_c)), near(decay(j > i, g_c))
            d_reader, d_writer = near(from_read) * since, near(from_write) * until
            d_end += tl.sum(flat(writer * d_writer), 0)
            if OWN:
                # What a token reads of its own write cancels in the gradient of g.
                d_reader += near(p_here) * writer
                d_writer += near(p_here) * reader
            if written is not None:
                if a is not None:
                    eraser = near(get_rows(b, row, valid, column, BT, RAGGED).to(tl.float32))
                else:
                    eraser = near(e_c[:, None]) * writer
                d_eraser = near(from_erase) * (since if a is not None else -since)
            if a is not None:
                adder = near(get_rows(a, row, valid, column, BT, RAGGED).to(tl.float32))
                d_adder = near(from_add) * until
                d_end += tl.sum(flat(adder * d_adder), 0)
                if OWN:
                    d_reader += near(q_here) * adder
                    d_adder += near(q_here) * reader
            if EXACT:
                from_reader = reader * d_reader
                d_decay = from_reader - writer * d_writer
                if written is not None:
                    from_eraser = eraser * d_eraser
                    d_decay += from_eraser
                if a is not None:
                    d_decay -= adder * d_adder
            for level in tl.static_range(7):
                if 1 << level < BT:
                    factor, second_half = factor_and_half(g_c, g_near, level, OWN)
                    x = (tl.where(second_half, reader, writer) * factor).to(dtype)
                    dx = _across(x, d_p, p_near, level, PRECISION)
                    if a is not None:
                        y = (tl.where(second_half, eraser, adder) * factor).to(dtype)
                        dx += _across(y, d_q, q_near, level, PRECISION)
                    d_reader = tl.where(second_half, d_reader + dx * factor, d_reader)
                    d_writer = tl.where(second_half, d_writer, d_writer + dx * factor)
                    if a is not None:
                        dy = _across(y, d_m, m_near, level, PRECISION)
                        dy += _across(x, d_n, n_near, level, PRECISION)
                        d_eraser = tl.where(second_half, d_eraser + dy * factor, d_eraser)
                        d_adder = tl.where(second_half, d_adder, d_adder + dy * factor)
                    if e is not None:
                        y = (tl.where(second_half, eraser, writer) * factor).to(dtype)
                        dy = _across(y, d_m, m_near, level, PRECISION)
                        d_eraser = tl.where(second_half, d_eraser + dy * factor, d_eraser)
                        d_writer = tl.where(second_half, d_writer, d_writer + dy * factor)
                    if EXACT:
                        d_decay += tl.where(second_half, x.to(tl.float32), -x.to(tl.float32)) * dx
                        if EARLY:
                            from_reader += tl.where(second_half, x.to(tl.float32), 0.0) * dx
                        if written is not None:
                            d_decay += tl.where(second_half, y.to(tl.float32), -y.to(tl.float32)) * dy
                            from_eraser += tl.where(second_half, y.to(tl.float32), 0.0) * dy
            if not EXACT:
                from_reader = reader * d_reader
                d_decay = from_reader - writer * d_writer
                if written is not None:
                    from_eraser = eraser * d_eraser
                    d_decay += from_eraser
                if a is not None:
                    d_decay -= adder * d_adder
            # Without LATE, an eraser sees the state before its own g, and if EARLY, a reader.
            dg = _summed(flat(d_decay), dtype, PRECISION) + d_end[None, :]
            if written is not None and not LATE:
                dg -= flat(from_eraser)
            if EARLY:
                dg -= flat(from_reader)
            put_rows(d_g, dg, row, valid, column, H * K, BT, BK, RAGGED)

            d_reader, d_writer = flat(d_reader), flat(d_writer)
            if not OWN and not EARLY:
                reader, writer = read_and_written(
                    r, k, e, beta, read, d, row, valid, head, H, column, scale, BT, RAGGED
                )  # fmt: skip
                d_reader = tl.exp2(g_c.to(tl.float32)) * d_reader + p_here * writer
                d_writer += p_here * reader
                if a is not None:
                    d_reader += q_here * flat(adder)
                    put_rows(d_a, flat(d_adder) + q_here * reader, row, valid, column, H * K, BT, BK, RAGGED)
            elif a is not None:
                put_rows(d_a, flat(d_adder), row, valid, column, H * K, BT, BK, RAGGED)
            d_reader *= scale
            if e is not None or beta is not None or d is not None:
                k_c = get_rows(k, row, valid, column, BT, RAGGED).to(tl.float32)
            if e is not None:
                d_eraser = flat(d_eraser)
                d_e_c += tl.sum(k_c * d_eraser, 1)
                d_writer += e_c[:, None] * d_eraser
            elif beta is not None:
                d_beta_c += tl.sum(k_c * d_writer, 1)
                d_writer *= beta_c
            if b is not None:
                put_rows(d_b, flat(d_eraser), row, valid, column, H * K, BT, BK, RAGGED)
            if d is not None:
                d_d_c -= tl.sum(k_c * d_reader, 1)
                d_writer -= scalars(d, row, valid, head, H, BT)[:, None] * d_reader
            if read is not None:
                d_read_c += tl.sum(get_rows(r, row, valid, column, BT, RAGGED).to(tl.float32) * d_reader, 1)
                d_reader *= scalars(read, row, valid, head, H, BT)[:, None]
            put_rows(d_r, d_reader, row, valid, column, H * K, BT, BK, RAGGED)
            put_rows(d_k, d_writer, row, valid, column, H * K, BT, BK, RAGGED)
        if e is not None:
            put_scalars(d_e, d_e_c, row, valid, head, H, BT)
        if read is not None:
            put_scalars(d_read, d_read_c, row, valid, head, H, BT)
        if d is not None:
            put_scalars(d_d, d_d_c, row, valid, head, H, BT)
        if e is not None and beta is not None:
            for block in range(0, V, BV):
                u_c = get_rows(u, row, valid, head * V + block, BT, RAGGED).to(tl.float32)
                du = get_rows(d_u, row, valid, head * V + block, BT, RAGGED).to(tl.float32)
                d_beta_c += tl.sum(du * u_c, 1)
                put_rows(new_d_u, beta_c * du, row, valid, head * V + block, H * V, BT, BV, RAGGED)
        if beta is not None:
            put_scalars(d_beta, d_beta_c, row, valid, head, H, BT)
