"""Kernels for a state that may decay by a scalar, and may erase along its key.

For a chunk with S before it, G the cumulative log-decay and A_ij = exp(G_i - G_j) (see reference._scan):

    (I + M) w = beta u - e exp(G') k S,   M_ij = e_i exp(G'_i - G_j) k_i . k_j,  j < i     G' = G or G_{i-1}
    o = scale (exp(G) r S + P w),   P_ij = A_ij r_i . k_j,  j <= i
    S <- exp(G_C) S + k^T (exp(G_C - G) w)

where r stands for read r - d k. `prepare` computes what does not depend on S, for all chunks at once, and multiplies
what reads by scale. `scan` goes through the chunks with the state in registers, transposed to [V, K]: the left operand
of every product is then in registers already, and the right one is a tile that was loaded ahead. If nothing is erased
or corrected, `scan` waits for memory alone and has time to compute P itself, so that P is neither stored nor loaded.
K is a power of two and V a multiple of BV. r, k, u and their like are descriptors (`launch.tiles`).
"""

from typing import no_type_check

import triton
import triton.language as tl

from deltalab.kernels.chunk import (
    MOVES,
    apart,
    bounds,
    cumulative,
    decays,
    get_rows,
    locate,
    put_rows,
    scalars,
    unit_lower_inverse,
)

READS, CORRECTS, ERASES, WRITES, ENDS, KEEPS, SINCE, READ, SUMS, SEEN = (tl.constexpr(n) for n in range(10))
"""Rows of `vectors`, factors for each token of a chunk. READS: exp(G) read. CORRECTS: exp(G) d. ERASES: exp(G') e.
WRITES: beta. ENDS: exp(G_C - G), from the token to the chunk's end. KEEPS: exp(G_C) in its first element. SINCE:
exp(G), to predict. For kernels that compute P: READ is read, SUMS is G in base 2, and SEEN is the G that a reader sees,
G_i or G_{i-1}."""

ROWS = tl.constexpr(10)


@triton.jit
@no_type_check
def _put(vectors, what: tl.constexpr, x, SIZE: tl.constexpr):
    tl.store(vectors + what * SIZE + tl.arange(0, SIZE), x.to(vectors.dtype.element_ty))


@triton.jit
@no_type_check
def _get(vectors, what: tl.constexpr, SIZE: tl.constexpr):
    return tl.load(vectors + what * SIZE + tl.arange(0, SIZE)).to(tl.float32)


