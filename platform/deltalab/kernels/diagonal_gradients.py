"""The last kernel of `kernels.diagonal`'s backward: the gradients of a chunk's operands, parallel over chunks."""

import triton
import triton.language as tl

from deltalab.kernels.chunk import bounds, locate, put_scalars, scalars
from deltalab.kernels.diagonal import (
    between,
    decay,
    erased,
    get_channels,
    halves,
    log_decays,
    put_channels,
    read_and_written,
    rows,
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
    SIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL: tl.constexpr, FULL_V: tl.constexpr,
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
    i, key = tl.arange(0, SIZE), tl.arange(0, BK)
    kind = states.dtype.element_ty
    slot = program.to(tl.int64) * H + head
    here, below = i[:, None] == i[None, :], i[:, None] > i[None, :]

    d_p, d_p_t = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    if written is not None:
        d_m, d_m_t = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    if a is not None:
        d_q, d_q_t = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
        d_n, d_n_t = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    for block in range(tl.cdiv(V, BV)):
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
    p_here = tl.sum(tl.where(here, d_p, 0.0), 0)[None, :]
    d_p = tl.where(below, d_p, d_p_t).to(kind)
    if written is not None:
        d_m = tl.where(below, d_m, d_m_t)
        d_m = (d_m if a is not None else -d_m).to(kind)
    if a is not None:
        q_here = tl.sum(tl.where(here, d_q, 0.0), 0)[None, :]
        # Readers against adders and writers against erasers, [j, i] for what i gets; and the other way round.
        d_q, d_n = tl.where(below, d_n, d_q_t).to(kind), tl.where(below, d_q, d_n_t).to(kind)

    from_read, from_write = tl.zeros([BK, SIZE], tl.float32), tl.zeros([BK, SIZE], tl.float32)
    if written is not None:
        from_erase = tl.zeros([BK, SIZE], tl.float32)
    if a is not None:
        from_add = tl.zeros([BK, SIZE], tl.float32)
    ended = tl.zeros([BK], tl.float32)
    for block in range(tl.cdiv(V, BV)):
        value = block * BV + tl.arange(0, BV)
        at = (slot * V + value)[:, None] * BK + key[None, :]
        before = tl.load(states + at, mask=(value < V)[:, None], other=0.0)
        after = tl.load(states_after + at, mask=(value < V)[:, None], other=0.0)
        ended += tl.sum(before.to(tl.float32) * after.to(tl.float32), 0)
        before, after = tl.trans(before), tl.trans(after)
        do = get_channels(d_o, row, valid, head, H, value, V, SIZE, FULL_V).to(kind)
        from_read = tl.dot(before, do, from_read, input_precision=PRECISION)
        at_w = (slot * SIZE + i)[None, :] * V + value[:, None]
        if written is not None:
            w = tl.load(written + at_w, mask=(value < V)[:, None], other=0.0)
        x = get_channels(u, row, valid, head, H, value, V, SIZE, FULL_V).to(kind) if e is None else w
        from_write = tl.dot(after, x, from_write, input_precision=PRECISION)
        if written is not None:
            if a is not None:
                from_add = tl.dot(after, w, from_add, input_precision=PRECISION)
                seen = tl.load(d_seen + at_w, mask=(value < V)[:, None], other=0.0)
            else:
                seen = get_channels(d_u, row, valid, head, H, value, V, SIZE, FULL_V).to(kind)
            from_erase = tl.dot(before, seen, from_erase, input_precision=PRECISION)

    one, high, low = log_decays(g, row, valid, head, H, key, K, SIZE, FULL)
    alpha = tl.exp2(one)
    reader, writer = read_and_written(r, k, e, beta, read, d, row, valid, head, H, key, K, scale, SIZE, FULL)
    since, until = decay(high, low, i[:, None] < i[None, :]), decay(high, low, below)
    d_reader, d_writer = from_read * since, from_write * until
    d_end = tl.exp2(tl.sum(one, 1)) * ended + tl.sum(writer * d_writer, 1)
    reading = reader * alpha
    if written is not None:
        eraser = erased(k, e, b, alpha, row, valid, head, H, key, K, SIZE, FULL, LATE)
        d_eraser = (from_erase if a is not None else -from_erase) * since
    if a is not None:
        adder = get_channels(a, row, valid, head, H, key, K, SIZE, FULL)
        d_adder = from_add * until
        d_end += tl.sum(adder * d_adder, 1)
    for level in tl.static_range(7):
        if 1 << level < SIZE:
            factor = decay(high, low, between(level, SIZE)) if level > 0 else 1.0
            second = ((i >> level) % 2 == 1)[None, :]
            pair = halves(level, SIZE)
            x = tl.where(second, reading * factor, writer * factor).to(kind)
            dx = tl.dot(x, tl.where(pair, d_p, 0.0), input_precision=PRECISION)
            if written is not None:
                y = tl.where(second, eraser * factor, (writer if a is None else adder) * factor).to(kind)
                dy = tl.dot(y, tl.where(pair, d_m, 0.0), input_precision=PRECISION)
            if a is not None:
                dx = tl.dot(y, tl.where(pair, d_q, 0.0), dx, input_precision=PRECISION)
                dy = tl.dot(x, tl.where(pair, d_n, 0.0), dy, input_precision=PRECISION)
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
    dg = tl.dot(d_decay, tl.where(i[:, None] >= i[None, :], 1.0, 0.0), input_precision=PRECISION) + d_end[:, None]
    if written is not None and not LATE:
        dg -= eraser * d_eraser
    put_channels(d_g, dg, row, valid, head, H, key, K, SIZE, FULL)

    d_reader = alpha * d_reader + p_here * writer
    d_writer += p_here * reader
    if a is not None:
        d_reader += q_here * adder
        put_channels(d_a, d_adder + q_here * reader, row, valid, head, H, key, K, SIZE, FULL)
    if written is not None and LATE:
        d_eraser *= alpha
    d_reader *= scale
    if e is not None or beta is not None or d is not None:
        along = get_channels(k, row, valid, head, H, key, K, SIZE, FULL)
    if e is not None:
        put_scalars(d_e, tl.sum(along * d_eraser, 0), row, valid, head, H, SIZE)
        d_writer += scalars(e, row, valid, head, H, SIZE)[None, :] * d_eraser
    elif beta is not None:
        put_scalars(d_beta, tl.sum(along * d_writer, 0), row, valid, head, H, SIZE)
        d_writer *= scalars(beta, row, valid, head, H, SIZE)[None, :]
    if b is not None:
        put_channels(d_b, d_eraser, row, valid, head, H, key, K, SIZE, FULL)
    if d is not None:
        put_scalars(d_d, -tl.sum(along * d_reader, 0), row, valid, head, H, SIZE)
        d_writer -= scalars(d, row, valid, head, H, SIZE)[None, :] * d_reader
    if read is not None:
        read_by = get_channels(r, row, valid, head, H, key, K, SIZE, FULL)
        put_scalars(d_read, tl.sum(read_by * d_reader, 0), row, valid, head, H, SIZE)
        d_reader *= scalars(read, row, valid, head, H, SIZE)[None, :]
    put_channels(d_r, d_reader, row, valid, head, H, key, K, SIZE, FULL)
    put_channels(d_k, d_writer, row, valid, head, H, key, K, SIZE, FULL)
    if e is not None and beta is not None:
        # Last, where nothing reads the gradient of beta u any more.
        strength = scalars(beta, row, valid, head, H, SIZE)[:, None]
        d_strength = tl.zeros([SIZE], tl.float32)
        for block in range(tl.cdiv(V, BV)):
            value = block * BV + tl.arange(0, BV)
            out, there = rows(d_u, row, valid, head, H, value, V, SIZE, FULL_V)
            du = tl.load(out, mask=there, other=0.0).to(tl.float32)
            u_at, there = rows(u, row, valid, head, H, value, V, SIZE, FULL_V)
            d_strength += tl.sum(du * tl.load(u_at, mask=there, other=0.0).to(tl.float32), 1)
            tl.store(out, (strength * du).to(d_u.dtype.element_ty), mask=there)
        put_scalars(d_beta, d_strength, row, valid, head, H, SIZE)
