"""Kernels for a state that may decay by a scalar, and may erase along its key.

For a chunk with S before it, G the cumulative log-decay and A_ij = exp(G_i - G_j) (see reference._scan):

    (I + M) w = beta u - e exp(G') k S,   M_ij = e_i exp(G'_i - G_j) k_i . k_j,  j < i     G' = G or G_{i-1}
    o = scale (exp(G) r S + P w),   P_ij = A_ij r_i . k_j,  j <= i
    S <- exp(G_C) S + k^T (exp(G_C - G) w)

where r stands for read r - d k. `prepare` computes what does not depend on S, for all chunks at once, and multiplies
the factors of reads by `scale`. `scan` goes through the chunks with the state in registers, transposed to [V, K]: the
left operand of every product is then in registers already, and the right one is a tile that was loaded ahead. If
nothing is erased or corrected, `scan` waits for memory alone and has time to compute P itself, so that P is neither
stored nor loaded. K is a power of two and V a multiple of BV. Tensors as wide as r, k or u are descriptors
(`launch.tiles`).
"""

from typing import no_type_check

import triton
import triton.language as tl

from deltalab.kernels.chunk import (
    MOVES,
    bounds,
    cumulative,
    decay_between,
    decays,
    get_rows,
    locate,
    put_rows,
    scalars,
    unit_lower_inverse,
)

READS, CORRECTS, ERASES, WRITES, ENDS, KEEPS, SINCE, READ, SUMS, SEEN = (tl.constexpr(n) for n in range(10))
"""Rows of `vectors`, which are factors for each token of a chunk.

READS is exp(G) read, CORRECTS exp(G) d, ERASES exp(G') e, and WRITES beta. ENDS is exp(G_C - G), from the token to the
chunk's end. KEEPS holds exp(G_C) in its first element. SINCE is exp(G) for predictions. Kernels that compute P
themselves take three more rows: READ is read, SUMS is G in base 2, and SEEN is the G of the state that a reader sees,
G_i or G_{i-1}.
"""

ROWS = tl.constexpr(10)


@triton.jit
@no_type_check
def _put(vectors, index: tl.constexpr, x, BT: tl.constexpr):
    tl.store(vectors + index * BT + tl.arange(0, BT), x.to(vectors.dtype.element_ty))


@triton.jit
@no_type_check
def _get(vectors, index: tl.constexpr, BT: tl.constexpr):
    return tl.load(vectors + index * BT + tl.arange(0, BT)).to(tl.float32)


