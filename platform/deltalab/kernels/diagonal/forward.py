"""Kernels for a state that decays by channel, with or without a low rank.

For a chunk with S before it, G the cumulative log-decay, y = e k (tied) or b (free), and G' = G or G_{i-1}:

    (I + M) w = beta u - exp(G') y S         tied: M_ij = sum_c y_ic k_jc exp(G'_ic - G_jc), j < i
    (I - M) w = exp(G') y S + N u            free: M so of y and a, N so of y and beta k
    o = scale (exp(G) r S + P w)             tied; free: P of beta k times u, plus P of a times w
    S <- exp(G_C) S + (k exp(G_C - G))^T w   tied; free: of beta k and u, plus of a and w

`prepare` computes all that does not depend on S, so that `scan` and `reverse` are products alone: w = erasing S +
given u, plus beta u if tied, because the inverse's identity is not rounded and should not meet rounded vectors.

M, N and P are built from halves. In each block of 2 h tokens, rows are tokens of the second half and columns tokens of
the first, each with its decay to or from the border between the halves, which is at most 1. The decay is the
exponential of a sum of g over the tokens that `between` chooses. There are no differences, so the decay is exact next
to any g, and the sum is a product of matrices. A token is either a row or a column of its block, so one factor for
each token suffices. Up to h = 8, blocks of 16 tokens are a batch, each within one warp; `far` blocks beyond are whole
products. One program takes several chunks, which share the choosing matrices. K is a power of two. r, k, g and their
like are descriptors (`launch.tiles`).
"""

from typing import no_type_check

import triton
import triton.language as tl

from deltalab.kernels.chunk import LOG2_E, LOWEST, bounds, get_rows, held, locate, rows, scalars, unit_lower_inverse


@triton.jit
@no_type_check
def log_decays(g, row, valid, column, PRECISION: tl.constexpr, SIZE: tl.constexpr, RAGGED: tl.constexpr):
    """g of a chunk in base 2, finite, because `decay` multiplies it by 0 and 1.

    In fp16 beside 16-bit operands: the error of exp(G) is then at most 2^-12 |G| exp(G) < 1e-4.
    """
    found = tl.maximum(get_rows(g, row, valid, column, SIZE, RAGGED).to(tl.float32), LOWEST) * LOG2_E
    return found.to(tl.float32 if PRECISION == "ieee" else tl.float16)


@triton.jit
@no_type_check
def decay(chosen, g):
    """exp2 of the sum of g_jc over the tokens j with chosen[i, j], [.., N, W] in fp32."""
    chosen = chosen.to(g.dtype)
    if len(g.shape) == 3:
        chosen = tl.broadcast_to(chosen[None, :, :], [g.shape[0], g.shape[1], g.shape[1]])
    return tl.exp2(tl.dot(chosen, g, input_precision="ieee"))


@triton.jit
@no_type_check
def second(level: tl.constexpr, N: tl.constexpr):
    """[N, 1]: whether a token is in the second half of its block, whose halves have 2**level tokens."""
    return ((tl.arange(0, N) >> level) % 2 == 1)[:, None]


@triton.jit
@no_type_check
def between(level: tl.constexpr, N: tl.constexpr, OWN: tl.constexpr):
    """[i, j]: whether token j lies between token i and the border of its block's halves.

    OWN: i itself counts if it is in the second half.
    """
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    behind = j <= i if OWN else j < i
    return (i >> level == j >> level) & ((second(level, N) & behind) | (((i >> level) % 2 == 0) & (j > i)))


@triton.jit
@no_type_check
def halves(level: tl.constexpr, N: tl.constexpr):
    """[i, j]: whether i and j are in different halves of one block."""
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    return (i >> level) ^ (j >> level) == 1


