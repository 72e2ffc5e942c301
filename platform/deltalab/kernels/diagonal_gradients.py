"""The last kernel of `kernels.diagonal`'s backward: the gradients of a chunk's operands, parallel over chunks."""

import triton
import triton.language as tl

from deltalab.kernels.chunk import bounds, locate, put_scalars, scalars
from deltalab.kernels.diagonal import (
    between,
    decay,
    erased,
    halves,
    log_decays,
    read_and_written,
    rows,
    second_half,
)


@triton.jit
def _both_ways(x, y, lower, upper, PRECISION: tl.constexpr):
    """Adds x y^T to `lower` and y x^T to `upper`: of a product's result no transpose is ever taken."""
    lower = tl.dot(x, tl.trans(y), lower, input_precision=PRECISION)
    return lower, tl.dot(y, tl.trans(x), upper, input_precision=PRECISION)


@triton.jit
def gradients(
    r, k, u, g, e, a, b, beta, read, d, written, d_seen, states, states_after, d_o,
    d_u, d_r, d_k, d_g, d_e, d_a, d_b, d_beta, d_read, d_d,
    cu_seqlens, of, first, length, from_chunk, span, sequences, scale, H, K, V,
    SIZE: tl.constexpr, BK: tl.constexpr, KB: tl.constexpr, BV: tl.constexpr, FULL: tl.constexpr, FULL_V: tl.constexpr,
    LATE: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head: d_u holds the gradient of beta u where the low rank is tied, and leaves with that of u.

    What is read or erased at i grows with G_i, what is written at j shrinks with G_j: the gradient of G is that of
    each vector times the vector itself, and that of g its sum from the end.
    """
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    sequence, chunk = locate(program, of, first, span, PACKED)
    if sequence >= sequences:
        return
    chunk += from_chunk
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    row, valid = start + chunk * SIZE, length - chunk * SIZE
    i = tl.arange(0, SIZE)
    kind = states.dtype.element_ty
    slot = program.to(tl.int64) * H + head
    here, below = i[:, None] == i[None, :], i[:, None] > i[None, :]

    d_p, d_p_t = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    if written is not None:
        d_m, d_m_t = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    if a is not None:
        d_q, d_q_t = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
        d_n, d_n_t = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    for block in range(0, tl.cdiv(V, BV)):
        value = block * BV + tl.arange(0, BV)
        at, there = rows(d_o, row, valid, head, H, value, V, SIZE, FULL_V)
        do = tl.load(at, mask=there, other=0.0)
        at = (slot * SIZE + i)[:, None] * V + value[None, :]
        if written is not None:
            w = tl.load(written + at, mask=(value < V)[None, :], other=0.0)
        if e is None:
            u_at, there = rows(u, row, valid, head, H, value, V, SIZE, FULL_V)
            x = tl.load(u_at, mask=there, other=0.0)
        else:
            x = w
        d_p, d_p_t = _both_ways(do, x, d_p, d_p_t, PRECISION)
        if written is not None:
            if a is not None:
                seen = tl.load(d_seen + at, mask=(value < V)[None, :], other=0.0)
                d_q, d_q_t = _both_ways(do, w, d_q, d_q_t, PRECISION)
                d_n, d_n_t = _both_ways(seen, x, d_n, d_n_t, PRECISION)
            else:
                # That of -e k S and of the system alike.
                du_at, there = rows(d_u, row, valid, head, H, value, V, SIZE, FULL_V)
                seen = tl.load(du_at, mask=there, other=0.0)
            d_m, d_m_t = _both_ways(seen, w, d_m, d_m_t, PRECISION)
    p_here = tl.sum(tl.where(here, d_p, 0.0), 1)[:, None]
    d_p = tl.where(below, d_p, d_p_t).to(kind)
    if written is not None:
        d_m = tl.where(below, d_m, d_m_t)
        d_m = (d_m if a is not None else -d_m).to(kind)
    if a is not None:
        q_here = tl.sum(tl.where(here, d_q, 0.0), 1)[:, None]
        # Rows of readers against adders, columns of writers against erasers; and the other way round.
        d_q, d_n = tl.where(below, d_q, d_n_t).to(kind), tl.where(below, d_n, d_q_t).to(kind)

    d_strength, d_erase = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    d_reading, d_correction = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    for start_k in tl.range(0, BK, KB, disable_licm=True):
        column = start_k + tl.arange(0, KB)
        m, n = (i + start_k // BK)[:, None], (i + start_k // BK)[None, :]
        from_read, from_write = tl.zeros([SIZE, KB], tl.float32), tl.zeros([SIZE, KB], tl.float32)
        if written is not None:
            from_erase = tl.zeros([SIZE, KB], tl.float32)
        if a is not None:
            from_add = tl.zeros([SIZE, KB], tl.float32)
        ended = tl.zeros([KB], tl.float32)
        for block in range(0, tl.cdiv(V, BV)):
            value = block * BV + tl.arange(0, BV)
            at = (slot * V + value)[:, None] * BK + column[None, :]
            before = tl.load(states + at, mask=(value < V)[:, None], other=0.0)
            after = tl.load(states_after + at, mask=(value < V)[:, None], other=0.0)
            ended += tl.sum(before.to(tl.float32) * after.to(tl.float32), 0)
            v_at, there = rows(d_o, row, valid, head, H, value, V, SIZE, FULL_V)
            from_read = tl.dot(
                tl.load(v_at, mask=there, other=0.0), before, from_read, input_precision=PRECISION
            )
            at_w = (slot * SIZE + i)[:, None] * V + value[None, :]
            if written is not None:
                w = tl.load(written + at_w, mask=(value < V)[None, :], other=0.0)
            if e is None:
                v_at, there = rows(u, row, valid, head, H, value, V, SIZE, FULL_V)
                x = tl.load(v_at, mask=there, other=0.0)
            else:
                x = w
            from_write = tl.dot(x, after, from_write, input_precision=PRECISION)
            if written is not None:
                if a is not None:
                    from_add = tl.dot(w, after, from_add, input_precision=PRECISION)
                    seen = tl.load(d_seen + at_w, mask=(value < V)[None, :], other=0.0)
                else:
                    v_at, there = rows(d_u, row, valid, head, H, value, V, SIZE, FULL_V)
                    seen = tl.load(v_at, mask=there, other=0.0)
                from_erase = tl.dot(seen, before, from_erase, input_precision=PRECISION)

        one, high, low = log_decays(g, row, valid, head, H, column, K, SIZE, FULL)
        alpha = tl.exp(one)
        reader, writer = read_and_written(r, k, e, beta, read, d, row, valid, head, H, column, K, scale, SIZE, FULL)
        since, until = decay(m > n, high, low), decay(m < n, high, low)
        d_reader, d_writer = from_read * since, from_write * until
        d_end = tl.exp(tl.sum(one, 0)) * ended + tl.sum(writer * d_writer, 0)
        reading = reader * alpha
        if written is not None:
            eraser = erased(k, e, b, alpha, row, valid, head, H, column, K, SIZE, FULL, LATE)
            d_eraser = (from_erase if a is not None else -from_erase) * since
        if a is not None:
            a_at, there = rows(a, row, valid, head, H, column, K, SIZE, FULL)
            adder = tl.load(a_at, mask=there, other=0.0).to(tl.float32)
            d_adder = from_add * until
            d_end += tl.sum(adder * d_adder, 0)
        for level in tl.static_range(7):
            if 1 << level < SIZE:
                factor = decay(between(level, m, n), high, low) if level > 0 else 1.0
                second = second_half(level, m)
                pair = halves(level, m, n)
                x = (tl.where(second, reading, writer) * factor).to(kind)
                dx = tl.dot(tl.where(pair, d_p, 0.0), x, input_precision=PRECISION)
                if written is not None:
                    y = (tl.where(second, eraser, writer if a is None else adder) * factor).to(kind)
                    dy = tl.dot(tl.where(pair, d_m, 0.0), y, input_precision=PRECISION)
                if a is not None:
                    dx = tl.dot(tl.where(pair, d_q, 0.0), y, dx, input_precision=PRECISION)
                    dy = tl.dot(tl.where(pair, d_n, 0.0), x, dy, input_precision=PRECISION)
                dx *= factor
                d_reader += tl.where(second, dx, 0.0)
                d_writer += tl.where(second, 0.0, dx)
                if written is not None:
                    dy *= factor
                    d_eraser += tl.where(second, dy, 0.0)
                if e is not None:
                    d_writer += tl.where(second, 0.0, dy)
                if a is not None:
                    d_adder += tl.where(second, 0.0, dy)
        # What is read of the same token does not decay, and what erases from the state before decays less by its g.
        d_decay = reading * d_reader - writer * d_writer
        if written is not None:
            d_decay += eraser * d_eraser
        if a is not None:
            d_decay -= adder * d_adder
        dg = tl.dot(tl.where(m <= n, 1.0, 0.0), d_decay, input_precision=PRECISION)
        dg += d_end[None, :]
        if written is not None and not LATE:
            dg -= eraser * d_eraser
        out, there = rows(d_g, row, valid, head, H, column, K, SIZE, FULL)
        tl.store(out, dg.to(d_g.dtype.element_ty), mask=there)

        d_reader = alpha * d_reader + p_here * writer
        d_writer += p_here * reader
        if a is not None:
            d_reader += q_here * adder
            d_adder += q_here * reader
            out, there = rows(d_a, row, valid, head, H, column, K, SIZE, FULL)
            tl.store(out, d_adder.to(d_a.dtype.element_ty), mask=there)
        if written is not None and LATE:
            d_eraser *= alpha
        d_reader *= scale
        out, there = rows(k, row, valid, head, H, column, K, SIZE, FULL)
        key = tl.load(out, mask=there, other=0.0).to(tl.float32)
        if e is not None:
            d_erase += tl.sum(key * d_eraser, 1)
            d_writer += scalars(e, row, valid, head, H, SIZE)[:, None] * d_eraser
        elif beta is not None:
            d_strength += tl.sum(key * d_writer, 1)
            d_writer *= scalars(beta, row, valid, head, H, SIZE)[:, None]
        if b is not None:
            out, there = rows(d_b, row, valid, head, H, column, K, SIZE, FULL)
            tl.store(out, d_eraser.to(d_b.dtype.element_ty), mask=there)
        if d is not None:
            d_correction -= tl.sum(key * d_reader, 1)
            d_writer -= scalars(d, row, valid, head, H, SIZE)[:, None] * d_reader
        if read is not None:
            out, there = rows(r, row, valid, head, H, column, K, SIZE, FULL)
            d_reading += tl.sum(tl.load(out, mask=there, other=0.0).to(tl.float32) * d_reader, 1)
            d_reader *= scalars(read, row, valid, head, H, SIZE)[:, None]
        out, there = rows(d_r, row, valid, head, H, column, K, SIZE, FULL)
        tl.store(out, d_reader.to(d_r.dtype.element_ty), mask=there)
        out, there = rows(d_k, row, valid, head, H, column, K, SIZE, FULL)
        tl.store(out, d_writer.to(d_k.dtype.element_ty), mask=there)

    if e is not None:
        put_scalars(d_e, d_erase, row, valid, head, H, SIZE)
        if beta is not None:
            # Last, where nothing reads the gradient of beta u any more.
            strength = scalars(beta, row, valid, head, H, SIZE)[:, None]
            for block in range(0, tl.cdiv(V, BV)):
                value = block * BV + tl.arange(0, BV)
                out, there = rows(d_u, row, valid, head, H, value, V, SIZE, FULL_V)
                du = tl.load(out, mask=there, other=0.0).to(tl.float32)
                u_at, there = rows(u, row, valid, head, H, value, V, SIZE, FULL_V)
                d_strength += tl.sum(du * tl.load(u_at, mask=there, other=0.0).to(tl.float32), 1)
                tl.store(out, (strength * du).to(d_u.dtype.element_ty), mask=there)
    if beta is not None:
        put_scalars(d_beta, d_strength, row, valid, head, H, SIZE)
    if read is not None:
        put_scalars(d_read, d_reading, row, valid, head, H, SIZE)
    if d is not None:
        put_scalars(d_d, d_correction, row, valid, head, H, SIZE)
