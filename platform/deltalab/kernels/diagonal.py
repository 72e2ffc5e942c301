"""Kernels for a state that decays channel by channel, with a low rank or without.

Per chunk that starts at S, with G the cumulative log-decay, y what erases (e k, or b) and G' = G or G_{i-1}:

    w = beta u - ..., (I + M) w = beta u - exp(G') y S           M_ij = sum_c y_ic k_jc exp(G'_ic - G_jc), j < i, tied
    (I - M) w = exp(G') y S + N u                                M of y and a, N of y and beta k, free
    o = scale (exp(G) r S + P w), S <- exp(G_C) S + (k exp(G_C - G))^T w    tied; with u, and a beside k, free

`prepare` makes all that does not depend on S, so that `scan` and `reverse` are products alone: w = erasing S + given u.

M, N, P are built from halves: in each block of 2 h tokens, rows are of its second half and columns of its first, with
decays to and from the border between the two, which are both at most 1. Each is the exponential of a sum of g over
tokens that `between` chooses: no differences, so that they are exact next to any g, and the sum is a product of
matrices. A token is a row or a column, so that one factor and one tile serves both sides of a block.
"""

import triton
import triton.language as tl

from deltalab.kernels.chunk import LOWEST, bounds, locate, scalars, unit_lower_inverse


@triton.jit
def rows(x, row, valid, head, H, column, width, SIZE: tl.constexpr, FULL: tl.constexpr):
    """[SIZE, W] of x [.., H, width] from a row on: pointers, and the mask of what is there.

    valid: rows that are there; FULL: that all columns are.
    """
    i = tl.arange(0, SIZE)
    at = x + (row.to(tl.int64) * H + head) * width + (i[:, None] * (H * width) + column[None, :])
    there = (i < valid)[:, None]
    return at, there if FULL else there & (column < width)[None, :]


@triton.jit
def log_decays(g, row, valid, head, H, column, K, SIZE: tl.constexpr, FULL: tl.constexpr):
    """g of a chunk in fp32, and as two halves of fp16 that add up to it; the second is None where one holds it."""
    at, there = rows(g, row, valid, head, H, column, K, SIZE, FULL)
    value = tl.maximum(tl.load(at, mask=there, other=0.0).to(tl.float32), LOWEST)
    high = value.to(tl.float16)
    low = None
    if g.dtype.element_ty == tl.float32:
        low = (value - high.to(tl.float32)).to(tl.float16)
    return value, high, low


@triton.jit
def decay(chosen, high, low):
    """exp of the sums of g over tokens that [i, j] chooses."""
    chosen = chosen.to(tl.float16)
    sums = tl.dot(chosen, high)
    if low is not None:
        sums = tl.dot(chosen, low, sums)
    return tl.exp(sums)


@triton.jit
def between(level: tl.constexpr, i, j):
    """Tokens between i and the border within its block of two halves of 2**level: before or after i, never i."""
    return (i >> level == j >> level) & ((j < i) == second_half(level, i)) & (i != j)


@triton.jit
def second_half(level: tl.constexpr, i):
    """Whether token i is a row at this level, or a column."""
    return (i >> level) % 2 == 1


@triton.jit
def halves(level: tl.constexpr, i, j):
    """Whether i and j are in different halves of one block."""
    return (i >> level) ^ (j >> level) == 1


@triton.jit
def read_and_written(
    r, k, e, beta, read, d, row, valid, head, H, column, K, scale, SIZE: tl.constexpr, FULL: tl.constexpr
):
    """What reads and what is written along, in fp32. A tied low rank takes beta u for what is written, not beta k."""
    at, there = rows(k, row, valid, head, H, column, K, SIZE, FULL)
    writer = tl.load(at, mask=there, other=0.0).to(tl.float32)
    at, there = rows(r, row, valid, head, H, column, K, SIZE, FULL)
    reader = tl.load(at, mask=there, other=0.0).to(tl.float32) * scale
    if read is not None:
        reader *= scalars(read, row, valid, head, H, SIZE)[:, None]
    if d is not None:
        reader -= scale * scalars(d, row, valid, head, H, SIZE)[:, None] * writer
    if e is None and beta is not None:
        writer *= scalars(beta, row, valid, head, H, SIZE)[:, None]
    return reader, writer


