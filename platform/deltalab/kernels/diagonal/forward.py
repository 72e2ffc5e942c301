"""Kernels for a state that decays by channel, with or without a low rank.

For a chunk with S before it, G the cumulative log-decay, y = e k (tied) or b (free), and G' = G or G_{i-1}:

    (I + M) w = beta u - exp(G') y S         tied: M_ij = sum_c y_ic k_jc exp(G'_ic - G_jc), j < i
    (I - M) w = exp(G') y S + N u            free: M likewise from y and a, N from y and beta k
    o = scale (exp(G) r S + P w)             tied; free: P from beta k times u, plus P from a times w
    S <- exp(G_C) S + (k exp(G_C - G))^T w   tied; free: of beta k and u, plus of a and w

`prepare` computes all that does not depend on S, so that `scan` and `reverse` are products alone: w = erasing S +
from_u u, plus beta u if tied, because the inverse's identity is not rounded and should not meet rounded vectors.

M, N and P are built from halves. In each block of 2 h tokens, rows are tokens of the second half and columns tokens of
the first, each with its decay to or from the border between the halves, which is at most 1. The decay is the
exponential of a sum of g over the tokens that `between` chooses. There are no differences, so the decay is exact next
to any g, and the sum is a product of matrices. A token is either a row or a column of its block, so one factor for each
token suffices. Up to h = 8, blocks of 16 tokens are a batch, each within one warp. Larger blocks are computed by whole
products. One program takes several chunks, which share the choosing matrices. K is a power of two. Tensors as wide as
r, k and g are descriptors (`launch.tiles`).
"""

from typing import no_type_check

import triton
import triton.language as tl

from deltalab.kernels.chunk import LOG2_E, LOWEST, bounds, get_rows, held, locate, rows, scalars, unit_lower_inverse


@triton.jit
@no_type_check
def log_decays(g, row, valid, column, PRECISION: tl.constexpr, BT: tl.constexpr, RAGGED: tl.constexpr):
    """Loads g of a chunk in base 2, finite, because `decay` multiplies it by 0 and 1.

    g is in fp16 beside 16-bit operands. The error of exp(G) is then at most 2^-12 |G| exp(G) < 1e-4.
    """
    g_c = tl.maximum(get_rows(g, row, valid, column, BT, RAGGED).to(tl.float32), LOWEST) * LOG2_E
    return g_c.to(tl.float32 if PRECISION == "ieee" else tl.float16)


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
def in_second_half(level: tl.constexpr, N: tl.constexpr):
    """[N, 1]: whether a token is in the second half of its block, whose halves have 2**level tokens."""
    return ((tl.arange(0, N) >> level) % 2 == 1)[:, None]


@triton.jit
@no_type_check
def between(level: tl.constexpr, N: tl.constexpr, OWN: tl.constexpr):
    """[i, j]: whether token j lies between token i and the border of its block's halves.

    If OWN, i itself counts in the second half.
    """
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    behind = j <= i if OWN else j < i
    return (i >> level == j >> level) & ((in_second_half(level, N) & behind) | (((i >> level) % 2 == 0) & (j > i)))


@triton.jit
@no_type_check
def halves(level: tl.constexpr, N: tl.constexpr):
    """[i, j]: whether i and j are in different halves of one block."""
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    return (i >> level) ^ (j >> level) == 1


