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

from deltalab.kernels.chunk import LOG2_E, LOWEST, bounds, locate, scalars, unit_lower_inverse


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
def channels(x, row, valid, head, H, key, width, SIZE: tl.constexpr, FULL: tl.constexpr):
    """`rows`, transposed: [W, SIZE]."""
    i = tl.arange(0, SIZE)
    at = x + (row.to(tl.int64) * H + head) * width + (i[None, :] * (H * width) + key[:, None])
    there = (i < valid)[None, :]
    return at, there if FULL else there & (key < width)[:, None]


@triton.jit
def get_channels(x, row, valid, head, H, key, width, SIZE: tl.constexpr, FULL: tl.constexpr):
    """[W, SIZE] of x in fp32, 0 where there is nothing."""
    at, there = channels(x, row, valid, head, H, key, width, SIZE, FULL)
    return tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def put_channels(x, tile, row, valid, head, H, key, width, SIZE: tl.constexpr, FULL: tl.constexpr):
    """Stores where `get_channels` finds it."""
    at, there = channels(x, row, valid, head, H, key, width, SIZE, FULL)
    tl.store(at, tile.to(x.dtype.element_ty), mask=there)


@triton.jit
def log_decays(g, row, valid, head, H, key, K, SIZE: tl.constexpr, FULL: tl.constexpr):
    """g of a chunk, base 2, [W, SIZE] in fp32, and as two of fp16 that add up to it."""
    value = tl.maximum(get_channels(g, row, valid, head, H, key, K, SIZE, FULL), LOWEST) * LOG2_E
    high = value.to(tl.float16)
    return value, high, (value - high.to(tl.float32)).to(tl.float16)


@triton.jit
def decay(high, low, chosen):
    """exp2 of the sums of g, [W, SIZE], over the tokens j that [j, i] chooses for i."""
    chosen = chosen.to(tl.float16)
    return tl.exp2(tl.dot(low, chosen, tl.dot(high, chosen)))


@triton.jit
def between(level: tl.constexpr, SIZE: tl.constexpr):
    """[j, i]: whether j lies between i and the border within its block of two halves of 2**level; i itself does not."""
    j, i = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    return (i >> level == j >> level) & ((j < i) == ((i >> level) % 2 == 1)) & (i != j)


@triton.jit
def halves(level: tl.constexpr, SIZE: tl.constexpr):
    """Whether i and j are in different halves of one block."""
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    return (i >> level) ^ (j >> level) == 1


@triton.jit
def read_and_written(
    r, k, e, beta, read, d, row, valid, head, H, key, K, scale, SIZE: tl.constexpr, FULL: tl.constexpr
):
    """What reads and what is written along, [W, SIZE]. A tied low rank takes beta u for what is written, not beta k."""
    writer = get_channels(k, row, valid, head, H, key, K, SIZE, FULL)
    reader = get_channels(r, row, valid, head, H, key, K, SIZE, FULL) * scale
    if read is not None:
        reader *= scalars(read, row, valid, head, H, SIZE)[None, :]
    if d is not None:
        reader -= scale * scalars(d, row, valid, head, H, SIZE)[None, :] * writer
    if e is None and beta is not None:
        writer *= scalars(beta, row, valid, head, H, SIZE)[None, :]
    return reader, writer


@triton.jit
def erased(k, e, b, alpha, row, valid, head, H, key, K, SIZE: tl.constexpr, FULL: tl.constexpr, LATE: tl.constexpr):
    """What erases, e k or b, [W, SIZE]; with a decay more where it sees the decayed state."""
    if e is not None:
        eraser = get_channels(k, row, valid, head, H, key, K, SIZE, FULL)
        eraser *= scalars(e, row, valid, head, H, SIZE)[None, :]
    else:
        eraser = get_channels(b, row, valid, head, H, key, K, SIZE, FULL)
    return eraser * alpha if LATE else eraser


