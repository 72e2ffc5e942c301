"""The last kernel of `kernels.scalar`'s backward: the gradients of a chunk's operands, parallel over chunks."""

import triton
import triton.language as tl

from deltalab.kernels.chunk import apart, bounds, cumulative, get_rows, locate, put_rows, put_scalars, scalars
from deltalab.kernels.scalar import through_residual


@triton.jit
def _row_dot(x, y):
    return tl.sum(x.to(tl.float32) * y, 1)


@triton.jit
def gradients(
    r, k, u, g, e, beta, read, d, written, states, states_after, d_o, residual, d_residual,
    d_u, new_d_u, d_r, d_k, d_g, d_e, d_beta, d_read, d_d, d_target,
    cu_seqlens, of, first, length, chunks, from_chunk, span, sequences, scale, clip, H, V,
    K: tl.constexpr, SIZE: tl.constexpr, BV: tl.constexpr, LATE: tl.constexpr, LOSS: tl.constexpr, SUM: tl.constexpr,
    PACKED: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head. d_u and new_d_u are one tensor: it holds the gradient of beta u and leaves with that of u.

    What is read or erased at i grows with G_i, what is written at j shrinks with G_j. Where both lie in the chunk the
    two are sums over rows and columns of one matrix, so that they cancel as they should in the sum that g_t gets.
    First what reads, then what is written and erased: so fewer sums are kept in registers at once.
    """
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
    sums, earlier, total = cumulative(g, row, valid, head, H, SIZE, SUM)
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
        if FIT or e is not None:
            overlap = tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION)
        if FIT:
            pair += d_overlap * decay * overlap
            grow += _row_dot(k_c, from_predict)
        grow += tl.sum(pair, 1)
        shrink = tl.sum(pair, 0)
    reading = from_read + tl.dot(d_within.to(kind), k_c, input_precision=PRECISION)
    dk = tl.dot((d_within_t * decay_t * scale).to(kind), wanted, input_precision=PRECISION)
    if FIT:
        dk += from_predict + tl.dot((d_overlap * decay).to(kind), k_c, input_precision=PRECISION)
        dk += tl.dot((d_overlap_t * decay_t).to(kind), k_c, input_precision=PRECISION)
    if read is not None:
        put_scalars(d_read, _row_dot(r_c, reading), row, valid, head, H, SIZE)
    if d is not None:
        put_scalars(d_d, -_row_dot(k_c, reading), row, valid, head, H, SIZE)
        dk -= correction[:, None] * reading
    if read is not None:
        reading *= factor[:, None]
    put_rows(d_r, reading, row, valid, head * K, H * K, SIZE, K, RAGGED)

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
    from_write *= tl.exp2((total - sums).to(tl.float32))[:, None]
    if g is not None:
        ending = _row_dot(k_c, from_write)
        shrink += ending
    dk += from_write
    if e is not None:
        erase = scalars(e, row, valid, head, H, SIZE)
        late = sums if LATE else earlier
        from_erase *= tl.exp2(late.to(tl.float32))[:, None]
        d_system *= apart(late[:, None], sums[None, :], i[:, None], i[None, :], True)
        d_system_t *= apart(late[None, :], sums[:, None], i[None, :], i[:, None], True)
        if g is not None:
            pair = erase[:, None] * d_system * overlap
            grow_e = tl.sum(pair, 1) + erase * _row_dot(k_c, from_erase)
            shrink -= tl.sum(pair, 0)
        # The gradient of M is -d_u w^T, since that of X^{-1} is -X^{-T} (.) X^{-T}.
        from_erase += tl.dot(d_system.to(kind), k_c, input_precision=PRECISION)
        put_scalars(d_e, -_row_dot(k_c, from_erase), row, valid, head, H, SIZE)
        dk -= erase[:, None] * from_erase
        dk -= tl.dot((d_system_t * erase[None, :]).to(kind), k_c, input_precision=PRECISION)
    put_rows(d_k, dk, row, valid, head * K, H * K, SIZE, K, RAGGED)
    if g is not None:
        net = grow - shrink
        if e is not None:
            net -= grow_e
        # A sum that stands before its token takes nothing of that token's own g.
        found = tl.cumsum(net, 0, reverse=True) + tl.sum(ending) + tl.exp2(total.to(tl.float32)) * kept
        if FIT:
            found -= grow
        if e is not None and not LATE:
            found += grow_e
        put_scalars(d_g, found, row, valid, head, H, SIZE)