@triton.jit
@no_type_check
def near(x):
    """[BT, W] as blocks of 16 rows, whose products cost less than those of whole matrices, which are mostly masked."""
    return tl.reshape(x, [x.shape[0] // 16, 16, x.shape[1]])


@triton.jit
@no_type_check
def flat(x):
    """Returns blocks of 16 rows, as `near` makes them, as one matrix [BT, W]."""
    return tl.reshape(x, [x.shape[0] * 16, x.shape[2]])


@triton.jit
@no_type_check
def near_squares(x, BT: tl.constexpr):
    """The blocks of 16 on the diagonal of [BT, BT]."""
    block = tl.arange(0, BT // 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(x, [BT // 16, 16, BT // 16, 16]), 0.0), 2)


@triton.jit
@no_type_check
def near_and_far(blocks, far, BT: tl.constexpr):
    """[BT, BT] with `blocks` of 16 on the diagonal, where `far` is 0."""
    block = tl.arange(0, BT // 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    return far + tl.reshape(tl.where(same, tl.expand_dims(blocks, 2), 0.0), [BT, BT])


@triton.jit
@no_type_check
def _pairs(sums, x, y, level: tl.constexpr, PRECISION: tl.constexpr):
    """Adds x y^T to `sums` where x is in the second half and y in the first."""
    N: tl.constexpr = x.shape[-2]
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    product = tl.dot(x, tl.trans(y), sums, input_precision=PRECISION)
    return tl.where(halves(level, N) & (i > j), product, sums)


@triton.jit
@no_type_check
def _here(sums, x, y, PRECISION: tl.constexpr):
    """Adds the diagonal of x y^T to `sums`: pairs of each token with itself."""
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    return tl.where(i == j, tl.dot(x, tl.trans(y), sums, input_precision=PRECISION), sums)


@triton.jit
@no_type_check
def factor_and_half(g, g_near, level: tl.constexpr, OWN: tl.constexpr):
    """Each token's decay to or from its block's border, and whether it is in the second half, in blocks of 16."""
    if level < 4:
        factor, second_half = decay(between(level, 16, OWN), g_near), in_second_half(level, 16)[None, :, :]
    else:
        BT: tl.constexpr = g.shape[0]
        factor, second_half = near(decay(between(level, BT, OWN), g)), near(in_second_half(level, BT))
    return factor, second_half


@triton.jit
@no_type_check
def _near_level(
    factor, reader, writer, eraser, adder, p, q, moved, system, level: tl.constexpr,
    DTYPE: tl.constexpr, TIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of tokens across the borders of a level to p (P), q (P of a), moved (N) and system (M)."""
    second_half = in_second_half(level, 16)[None, :, :]
    if TIED:
        x, y = (reader * factor).to(DTYPE), (writer * factor).to(DTYPE)
        p = _pairs(p, x, y, level, PRECISION)
        system = _pairs(system, y, y, level, PRECISION)
    else:
        x = (tl.where(second_half, reader, writer) * factor).to(DTYPE)
        p = _pairs(p, x, x, level, PRECISION)
    if adder is not None:
        y = (tl.where(second_half, eraser, adder) * factor).to(DTYPE)
        q = _pairs(q, x, y, level, PRECISION)
        moved = _pairs(moved, y, x, level, PRECISION)
        system = _pairs(system, y, y, level, PRECISION)
    return p, q, moved, system


@triton.jit
@no_type_check
def _far_level(
    factor, reader, writer, eraser, adder, p, q, moved, system, level: tl.constexpr,
    DTYPE: tl.constexpr, TIED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Does the same as `_near_level`, by whole products for each block.

    Masks the operands, which are smaller than the product.
    """
    BT: tl.constexpr = 16 * reader.shape[0]
    half_index = near((tl.arange(0, BT) >> level)[:, None])
    for block in tl.static_range(BT >> level + 1):
        first_half, second_half = (
            tl.where(half_index == 2 * block, factor, 0.0),
            tl.where(half_index == 2 * block + 1, factor, 0.0),
        )
        x, y = flat((reader * second_half).to(DTYPE)), flat((writer * first_half).to(DTYPE))
        p = tl.dot(x, tl.trans(y), p, input_precision=PRECISION)
        if TIED:
            x = flat((writer * second_half).to(DTYPE))
            system = tl.dot(x, tl.trans(y), system, input_precision=PRECISION)
        if adder is not None:
            z = flat((adder * first_half).to(DTYPE))
            q = tl.dot(x, tl.trans(z), q, input_precision=PRECISION)
            x = flat((eraser * second_half).to(DTYPE))
            moved = tl.dot(x, tl.trans(y), moved, input_precision=PRECISION)
            system = tl.dot(x, tl.trans(z), system, input_precision=PRECISION)
    return p, q, moved, system


@triton.jit
@no_type_check
def read_and_written(
    r, k, e, beta, read, d, row, valid, head, H, column, scale, BT: tl.constexpr, RAGGED: tl.constexpr
):
    """Returns the vector that reads, scale (read r - d k), and the vector that u is written along.

    The latter is k if the low rank is tied, because beta then multiplies u, and else beta k.
    """
    writer = get_rows(k, row, valid, column, BT, RAGGED).to(tl.float32)
    reader = get_rows(r, row, valid, column, BT, RAGGED).to(tl.float32) * scale
    if read is not None:
        reader *= scalars(read, row, valid, head, H, BT)[:, None]
    if d is not None:
        reader -= scale * scalars(d, row, valid, head, H, BT)[:, None] * writer
    if e is None and beta is not None:
        writer *= scalars(beta, row, valid, head, H, BT)[:, None]
    return reader, writer


@triton.jit
@no_type_check
def prepare(
    r, k, g, e, a, b, beta, read, d,
    reading, writing, kept, within, erasing, from_u, inverse, adding, within_a,
    cu_seqlens, chunk_sequences, first_chunks, length, from_chunk, span, sequences, total, scale, H, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, LATE: tl.constexpr, EARLY: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores for each chunk and head what is not None, in tiles [BT, K] or [BT, BT].

    `reading` is exp(G) r, `writing` exp(G_C - G) k, `adding` exp(G_C - G) a, and `kept` [K] exp(G_C). `within` is P and
    `within_a` P of a. `inverse` is (I + M)^{-1} - I, or (I - M)^{-1} - I if free. The docstring of this module defines
    `erasing` and `from_u`. If EARLY, tokens read the state before they write: exp(G) is exp(G_{i-1}), and P has no
    diagonal.
    """
    i, j = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    dtype: tl.constexpr = k.dtype
    TIED: tl.constexpr = e is not None
    OWN: tl.constexpr = (LATE or erasing is None) and not EARLY
    # Programs that run at a time take heads of the same tokens, which lie side by side.
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        program, head = index // H, index % H
        sequence, chunk = locate(program, chunk_sequences, first_chunks, span, PACKED)
        start, tokens = bounds(tl.minimum(sequence, sequences - 1), cu_seqlens, length, PACKED)
        # With packed sequences, the last programs may have no chunk: no row of theirs is valid.
        tokens = tl.where(sequence < sequences, tokens, 0)
        row, valid = start + (chunk + from_chunk) * BT, tokens - (chunk + from_chunk) * BT
        slot = program * H + head
        p, p_near = tl.zeros([BT, BT], tl.float32), tl.zeros([BT // 16, 16, 16], tl.float32)
        q, moved, system, q_near, moved_near, system_near = p, p, p, p_near, p_near, p_near
        for key in range(0, K, BK):
            column = head * K + key
            g_c = log_decays(g, row, valid, column, PRECISION, BT, RAGGED)
            g_near = near(g_c)
            since, until = near(decay(j <= i if OWN else j < i, g_c)), near(decay(j > i, g_c))
            reader, writer = read_and_written(r, k, e, beta, read, d, row, valid, head, H, column, scale, BT, RAGGED)
            reader, writer = near(reader), near(writer)
            if not EARLY:
                p_near = _here(p_near, reader.to(dtype), writer.to(dtype), PRECISION)
            writing.store([slot * BT, key], flat((writer * until).to(dtype)))
            eraser, adder = None, None
            if adding is not None:
                eraser = near(get_rows(b, row, valid, column, BT, RAGGED).to(tl.float32))
                adder = near(get_rows(a, row, valid, column, BT, RAGGED).to(tl.float32))
                if not EARLY:
                    q_near = _here(q_near, reader.to(dtype), adder.to(dtype), PRECISION)
                adding.store([slot * BT, key], flat((adder * until).to(dtype)))
            if not OWN:
                alpha = tl.exp2(g_near.to(tl.float32))
                if not EARLY:
                    reader *= alpha
            reading.store([slot * BT, key], flat((reader * since).to(dtype)))
            ends = kept + slot.to(tl.int64) * K + key + tl.arange(0, BK)[None, :] + 0 * i
            tl.store(ends, flat(since if OWN else since * alpha), mask=i == BT - 1)
            for level in tl.static_range(7):
                if 1 << level < BT:
                    factor, _ = factor_and_half(g_c, g_near, level, OWN)
                    if level < 4:
                        p_near, q_near, moved_near, system_near = _near_level(
                            factor, reader, writer, eraser, adder, p_near, q_near, moved_near, system_near,
                            level, dtype, TIED, PRECISION,
                        )  # fmt: skip
                    else:
                        p, q, moved, system = _far_level(
                            factor, reader, writer, eraser, adder, p, q, moved, system,
                            level, dtype, TIED, PRECISION,
                        )  # fmt: skip
        p = near_and_far(p_near, p, BT)
        within.store([slot * BT, 0], p.to(dtype))
        if erasing is not None:
            system = near_and_far(system_near, system, BT)
            if adding is not None:
                q = near_and_far(q_near, q, BT)
                within_a.store([slot * BT, 0], q.to(dtype))
                moved = near_and_far(moved_near, moved, BT)
                system = -system
            else:
                e_c = scalars(e, row, valid, head, H, BT)[:, None]
                system *= e_c
            solved = unit_lower_inverse(system, BT, PRECISION)
            solved_c = solved.to(dtype)
            if inverse is not None:
                inverse.store([slot * BT, 0], solved_c)
            if adding is not None:
                values = tl.dot(solved_c, moved.to(dtype), moved, input_precision=PRECISION)
            elif beta is not None:
                values = solved * scalars(beta, row, valid, head, H, BT)[None, :]
            else:
                values = solved
            from_u.store([slot * BT, 0], values.to(dtype))
            for key in range(0, K, BK):
                g_c = log_decays(g, row, valid, head * K + key, PRECISION, BT, RAGGED)
                since = decay(j <= i if OWN else j < i, g_c)
                if adding is not None:
                    eraser_c = get_rows(b, row, valid, head * K + key, BT, RAGGED).to(tl.float32) * since
                else:
                    eraser_c = get_rows(k, row, valid, head * K + key, BT, RAGGED).to(tl.float32) * (-e_c * since)
                erasing_c = tl.dot(held(solved_c), eraser_c.to(dtype), eraser_c, input_precision=PRECISION)
                erasing.store([slot * BT, key], erasing_c.to(dtype))


@triton.jit
@no_type_check
def scan(
    u, beta, reading, writing, kept, within, erasing, from_u, adding, within_a, state, begin_states,
    o, last, states, written,
    cu_seqlens, first_chunks, length, chunks, from_chunk, to_chunk, segment_chunks, segments, H, K, V,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL_V: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes one head's block of values through chunks from_chunk to to_chunk, the state transposed to [V, K].

    Stores what is not None: the output o, the last state, the transposed state before each chunk (states), w (written).
    `begin_states` [B, segments, H, V, K] is the state before each segment. It is stored if o is stored, else loaded.
    """
    value, head, sequence = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    slot_0 = (tl.load(first_chunks + sequence) if PACKED else sequence * (to_chunk - from_chunk) - from_chunk).to(
        tl.int64
    )
    if PACKED:
        to_chunk = tl.load(first_chunks + sequence + 1) - slot_0.to(tl.int32)
    column, i = tl.arange(0, BK), tl.arange(0, BT)
    dtype = reading.dtype.element_ty
    state_mask = (value < V)[:, None] & (column < K)[None, :]
    transposed = value[:, None] * K + column[None, :]
    state_offset = (sequence.to(tl.int64) * H + head) * K * V + column[None, :] * V + value[:, None]
    if o is None:
        begin_at = begin_states + ((sequence.to(tl.int64) * segments + from_chunk // segment_chunks) * H + head) * K * V
        s = tl.load(begin_at + transposed, mask=state_mask, other=0.0)
    elif state is not None:
        s = tl.load(state + state_offset, mask=state_mask, other=0.0).to(tl.float32)
    else:
        s = tl.zeros([BV, BK], tl.float32)
    for segment in range(from_chunk // segment_chunks, tl.cdiv(to_chunk, segment_chunks)):
        if o is not None and begin_states is not None:
            begin_at = begin_states + ((sequence.to(tl.int64) * segments + segment) * H + head) * K * V
            tl.store(begin_at + transposed, s, mask=state_mask)
        for chunk in range(
            tl.maximum(segment * segment_chunks, from_chunk),
            tl.minimum(segment * segment_chunks + segment_chunks, to_chunk),
        ):
            slot = (slot_0 + chunk) * H + head
            tile = slot * BT * BK + i[:, None] * BK + column[None, :]
            square = slot * BT * BT + i[:, None] * BT + i[None, :]
            row, valid = start + chunk * BT, length - chunk * BT
            u_at, mask = rows(u, row, valid, head, H, value, V, BT, FULL_V)
            write_t = tl.trans(tl.load(u_at, mask=mask, other=0.0))
            s_c = s.to(dtype)
            if states is not None:
                states_at = states + (slot * V + value)[:, None] * BK + column[None, :]
                tl.store(states_at, s_c, mask=(value < V)[:, None])
            if erasing is not None:
                w = write_t.to(tl.float32) if adding is None else tl.zeros([BV, BT], tl.float32)
                if adding is None and beta is not None:
                    w *= scalars(beta, row, valid, head, H, BT)[None, :]
                w = tl.dot(write_t, tl.trans(tl.load(from_u + square)), w, input_precision=PRECISION)
                w = tl.dot(s_c, tl.trans(tl.load(erasing + tile)), w, input_precision=PRECISION).to(dtype)
                if written is not None:
                    written_at = written + (slot * BT + i)[:, None] * V + value[None, :]
                    tl.store(written_at, tl.trans(w), mask=(value < V)[None, :])
                if adding is None:
                    write_t = w
            if o is not None:
                out = tl.dot(s_c, tl.trans(tl.load(reading + tile)), input_precision=PRECISION)
                out = tl.dot(write_t, tl.trans(tl.load(within + square)), out, input_precision=PRECISION)
                if adding is not None:
                    out = tl.dot(w, tl.trans(tl.load(within_a + square)), out, input_precision=PRECISION)
                o_at, mask = rows(o, row, valid, head, H, value, V, BT, FULL_V)
                tl.store(o_at, tl.trans(out).to(o.dtype.element_ty), mask=mask)
            s *= tl.load(kept + slot * BK + column)[None, :]
            s = tl.dot(write_t, tl.load(writing + tile), s, input_precision=PRECISION)
            if adding is not None:
                s = tl.dot(w, tl.load(adding + tile), s, input_precision=PRECISION)
    if last is not None:
        tl.store(last + state_offset, s, mask=state_mask)


@triton.jit
@no_type_check
def reverse(
    d_o, reading, writing, kept, within, erasing, from_u, inverse, adding, within_a,
    d_last, states_after, d_u, d_seen, d_state,
    cu_seqlens, first_chunks, length, chunks, from_chunk, to_chunk, H, K, V,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL_V: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the gradient of the state from chunk to_chunk back to from_chunk, for one head's block of values.

    Starts from d_last [.., V, K] and ends in d_state [.., V, K]. Stores states_after, the transposed gradient of the
    state after each chunk; d_u, the gradient of u, or of beta u if tied; and d_seen, if the low rank is free, the
    gradient of exp(G') y S, through the inverse.
    """
    value, head, sequence = tl.program_id(0) * BV + tl.arange(0, BV), tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    slot_0 = (tl.load(first_chunks + sequence) if PACKED else sequence * (to_chunk - from_chunk) - from_chunk).to(
        tl.int64
    )
    if PACKED:
        to_chunk = tl.load(first_chunks + sequence + 1) - slot_0.to(tl.int32)
    column, i = tl.arange(0, BK), tl.arange(0, BT)
    dtype = reading.dtype.element_ty
    state_mask = (value < V)[:, None] & (column < K)[None, :]
    state_offset = (sequence.to(tl.int64) * H + head) * K * V + value[:, None] * K + column[None, :]
    ds = tl.load(d_last + state_offset, mask=state_mask, other=0.0)
    for back in range(from_chunk, to_chunk):
        chunk = to_chunk - 1 - (back - from_chunk)
        slot = (slot_0 + chunk) * H + head
        tile = slot * BT * BK + i[:, None] * BK + column[None, :]
        square = slot * BT * BT + i[:, None] * BT + i[None, :]
        row, valid = start + chunk * BT, length - chunk * BT
        at, mask = rows(d_o, row, valid, head, H, value, V, BT, FULL_V)
        do = tl.trans(tl.load(at, mask=mask, other=0.0))
        ds_c = ds.to(dtype)
        at = states_after + (slot * V + value)[:, None] * BK + column[None, :]
        tl.store(at, ds_c, mask=(value < V)[:, None])
        du = tl.dot(do, tl.load(within + square), input_precision=PRECISION)
        du = tl.dot(ds_c, tl.trans(tl.load(writing + tile)), du, input_precision=PRECISION)
        ds *= tl.load(kept + slot * BK + column)[None, :]
        ds = tl.dot(do, tl.load(reading + tile), ds, input_precision=PRECISION)
        if erasing is not None:
            if adding is None:
                dw = du.to(dtype)
                du = tl.dot(dw, tl.load(inverse + square), du, input_precision=PRECISION)
            else:
                dw = tl.dot(do, tl.load(within_a + square), input_precision=PRECISION)
                d_seen_t = tl.dot(ds_c, tl.trans(tl.load(adding + tile)), dw, input_precision=PRECISION)
                dw = d_seen_t.to(dtype)
                du = tl.dot(dw, tl.load(from_u + square), du, input_precision=PRECISION)
                d_seen_t = tl.dot(dw, tl.load(inverse + square), d_seen_t, input_precision=PRECISION)
                at = d_seen + (slot * BT + i)[:, None] * V + value[None, :]
                tl.store(at, tl.trans(d_seen_t).to(dtype), mask=(value < V)[None, :])
            ds = tl.dot(dw, tl.load(erasing + tile), ds, input_precision=PRECISION)
        at, mask = rows(d_u, row, valid, head, H, value, V, BT, FULL_V)
        tl.store(at, tl.trans(du).to(d_u.dtype.element_ty), mask=mask)
    tl.store(d_state + state_offset, ds, mask=state_mask)