@triton.jit(do_not_specialize=MOVES)
@no_type_check
def prepare(
    r, k, g, e, beta, read, d, vectors, inverse, within, overlaps,
    cu_seqlens, of, first, length, chunks, sequences, scale, H,
    K: tl.constexpr, SIZE: tl.constexpr, LATE: tl.constexpr, FIT: tl.constexpr, SUM: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For each chunk and head: stores `vectors` and, unless None, inverse (I + M)^{-1} - I and within, P.

    FIT: the pass predicts its target from the state before each token. overlaps is then P with k in place of r.
    """
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    sequence, chunk = locate(program, of, first, chunks, PACKED)
    if sequence >= sequences:
        return
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    row, valid = start + chunk * SIZE, length - chunk * SIZE
    i = tl.arange(0, SIZE)
    at = program * H + head
    mine = vectors + at.to(tl.int64) * (ROWS * SIZE)
    there = tl.where(i < valid, 1.0, 0.0)
    # Begin all loads before anything waits for one.
    steps = None if g is None else decays(g, row, valid, head, H, SIZE)
    strength = there if read is None else scalars(read, row, valid, head, H, SIZE)
    writes = there if beta is None else scalars(beta, row, valid, head, H, SIZE)
    if d is not None:
        correction = scalars(d, row, valid, head, H, SIZE)
    if e is not None:
        erase = scalars(e, row, valid, head, H, SIZE)
    if within is not None:
        key = get_rows(k, row, valid, head * K, SIZE, RAGGED)
        reader = get_rows(r, row, valid, head * K, SIZE, RAGGED)
    sums, earlier, total = cumulative(steps, SIZE, SUM)
    seen = earlier if FIT else sums
    since = tl.exp2(seen.to(tl.float32))
    _put(mine, READS, strength * (since * scale), SIZE)
    _put(mine, WRITES, writes, SIZE)
    _put(mine, ENDS, tl.exp2((total - sums).to(tl.float32)), SIZE)
    _put(mine, KEEPS, tl.where(i == 0, tl.exp2(total.to(tl.float32)), 0.0), SIZE)
    if within is None:
        _put(mine, READ, strength * scale, SIZE)
        _put(mine, SUMS, sums, SIZE)
        _put(mine, SEEN, seen, SIZE)
    else:
        decay = apart(seen[:, None], sums[None, :], i[:, None], i[None, :], FIT, g is not None)
        pairs = tl.dot(reader, tl.trans(key), input_precision=PRECISION) * strength[:, None]
        overlap = tl.dot(key, tl.trans(key), input_precision=PRECISION)
        if d is not None:
            _put(mine, CORRECTS, correction * (since * scale), SIZE)
            pairs -= correction[:, None] * overlap
        within.store([at * SIZE, 0], (pairs * (decay * scale)).to(within.dtype))
        if FIT:
            _put(mine, SINCE, since, SIZE)
            overlaps.store([at * SIZE, 0], (overlap * decay).to(overlaps.dtype))
        if e is not None:
            late = sums if LATE else earlier
            _put(mine, ERASES, erase * tl.exp2(late.to(tl.float32)), SIZE)
            decay = apart(late[:, None], sums[None, :], i[:, None], i[None, :], True, g is not None)
            system = overlap * erase[:, None] * decay
            inverse.store([at * SIZE, 0], unit_lower_inverse(system, SIZE, PRECISION).to(inverse.dtype))


@triton.jit
@no_type_check
def _decays(vectors, SIZE: tl.constexpr, FIT: tl.constexpr):
    """A_ij of what a reader sees, which P and P of k share, and `SINCE`."""
    i = tl.arange(0, SIZE)
    sums, seen = tl.load(vectors + SUMS * SIZE + i), tl.load(vectors + SEEN * SIZE + i)
    return apart(seen[:, None], sums[None, :], i[:, None], i[None, :], FIT), tl.exp2(seen.to(tl.float32))


@triton.jit
@no_type_check
def _along(x, y):
    """Returns x + 0 y. If x reaches an operand of a product, a loop loads y ahead as well."""
    return x + 0 * y


@triton.jit
@no_type_check
def pseudo_residual(error, clip, LOSS: tl.constexpr):
    """The pseudo-residual of `structure.ResidualState`, in fp32. tanh by exp(-2 |error|) cannot overflow."""
    if LOSS == "huber":
        error = tl.minimum(tl.maximum(error, -clip), clip)
    elif LOSS == "log_cosh":
        small = tl.exp(-2 * tl.abs(error))
        error = tl.where(error < 0, -1.0, 1.0) * (1 - small) / (1 + small)
    return error


@triton.jit
@no_type_check
def through_residual(upstream, residual, clip, LOSS: tl.constexpr):
    """The gradient of the error. upstream: gradient of its pseudo-residual. residual: the pseudo-residual."""
    if LOSS == "huber":
        upstream = tl.where(tl.abs(residual) < clip, upstream, 0.0)
    elif LOSS == "log_cosh":
        upstream *= 1 - residual * residual
    return upstream


@triton.jit(do_not_specialize=MOVES)
@no_type_check
def scan(
    r, k, u, vectors, inverse, within, overlaps, target, base, state, begin_states,
    o, residual, last, states, written,
    cu_seqlens, first, length, chunks, from_chunk, to_chunk, every, segments, clip, H, V,
    K: tl.constexpr, SIZE: tl.constexpr, BV: tl.constexpr, CORRECTED: tl.constexpr, LOSS: tl.constexpr,
    MAPS: tl.constexpr, PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes one head's block of values through chunks from_chunk to to_chunk.

    Stores what is not None: o, the output plus `base`; `residual`, the pseudo-residual of `target` (u if None); last,
    the last state; and for this span the transposed state before each chunk (states) and w (written).
    With a residual, the prediction and o read the state before their token writes.
    begin_states: [B, segments, H, V, K], the state before every `every`-th chunk; stored if o is, else loaded.
    MAPS: K more columns follow the V values. They start as I and nothing is written to them: last [B, H, K, V + K].
    """
    block, head, sequence = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    slot = sequence * (to_chunk - from_chunk)
    number = sequence * chunks
    if PACKED:
        number = tl.load(first + sequence)
        slot = number
        to_chunk = tl.load(first + sequence + 1) - number
    value, key = block + tl.arange(0, BV), tl.arange(0, K)
    kind = k.dtype
    wide, source = V, block
    if MAPS:
        wide, source = V + K, tl.where(block < V, block, 0)
    held = (sequence.to(tl.int64) * H + head) * K * wide + key[None, :] * wide + value[:, None]
    begun = (sequence.to(tl.int64) * segments * H + head) * K * V + value[:, None] * K + key[None, :]
    if MAPS:
        s = tl.where(value[:, None] == V + key[None, :], 1.0, 0.0)
    elif o is None and begin_states is not None:
        s = tl.load(begin_states + begun + (from_chunk // every).to(tl.int64) * H * K * V)
    elif state is not None:
        s = tl.load(state + held).to(tl.float32)
    else:
        s = tl.zeros([BV, K], tl.float32)
    for begin in range(from_chunk, to_chunk, every):
        # Store outside of the loop over chunks: a layout conversion in it would take the room of tiles loaded ahead.
        if o is not None and begin_states is not None:
            tl.store(begin_states + begun + (begin // every).to(tl.int64) * H * K * V, s)
        for chunk in range(begin, tl.minimum(begin + every, to_chunk)):
            row, valid = start + chunk * SIZE, length - chunk * SIZE
            at = (number + chunk) * H + head
            mine = vectors + at.to(tl.int64) * (ROWS * SIZE)
            keep, until = tl.load(mine + KEEPS * SIZE).to(tl.float32), _get(mine, ENDS, SIZE)
            if states is not None:
                states.store([((slot + chunk - from_chunk) * H + head) * V + block, 0], s.to(kind))
            k_c = get_rows(k, row, valid, head * K, SIZE, RAGGED)
            if o is not None:
                r_c = get_rows(r, row, valid, head * K, SIZE, RAGGED)
                if within is None:
                    pairs_t = tl.dot(k_c, tl.trans(r_c), input_precision=PRECISION)
                    decays, since = _decays(mine, SIZE, LOSS is not None)
                    pairs_t = (pairs_t * tl.trans(_get(mine, READ, SIZE)[:, None] * decays)).to(kind)
            if LOSS is not None:
                if overlaps is not None:
                    overlap_t = tl.trans(overlaps.load([at * SIZE, 0]))
                else:
                    overlap_t = tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION)
                    overlap_t = (overlap_t * tl.trans(decays)).to(kind)
            if inverse is not None or CORRECTED or LOSS is not None:
                k_s = tl.dot(s.to(kind), tl.trans(k_c), input_precision=PRECISION)
            w = tl.trans(get_rows(u, row, valid, head * V + source, SIZE, RAGGED)).to(tl.float32)
            if MAPS:
                w = tl.where(block < V, w, 0.0)
            if LOSS is not None:
                if within is not None:
                    since = _get(mine, SINCE, SIZE)
                until = _along(until, since)
                error = k_s * since[None, :]
                if target is None:
                    error -= w
            w *= _get(mine, WRITES, SIZE)[None, :]
            if inverse is not None:
                w -= _get(mine, ERASES, SIZE)[None, :] * k_s
                w = tl.dot(w.to(kind), tl.trans(inverse.load([at * SIZE, 0])), w, input_precision=PRECISION)
            if written is not None:
                at_span = (
                    start + chunk * SIZE
                    if PACKED
                    else sequence * (to_chunk - from_chunk) * SIZE + (chunk - from_chunk) * SIZE
                )
                put_rows(written, tl.trans(w), at_span, valid, head * V + block, H * V, SIZE, BV, RAGGED)
            if LOSS is not None:
                # Before the output is computed, so that its registers are free again.
                error = tl.dot(w.to(kind), overlap_t, error, input_precision=PRECISION)
                if target is not None:
                    more = tl.trans(get_rows(target, row, valid, head * V + block, SIZE, RAGGED)).to(tl.float32)
                    w = _along(w, more)
                    error -= more
                found = pseudo_residual(-error, clip, LOSS)
                put_rows(residual, tl.trans(found), row, valid, head * V + block, H * V, SIZE, BV, RAGGED)
            if o is not None:
                out = tl.dot(s.to(kind), tl.trans(r_c), input_precision=PRECISION)
                reading = _get(mine, READS, SIZE)
                until = _along(until, reading)
                out *= reading[None, :]
                if CORRECTED:
                    correction = _get(mine, CORRECTS, SIZE)
                    until = _along(until, correction)
                    out -= correction[None, :] * k_s
                if within is not None:
                    pairs_t = tl.trans(within.load([at * SIZE, 0]))
                out += tl.dot(w.to(kind), pairs_t, input_precision=PRECISION)
                if base is not None:
                    before = tl.trans(get_rows(base, row, valid, head * V + block, SIZE, RAGGED)).to(tl.float32)
                    out += before
                    w = _along(w, before)
                put_rows(o, tl.trans(out), row, valid, head * V + block, H * V, SIZE, BV, RAGGED)
            w *= until[None, :]
            s *= keep
            s += tl.dot(w.to(kind), k_c, input_precision=PRECISION)
    if last is not None:
        tl.store(last + held, s)


@triton.jit(do_not_specialize=MOVES)
@no_type_check
def reverse(
    r, k, vectors, inverse, within, overlaps, d_o, d_error, d_state, states_after, d_u,
    cu_seqlens, first, length, chunks, from_chunk, to_chunk, H, V,
    K: tl.constexpr, SIZE: tl.constexpr, BV: tl.constexpr, CORRECTED: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the gradient of the state, d_state [.., V, K], from chunk to_chunk back to from_chunk, one block of values.

    Stores what is not None: states_after, the transposed gradient of the state after each chunk, and d_u, the gradient
    of beta u, through the inverse.
    d_error: gradient of target - prediction, if the pass predicts.
    """
    block, head, sequence = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    slot = sequence * (to_chunk - from_chunk)
    number = sequence * chunks
    if PACKED:
        number = tl.load(first + sequence)
        slot = number
        to_chunk = tl.load(first + sequence + 1) - number
    value, key = block + tl.arange(0, BV), tl.arange(0, K)
    kind = k.dtype
    held = d_state + (sequence.to(tl.int64) * H + head) * K * V + value[:, None] * K + key[None, :]
    ds = tl.load(held)
    for back in range(from_chunk, to_chunk):
        chunk = to_chunk - 1 - (back - from_chunk)
        row, valid = start + chunk * SIZE, length - chunk * SIZE
        at = (number + chunk) * H + head
        mine = vectors + at.to(tl.int64) * (ROWS * SIZE)
        keep, until, reading = (
            tl.load(mine + KEEPS * SIZE).to(tl.float32),
            _get(mine, ENDS, SIZE),
            _get(mine, READS, SIZE),
        )
        if states_after is not None:
            states_after.store([((slot + chunk - from_chunk) * H + head) * V + block, 0], ds.to(kind))
        k_c = get_rows(k, row, valid, head * K, SIZE, RAGGED)
        r_c = get_rows(r, row, valid, head * K, SIZE, RAGGED)
        if within is None:
            decays, since = _decays(mine, SIZE, d_error is not None)
            pairs = tl.dot(r_c, tl.trans(k_c), input_precision=PRECISION)
            pairs = (pairs * (_get(mine, READ, SIZE)[:, None] * decays)).to(kind)
        else:
            pairs = within.load([at * SIZE, 0])
        if d_error is not None:
            if overlaps is not None:
                overlap, since = overlaps.load([at * SIZE, 0]), _get(mine, SINCE, SIZE)
            else:
                overlap = (tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION) * decays).to(kind)
        dw = tl.dot(ds.to(kind), tl.trans(k_c), input_precision=PRECISION)
        dw *= until[None, :]
        reads = tl.trans(get_rows(d_o, row, valid, head * V + block, SIZE, RAGGED))
        dw += tl.dot(reads, pairs, input_precision=PRECISION)
        if d_error is not None:
            wrong = tl.trans(get_rows(d_error, row, valid, head * V + block, SIZE, RAGGED))
            dw -= tl.dot(wrong, overlap, input_precision=PRECISION)
        if inverse is not None:
            dw = tl.dot(dw.to(kind), inverse.load([at * SIZE, 0]), dw, input_precision=PRECISION)
        if d_u is not None:
            put_rows(d_u, tl.trans(dw), row, valid, head * V + block, H * V, SIZE, BV, RAGGED)
        ds *= keep
        if inverse is not None or CORRECTED or d_error is not None:
            along = tl.zeros([BV, SIZE], tl.float32)
            if inverse is not None:
                along -= _get(mine, ERASES, SIZE)[None, :] * dw
            if CORRECTED:
                along -= _get(mine, CORRECTS, SIZE)[None, :] * reads
            if d_error is not None:
                along -= since[None, :] * wrong
            ds += tl.dot(along.to(kind), k_c, input_precision=PRECISION)
        ds += tl.dot((reads * _along(reading, until)[None, :]).to(kind), r_c, input_precision=PRECISION)
    tl.store(held, ds)
