"""The last kernel of `kernels.scalar`'s backward: the gradients of a chunk's operands, parallel over chunks.

What is read or erased at i grows with G_i, and what is written at j shrinks with G_j. If both lie in the chunk, both
come from one matrix that is rounded once, so that they cancel in the sum that is the gradient of g_t.
The kernel has few warps and goes through the keys in blocks, so that several chunks share a multiprocessor: one of
them computes while the others wait for memory.
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
    held,
    locate,
    put_rows,
    put_scalars,
    scalars,
)
from deltalab.kernels.scalar.forward import through_residual


@triton.jit
@no_type_check
def _row_dot(x, y):
    return tl.sum(x.to(tl.float32) * y, 1)


@triton.jit
@no_type_check
def _write(u, written, row, here, valid, column, SIZE: tl.constexpr, RAGGED: tl.constexpr):
    """w of a chunk, [SIZE, BV]. If nothing is erased, that is u, before its product with beta."""
    if written is not None:
        found = get_rows(written, here, valid, column, SIZE, RAGGED)
    else:
        found = get_rows(u, row, valid, column, SIZE, RAGGED)
    return found


@triton.jit(do_not_specialize=MOVES)
@no_type_check
def gradients(
    r, k, u, g, e, beta, read, d, written, states, states_after, d_o, d_u, d_error, more_r, more_k, more_g,
    d_r, d_k, new_d_u, d_g, d_e, d_beta, d_read, d_d,
    cu_seqlens, of, first, length, chunks, from_chunk, span, sequences, scale, clip, H,
    V: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, LATE: tl.constexpr,
    FIT: tl.constexpr, OWN: tl.constexpr, LOSS: tl.constexpr, SUM: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one chunk and head.

    d_u, new_d_u: one tensor, which holds the gradient of beta u before and the gradient of u after.
    more_r, more_k, more_g: gradients to add to those of r, k and g, or None; they are d_r, d_k and d_g themselves.
    LOSS: u is a pseudo-residual, and new_d_u becomes the gradient of its error.
    FIT: the pass predicts from S_{t-1}, and d_error is the gradient of its error. OWN: it predicts u.
    """
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    sequence, chunk = locate(program, of, first, span, PACKED)
    if sequence >= sequences:
        return
    chunk += from_chunk
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    row, valid = start + chunk * SIZE, length - chunk * SIZE
    i = tl.arange(0, SIZE)
    kind = k.dtype
    slot, column = (program * H + head) * V, head * V
    # First row in `written`, which holds this span alone.
    here = row if PACKED else (sequence * span + chunk - from_chunk) * SIZE
    steps = None if g is None else decays(g, row, valid, head, H, SIZE)
    strength = None
    if beta is not None:
        strength = scalars(beta, row, valid, head, H, SIZE)
        d_strength = tl.zeros([SIZE], tl.float32)
    if e is not None:
        erase = scalars(e, row, valid, head, H, SIZE)
    if read is not None:
        factor = scalars(read, row, valid, head, H, SIZE)
    if d is not None:
        correction = scalars(d, row, valid, head, H, SIZE)

    # [i, j]: gradients of what token i reads, predicts and erases of what token j wrote.
    reads, reads_t = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
    if FIT:
        fits, fits_t = reads, reads
    if e is not None:
        erases, erases_t = reads, reads
    for block in tl.static_range(0, V, BV):
        w_c = _write(u, written, row, here, valid, column + block, SIZE, RAGGED)
        do_c = get_rows(d_o, row, valid, column + block, SIZE, RAGGED)
        reads += tl.dot(do_c, tl.trans(w_c), input_precision=PRECISION)
        reads_t += tl.dot(w_c, tl.trans(do_c), input_precision=PRECISION)
        if FIT:
            wrong_c = get_rows(d_error, row, valid, column + block, SIZE, RAGGED)
            fits -= tl.dot(wrong_c, tl.trans(w_c), input_precision=PRECISION)
            fits_t -= tl.dot(w_c, tl.trans(wrong_c), input_precision=PRECISION)
        if e is not None:
            du_c = get_rows(d_u, row, valid, column + block, SIZE, RAGGED)
            # The gradient of M is -d_u w^T, since that of X^{-1} is -X^{-T} (.) X^{-T}.
            erases -= tl.dot(du_c, tl.trans(w_c), input_precision=PRECISION)
            erases_t -= tl.dot(w_c, tl.trans(du_c), input_precision=PRECISION)
    sums, earlier, total = cumulative(steps, SIZE, SUM)
    seen = earlier if FIT else sums
    within = apart(seen[:, None], sums[None, :], i[:, None], i[None, :], FIT)
    within_t = apart(seen[None, :], sums[:, None], i[None, :], i[:, None], FIT)
    if beta is not None and written is None:
        within *= strength[None, :]
        within_t *= strength[:, None]
    reads, reads_t = (reads * within * scale).to(kind), (reads_t * within_t * scale).to(kind)
    since = tl.exp2(seen.to(tl.float32))
    until = tl.exp2((total - sums).to(tl.float32))
    if beta is not None and written is None:
        until *= strength
    if FIT:
        fits, fits_t = (fits * within).to(kind), (fits_t * within_t).to(kind)
    if e is not None:
        late = sums if LATE else earlier
        before = tl.exp2(late.to(tl.float32))
        within = apart(late[:, None], sums[None, :], i[:, None], i[None, :], True)
        within_t = apart(late[None, :], sums[:, None], i[None, :], i[:, None], True)
        erases, erases_t = (erases * within).to(kind), (erases_t * within_t).to(kind)
        d_erase = tl.zeros([SIZE], tl.float32)
    if read is not None:
        d_factor = tl.zeros([SIZE], tl.float32)
    if d is not None:
        d_correction = tl.zeros([SIZE], tl.float32)
    # Parts of the gradient of G: from reading and predicting, from erasing, from writing, and from the last state.
    grow, grow_e = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    shrink, ending = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
    kept = tl.zeros([BK, BK], tl.float32)

    for key in range(0, K, BK):
        found = tl.zeros([SIZE, BK], tl.float32)
        for block in tl.static_range(0, V, BV):
            s = states.load([slot + block, key])
            if g is not None:
                after = states_after.load([slot + block, key])
                # Only the diagonal is needed, but a product takes both operands from shared memory, where they are.
                kept += tl.dot(tl.trans(s), after, input_precision=PRECISION)
            if V > BV:
                do_c = get_rows(d_o, row, valid, column + block, SIZE, RAGGED)
            found += tl.dot(do_c, s, input_precision=PRECISION)
        k_c = get_rows(k, row, valid, head * K + key, SIZE, RAGGED)
        r_c = get_rows(r, row, valid, head * K + key, SIZE, RAGGED)
        wanted = r_c
        if read is not None:
            wanted = (factor[:, None] * wanted.to(tl.float32)).to(kind)
        if d is not None:
            wanted = (wanted.to(tl.float32) - correction[:, None] * k_c.to(tl.float32)).to(kind)
        dk = tl.dot(held(reads_t), wanted, input_precision=PRECISION)
        found *= (since * scale)[:, None]
        found += tl.dot(held(reads), k_c, input_precision=PRECISION)
        grow += _row_dot(wanted, found)
        if read is not None:
            d_factor += _row_dot(r_c, found)
        if d is not None:
            d_correction -= _row_dot(k_c, found)
        if FIT:
            predicting = tl.zeros([SIZE, BK], tl.float32)
            for block in tl.static_range(0, V, BV):
                if V > BV:
                    wrong_c = get_rows(d_error, row, valid, column + block, SIZE, RAGGED)
                    s = states.load([slot + block, key])
                predicting -= tl.dot(wrong_c, s, input_precision=PRECISION)
            predicting *= since[:, None]
            predicting += tl.dot(held(fits), k_c, input_precision=PRECISION)
            grow += _row_dot(k_c, predicting)
            dk += tl.dot(held(fits_t), k_c, input_precision=PRECISION)
        if e is not None:
            erased = (erase[:, None] * k_c.to(tl.float32)).to(kind)
            dk += tl.dot(held(erases_t), erased, input_precision=PRECISION)
        shrink += _row_dot(k_c, dk)
        if FIT:
            dk += predicting
        if d is not None:
            dk -= correction[:, None] * found
        if read is not None:
            found *= factor[:, None]
        if more_r is not None:
            found += get_rows(more_r, row, valid, head * K + key, SIZE, RAGGED).to(tl.float32)
        put_rows(d_r, found, row, valid, head * K + key, H * K, SIZE, BK, RAGGED)
        if e is not None:
            erasing = tl.zeros([SIZE, BK], tl.float32)
            for block in tl.static_range(0, V, BV):
                if V > BV:
                    du_c = get_rows(d_u, row, valid, column + block, SIZE, RAGGED)
                    s = states.load([slot + block, key])
                erasing -= tl.dot(du_c, s, input_precision=PRECISION)
            erasing *= before[:, None]
            erasing += tl.dot(held(erases), k_c, input_precision=PRECISION)
            d_erase += _row_dot(k_c, erasing)
            grow_e += _row_dot(erased, erasing)
            dk += erase[:, None] * erasing
        leaving = tl.zeros([SIZE, BK], tl.float32)
        for block in tl.static_range(0, V, BV):
            if V > BV or g is None:
                after = states_after.load([slot + block, key])
            if V > BV:
                w_c = _write(u, written, row, here, valid, column + block, SIZE, RAGGED)
            leaving += tl.dot(w_c, after, input_precision=PRECISION)
        leaving *= until[:, None]
        ending += _row_dot(k_c, leaving)
        if more_k is not None:
            dk += get_rows(more_k, row, valid, head * K + key, SIZE, RAGGED).to(tl.float32)
        put_rows(d_k, dk + leaving, row, valid, head * K + key, H * K, SIZE, BK, RAGGED)

    if d is not None:
        put_scalars(d_d, d_correction, row, valid, head, H, SIZE)
    if read is not None:
        put_scalars(d_read, d_factor, row, valid, head, H, SIZE)
    if e is not None:
        put_scalars(d_e, d_erase, row, valid, head, H, SIZE)
    if g is not None:
        dg = tl.cumsum(grow + grow_e - shrink - ending, 0, reverse=True)
        key = tl.arange(0, BK)
        kept = tl.sum(tl.sum(tl.where(key[:, None] == key[None, :], kept, 0.0), 1), 0)
        dg += tl.sum(ending) + tl.exp2(total.to(tl.float32)) * kept
        # What sees G_{i-1} has no gradient for its own token's g.
        if FIT:
            dg -= grow
        if e is not None and not LATE:
            dg -= grow_e
        if more_g is not None:
            dg += scalars(more_g, row, valid, head, H, SIZE)
        put_scalars(d_g, dg, row, valid, head, H, SIZE)
    if beta is not None or OWN:
        for block in range(0, V, BV):
            from_u = get_rows(d_u, row, valid, column + block, SIZE, RAGGED).to(tl.float32)
            if beta is not None:
                u_c = get_rows(u, row, valid, column + block, SIZE, RAGGED).to(tl.float32)
                d_strength += _row_dot(u_c, from_u)
                from_u = through_residual(strength[:, None] * from_u, u_c, clip, LOSS)
            if OWN:
                from_u += get_rows(d_error, row, valid, column + block, SIZE, RAGGED).to(tl.float32)
            put_rows(new_d_u, from_u, row, valid, column + block, H * V, SIZE, BV, RAGGED)
    if beta is not None:
        put_scalars(d_beta, d_strength, row, valid, head, H, SIZE)
