"""The last kernel of `kernels.scalar`'s backward: the gradients of a chunk's operands, parallel over chunks.

What is read or erased at i grows with G_i, and what is written at j shrinks with G_j. If i and j lie in the chunk, the
gradients of G_i and G_j come from one matrix, which is rounded once. So they cancel in their sum, which is the gradient
of g_t.

The kernel has few warps and goes through the keys in blocks, so that several chunks share a multiprocessor: one chunk
computes while the others wait for memory.
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
    """The product of each row of x with the same row of y."""
    return tl.sum(x.to(tl.float32) * y, 1)


@triton.jit
@no_type_check
def _write(u, written, row, here, valid, column, BT: tl.constexpr, RAGGED: tl.constexpr):
    """Loads w of a chunk, [BT, BV]. If nothing is erased, w is u before its product with beta."""
    if written is not None:
        w_c = get_rows(written, here, valid, column, BT, RAGGED)
    else:
        w_c = get_rows(u, row, valid, column, BT, RAGGED)
    return w_c


@triton.jit(do_not_specialize=MOVES)
@no_type_check
def gradients(
    r, k, u, g, e, beta, read, d, written, states, states_after, d_o, d_u, d_error, more_r, more_k, more_g,
    d_r, d_k, new_d_u, d_g, d_e, d_beta, d_read, d_d,
    cu_seqlens, chunk_sequences, first_chunks, length, chunks, from_chunk, span, sequences, scale, clip, H,
    V: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, LATE: tl.constexpr,
    EARLY: tl.constexpr, PREDICTS: tl.constexpr, PREDICTS_U: tl.constexpr, LOSS: tl.constexpr, SUM_DTYPE: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one chunk and head.

    `d_u` and `new_d_u` are one tensor, which holds the gradient of beta u before the kernel and the gradient of u after
    it. `more_r`, `more_k` and `more_g` are None, or gradients that the kernel adds to those of r, k and g. They are the
    same tensors as d_r, d_k and d_g. With a LOSS, u is a pseudo-residual, and new_d_u becomes the gradient of its
    error. If EARLY, tokens read S_{t-1}. If PREDICTS, the pass predicts from S_{t-1}, too, and d_error is the gradient
    of its error. If PREDICTS_U, the pass predicts u.
    """
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    sequence, chunk = locate(program, chunk_sequences, first_chunks, span, PACKED)
    if sequence >= sequences:
        return
    chunk += from_chunk
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    row, valid = start + chunk * BT, length - chunk * BT
    i = tl.arange(0, BT)
    dtype = k.dtype
    state_row, column = (program * H + head) * V, head * V
    # The first row in `written`, which holds this span alone.
    written_row = row if PACKED else (sequence * span + chunk - from_chunk) * BT
    steps = None if g is None else decays(g, row, valid, head, H, BT)
    beta_c = None
    if beta is not None:
        beta_c = scalars(beta, row, valid, head, H, BT)
        d_beta_c = tl.zeros([BT], tl.float32)
    if e is not None:
        e_c = scalars(e, row, valid, head, H, BT)
    if read is not None:
        read_c = scalars(read, row, valid, head, H, BT)
    if d is not None:
        d_c = scalars(d, row, valid, head, H, BT)

    # [i, j]: gradients of what token i reads, predicts and erases of what token j wrote.
    reads, reads_t = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    if PREDICTS:
        fits, fits_t = reads, reads
    if e is not None:
        erases, erases_t = reads, reads
    for block in tl.static_range(0, V, BV):
        w_c = _write(u, written, row, written_row, valid, column + block, BT, RAGGED)
        do_c = get_rows(d_o, row, valid, column + block, BT, RAGGED)
        reads += tl.dot(do_c, tl.trans(w_c), input_precision=PRECISION)
        reads_t += tl.dot(w_c, tl.trans(do_c), input_precision=PRECISION)
        if PREDICTS:
            d_error_c = get_rows(d_error, row, valid, column + block, BT, RAGGED)
            fits -= tl.dot(d_error_c, tl.trans(w_c), input_precision=PRECISION)
            fits_t -= tl.dot(w_c, tl.trans(d_error_c), input_precision=PRECISION)
        if e is not None:
            du_c = get_rows(d_u, row, valid, column + block, BT, RAGGED)
            # The gradient of M is -d_u w^T, since that of X^{-1} is -X^{-T} (.) X^{-T}.
            erases -= tl.dot(du_c, tl.trans(w_c), input_precision=PRECISION)
            erases_t -= tl.dot(w_c, tl.trans(du_c), input_precision=PRECISION)
    sums, earlier, total = cumulative(steps, BT, SUM_DTYPE)
    seen = earlier if EARLY else sums
    within = decay_between(seen[:, None], sums[None, :], i[:, None], i[None, :], EARLY)
    within_t = decay_between(seen[None, :], sums[:, None], i[None, :], i[:, None], EARLY)
    if beta is not None and written is None:
        within *= beta_c[None, :]
        within_t *= beta_c[:, None]
    reads, reads_t = (reads * within * scale).to(dtype), (reads_t * within_t * scale).to(dtype)
    since = tl.exp2(seen.to(tl.float32))
    until = tl.exp2((total - sums).to(tl.float32))
    if beta is not None and written is None:
        until *= beta_c
    if PREDICTS:
        fits, fits_t = (fits * within).to(dtype), (fits_t * within_t).to(dtype)
    if e is not None:
        erase_sums = sums if LATE else earlier
        before = tl.exp2(erase_sums.to(tl.float32))
        within = decay_between(erase_sums[:, None], sums[None, :], i[:, None], i[None, :], True)
        within_t = decay_between(erase_sums[None, :], sums[:, None], i[None, :], i[:, None], True)
        erases, erases_t = (erases * within).to(dtype), (erases_t * within_t).to(dtype)
        d_e_c = tl.zeros([BT], tl.float32)
    if read is not None:
        d_read_c = tl.zeros([BT], tl.float32)
    if d is not None:
        d_d_c = tl.zeros([BT], tl.float32)
    # Parts of the gradient of G: from reading and predicting, from erasing, from writing, and from the last state.
    grow, grow_e = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    shrink, ending = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    state_products = tl.zeros([BK, BK], tl.float32)

    for key in range(0, K, BK):
        dr = tl.zeros([BT, BK], tl.float32)
        for block in tl.static_range(0, V, BV):
            s = states.load([state_row + block, key])
            if g is not None:
                after = states_after.load([state_row + block, key])
                # Only the diagonal is needed, but a product takes both operands from shared memory, where they are.
                state_products += tl.dot(tl.trans(s), after, input_precision=PRECISION)
            if V > BV:
                do_c = get_rows(d_o, row, valid, column + block, BT, RAGGED)
            dr += tl.dot(do_c, s, input_precision=PRECISION)
        k_c = get_rows(k, row, valid, head * K + key, BT, RAGGED)
        r_c = get_rows(r, row, valid, head * K + key, BT, RAGGED)
        reader = r_c
        if read is not None:
            reader = (read_c[:, None] * reader.to(tl.float32)).to(dtype)
        if d is not None:
            reader = (reader.to(tl.float32) - d_c[:, None] * k_c.to(tl.float32)).to(dtype)
        dk = tl.dot(held(reads_t), reader, input_precision=PRECISION)
        dr *= (since * scale)[:, None]
        dr += tl.dot(held(reads), k_c, input_precision=PRECISION)
        grow += _row_dot(reader, dr)
        if read is not None:
            d_read_c += _row_dot(r_c, dr)
        if d is not None:
            d_d_c -= _row_dot(k_c, dr)
        if PREDICTS:
            predicting = tl.zeros([BT, BK], tl.float32)
            for block in tl.static_range(0, V, BV):
                if V > BV:
                    d_error_c = get_rows(d_error, row, valid, column + block, BT, RAGGED)
                    s = states.load([state_row + block, key])
                predicting -= tl.dot(d_error_c, s, input_precision=PRECISION)
            predicting *= since[:, None]
            predicting += tl.dot(held(fits), k_c, input_precision=PRECISION)
            grow += _row_dot(k_c, predicting)
            dk += tl.dot(held(fits_t), k_c, input_precision=PRECISION)
        if e is not None:
            erased = (e_c[:, None] * k_c.to(tl.float32)).to(dtype)
            dk += tl.dot(held(erases_t), erased, input_precision=PRECISION)
        shrink += _row_dot(k_c, dk)
        if PREDICTS:
            dk += predicting
        if d is not None:
            dk -= d_c[:, None] * dr
        if read is not None:
            dr *= read_c[:, None]
        if more_r is not None:
            dr += get_rows(more_r, row, valid, head * K + key, BT, RAGGED).to(tl.float32)
        put_rows(d_r, dr, row, valid, head * K + key, H * K, BT, BK, RAGGED)
        if e is not None:
            erasing = tl.zeros([BT, BK], tl.float32)
            for block in tl.static_range(0, V, BV):
                if V > BV:
                    du_c = get_rows(d_u, row, valid, column + block, BT, RAGGED)
                    s = states.load([state_row + block, key])
                erasing -= tl.dot(du_c, s, input_precision=PRECISION)
            erasing *= before[:, None]
            erasing += tl.dot(held(erases), k_c, input_precision=PRECISION)
            d_e_c += _row_dot(k_c, erasing)
            grow_e += _row_dot(erased, erasing)
            dk += e_c[:, None] * erasing
        leaving = tl.zeros([BT, BK], tl.float32)
        for block in tl.static_range(0, V, BV):
            if V > BV or g is None:
                after = states_after.load([state_row + block, key])
            if V > BV:
                w_c = _write(u, written, row, written_row, valid, column + block, BT, RAGGED)
            leaving += tl.dot(w_c, after, input_precision=PRECISION)
        leaving *= until[:, None]
        ending += _row_dot(k_c, leaving)
        if more_k is not None:
            dk += get_rows(more_k, row, valid, head * K + key, BT, RAGGED).to(tl.float32)
        put_rows(d_k, dk + leaving, row, valid, head * K + key, H * K, BT, BK, RAGGED)

    if d is not None:
        put_scalars(d_d, d_d_c, row, valid, head, H, BT)
    if read is not None:
        put_scalars(d_read, d_read_c, row, valid, head, H, BT)
    if e is not None:
        put_scalars(d_e, d_e_c, row, valid, head, H, BT)
    if g is not None:
        dg = tl.cumsum(grow + grow_e - shrink - ending, 0, reverse=True)
        key = tl.arange(0, BK)
        state_products = tl.sum(tl.sum(tl.where(key[:, None] == key[None, :], state_products, 0.0), 1), 0)
        dg += tl.sum(ending) + tl.exp2(total.to(tl.float32)) * state_products
        # Reads, predictions and erasures that see G_{i-1} do not depend on their own token's g.
        if EARLY:
            dg -= grow
        if e is not None and not LATE:
            dg -= grow_e
        if more_g is not None:
            dg += scalars(more_g, row, valid, head, H, BT)
        put_scalars(d_g, dg, row, valid, head, H, BT)
    if beta is not None or PREDICTS_U:
        for block in range(0, V, BV):
            from_u = get_rows(d_u, row, valid, column + block, BT, RAGGED).to(tl.float32)
            if beta is not None:
                u_c = get_rows(u, row, valid, column + block, BT, RAGGED).to(tl.float32)
                d_beta_c += _row_dot(u_c, from_u)
                from_u = through_residual(beta_c[:, None] * from_u, u_c, clip, LOSS)
            if PREDICTS_U:
                from_u += get_rows(d_error, row, valid, column + block, BT, RAGGED).to(tl.float32)
            put_rows(new_d_u, from_u, row, valid, column + block, H * V, BT, BV, RAGGED)
    if beta is not None:
        put_scalars(d_beta, d_beta_c, row, valid, head, H, BT)
