"""The last kernel of `kernels.scalar`'s backward: the gradients of a chunk's operands, parallel over chunks."""

import triton
import triton.language as tl

from deltalab.kernels.chunk import apart, bounds, cumulative_at, locate, read_rows, rows, scalars


@triton.jit
def _row_dot(x, y):
    return tl.sum(x * y, 1)


@triton.jit
def gradients(
    r, k, u, e, beta, read, d, cumulative, written, states, states_after, d_o, residual, d_residual,
    d_u, d_r, d_k, d_g, d_e, d_beta, d_read, d_d, d_target,
    cu_seqlens, of, first, length, chunks, from_chunk, span, sequences, scale, clip, H, K, V,
    SIZE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL: tl.constexpr, FULL_V: tl.constexpr,
    LATE: tl.constexpr, STEPS: tl.constexpr, LOSS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of one chunk and head: d_u holds the gradient of beta u and leaves with that of u.

    What is read or erased at i grows with G_i, what is written at j shrinks with G_j. Where both lie in the chunk the
    two are sums over rows and columns of one matrix, so that they cancel as they should in the sum that g_t gets.
    """
    FIT: tl.constexpr = LOSS is not None
    program, head = tl.program_id(0), tl.program_id(1)
    sequence, chunk = locate(program, of, first, span, PACKED)
    if sequence >= sequences:
        return
    chunk += from_chunk
    start, length = bounds(sequence, cu_seqlens, length, PACKED)
    row, valid = start + chunk * SIZE, length - chunk * SIZE
    if valid <= 0:
        return
    i, key = tl.arange(0, SIZE), tl.arange(0, BK)
    kind = k.dtype.element_ty
    slot = (program.to(tl.int64) * H + head) * K * V

    from_read = tl.zeros([SIZE, BK], tl.float32)
    from_write = tl.zeros([SIZE, BK], tl.float32)
    if e is not None:
        from_erase = tl.zeros([SIZE, BK], tl.float32)
        d_system = tl.zeros([SIZE, SIZE], tl.float32)
        d_system_t = tl.zeros([SIZE, SIZE], tl.float32)
    d_within = tl.zeros([SIZE, SIZE], tl.float32)
    d_within_t = tl.zeros([SIZE, SIZE], tl.float32)
    if FIT:
        from_predict = tl.zeros([SIZE, BK], tl.float32)
        d_overlap = tl.zeros([SIZE, SIZE], tl.float32)
        d_overlap_t = tl.zeros([SIZE, SIZE], tl.float32)
    if beta is not None:
        beta_at, beta_there = scalars(beta, row, valid, head, H, SIZE)
        strength = tl.load(beta_at, mask=beta_there, other=0.0).to(tl.float32)
        d_strength = tl.zeros([SIZE], tl.float32)
    kept = 0.0
    for block in range(0, tl.cdiv(V, BV)):
        value = block * BV + tl.arange(0, BV)
        at, there = read_rows(d_o, start // STEPS, chunk * SIZE, length, head, H, value, V, SIZE, STEPS, FULL_V)
        do_c = tl.load(at, mask=there, other=0.0)
        du_at, du_there = rows(d_u, row, valid, head, H, value, V, SIZE, FULL_V)
        du_c = tl.load(du_at, mask=du_there, other=0.0)
        at, there = rows(u, row, valid, head, H, value, V, SIZE, FULL_V)
        u_c = tl.load(at, mask=there, other=0.0).to(tl.float32)
        if written is not None:
            at, there = rows(written, row, valid, head, H, value, V, SIZE, FULL_V)
            w_c = tl.load(at, mask=there, other=0.0)
        elif beta is not None:
            w_c = (strength[:, None] * u_c).to(kind)
        else:
            w_c = u_c.to(kind)
        both = (value < V)[:, None] & (key < K)[None, :]
        at = slot + value[:, None] * K + key[None, :]
        before = tl.load(states + at, mask=both, other=0.0)
        after = tl.load(states_after + at, mask=both, other=0.0)
        from_read += tl.dot(do_c, before, input_precision=PRECISION)
        from_write += tl.dot(w_c, after, input_precision=PRECISION)
        d_within += tl.dot(do_c, tl.trans(w_c), input_precision=PRECISION)
        d_within_t += tl.dot(w_c, tl.trans(do_c), input_precision=PRECISION)
        if e is not None:
            from_erase += tl.dot(du_c, before, input_precision=PRECISION)
            d_system += tl.dot(du_c, tl.trans(w_c), input_precision=PRECISION)
            d_system_t += tl.dot(w_c, tl.trans(du_c), input_precision=PRECISION)
        if FIT:
            at, there = rows(residual, row, valid, head, H, value, V, SIZE, FULL_V)
            found = tl.load(at, mask=there, other=0.0).to(tl.float32)
            at, there = rows(d_residual, row, valid, head, H, value, V, SIZE, FULL_V)
            d_error = tl.load(at, mask=there, other=0.0).to(tl.float32)
            if LOSS == "huber":
                d_error = tl.where(tl.abs(found) < clip, d_error, 0.0)
            elif LOSS == "log_cosh":
                d_error *= 1 - found * found
            at, there = rows(d_target, row, valid, head, H, value, V, SIZE, FULL_V)
            tl.store(at, d_error.to(d_target.dtype.element_ty), mask=there)
            d_predicted = (-d_error).to(kind)
            from_predict += tl.dot(d_predicted, before, input_precision=PRECISION)
            d_overlap += tl.dot(d_predicted, tl.trans(w_c), input_precision=PRECISION)
            d_overlap_t += tl.dot(w_c, tl.trans(d_predicted), input_precision=PRECISION)
        if cumulative is not None:
            kept += tl.sum(before.to(tl.float32) * after.to(tl.float32))
        if beta is not None:
            d_strength += _row_dot(du_c.to(tl.float32), u_c)
            tl.store(du_at, (strength[:, None] * du_c.to(tl.float32)).to(d_u.dtype.element_ty), mask=du_there)

    at, there = rows(k, row, valid, head, H, key, K, SIZE, FULL)
    k_c = tl.load(at, mask=there, other=0.0)
    at, there = read_rows(r, start // STEPS, chunk * SIZE, length, head, H, key, K, SIZE, STEPS, FULL)
    r_c = tl.load(at, mask=there, other=0.0)
    k_f, r_f = k_c.to(tl.float32), r_c.to(tl.float32)
    if cumulative is not None:
        sums = cumulative_at(cumulative, row, valid, head, H, SIZE, 0)
        earlier = cumulative_at(cumulative, row, valid, head, H, SIZE, 1)
        total = tl.load(cumulative + (row + tl.minimum(valid, SIZE) - 1) * H + head)
        seen = earlier if FIT else sums
        decay = apart(seen[:, None], sums[None, :], i[:, None], i[None, :], FIT)
        decay_t = apart(seen[None, :], sums[:, None], i[None, :], i[:, None], FIT)
        since = tl.exp2(seen.to(tl.float32))
        from_read *= since[:, None]
        from_write *= tl.exp2((total - sums).to(tl.float32))[:, None]
        if FIT:
            from_predict *= since[:, None]
    else:
        decay = tl.where(i[:, None] > i[None, :] if FIT else i[:, None] >= i[None, :], 1.0, 0.0)
        decay_t = tl.where(i[None, :] > i[:, None] if FIT else i[None, :] >= i[:, None], 1.0, 0.0)
    # scale stands in d_o, once.
    reading = scale * (from_read + tl.dot((d_within * decay).to(kind), k_c, input_precision=PRECISION))
    wanted = r_f
    dk = tl.zeros([SIZE, BK], tl.float32)
    if read is not None:
        read_at, read_there = scalars(read, row, valid, head, H, SIZE)
        factor = tl.load(read_at, mask=read_there, other=0.0).to(tl.float32)
        at, there = scalars(d_read, row, valid, head, H, SIZE)
        tl.store(at, _row_dot(r_f, reading).to(d_read.dtype.element_ty), mask=there)
        wanted = factor[:, None] * r_f
    if d is not None:
        d_at, d_there = scalars(d, row, valid, head, H, SIZE)
        correction = tl.load(d_at, mask=d_there, other=0.0).to(tl.float32)
        at, there = scalars(d_d, row, valid, head, H, SIZE)
        tl.store(at, -_row_dot(k_f, reading).to(d_d.dtype.element_ty), mask=there)
        wanted -= correction[:, None] * k_f
        dk -= correction[:, None] * reading
    if cumulative is not None:
        ending = _row_dot(k_f, from_write)
        between_two = scale * d_within * decay * tl.dot(wanted.to(kind), tl.trans(k_c), input_precision=PRECISION)
        grow = scale * _row_dot(wanted, from_read)
        if FIT or e is not None:
            overlap = tl.dot(k_c, tl.trans(k_c), input_precision=PRECISION)
        if FIT:
            between_two += d_overlap * decay * overlap
            grow += _row_dot(k_f, from_predict)
        grow += tl.sum(between_two, 1)
        shrink = ending + tl.sum(between_two, 0)
    dr = reading if read is None else factor[:, None] * reading
    at, there = read_rows(d_r, start // STEPS, chunk * SIZE, length, head, H, key, K, SIZE, STEPS, FULL)
    tl.store(at, dr.to(d_r.dtype.element_ty), mask=there)
    from_write += scale * tl.dot((d_within_t * decay_t).to(kind), wanted.to(kind), input_precision=PRECISION)
    if FIT:
        predicting = from_predict + tl.dot((d_overlap * decay).to(kind), k_c, input_precision=PRECISION)
        dk += predicting
        from_write += tl.dot((d_overlap_t * decay_t).to(kind), k_c, input_precision=PRECISION)
    if e is not None:
        e_at, e_there = scalars(e, row, valid, head, H, SIZE)
        erase = tl.load(e_at, mask=e_there, other=0.0).to(tl.float32)
        if cumulative is not None:
            seen_e = sums if LATE else earlier
            between = apart(seen_e[:, None], sums[None, :], i[:, None], i[None, :], True)
            between_t = apart(seen_e[None, :], sums[:, None], i[None, :], i[:, None], True)
            from_erase *= tl.exp2(seen_e.to(tl.float32))[:, None]
            between_two = -erase[:, None] * d_system * between * overlap
            grow_e = tl.sum(between_two, 1) - erase * _row_dot(k_f, from_erase)
            shrink += tl.sum(between_two, 0)
        else:
            between = tl.where(i[:, None] > i[None, :], 1.0, 0.0)
            between_t = tl.where(i[None, :] > i[:, None], 1.0, 0.0)
        # d(I + M)^{-1}: -d_u w^T.
        erasing = -from_erase - tl.dot((d_system * between).to(kind), k_c, input_precision=PRECISION)
        from_write -= tl.dot((d_system_t * between_t * erase[None, :]).to(kind), k_c, input_precision=PRECISION)
        dk += erase[:, None] * erasing
        at, there = scalars(d_e, row, valid, head, H, SIZE)
        tl.store(at, _row_dot(k_f, erasing).to(d_e.dtype.element_ty), mask=there)
    at, there = rows(d_k, row, valid, head, H, key, K, SIZE, FULL)
    tl.store(at, (dk + from_write).to(d_k.dtype.element_ty), mask=there)
    if beta is not None:
        at, there = scalars(d_beta, row, valid, head, H, SIZE)
        tl.store(at, d_strength.to(d_beta.dtype.element_ty), mask=there)
    if cumulative is not None:
        net = grow - shrink
        alone = grow if FIT else tl.zeros([SIZE], tl.float32)
        if e is not None:
            net += grow_e
            alone += tl.zeros([SIZE], tl.float32) if LATE else grow_e
        # A sum that stands before its token takes nothing of that token's own g.
        found = tl.cumsum(net, 0, reverse=True) - alone + tl.sum(ending) + tl.exp2(total.to(tl.float32)) * kept
        at, there = scalars(d_g, row, valid, head, H, SIZE)
        tl.store(at, found.to(d_g.dtype.element_ty), mask=there)
