"""The backward of Gated KalmaNet's kernels: first the gradients of both states, then those of each token's operands.

Let y_t solve (H_t + lambda_t I) y_t = dx_t. With x and y held fixed, all gradients are those of

    sum_t do_t . o_t - y_t . H_t x_t + c_t ||H_t||^2 / 2

(implicit differentiation; c_t / 2 is the gradient that ||H_t||^2 gets through lambda_t).
"""

from typing import no_type_check

import triton
import triton.language as tl

from deltalab.kernels.chunk import decay_between, put_scalars, rows, scalars
from deltalab.kernels.ridge.forward import kernel, log_decays, product, put_state, scaled, stored, times


@kernel
@no_type_check
def reverse(
    k, x, y, c, d_o, g, states, norms, after, states_after, norms_after, across,
    T, H, K, D, from_chunk, to_chunk, scale,
    BT: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, FULL: tl.constexpr, FULL_D: tl.constexpr,
    GRAM: tl.constexpr, PARTS: tl.constexpr, IN: tl.constexpr, DTYPE: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """Computes dS <- exp(G_C) dS + the gradient of a chunk's reads of S, from the last chunk to the first.

    Stores each dS. S is U, which o = scale U^T x reads; if GRAM, S is H, which -y . H x + sum c ||H_t||^2 / 2 reads.
    `across` is exp(G_C) <dS after, S before>, the part of dg that only passes through the chunk.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, BK), block * BW + tl.arange(0, BW)
    blocks = tl.num_programs(0)
    bound = after + (batch.to(tl.int64) * H + head) * K * D + i[:, None] * D + j[None, :]
    inside = (i < K)[:, None] & (j < D)[None, :]
    ds = tl.load(bound, mask=inside, other=0.0)
    for back in range(to_chunk - from_chunk):
        chunk = to_chunk - 1 - back
        slot = (batch * (to_chunk - from_chunk) + chunk - from_chunk) * H + head
        put_state(ds, states_after, norms_after, slot, block, blocks, BK, BW, PARTS)
        row, valid = batch.to(tl.int64) * T + chunk * BT, T - chunk * BT
        sums, total = log_decays(g, row, valid, head, H, BT, FP32)
        keep = tl.exp2(total.to(tl.float32))
        since = tl.exp2(sums.to(tl.float32))
        s = tl.load(stored(states, slot, 0, 0, block, blocks, BK, BK, BW, PARTS)).to(tl.float32)
        if PARTS == 2:
            s += tl.load(stored(states, slot, 1, 0, block, blocks, BK, BK, BW, PARTS)).to(tl.float32)
        s *= tl.load(norms + slot * blocks + block)
        tl.store(across + slot * blocks + block, keep * tl.sum(s * ds))
        at, mask = rows(y if GRAM else x, row, valid, head, H, i, K, BT, FULL)
        left = tl.load(at, mask=mask, other=0.0)
        at, mask = rows(x if GRAM else d_o, row, valid, head, H, j, D, BT, FULL_D)
        right = tl.load(at, mask=mask, other=0.0)
        left *= (since * (-1.0 if GRAM else scale))[:, None]
        ds = keep * ds + product(tl.trans(left), right, 2, 2 if GRAM else IN, DTYPE)
        if GRAM:
            weight = scalars(c, row, valid, head, H, BT) * since
            t = tl.arange(0, BT)
            within = decay_between(sums[:, None], sums[None, :], t[:, None], t[None, :], False)
            weights = tl.sum(within * weight[:, None], 0)
            at, mask = rows(k, row, valid, head, H, i, K, BT, FULL)
            key = tl.load(at, mask=mask, other=0.0)
            at, mask = rows(k, row, valid, head, H, j, D, BT, FULL_D)
            other = tl.load(at, mask=mask, other=0.0).to(tl.float32) * weights[:, None]
            ds += tl.sum(weight * since, 0) * s + product(tl.trans(key), other, IN, 2, DTYPE)
    tl.store(bound, ds, mask=inside)


@kernel
@no_type_check
def differentiate(
    k, v, g, d_o, x, memories, memory_norms, d_x, readers, T, H, K, V, from_chunk, span, scale,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL: tl.constexpr, FULL_V: tl.constexpr,
    PARTS: tl.constexpr, IN: tl.constexpr, DTYPE: tl.constexpr, HALF: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """Stores dx for each chunk and head, and `readers`, the gradient of each cumulative log-decay from reading U."""
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    batch, chunk = program // span, from_chunk + program % span
    slot = program * H + head
    row, valid = batch.to(tl.int64) * T + chunk * BT, T - chunk * BT
    i, channel = tl.arange(0, BT), tl.arange(0, BK)
    sums, _ = log_decays(g, row, valid, head, H, BT, FP32)
    due = tl.zeros([BT, BT], tl.float32)
    dx = tl.zeros([BT, BK], tl.float32)
    for block in range(tl.cdiv(V, BV)):
        channels = block * BV + tl.arange(0, BV)
        from_o, mask = rows(d_o, row, valid, head, H, channels, V, BT, FULL_V)
        d_out = tl.load(from_o, mask=mask, other=0.0)
        from_v, mask = rows(v, row, valid, head, H, channels, V, BT, FULL_V)
        due += product(d_out, tl.trans(tl.load(from_v, mask=mask, other=0.0)), IN, IN, DTYPE)
        half, power = scaled(d_out, HALF)
        moved = times(half, half, memories, slot, 0, block, tl.cdiv(V, BV), BK, BK, BV, 1, PARTS, True)
        dx += (power * tl.load(memory_norms + slot * tl.cdiv(V, BV) + block))[:, None] * moved
    dx *= (scale * tl.exp2(sums.to(tl.float32)))[:, None]
    at, mask = rows(x, row, valid, head, H, channel, K, BT, FULL)
    put_scalars(readers, tl.sum(tl.load(at, mask=mask, other=0.0) * dx, 1), row, valid, head, H, BT)
    due *= scale * decay_between(sums[:, None], sums[None, :], i[:, None], i[None, :], False)
    at, mask = rows(k, row, valid, head, H, channel, K, BT, FULL)
    dx += product(due, tl.load(at, mask=mask, other=0.0), 2, IN, DTYPE)
    at, mask = rows(d_x, row, valid, head, H, channel, K, BT, FULL)
    tl.store(at, dx, mask=mask)


@triton.jit
@no_type_check
def _passing(matrix, i):
    """Returns two sums over the pairs j < t of a matrix [j, t]: for each j, and for each t.

    The first belongs to the decays after j, and the second to the decays up to t.
    """
    matrix = tl.where(i[:, None] < i[None, :], matrix, 0.0)
    return tl.sum(matrix, 1), tl.sum(matrix, 0)


@triton.jit
@no_type_check
def _put_d_g(d_g, reading, written, passing, row, valid, head, H, BT: tl.constexpr):
    """Stores d_g: the sum of `reading` of this and later tokens, and of `written` of earlier ones, plus `passing`."""
    i = tl.arange(0, BT)
    d_step = tl.where(i[:, None] >= i[None, :], reading[:, None], written[:, None])
    put_scalars(d_g, tl.sum(d_step, 0) + passing, row, valid, head, H, BT)


@kernel
@no_type_check
def pairs(
    k, v, g, d_o, x, y, c, readers, memory_after, memory_norms_after, memory_across, gram_across,
    for_x, for_y, for_key, d_v, d_g, T, H, K, V, from_chunk, span, scale,
    BT: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr, BV: tl.constexpr, FULL: tl.constexpr, FULL_V: tl.constexpr,
    PARTS: tl.constexpr, IN: tl.constexpr, DTYPE: tl.constexpr, HALF: tl.constexpr, FP32: tl.constexpr,
    ADAPTIVE: tl.constexpr,
):  # fmt: skip
    """Stores, for each chunk and head, gradients of sum do . o - y . H x + c ||H||^2 / 2 from pairs of tokens.

    These are dv and a part of dg. Token j writes and token t >= j reads. Matrices are [j, t], so that no result of a
    product is transposed. The gradient of the decay between j and t goes to every g_s with j < s <= t. `for_x`, `for_y`
    and `for_key`, times x, y and k, are parts of dk.
    """
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    batch, chunk = program // span, from_chunk + program % span
    slot = program * H + head
    row, valid = batch.to(tl.int64) * T + chunk * BT, T - chunk * BT
    i, channel = tl.arange(0, BT), tl.arange(0, BK)
    value_blocks = tl.cdiv(V, BV)
    square = slot.to(tl.int64) * BT * BT + i[:, None] * BT + i[None, :]
    sums, total = log_decays(g, row, valid, head, H, BT, FP32)
    until = tl.exp2((total - sums).to(tl.float32))
    within = decay_between(sums[None, :], sums[:, None], i[None, :], i[:, None], False)

    at, mask = rows(k, row, valid, head, H, channel, K, BT, FULL)
    key = tl.load(at, mask=mask, other=0.0)
    at, mask = rows(x, row, valid, head, H, channel, K, BT, FULL)
    along_x = within * product(key, tl.trans(tl.load(at, mask=mask, other=0.0)), IN, 2, DTYPE)
    tl.store(for_y + square, (-along_x).to(for_y.dtype.element_ty))
    at, mask = rows(y, row, valid, head, H, channel, K, BT, FULL)
    pair = -product(key, tl.trans(tl.load(at, mask=mask, other=0.0)), IN, 2, DTYPE)
    half_key, key_power = scaled(key, HALF)
    written = tl.zeros([BT], tl.float32)
    passing = 0.0
    for block in range(value_blocks):
        values = block * BV + tl.arange(0, BV)
        from_v, mask_v = rows(v, row, valid, head, H, values, V, BT, FULL_V)
        value = tl.load(from_v, mask=mask_v, other=0.0)
        from_o, mask_v = rows(d_o, row, valid, head, H, values, V, BT, FULL_V)
        d_out = tl.load(from_o, mask=mask_v, other=0.0)
        pair += scale * product(value, tl.trans(d_out), IN, IN, DTYPE)
        d_value = times(half_key, half_key, memory_after, slot, 0, block, value_blocks, BK, BK, BV, 1, PARTS, False)
        norm_u = tl.load(memory_norms_after + slot * value_blocks + block)
        d_value *= (norm_u * until * key_power)[:, None]
        written += tl.sum(d_value * value.to(tl.float32), 1)
        d_value += scale * product(along_x, d_out, PARTS, IN, DTYPE)
        d_v_at, mask_v = rows(d_v, row, valid, head, H, values, V, BT, FULL_V)
        tl.store(d_v_at, d_value.to(d_v.dtype.element_ty), mask=mask_v)
        passing += tl.load(memory_across + slot * value_blocks + block)
    for block in tl.static_range(BK // BG):
        passing += tl.load(gram_across + slot * (BK // BG) + block)
    tl.store(for_x + square, (pair * within).to(for_x.dtype.element_ty))
    crossing = along_x * pair
    if ADAPTIVE:
        overlap = product(key, tl.trans(key), IN, IN, DTYPE)
        weighted = within * scalars(c, row, valid, head, H, BT)[None, :]
        crossing += weighted * product(overlap * overlap, within, PARTS, PARTS, DTYPE)
        overlap *= 2 * product(weighted, tl.trans(within), PARTS, PARTS, DTYPE)
        tl.store(for_key + square, overlap.to(for_key.dtype.element_ty))
    began, ended = _passing(crossing, i)
    reading = scalars(readers, row, valid, head, H, BT)
    _put_d_g(d_g, reading, written + began - ended, passing, row, valid, head, H, BT)


@kernel
@no_type_check
def gradients(
    k, v, g, x, y, c, for_x, for_y, for_key, grams, gram_norms, gram_after, gram_norms_after,
    memory_after, memory_norms_after, d_k, d_g, T, H, K, V, from_chunk, span,
    BT: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr, BV: tl.constexpr, FULL: tl.constexpr, FULL_V: tl.constexpr,
    PARTS: tl.constexpr, IN: tl.constexpr, DTYPE: tl.constexpr, HALF: tl.constexpr, FP32: tl.constexpr,
    ADAPTIVE: tl.constexpr,
):  # fmt: skip
    """Stores dk for each chunk, head and block of keys, with x, y and c held fixed, and part of dg, d_g [block, ..]."""
    blocks: tl.constexpr = BK // BG
    program, head = tl.program_id(0) // (H * blocks), tl.program_id(0) // blocks % H
    block = tl.program_id(0) % blocks
    batch, chunk = program // span, from_chunk + program % span
    slot = program * H + head
    row, valid = batch.to(tl.int64) * T + chunk * BT, T - chunk * BT
    i, channel, channels = tl.arange(0, BT), tl.arange(0, BK), block * BG + tl.arange(0, BG)
    value_blocks = tl.cdiv(V, BV)
    square = slot.to(tl.int64) * BT * BT + i[:, None] * BT + i[None, :]
    sums, total = log_decays(g, row, valid, head, H, BT, FP32)
    since = tl.exp2(sums.to(tl.float32))
    until = tl.exp2((total - sums).to(tl.float32))
    at, mask = rows(k, row, valid, head, H, channel, K, BT, FULL)
    half_key, key_power = scaled(tl.load(at, mask=mask, other=0.0), HALF)

    d_key = times(half_key, half_key, gram_after, slot, 0, block, blocks, BK, BK, BG, 1, PARTS, False)
    d_key *= tl.load(gram_norms_after + slot * blocks + block)
    for other in range(blocks):
        from_other, mask_other = rows(k, row, valid, head, H, other * BG + tl.arange(0, BG), K, BT, FULL)
        half = (tl.load(from_other, mask=mask_other, other=0.0).to(tl.float32) / key_power[:, None]).to(HALF)
        moved_k = times(half, half, gram_after, slot, block * BG, other, blocks, BK, BG, BG, 1, PARTS, True)
        d_key += tl.load(gram_norms_after + slot * blocks + other) * moved_k
    d_key *= key_power[:, None]
    from_k, mask_k = rows(k, row, valid, head, H, channels, K, BT, FULL)
    key_part = tl.load(from_k, mask=mask_k, other=0.0).to(tl.float32)
    # Half of the sum, because each of the two products contains k^T dH k once.
    written = 0.5 * until * tl.sum(d_key * key_part, 1)
    for other in range(value_blocks):
        from_v, mask_v = rows(v, row, valid, head, H, other * BV + tl.arange(0, BV), V, BT, FULL_V)
        half_v, power = scaled(tl.load(from_v, mask=mask_v, other=0.0), HALF)
        norm_u = tl.load(memory_norms_after + slot * value_blocks + other)
        moved_v = times(half_v, half_v, memory_after, slot, block * BG, other, value_blocks, BK, BG, BV, 1, PARTS, True)
        d_key += (power * norm_u)[:, None] * moved_v
    d_key *= until[:, None]
    from_x, mask_k = rows(x, row, valid, head, H, channels, K, BT, FULL)
    x_part = tl.load(from_x, mask=mask_k, other=0.0)
    d_key += product(tl.load(for_x + square), x_part, PARTS, PARTS, DTYPE)
    from_y, mask_k = rows(y, row, valid, head, H, channels, K, BT, FULL)
    d_key += product(tl.load(for_y + square), tl.load(from_y, mask=mask_k, other=0.0), PARTS, PARTS, DTYPE)
    at, mask = rows(y, row, valid, head, H, channel, K, BT, FULL)
    solved = tl.load(at, mask=mask, other=0.0)
    half_y, y_power = scaled(solved, HALF)
    y_low = (solved / y_power[:, None] - half_y.to(tl.float32)).to(HALF)
    norm = tl.load(gram_norms + slot * blocks + block)
    moved = times(half_y, y_low, grams, slot, 0, block, blocks, BK, BK, BG, PARTS, PARTS, False)
    reading = -since * norm * y_power * tl.sum(moved * x_part, 1)
    if ADAPTIVE:
        weight = scalars(c, row, valid, head, H, BT) * since
        within = decay_between(sums[None, :], sums[:, None], i[None, :], i[:, None], False) * weight[None, :]
        moved = times(half_key, half_key, grams, slot, 0, block, blocks, BK, BK, BG, 1, PARTS, False)
        moved *= (norm * key_power)[:, None]
        d_key += 2 * tl.sum(within, 1)[:, None] * moved
        d_key += product(tl.load(for_key + square), key_part, PARTS, IN, DTYPE)
        by_key = within * tl.sum(moved * key_part, 1)[:, None]
        reading += weight * since * (norm * norm) + tl.sum(by_key, 0)
        began, ended = _passing(by_key, i)
        written += began - ended
    d_k_at, mask_k = rows(d_k, row, valid, head, H, channels, K, BT, FULL)
    tl.store(d_k_at, d_key.to(d_k.dtype.element_ty), mask=mask_k)
    block_d_g = d_g + block.to(tl.int64) * (tl.num_programs(0) // (span * blocks) * T)
    _put_d_g(block_d_g, reading, written, 0.0, row, valid, head, H, BT)