@triton.jit
def prepare(
    r, k, g, e, a, b, beta, read, d,
    reading, writing, kept, within, erasing, given, inverse, adding, within_a,
    cu_seqlens, of, first, length, from_chunk, span, sequences, scale, H, K,
    SIZE: tl.constexpr, BK: tl.constexpr, FULL: tl.constexpr, LATE: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Per chunk and head, in tiles [SIZE, BK] or [SIZE, SIZE]: with vectors as they meet the chunk's first state,

    reading (exp(G) r), writing (exp(G_C - G) k), adding (so of a), erasing and given as above, `within` [i, j] what of
    j's value is read at i, `within_a` what of its erasure; kept [BK] is exp(G_C), `inverse` that of I + M or I - M.
    Channels are rows here, so that they fill the left side of the products that make decays.
    """
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    sequence, chunk = locate(program, of, first, span, PACKED)
    if sequence >= sequences:
        return
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    row, valid = start + (chunk + from_chunk) * SIZE, length - (chunk + from_chunk) * SIZE
    i, key = tl.arange(0, SIZE), tl.arange(0, BK)
    here, lower = i[:, None] == i[None, :], i[:, None] > i[None, :]
    kind = reading.dtype.element_ty
    slot = program.to(tl.int64) * H + head
    tile = slot * SIZE * BK + i[None, :] * BK + key[:, None]
    square = slot * SIZE * SIZE + i[:, None] * SIZE + i[None, :]
    one, high, low = log_decays(g, row, valid, head, H, key, K, SIZE, FULL)
    alpha = tl.exp2(one)
    since, until = decay(high, low, i[:, None] < i[None, :]), decay(high, low, lower)
    tl.store(kept + slot * BK + key, tl.exp2(tl.sum(one, 1)))
    reader, writer = read_and_written(r, k, e, beta, read, d, row, valid, head, H, key, K, scale, SIZE, FULL)
    p = tl.where(here, tl.sum(reader * writer, 0)[:, None], 0.0)
    tl.store(writing + tile, (writer * until).to(kind))
    if erasing is not None:
        eraser = erased(k, e, b, alpha, row, valid, head, H, key, K, SIZE, FULL, LATE)
        seen = (eraser * since).to(kind)
        system = tl.zeros([SIZE, SIZE], tl.float32)
    if adding is not None:
        adder = get_channels(a, row, valid, head, H, key, K, SIZE, FULL)
        q = tl.where(here, tl.sum(reader * adder, 0)[:, None], 0.0)
        tl.store(adding + tile, (adder * until).to(kind))
        moved = tl.zeros([SIZE, SIZE], tl.float32)
    reader *= alpha
    tl.store(reading + tile, (reader * since).to(kind))
    for level in tl.static_range(7):
        if 1 << level < SIZE:
            factor = decay(high, low, between(level, SIZE)) if level > 0 else 1.0
            second = ((i >> level) % 2 == 1)[None, :]
            below = halves(level, SIZE) & lower
            if e is not None:
                x = (reader * factor).to(kind)
                y = tl.where(second, eraser * factor, writer * factor).to(kind)
                p = tl.where(below, tl.dot(tl.trans(x), y, input_precision=PRECISION), p)
            else:
                x = tl.where(second, reader * factor, writer * factor).to(kind)
                p = tl.where(below, tl.dot(tl.trans(x), x, input_precision=PRECISION), p)
            if adding is not None:
                y = tl.where(second, eraser * factor, adder * factor).to(kind)
                q = tl.where(below, tl.dot(tl.trans(x), y, input_precision=PRECISION), q)
                moved = tl.where(below, tl.dot(tl.trans(y), x, input_precision=PRECISION), moved)
            if erasing is not None:
                system = tl.where(below, tl.dot(tl.trans(y), y, input_precision=PRECISION), system)
    tl.store(within + square, p.to(kind))
    if erasing is not None:
        if adding is not None:
            tl.store(within_a + square, q.to(kind))
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
        found = tl.dot(solved.to(kind), tl.trans(seen), input_precision=PRECISION)
        at = erasing + slot * SIZE * BK + i[:, None] * BK + key[None, :]
        tl.store(at, (-found if adding is None else found).to(kind))


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
