"""The last kernels of `kernels.scalar`'s backward: the gradients of a chunk's operands, parallel over chunks.

What is read or erased at i grows with G_i, what is written at j shrinks with G_j. Where both lie in the chunk the two
are sums over rows and columns of one matrix, so that they cancel as they should in the sum that g_t gets.
Two kernels, `reading` first and then `writing`, which adds to d_k and d_g: one alone fills the registers, so that
nothing runs while it waits.
"""

import triton
import triton.language as tl

from deltalab.kernels.chunk import apart, bounds, cumulative, get_rows, locate, put_rows, put_scalars, scalars
from deltalab.kernels.scalar import through_residual


@triton.jit
def _row_dot(x, y):
    return tl.sum(x.to(tl.float32) * y, 1)


@triton.jit
def reading(
    r, k, u, g, beta, read, d, written, states, d_o, residual, d_residual,
    d_r, d_k, d_g, d_read, d_d, d_target,
    cu_seqlens, of, first, length, chunks, from_chunk, span, sequences, scale, clip, H, V,
    K: tl.constexpr, SIZE: tl.constexpr, BV: tl.constexpr, LOSS: tl.constexpr, SUM: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head, from what it reads and predicts."""
    FIT: tl.constexpr = LOSS is not None
    program, head = tl.program_id(0), tl.program_id(1)
    sequence, chunk = locate(program, of, first, span, PACKED)
    if sequence >= sequences:
        return
    chunk += from_chunk
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    row, valid = start + chunk * SIZE, length - chunk * SIZE
    i = tl.arange(0, SIZE)
    kind = k.dtype
    slot = (program * H + head) * V
    # Where `written` and its like begin: they hold this span alone.
    here = row if PACKED else (sequence * span + chunk - from_chunk) * SIZE
    sums, earlier, _total = cumulative(g, row, valid, head, H, SIZE, SUM)
    seen = earlier if FIT else sums

    from_read = tl.zeros([SIZE, K], tl.float32)
    d_within = tl.zeros([SIZE, SIZE], tl.float32)
    d_within_t = tl.zeros([SIZE, SIZE], tl.float32)
    if FIT:
        from_predict = tl.zeros([SIZE, K], tl.float32)
        d_overlap = tl.zeros([SIZE, SIZE], tl.float32)
        d_overlap_t = tl.zeros([SIZE, SIZE], tl.float32)
    if beta is not None:
        strength = scalars(beta, row, valid, head, H, SIZE)
    for block in range(0, V, BV):
        do_c = get_rows(d_o, row, valid, head * V + block, SIZE, RAGGED)
        if written is not None:
            w_c = get_rows(written, here, valid, head * V + block, SIZE, RAGGED)
        else:
            w_c = get_rows(u, row, valid, head * V + block, SIZE, RAGGED)
            if beta is not None:
                w_c = (strength[:, None] * w_c.to(tl.float32)).to(kind)
        before = states.load([slot + block, 0])
        from_read += tl.dot(do_c, before, input_precision=PRECISION)
        d_within += tl.dot(do_c, tl.trans(w_c), input_precision=PRECISION)
        d_within_t += tl.dot(w_c, tl.trans(do_c), input_precision=PRECISION)
        if FIT:
            found = get_rows(residual, row, valid, head * V + block, SIZE, RAGGED).to(tl.float32)
            wrong = get_rows(d_residual, row, valid, head * V + block, SIZE, RAGGED).to(tl.float32)
            wrong = through_residual(wrong, found, clip, LOSS)
            put_rows(d_target, wrong, row, valid, head * V + block, H * V, SIZE, BV, RAGGED)
            wrong = wrong.to(kind)
            from_predict -= tl.dot(wrong, before, input_precision=PRECISION)
            d_overlap -= tl.dot(wrong, tl.trans(w_c), input_precision=PRECISION)
            d_overlap_t -= tl.dot(w_c, tl.trans(wrong), input_precision=PRECISION)

    k_c = get_rows(k, row, valid, head * K, SIZE, RAGGED)
    r_c = get_rows(r, row, valid, head * K, SIZE, RAGGED)
    decay = apart(seen[:, None], sums[None, :], i[:, None], i[None, :], FIT)
    decay_t = apart(seen[None, :], sums[:, None], i[None, :], i[:, None], FIT)
    from_read *= tl.exp2(seen.to(tl.float32))[:, None]
    wanted = r_c
    if read is not None:
        factor = scalars(read, row, valid, head, H, SIZE)
        wanted = (factor[:, None] * r_c.to(tl.float32)).to(kind)
    if d is not None:
        correction = scalars(d, row, valid, head, H, SIZE)
        wanted = (wanted.to(tl.float32) - correction[:, None] * k_c.to(tl.float32)).to(kind)
    d_within *= decay * scale
    from_read *= scale
    if FIT:
        from_predict *= tl.exp2(seen.to(tl.float32))[:, None]
    if g is not None:
        pair = d_within * tl.dot(wanted, tl.trans(k_c), input_precision=PRECISION)
        grow = _row_dot(wanted, from_read)
        if FIT:
            pair += d_overlap * decay * tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION)
            grow += _row_dot(k_c, from_predict)
        grow += tl.sum(pair, 1)
        # A sum that stands before its token takes nothing of that token's own g.
        found = tl.cumsum(grow - tl.sum(pair, 0), 0, reverse=True)
        put_scalars(d_g, found - grow if FIT else found, row, valid, head, H, SIZE)
    from_read += tl.dot(d_within.to(kind), k_c, input_precision=PRECISION)
    dk = tl.dot((d_within_t * decay_t * scale).to(kind), wanted, input_precision=PRECISION)
    if FIT:
        dk += from_predict + tl.dot((d_overlap * decay).to(kind), k_c, input_precision=PRECISION)
        dk += tl.dot((d_overlap_t * decay_t).to(kind), k_c, input_precision=PRECISION)
    if read is not None:
        put_scalars(d_read, _row_dot(r_c, from_read), row, valid, head, H, SIZE)
    if d is not None:
        put_scalars(d_d, -_row_dot(k_c, from_read), row, valid, head, H, SIZE)
        dk -= correction[:, None] * from_read
    if read is not None:
        from_read *= factor[:, None]
    put_rows(d_r, from_read, row, valid, head * K, H * K, SIZE, K, RAGGED)

    put_rows(d_k, dk, row, valid, head * K, H * K, SIZE, K, RAGGED)


@triton.jit
def writing(
    k, u, g, e, beta, written, states, states_after, d_u, new_d_u, d_k, new_d_k, d_g, d_e, d_beta,
    cu_seqlens, of, first, length, chunks, from_chunk, span, sequences, H, V,
    K: tl.constexpr, SIZE: tl.constexpr, BV: tl.constexpr, LATE: tl.constexpr, SUM: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head, from what it writes and erases.

    d_u and new_d_u are one tensor, which holds the gradient of beta u and leaves with that of u, and so are d_k and
    new_d_k.
    """
    program, head = tl.program_id(0), tl.program_id(1)
    sequence, chunk = locate(program, of, first, span, PACKED)
    if sequence >= sequences:
        return
    chunk += from_chunk
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    row, valid = start + chunk * SIZE, length - chunk * SIZE
    i = tl.arange(0, SIZE)
    kind = k.dtype
    slot = (program * H + head) * V
    here = row if PACKED else (sequence * span + chunk - from_chunk) * SIZE
    if beta is not None:
        strength = scalars(beta, row, valid, head, H, SIZE)
    from_write = tl.zeros([SIZE, K], tl.float32)
    if e is not None:
        from_erase = tl.zeros([SIZE, K], tl.float32)
        d_system = tl.zeros([SIZE, SIZE], tl.float32)
        d_system_t = tl.zeros([SIZE, SIZE], tl.float32)
    if beta is not None:
        d_strength = tl.zeros([SIZE], tl.float32)
    kept = 0.0
    for block in range(0, V, BV):
        if written is not None:
            w_c = get_rows(written, here, valid, head * V + block, SIZE, RAGGED)
        else:
            w_c = get_rows(u, row, valid, head * V + block, SIZE, RAGGED)
            if beta is not None:
                w_c = (strength[:, None] * w_c.to(tl.float32)).to(kind)
        after = states_after.load([slot + block, 0])
        from_write += tl.dot(w_c, after, input_precision=PRECISION)
        if g is not None or e is not None:
            before = states.load([slot + block, 0])
        if g is not None:
            kept += tl.sum(before.to(tl.float32) * after.to(tl.float32))
        if e is not None or beta is not None:
            du_c = get_rows(d_u, row, valid, head * V + block, SIZE, RAGGED)
        if e is not None:
            from_erase += tl.dot(du_c, before, input_precision=PRECISION)
            d_system += tl.dot(du_c, tl.trans(w_c), input_precision=PRECISION)
            d_system_t += tl.dot(w_c, tl.trans(du_c), input_precision=PRECISION)
        if beta is not None:
            u_c = get_rows(u, row, valid, head * V + block, SIZE, RAGGED)
            d_strength += _row_dot(u_c, du_c.to(tl.float32))
            put_rows(
                new_d_u, strength[:, None] * du_c.to(tl.float32), row, valid, head * V + block, H * V, SIZE, BV, RAGGED
            )
    if beta is not None:
        put_scalars(d_beta, d_strength, row, valid, head, H, SIZE)
    sums, earlier, total = cumulative(g, row, valid, head, H, SIZE, SUM)
    k_c = get_rows(k, row, valid, head * K, SIZE, RAGGED)
    from_write *= tl.exp2((total - sums).to(tl.float32))[:, None]
    if g is not None:
        ending = _row_dot(k_c, from_write)
        shrink = ending
    if e is not None:
        erase = scalars(e, row, valid, head, H, SIZE)
        late = sums if LATE else earlier
        from_erase *= tl.exp2(late.to(tl.float32))[:, None]
        d_system *= apart(late[:, None], sums[None, :], i[:, None], i[None, :], True)
        d_system_t *= apart(late[None, :], sums[:, None], i[None, :], i[:, None], True)
        if g is not None:
            pair = erase[:, None] * d_system * tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION)
            grow_e = tl.sum(pair, 1) + erase * _row_dot(k_c, from_erase)
            shrink -= tl.sum(pair, 0)
        # The gradient of M is -d_u w^T, since that of X^{-1} is -X^{-T} (.) X^{-T}.
        from_erase += tl.dot(d_system.to(kind), k_c, input_precision=PRECISION)
        put_scalars(d_e, -_row_dot(k_c, from_erase), row, valid, head, H, SIZE)
        from_write -= erase[:, None] * from_erase
        from_write -= tl.dot((d_system_t * erase[None, :]).to(kind), k_c, input_precision=PRECISION)
    from_write += get_rows(d_k, row, valid, head * K, SIZE, RAGGED).to(tl.float32)
    put_rows(new_d_k, from_write, row, valid, head * K, H * K, SIZE, K, RAGGED)
    if g is not None:
        if e is not None:
            shrink += grow_e
        found = tl.sum(ending) + tl.exp2(total.to(tl.float32)) * kept - tl.cumsum(shrink, 0, reverse=True)
        if e is not None and not LATE:
            found += grow_e
        found += scalars(d_g, row, valid, head, H, SIZE)
        put_scalars(d_g, found, row, valid, head, H, SIZE)