@triton.jit
def erased(k, e, b, alpha, row, valid, head, H, column, K, SIZE: tl.constexpr, FULL: tl.constexpr, LATE: tl.constexpr):
    """What erases, e k or b, in fp32; with a decay more where it sees the decayed state."""
    if e is not None:
        at, there = rows(k, row, valid, head, H, column, K, SIZE, FULL)
        eraser = tl.load(at, mask=there, other=0.0).to(tl.float32) * scalars(e, row, valid, head, H, SIZE)[:, None]
    else:
        at, there = rows(b, row, valid, head, H, column, K, SIZE, FULL)
        eraser = tl.load(at, mask=there, other=0.0).to(tl.float32)
    return eraser * alpha if LATE else eraser


@triton.jit
def prepare(
    r, k, g, e, a, b, beta, read, d,
    reading, writing, kept, within, erasing, given, inverse, adding, within_a,
    cu_seqlens, of, first, length, from_chunk, span, sequences, scale, H, K,
    SIZE: tl.constexpr, BK: tl.constexpr, KB: tl.constexpr, FULL: tl.constexpr, LATE: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per chunk and head, in tiles [SIZE, BK] or [SIZE, SIZE]: with vectors as they meet the chunk's first state,

    reading (exp(G) r), writing (exp(G_C - G) k), adding (so of a), erasing and given as above, `within` [i, j] what of
    j's value is read at i, `within_a` what of its erasure; kept [BK] is exp(G_C), `inverse` that of I + M or I - M.
    """
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    sequence, chunk = locate(program, of, first, span, PACKED)
    if sequence >= sequences:
        return
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    row, valid = start + (chunk + from_chunk) * SIZE, length - (chunk + from_chunk) * SIZE
    i = tl.arange(0, SIZE)
    kind = reading.dtype.element_ty
    slot = program.to(tl.int64) * H + head
    square = slot * SIZE * SIZE + i[:, None] * SIZE + i[None, :]
    here, lower = i[:, None] == i[None, :], i[:, None] > i[None, :]
    p, p_here = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    if erasing is not None:
        system = tl.zeros([SIZE, SIZE], tl.float32)
    if adding is not None:
        q, q_here = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
        moved = tl.zeros([SIZE, SIZE], tl.float32)
    for block in tl.range(0, BK, KB, disable_licm=True):
        column = block + tl.arange(0, KB)
        m, n = (i + block // BK)[:, None], (i + block // BK)[None, :]
        one, high, low = log_decays(g, row, valid, head, H, column, K, SIZE, FULL)
        alpha = tl.exp(one)
        reader, writer = read_and_written(r, k, e, beta, read, d, row, valid, head, H, column, K, scale, SIZE, FULL)
        tile = slot * SIZE * BK + i[:, None] * BK + column[None, :]
        until = decay(m < n, high, low)
        tl.store(kept + slot * BK + column, tl.exp(tl.sum(one, 0)))
        tl.store(writing + tile, (writer * until).to(kind))
        p_here += tl.sum(reader * writer, 1)
        if erasing is not None:
            eraser = erased(k, e, b, alpha, row, valid, head, H, column, K, SIZE, FULL, LATE)
        if adding is not None:
            a_at, there = rows(a, row, valid, head, H, column, K, SIZE, FULL)
            adder = tl.load(a_at, mask=there, other=0.0).to(tl.float32)
            tl.store(adding + tile, (adder * until).to(kind))
            q_here += tl.sum(reader * adder, 1)
        reader *= alpha
        tl.store(reading + tile, (reader * decay(m > n, high, low)).to(kind))
        for level in tl.static_range(7):
            if 1 << level < SIZE:
                factor = decay(between(level, m, n), high, low) if level > 0 else 1.0
                second = second_half(level, m)
                below = halves(level, m, n) & (m > n)
                if e is not None:
                    x = (reader * factor).to(kind)
                    y = (tl.where(second, eraser, writer) * factor).to(kind)
                    p += tl.where(below, tl.dot(x, tl.trans(y), input_precision=PRECISION), 0.0)
                else:
                    x = (tl.where(second, reader, writer) * factor).to(kind)
                    p += tl.where(below, tl.dot(x, tl.trans(x), input_precision=PRECISION), 0.0)
                if adding is not None:
                    y = (tl.where(second, eraser, adder) * factor).to(kind)
                    q += tl.where(below, tl.dot(x, tl.trans(y), input_precision=PRECISION), 0.0)
                    moved += tl.where(below, tl.dot(y, tl.trans(x), input_precision=PRECISION), 0.0)
                if erasing is not None:
                    system += tl.where(below, tl.dot(y, tl.trans(y), input_precision=PRECISION), 0.0)
    tl.store(within + square, tl.where(here, p_here[:, None], p).to(kind))
    if erasing is not None:
        if adding is not None:
            tl.store(within_a + square, tl.where(here, q_here[:, None], q).to(kind))
            system = -system
        solved = unit_lower_inverse(system, SIZE, PRECISION)
        if inverse is not None:
            tl.store(inverse + square, solved.to(kind))
        if adding is not None:
            values = tl.dot(solved.to(kind), moved.to(kind), input_precision=PRECISION)
        elif beta is not None:
            values = solved * scalars(beta, row, valid, head, H, SIZE)[None, :]
        else:
            values = solved
        tl.store(given + square, values.to(kind))
        solved = solved.to(kind)
        for block in tl.range(0, BK, KB, disable_licm=True):
            column = block + tl.arange(0, KB)
            one, high, low = log_decays(g, row, valid, head, H, column, K, SIZE, FULL)
            eraser = erased(k, e, b, tl.exp(one), row, valid, head, H, column, K, SIZE, FULL, LATE)
            seen = (eraser * decay(lower, high, low)).to(kind)
            tile = slot * SIZE * BK + i[:, None] * BK + column[None, :]
            found = tl.dot(solved, seen, input_precision=PRECISION)
            tl.store(erasing + tile, (-found if adding is None else found).to(kind))


@triton.jit
def scan(
    u, reading, writing, kept, within, erasing, given, adding, within_a, state, begin_states,
    o, last, states, written,
    cu_seqlens, first, length, chunks, from_chunk, to_chunk, every, segments, H, K, V,
    SIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL_V: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One head's block of values through chunks from_chunk to to_chunk, the state transposed in registers, [V, K].

    Writes what is not None: the output o; the last state; `states` that chunks start with, transposed, and w.
    begin_states: [B, segments, H, V, K], the state before every `every`-th chunk; written where o is, else read.
    """
    value, head, sequence = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    begin = (tl.load(first + sequence) if PACKED else sequence * (to_chunk - from_chunk) - from_chunk).to(tl.int64)
    if PACKED:
        to_chunk = tl.load(first + sequence + 1) - begin.to(tl.int32)
    column, i = tl.arange(0, BK), tl.arange(0, SIZE)
    kind = reading.dtype.element_ty
    both = (value < V)[:, None] & (column < K)[None, :]
    transposed = value[:, None] * K + column[None, :]
    held = (sequence.to(tl.int64) * H + head) * K * V + column[None, :] * V + value[:, None]
    if o is None:
        begun = begin_states + ((sequence.to(tl.int64) * segments + from_chunk // every) * H + head) * K * V
        s = tl.load(begun + transposed, mask=both, other=0.0)
    elif state is not None:
        s = tl.load(state + held, mask=both, other=0.0).to(tl.float32)
    else:
        s = tl.zeros([BV, BK], tl.float32)
    for segment in range(from_chunk // every, tl.cdiv(to_chunk, every)):
        if o is not None and begin_states is not None:
            begun = begin_states + ((sequence.to(tl.int64) * segments + segment) * H + head) * K * V
            tl.store(begun + transposed, s, mask=both)
        for chunk in range(tl.maximum(segment * every, from_chunk), tl.minimum(segment * every + every, to_chunk)):
            slot = (begin + chunk) * H + head
            tile = slot * SIZE * BK + i[:, None] * BK + column[None, :]
            square = slot * SIZE * SIZE + i[:, None] * SIZE + i[None, :]
            row, valid = start + chunk * SIZE, length - chunk * SIZE
            u_at, there = rows(u, row, valid, head, H, value, V, SIZE, FULL_V)
            x = tl.trans(tl.load(u_at, mask=there, other=0.0))
            s_c = s.to(kind)
            if states is not None:
                states_at = states + (slot * V + value)[:, None] * BK + column[None, :]
                tl.store(states_at, s_c, mask=(value < V)[:, None])
            if erasing is not None:
                w = tl.dot(x, tl.trans(tl.load(given + square)), input_precision=PRECISION)
                w = tl.dot(s_c, tl.trans(tl.load(erasing + tile)), w, input_precision=PRECISION).to(kind)
                if written is not None:
                    written_at = written + (slot * SIZE + i)[:, None] * V + value[None, :]
                    tl.store(written_at, tl.trans(w), mask=(value < V)[None, :])
                if adding is None:
                    x = w
            if o is not None:
                out = tl.dot(s_c, tl.trans(tl.load(reading + tile)), input_precision=PRECISION)
                out = tl.dot(x, tl.trans(tl.load(within + square)), out, input_precision=PRECISION)
                if adding is not None:
                    out = tl.dot(w, tl.trans(tl.load(within_a + square)), out, input_precision=PRECISION)
                o_at, there = rows(o, row, valid, head, H, value, V, SIZE, FULL_V)
                tl.store(o_at, tl.trans(out).to(o.dtype.element_ty), mask=there)
            s *= tl.load(kept + slot * BK + column)[None, :]
            s = tl.dot(x, tl.load(writing + tile), s, input_precision=PRECISION)
            if adding is not None:
                s = tl.dot(w, tl.load(adding + tile), s, input_precision=PRECISION)
    if last is not None:
        tl.store(last + held, s, mask=both)


@triton.jit
def reverse(
    d_o, reading, writing, kept, within, erasing, given, inverse, adding, within_a,
    d_last, states_after, d_u, d_seen, d_state,
    cu_seqlens, first, length, chunks, from_chunk, to_chunk, H, K, V,
    SIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL_V: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state, from chunk to_chunk back to from_chunk, for one head's block of values.

    Starts from d_last [.., V, K] and leaves d_state [.., V, K]; writes the gradient of the state after each chunk,
    transposed too; the gradient of u or, tied, of beta u to d_u; and that of erasing S, through the inverse, to d_seen
    where the low rank is free.
    """
    value, head, sequence = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    begin = (tl.load(first + sequence) if PACKED else sequence * (to_chunk - from_chunk) - from_chunk).to(tl.int64)
    if PACKED:
        to_chunk = tl.load(first + sequence + 1) - begin.to(tl.int32)
    column, i = tl.arange(0, BK), tl.arange(0, SIZE)
    kind = reading.dtype.element_ty
    both = (value < V)[:, None] & (column < K)[None, :]
    held = (sequence.to(tl.int64) * H + head) * K * V + value[:, None] * K + column[None, :]
    ds = tl.load(d_last + held, mask=both, other=0.0)
    for back in range(from_chunk, to_chunk):
        chunk = to_chunk - 1 - (back - from_chunk)
        slot = (begin + chunk) * H + head
        tile = slot * SIZE * BK + i[:, None] * BK + column[None, :]
        square = slot * SIZE * SIZE + i[:, None] * SIZE + i[None, :]
        row, valid = start + chunk * SIZE, length - chunk * SIZE
        at, there = rows(d_o, row, valid, head, H, value, V, SIZE, FULL_V)
        do = tl.trans(tl.load(at, mask=there, other=0.0))
        ds_c = ds.to(kind)
        at = states_after + (slot * V + value)[:, None] * BK + column[None, :]
        tl.store(at, ds_c, mask=(value < V)[:, None])
        du = tl.dot(do, tl.load(within + square), input_precision=PRECISION)
        du = tl.dot(ds_c, tl.trans(tl.load(writing + tile)), du, input_precision=PRECISION)
        ds *= tl.load(kept + slot * BK + column)[None, :]
        ds = tl.dot(do, tl.load(reading + tile), ds, input_precision=PRECISION)
        if erasing is not None:
            if adding is None:
                dw = du.to(kind)
                du = tl.dot(dw, tl.load(inverse + square), input_precision=PRECISION)
            else:
                dw = tl.dot(do, tl.load(within_a + square), input_precision=PRECISION)
                dw = tl.dot(ds_c, tl.trans(tl.load(adding + tile)), dw, input_precision=PRECISION).to(kind)
                du = tl.dot(dw, tl.load(given + square), du, input_precision=PRECISION)
                seen = tl.dot(dw, tl.load(inverse + square), input_precision=PRECISION)
                at = d_seen + (slot * SIZE + i)[:, None] * V + value[None, :]
                tl.store(at, tl.trans(seen).to(kind), mask=(value < V)[None, :])
            ds = tl.dot(dw, tl.load(erasing + tile), ds, input_precision=PRECISION)
        at, there = rows(d_u, row, valid, head, H, value, V, SIZE, FULL_V)
        tl.store(at, tl.trans(du).to(d_u.dtype.element_ty), mask=there)
    tl.store(d_state + held, ds, mask=both)