@triton.jit
@no_type_check
def near(x):
    """[SIZE, W] as blocks of 16 rows, whose products cost less than whole ones that are mostly masked."""
    return tl.reshape(x, [x.shape[0] // 16, 16, x.shape[1]])


@triton.jit
@no_type_check
def flat(x):
    """The reverse of `near`."""
    return tl.reshape(x, [x.shape[0] * 16, x.shape[2]])


@triton.jit
@no_type_check
def near_squares(x, SIZE: tl.constexpr):
    """The blocks of 16 on the diagonal of [SIZE, SIZE]."""
    block = tl.arange(0, SIZE // 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(x, [SIZE // 16, 16, SIZE // 16, 16]), 0.0), 2)


@triton.jit
@no_type_check
def near_and_far(blocks, far, SIZE: tl.constexpr):
    """[SIZE, SIZE] with `blocks` of 16 on the diagonal; `far` is 0 there."""
    block = tl.arange(0, SIZE // 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    return far + tl.reshape(tl.where(same, tl.expand_dims(blocks, 2), 0.0), [SIZE, SIZE])


@triton.jit
@no_type_check
def _pairs(sums, x, y, level: tl.constexpr, PRECISION: tl.constexpr):
    """Adds x y^T to `sums` where x is in the second half and y in the first."""
    N: tl.constexpr = x.shape[-2]
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    found = tl.dot(x, tl.trans(y), sums, input_precision=PRECISION)
    return tl.where(halves(level, N) & (i > j), found, sums)


@triton.jit
@no_type_check
def _here(sums, x, y, PRECISION: tl.constexpr):
    """Adds the diagonal of x y^T to `sums`: pairs of each token with itself."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    return tl.where(i == j, tl.dot(x, tl.trans(y), sums, input_precision=PRECISION), sums)


@triton.jit
@no_type_check
def factor_and_half(g, g_near, level: tl.constexpr, OWN: tl.constexpr):
    """For each token, in blocks of 16: its decay to or from its block's border; whether it is in the second half."""
    if level < 4:
        factor, behind = decay(between(level, 16, OWN), g_near), second(level, 16)[None, :, :]
    else:
        SIZE: tl.constexpr = g.shape[0]
        factor, behind = near(decay(between(level, SIZE, OWN), g)), near(second(level, SIZE))
    return factor, behind


@triton.jit
@no_type_check
def _near_level(
    factor, reader, writer, eraser, adder, p, q, moved, system, level: tl.constexpr,
    KIND: tl.constexpr, TIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of tokens across the borders of a level to p (P), q (P of a), moved (N) and system (M)."""
    behind = second(level, 16)[None, :, :]
    if TIED:
        x, y = (reader * factor).to(KIND), (writer * factor).to(KIND)
        p = _pairs(p, x, y, level, PRECISION)
        system = _pairs(system, y, y, level, PRECISION)
    else:
        x = (tl.where(behind, reader, writer) * factor).to(KIND)
        p = _pairs(p, x, x, level, PRECISION)
    if adder is not None:
        y = (tl.where(behind, eraser, adder) * factor).to(KIND)
        q = _pairs(q, x, y, level, PRECISION)
        moved = _pairs(moved, y, x, level, PRECISION)
        system = _pairs(system, y, y, level, PRECISION)
    return p, q, moved, system


@triton.jit
@no_type_check
def _far_level(
    factor, reader, writer, eraser, adder, p, q, moved, system, level: tl.constexpr,
    KIND: tl.constexpr, TIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_near_level`, by whole products for each block. Masks the operands, which are smaller than the product."""
    SIZE: tl.constexpr = 16 * reader.shape[0]
    half = near((tl.arange(0, SIZE) >> level)[:, None])
    for block in tl.static_range(SIZE >> level + 1):
        first, behind = tl.where(half == 2 * block, factor, 0.0), tl.where(half == 2 * block + 1, factor, 0.0)
        x, y = flat((reader * behind).to(KIND)), flat((writer * first).to(KIND))
        p = tl.dot(x, tl.trans(y), p, input_precision=PRECISION)
        if TIED:
            x = flat((writer * behind).to(KIND))
            system = tl.dot(x, tl.trans(y), system, input_precision=PRECISION)
        if adder is not None:
            z = flat((adder * first).to(KIND))
            q = tl.dot(x, tl.trans(z), q, input_precision=PRECISION)
            x = flat((eraser * behind).to(KIND))
            moved = tl.dot(x, tl.trans(y), moved, input_precision=PRECISION)
            system = tl.dot(x, tl.trans(z), system, input_precision=PRECISION)
    return p, q, moved, system


@triton.jit
@no_type_check
def read_and_written(
    r, k, e, beta, read, d, row, valid, head, H, column, scale, SIZE: tl.constexpr, RAGGED: tl.constexpr
):
    """What reads, scale (read r - d k), and what is written along: k if tied, where u has the beta, else beta k."""
    writer = get_rows(k, row, valid, column, SIZE, RAGGED).to(tl.float32)
    reader = get_rows(r, row, valid, column, SIZE, RAGGED).to(tl.float32) * scale
    if read is not None:
        reader *= scalars(read, row, valid, head, H, SIZE)[:, None]
    if d is not None:
        reader -= scale * scalars(d, row, valid, head, H, SIZE)[:, None] * writer
    if e is None and beta is not None:
        writer *= scalars(beta, row, valid, head, H, SIZE)[:, None]
    return reader, writer


@triton.jit
@no_type_check
def prepare(
    r, k, g, e, a, b, beta, read, d,
    reading, writing, kept, within, erasing, given, inverse, adding, within_a,
    cu_seqlens, of, first, length, from_chunk, span, sequences, total, scale, H, K: tl.constexpr,
    SIZE: tl.constexpr, BK: tl.constexpr, LATE: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For each chunk and head, stores what is not None, in tiles [SIZE, K] or [SIZE, SIZE].

    reading: exp(G) r. writing: exp(G_C - G) k. adding: exp(G_C - G) a. erasing, given: as above. kept [K]: exp(G_C).
    within: P. within_a: P of a. inverse: (I + M)^{-1} - I, or (I - M)^{-1} - I if free.
    """
    i, j = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    kind: tl.constexpr = k.dtype
    TIED: tl.constexpr = e is not None
    OWN: tl.constexpr = LATE or erasing is None
    # Programs that run at a time take heads of the same tokens, which lie side by side.
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        program, head = index // H, index % H
        sequence, chunk = locate(program, of, first, span, PACKED)
        start, tokens = bounds(tl.minimum(sequence, sequences - 1), cu_seqlens, length, PACKED)
        # With packed sequences, the last programs may have no chunk: no row of theirs is valid.
        tokens = tl.where(sequence < sequences, tokens, 0)
        row, valid = start + (chunk + from_chunk) * SIZE, tokens - (chunk + from_chunk) * SIZE
        slot = program * H + head
        p, p_near = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE // 16, 16, 16], tl.float32)
        q, moved, system, q_near, moved_near, system_near = p, p, p, p_near, p_near, p_near
        for key in range(0, K, BK):
            column = head * K + key
            g_c = log_decays(g, row, valid, column, PRECISION, SIZE, RAGGED)
            g_near = near(g_c)
            since, until = near(decay(j <= i if OWN else j < i, g_c)), near(decay(j > i, g_c))
            reader, writer = read_and_written(r, k, e, beta, read, d, row, valid, head, H, column, scale, SIZE, RAGGED)
            reader, writer = near(reader), near(writer)
            p_near = _here(p_near, reader.to(kind), writer.to(kind), PRECISION)
            writing.store([slot * SIZE, key], flat((writer * until).to(kind)))
            eraser, adder = None, None
            if adding is not None:
                eraser = near(get_rows(b, row, valid, column, SIZE, RAGGED).to(tl.float32))
                adder = near(get_rows(a, row, valid, column, SIZE, RAGGED).to(tl.float32))
                q_near = _here(q_near, reader.to(kind), adder.to(kind), PRECISION)
                adding.store([slot * SIZE, key], flat((adder * until).to(kind)))
            if not OWN:
                alpha = tl.exp2(g_near.to(tl.float32))
                reader *= alpha
            reading.store([slot * SIZE, key], flat((reader * since).to(kind)))
            ends = kept + slot.to(tl.int64) * K + key + tl.arange(0, BK)[None, :] + 0 * i
            tl.store(ends, flat(since if OWN else since * alpha), mask=i == SIZE - 1)
            for level in tl.static_range(7):
                if 1 << level < SIZE:
                    factor, _ = factor_and_half(g_c, g_near, level, OWN)
                    if level < 4:
                        p_near, q_near, moved_near, system_near = _near_level(
                            factor, reader, writer, eraser, adder, p_near, q_near, moved_near, system_near,
                            level, kind, TIED, PRECISION,
                        )  # fmt: skip
                    else:
                        p, q, moved, system = _far_level(
                            factor, reader, writer, eraser, adder, p, q, moved, system,
                            level, kind, TIED, PRECISION,
                        )  # fmt: skip
        p = near_and_far(p_near, p, SIZE)
        within.store([slot * SIZE, 0], p.to(kind))
        if erasing is not None:
            system = near_and_far(system_near, system, SIZE)
            if adding is not None:
                q = near_and_far(q_near, q, SIZE)
                within_a.store([slot * SIZE, 0], q.to(kind))
                moved = near_and_far(moved_near, moved, SIZE)
                system = -system
            else:
                erase = scalars(e, row, valid, head, H, SIZE)[:, None]
                system *= erase
            solved = unit_lower_inverse(system, SIZE, PRECISION)
            solved_c = solved.to(kind)
            if inverse is not None:
                inverse.store([slot * SIZE, 0], solved_c)
            if adding is not None:
                values = tl.dot(solved_c, moved.to(kind), moved, input_precision=PRECISION)
            elif beta is not None:
                values = solved * scalars(beta, row, valid, head, H, SIZE)[None, :]
            else:
                values = solved
            given.store([slot * SIZE, 0], values.to(kind))
            for key in range(0, K, BK):
                g_c = log_decays(g, row, valid, head * K + key, PRECISION, SIZE, RAGGED)
                since = decay(j <= i if OWN else j < i, g_c)
                if adding is not None:
                    seen = get_rows(b, row, valid, head * K + key, SIZE, RAGGED).to(tl.float32) * since
                else:
                    seen = get_rows(k, row, valid, head * K + key, SIZE, RAGGED).to(tl.float32) * (-erase * since)
                found = tl.dot(held(solved_c), seen.to(kind), seen, input_precision=PRECISION)
                erasing.store([slot * SIZE, key], found.to(kind))


@triton.jit
@no_type_check
def scan(
    u, beta, reading, writing, kept, within, erasing, given, adding, within_a, state, begin_states,
    o, last, states, written,
    cu_seqlens, first, length, chunks, from_chunk, to_chunk, every, segments, H, K, V,
    SIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL_V: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes one head's block of values through chunks from_chunk to to_chunk, the state transposed to [V, K].

    Stores what is not None: the output o, the last state, the transposed state before each chunk (states), w (written).
    begin_states: [B, segments, H, V, K], the state before every `every`-th chunk; stored if o is, else loaded.
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
                w = x.to(tl.float32) if adding is None else tl.zeros([BV, SIZE], tl.float32)
                if adding is None and beta is not None:
                    w *= scalars(beta, row, valid, head, H, SIZE)[None, :]
                w = tl.dot(x, tl.trans(tl.load(given + square)), w, input_precision=PRECISION)
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
@no_type_check
def reverse(
    d_o, reading, writing, kept, within, erasing, given, inverse, adding, within_a,
    d_last, states_after, d_u, d_seen, d_state,
    cu_seqlens, first, length, chunks, from_chunk, to_chunk, H, K, V,
    SIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL_V: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the gradient of the state from chunk to_chunk back to from_chunk, for one head's block of values.

    Starts from d_last [.., V, K] and ends in d_state [.., V, K]. Stores states_after, the transposed gradient of the
    state after each chunk; d_u, the gradient of u, or of beta u if tied; and d_seen, if the low rank is free, the
    gradient of exp(G') y S, through the inverse.
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
                du = tl.dot(dw, tl.load(inverse + square), du, input_precision=PRECISION)
            else:
                dw = tl.dot(do, tl.load(within_a + square), input_precision=PRECISION)
                seen = tl.dot(ds_c, tl.trans(tl.load(adding + tile)), dw, input_precision=PRECISION)
                dw = seen.to(kind)
                du = tl.dot(dw, tl.load(given + square), du, input_precision=PRECISION)
                seen = tl.dot(dw, tl.load(inverse + square), seen, input_precision=PRECISION)
                at = d_seen + (slot * SIZE + i)[:, None] * V + value[None, :]
                tl.store(at, tl.trans(seen).to(kind), mask=(value < V)[None, :])
            ds = tl.dot(dw, tl.load(erasing + tile), ds, input_precision=PRECISION)
        at, there = rows(d_u, row, valid, head, H, value, V, SIZE, FULL_V)
        tl.store(at, tl.trans(du).to(d_u.dtype.element_ty), mask=there)
    tl.store(d_state + held, ds, mask=both)