@triton.jit(do_not_specialize=MOVES)
@no_type_check
def prepare(
    r, k, g, e, beta, read, d, vectors, inverse, within, overlaps,
    cu_seqlens, chunk_sequences, first_chunks, length, chunks, sequences, scale, H,
    K: tl.constexpr, BT: tl.constexpr, LATE: tl.constexpr, EARLY: tl.constexpr, PREDICTS: tl.constexpr,
    SUM_DTYPE: tl.constexpr, PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores `vectors` for each chunk and head and, unless None, `inverse`, (I + M)^{-1} - I, and `within`, P.

    EARLY says that tokens read the state before they write. PREDICTS says that the pass predicts its target from that
    state, too. `overlaps` is then P with k in place of r.
    """
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    sequence, chunk = locate(program, chunk_sequences, first_chunks, chunks, PACKED)
    if sequence >= sequences:
        return
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    row, valid = start + chunk * BT, length - chunk * BT
    i = tl.arange(0, BT)
    slot = program * H + head
    chunk_vectors = vectors + slot.to(tl.int64) * (ROWS * BT)
    ones = tl.where(i < valid, 1.0, 0.0)
    # Begin all loads before anything waits for one.
    steps = None if g is None else decays(g, row, valid, head, H, BT)
    read_c = ones if read is None else scalars(read, row, valid, head, H, BT)
    beta_c = ones if beta is None else scalars(beta, row, valid, head, H, BT)
    if d is not None:
        d_c = scalars(d, row, valid, head, H, BT)
    if e is not None:
        e_c = scalars(e, row, valid, head, H, BT)
    if within is not None:
        k_c = get_rows(k, row, valid, head * K, BT, RAGGED)
        r_c = get_rows(r, row, valid, head * K, BT, RAGGED)
    sums, earlier, total = cumulative(steps, BT, SUM_DTYPE)
    seen = earlier if EARLY else sums
    since = tl.exp2(seen.to(tl.float32))
    _put(chunk_vectors, READS, read_c * (since * scale), BT)
    _put(chunk_vectors, WRITES, beta_c, BT)
    _put(chunk_vectors, ENDS, tl.exp2((total - sums).to(tl.float32)), BT)
    _put(chunk_vectors, KEEPS, tl.where(i == 0, tl.exp2(total.to(tl.float32)), 0.0), BT)
    if within is None:
        _put(chunk_vectors, READ, read_c * scale, BT)
        _put(chunk_vectors, SUMS, sums, BT)
        _put(chunk_vectors, SEEN, seen, BT)
    else:
        decay = decay_between(seen[:, None], sums[None, :], i[:, None], i[None, :], EARLY, g is not None)
        pairs = tl.dot(r_c, tl.trans(k_c), input_precision=PRECISION) * read_c[:, None]
        overlap = tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION)
        if d is not None:
            _put(chunk_vectors, CORRECTS, d_c * (since * scale), BT)
            pairs -= d_c[:, None] * overlap
        within.store([slot * BT, 0], (pairs * (decay * scale)).to(within.dtype))
        if PREDICTS:
            _put(chunk_vectors, SINCE, since, BT)
            overlaps.store([slot * BT, 0], (overlap * decay).to(overlaps.dtype))
        if e is not None:
            erase_sums = sums if LATE else earlier
            _put(chunk_vectors, ERASES, e_c * tl.exp2(erase_sums.to(tl.float32)), BT)
            decay = decay_between(erase_sums[:, None], sums[None, :], i[:, None], i[None, :], True, g is not None)
            system = overlap * e_c[:, None] * decay
            inverse.store([slot * BT, 0], unit_lower_inverse(system, BT, PRECISION).to(inverse.dtype))


@triton.jit
@no_type_check
def _decays(vectors, BT: tl.constexpr, EARLY: tl.constexpr):
    """Returns A_ij up to the state that a reader sees, and `SINCE`. P has these A_ij, also with k in place of r."""
    i = tl.arange(0, BT)
    sums, seen = tl.load(vectors + SUMS * BT + i), tl.load(vectors + SEEN * BT + i)
    return decay_between(seen[:, None], sums[None, :], i[:, None], i[None, :], EARLY), tl.exp2(seen.to(tl.float32))


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
    """The gradient of the error, from `upstream`, the gradient of its pseudo-residual `residual`."""
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
    cu_seqlens, first_chunks, length, chunks, from_chunk, to_chunk, segment_chunks, segments, clip, H, V,
    K: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, CORRECTED: tl.constexpr, EARLY: tl.constexpr,
    LOSS: tl.constexpr, MAPS: tl.constexpr, PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the state of one head and one block of values through chunks from_chunk to to_chunk.

    Stores what is not None: o, the output plus `base`; `residual`, the pseudo-residual of `target` (u if None); last,
    the last state; and for this span the transposed state before each chunk (states) and w (written). If EARLY, as with
    a residual, the prediction and o read the state before their token writes.

    `begin_states` [B, segments, H, V, K] is the state before each segment. It is stored if o is stored, else loaded.
    If MAPS, K more columns follow the V values, so that last is [B, H, K, V + K]. These columns start as I, and nothing
    is written to them.
    """
    block, head, sequence = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    first_slot = sequence * (to_chunk - from_chunk)
    first_chunk = sequence * chunks
    if PACKED:
        first_chunk = tl.load(first_chunks + sequence)
        first_slot = first_chunk
        to_chunk = tl.load(first_chunks + sequence + 1) - first_chunk
    value, key = block + tl.arange(0, BV), tl.arange(0, K)
    dtype = k.dtype
    columns, u_block = V, block
    if MAPS:
        columns, u_block = V + K, tl.where(block < V, block, 0)
    state_offset = (sequence.to(tl.int64) * H + head) * K * columns + key[None, :] * columns + value[:, None]
    begin_offset = (sequence.to(tl.int64) * segments * H + head) * K * V + value[:, None] * K + key[None, :]
    if MAPS:
        s = tl.where(value[:, None] == V + key[None, :], 1.0, 0.0)
    elif o is None and begin_states is not None:
        s = tl.load(begin_states + begin_offset + (from_chunk // segment_chunks).to(tl.int64) * H * K * V)
    elif state is not None:
        s = tl.load(state + state_offset).to(tl.float32)
    else:
        s = tl.zeros([BV, K], tl.float32)
    for segment_begin in range(from_chunk, to_chunk, segment_chunks):
        # Store outside of the loop over chunks: a layout conversion in it would take the room of tiles loaded ahead.
        if o is not None and begin_states is not None:
            tl.store(begin_states + begin_offset + (segment_begin // segment_chunks).to(tl.int64) * H * K * V, s)
        for chunk in range(segment_begin, tl.minimum(segment_begin + segment_chunks, to_chunk)):
            row, valid = start + chunk * BT, length - chunk * BT
            slot = (first_chunk + chunk) * H + head
            chunk_vectors = vectors + slot.to(tl.int64) * (ROWS * BT)
            keeps, ends = tl.load(chunk_vectors + KEEPS * BT).to(tl.float32), _get(chunk_vectors, ENDS, BT)
            if states is not None:
                states.store([((first_slot + chunk - from_chunk) * H + head) * V + block, 0], s.to(dtype))
            k_c = get_rows(k, row, valid, head * K, BT, RAGGED)
            if o is not None:
                r_c = get_rows(r, row, valid, head * K, BT, RAGGED)
                if within is None:
                    pairs_t = tl.dot(k_c, tl.trans(r_c), input_precision=PRECISION)
                    decays, since = _decays(chunk_vectors, BT, EARLY)
                    pairs_t = (pairs_t * tl.trans(_get(chunk_vectors, READ, BT)[:, None] * decays)).to(dtype)
            if LOSS is not None:
                if overlaps is not None:
                    overlap_t = tl.trans(overlaps.load([slot * BT, 0]))
                else:
                    overlap_t = tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION)
                    overlap_t = (overlap_t * tl.trans(decays)).to(dtype)
            if inverse is not None or CORRECTED or LOSS is not None:
                k_s = tl.dot(s.to(dtype), tl.trans(k_c), input_precision=PRECISION)
            w = tl.trans(get_rows(u, row, valid, head * V + u_block, BT, RAGGED)).to(tl.float32)
            if MAPS:
                w = tl.where(block < V, w, 0.0)
            if LOSS is not None:
                if within is not None:
                    since = _get(chunk_vectors, SINCE, BT)
                ends = _along(ends, since)
                error = k_s * since[None, :]
                if target is None:
                    error -= w
            w *= _get(chunk_vectors, WRITES, BT)[None, :]
            if inverse is not None:
                w -= _get(chunk_vectors, ERASES, BT)[None, :] * k_s
                w = tl.dot(w.to(dtype), tl.trans(inverse.load([slot * BT, 0])), w, input_precision=PRECISION)
            if written is not None:
                written_row = (
                    start + chunk * BT
                    if PACKED
                    else sequence * (to_chunk - from_chunk) * BT + (chunk - from_chunk) * BT
                )
                put_rows(written, tl.trans(w), written_row, valid, head * V + block, H * V, BT, BV, RAGGED)
            if LOSS is not None:
                # Compute the residual before the output, so that the registers of the residual are free again.
                error = tl.dot(w.to(dtype), overlap_t, error, input_precision=PRECISION)
                if target is not None:
                    target_c = tl.trans(get_rows(target, row, valid, head * V + block, BT, RAGGED)).to(tl.float32)
                    w = _along(w, target_c)
                    error -= target_c
                residual_c = pseudo_residual(-error, clip, LOSS)
                put_rows(residual, tl.trans(residual_c), row, valid, head * V + block, H * V, BT, BV, RAGGED)
            if o is not None:
                out = tl.dot(s.to(dtype), tl.trans(r_c), input_precision=PRECISION)
                reads = _get(chunk_vectors, READS, BT)
                ends = _along(ends, reads)
                out *= reads[None, :]
                if CORRECTED:
                    corrects = _get(chunk_vectors, CORRECTS, BT)
                    ends = _along(ends, corrects)
                    out -= corrects[None, :] * k_s
                if within is not None:
                    pairs_t = tl.trans(within.load([slot * BT, 0]))
                out += tl.dot(w.to(dtype), pairs_t, input_precision=PRECISION)
                if base is not None:
                    base_c = tl.trans(get_rows(base, row, valid, head * V + block, BT, RAGGED)).to(tl.float32)
                    out += base_c
                    w = _along(w, base_c)
                put_rows(o, tl.trans(out), row, valid, head * V + block, H * V, BT, BV, RAGGED)
            w *= ends[None, :]
            s *= keeps
            s += tl.dot(w.to(dtype), k_c, input_precision=PRECISION)
    if last is not None:
        tl.store(last + state_offset, s)


@triton.jit(do_not_specialize=MOVES)
@no_type_check
def reverse(
    r, k, vectors, inverse, within, overlaps, d_o, d_error, d_state, states_after, d_u,
    cu_seqlens, first_chunks, length, chunks, from_chunk, to_chunk, H, V,
    K: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, CORRECTED: tl.constexpr, EARLY: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Takes the gradient of the state, d_state [.., V, K], from chunk to_chunk back to from_chunk, one block of values.

    Stores what is not None: states_after, the transposed gradient of the state after each chunk, and d_u, the gradient
    of beta u, through the inverse. If the pass predicts, d_error is the gradient of target - prediction.
    """
    block, head, sequence = tl.program_id(0) * BV, tl.program_id(1), tl.program_id(2)
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    first_slot = sequence * (to_chunk - from_chunk)
    first_chunk = sequence * chunks
    if PACKED:
        first_chunk = tl.load(first_chunks + sequence)
        first_slot = first_chunk
        to_chunk = tl.load(first_chunks + sequence + 1) - first_chunk
    value, key = block + tl.arange(0, BV), tl.arange(0, K)
    dtype = k.dtype
    d_state_at = d_state + (sequence.to(tl.int64) * H + head) * K * V + value[:, None] * K + key[None, :]
    ds = tl.load(d_state_at)
    for back in range(from_chunk, to_chunk):
        chunk = to_chunk - 1 - (back - from_chunk)
        row, valid = start + chunk * BT, length - chunk * BT
        slot = (first_chunk + chunk) * H + head
        chunk_vectors = vectors + slot.to(tl.int64) * (ROWS * BT)
        keeps, ends, reads = (
            tl.load(chunk_vectors + KEEPS * BT).to(tl.float32),
            _get(chunk_vectors, ENDS, BT),
            _get(chunk_vectors, READS, BT),
        )
        if states_after is not None:
            states_after.store([((first_slot + chunk - from_chunk) * H + head) * V + block, 0], ds.to(dtype))
        k_c = get_rows(k, row, valid, head * K, BT, RAGGED)
        r_c = get_rows(r, row, valid, head * K, BT, RAGGED)
        if within is None:
            decays, since = _decays(chunk_vectors, BT, EARLY)
            pairs = tl.dot(r_c, tl.trans(k_c), input_precision=PRECISION)
            pairs = (pairs * (_get(chunk_vectors, READ, BT)[:, None] * decays)).to(dtype)
        else:
            pairs = within.load([slot * BT, 0])
        if d_error is not None:
            if overlaps is not None:
                overlap, since = overlaps.load([slot * BT, 0]), _get(chunk_vectors, SINCE, BT)
            else:
                overlap = (tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION) * decays).to(dtype)
        dw = tl.dot(ds.to(dtype), tl.trans(k_c), input_precision=PRECISION)
        dw *= ends[None, :]
        do_c = tl.trans(get_rows(d_o, row, valid, head * V + block, BT, RAGGED))
        dw += tl.dot(do_c, pairs, input_precision=PRECISION)
        if d_error is not None:
            d_error_c = tl.trans(get_rows(d_error, row, valid, head * V + block, BT, RAGGED))
            dw -= tl.dot(d_error_c, overlap, input_precision=PRECISION)
        if inverse is not None:
            dw = tl.dot(dw.to(dtype), inverse.load([slot * BT, 0]), dw, input_precision=PRECISION)
        if d_u is not None:
            put_rows(d_u, tl.trans(dw), row, valid, head * V + block, H * V, BT, BV, RAGGED)
        ds *= keeps
        if inverse is not None or CORRECTED or d_error is not None:
            d_seen = tl.zeros([BV, BT], tl.float32)
            if inverse is not None:
                d_seen -= _get(chunk_vectors, ERASES, BT)[None, :] * dw
            if CORRECTED:
                d_seen -= _get(chunk_vectors, CORRECTS, BT)[None, :] * do_c
            if d_error is not None:
                d_seen -= since[None, :] * d_error_c
            ds += tl.dot(d_seen.to(dtype), k_c, input_precision=PRECISION)
        ds += tl.dot((do_c * _along(reads, ends)[None, :]).to(dtype), r_c, input_precision=PRECISION)
    tl.store(d_state_at, ds)
