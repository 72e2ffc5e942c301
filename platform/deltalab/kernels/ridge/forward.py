"""Kernels for reading by ridge regression: every token's system is solved on chip, chunk by chunk.

For a chunk with (H, U) before it, A_ij the decay from token j to token i, and a_i the decay from the chunk's start:

    H_i x = a_i H x + sum_j A_ij k_j (k_j . x)
    ||H_i||^2 = a_i^2 ||H||^2 + 2 a_i sum_j A_ij k_j^T H k_j + sum_jl A_ij A_il (k_j . k_l)^2

(arXiv:2511.21016, 4.2). Rounding makes this hard: x is up to 1 / strength times larger across the keys than along them,
and only the part along them is read, so 16 bits of x are not enough. Therefore

- x moves by steps that are rounded before they are multiplied, and its residual moves by the same rounded steps, so
  that later steps undo the rounding of earlier ones;
- states, and vectors that they are multiplied with, are fp16 times a scale of their own, which is exact for bf16 keys;
- x is taken as two halves of 16 bits, and so are the states (PARTS = 2) where `Ridge.in_one_half` says no.
"""

from typing import no_type_check

import triton
import triton.language as tl

from deltalab.kernels.chunk import LOG2_E, LOWEST, decay_between, held, put_scalars, rows, scalars

EMPTY = tl.constexpr(1e-31)
"""The square of a norm below which H counts as empty: tiny / eps of fp32, as in `deltalab.ridge`."""

kernel = triton.jit(
    do_not_specialize=["T", "H", "segment", "boundaries", "from_chunk", "to_chunk", "span", "iterations"]
)
"""Compiles a kernel once for all lengths and segments. Otherwise Triton would compile it again where one of these
numbers is 1 or a multiple of 16."""


@triton.jit
@no_type_check
def product(a, b, A: tl.constexpr, B: tl.constexpr, DTYPE: tl.constexpr):
    """Computes a @ b, with a in A and b in B parts of DTYPE, or in one part if DTYPE is fp32."""
    high_a, high_b = held(a.to(DTYPE)), b.to(DTYPE)
    out = tl.dot(high_a, high_b, input_precision="ieee")
    if tl.float32 != DTYPE:
        if A == 2:
            out = tl.dot(held((a.to(tl.float32) - high_a.to(tl.float32)).to(DTYPE)), high_b, out)
        if B == 2:
            out = tl.dot(high_a, (b.to(tl.float32) - high_b.to(tl.float32)).to(DTYPE), out)
    return out


@triton.jit
@no_type_check
def scaled(x, HALF: tl.constexpr):
    """Divides each row of x [.., W] by a power of two, so that it fits fp16. What fp16 holds exactly stays exact."""
    x = x.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return (x / power[:, None]).to(HALF), power


@triton.jit
@no_type_check
def log_decays(g, row, valid, head, H, BT: tl.constexpr, FP32: tl.constexpr):
    """Cumulative log-decays of a chunk in base 2, and the last one."""
    step = tl.maximum(scalars(g, row, valid, head, H, BT), LOWEST) * LOG2_E
    if FP32:
        step = step.to(tl.float64)
    return tl.cumsum(step, 0), tl.sum(step, 0)


@triton.jit
@no_type_check
def put_state(s, states, norms, slot, block, blocks, BK: tl.constexpr, BW: tl.constexpr, PARTS: tl.constexpr):
    """Stores a state's block [BK, BW], divided by its norm, in PARTS parts, and the norm."""
    largest = tl.max(tl.abs(s))
    within = s / tl.where(largest > 0, largest, 1.0)
    norm = largest * tl.sqrt(tl.sum(within * within))
    tl.store(norms + slot * blocks + block, norm)
    unit = s / tl.where(norm > 0, norm, 1.0)
    high = unit.to(states.dtype.element_ty)
    at = stored(states, slot, 0, 0, block, blocks, BK, BK, BW, PARTS)
    tl.store(at, high)
    if PARTS == 2:
        at = stored(states, slot, 1, 0, block, blocks, BK, BK, BW, PARTS)
        tl.store(at, (unit - high.to(tl.float32)).to(states.dtype.element_ty))


@triton.jit
@no_type_check
def stored(
    states, slot, part, row, block, blocks, BK: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, PARTS: tl.constexpr
):
    """Pointers to BR rows of a block that `put_state` stored."""
    i, j = row + tl.arange(0, BR), block * BW + tl.arange(0, BW)
    return states + ((slot.to(tl.int64) * PARTS + part) * BK + i[:, None]) * (blocks * BW) + j[None, :]


@triton.jit
@no_type_check
def times(
    a, a_low, states, slot, row, block, blocks, BK: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr,
    A: tl.constexpr, PARTS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Multiplies a [.., BR] by BR rows of a stored block or, if TRANSPOSED, a [.., BW] by their transpose.

    The product is not multiplied by the norm of the block.

    a is in A parts.
    """
    s = tl.load(stored(states, slot, 0, row, block, blocks, BK, BR, BW, PARTS))
    s = tl.trans(s) if TRANSPOSED else s
    a = held(a)
    out = tl.dot(a, s, input_precision="ieee")
    if A == 2:
        out = tl.dot(held(a_low), s, out)
    if PARTS == 2:
        s = tl.load(stored(states, slot, 1, row, block, blocks, BK, BR, BW, PARTS))
        out = tl.dot(a, tl.trans(s) if TRANSPOSED else s, out)
    return out


@kernel
@no_type_check
def sweep(
    k, u, g, begin, segment, boundaries, states, norms, T, H, K, D, from_chunk, to_chunk,
    BT: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr, FULL: tl.constexpr, FULL_D: tl.constexpr,
    PARTS: tl.constexpr, IN: tl.constexpr, DTYPE: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """Computes S <- exp(G_C) S + k^T (exp(G_C - G) u) over the chunks of a segment.

    Stores S before each chunk and after the last one.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, BK), block * BW + tl.arange(0, BW)
    bound = begin + ((batch * boundaries + segment).to(tl.int64) * H + head) * K * D + i[:, None] * D + j[None, :]
    inside = (i < K)[:, None] & (j < D)[None, :]
    s = tl.load(bound, mask=inside, other=0.0)
    for chunk in range(from_chunk, to_chunk):
        slot = (batch * (to_chunk - from_chunk) + chunk - from_chunk) * H + head
        put_state(s, states, norms, slot, block, tl.num_programs(0), BK, BW, PARTS)
        row, valid = batch.to(tl.int64) * T + chunk * BT, T - chunk * BT
        sums, total = log_decays(g, row, valid, head, H, BT, FP32)
        at, mask = rows(k, row, valid, head, H, i, K, BT, FULL)
        key = tl.load(at, mask=mask, other=0.0)
        at, mask = rows(u, row, valid, head, H, j, D, BT, FULL_D)
        write = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        write *= tl.exp2((total - sums).to(tl.float32))[:, None]
        s = tl.exp2(total.to(tl.float32)) * s + product(tl.trans(key), write, IN, 2, DTYPE)
    tl.store(bound + H.to(tl.int64) * K * D, s, mask=inside)


@triton.jit
@no_type_check
def _less_product(
    rest, d, d_low, key, gram, gram_low, within, since, PARTS: tl.constexpr, ALONG: tl.constexpr
):  # fmt: skip
    """Computes rest - H_t d_t, with H and d [BT, K] in PARTS parts, and k . d in ALONG parts."""
    along = tl.dot(d, tl.trans(key), input_precision="ieee")
    if PARTS == 2:
        along = tl.dot(d_low, tl.trans(key), along)
    along *= -within
    high = along.to(key.dtype)
    rest = tl.dot(high, key, rest, input_precision="ieee")
    if ALONG == 2:
        rest = tl.dot((along - high.to(tl.float32)).to(key.dtype), key, rest)
    before = tl.dot(d, gram, input_precision="ieee")
    if PARTS == 2:
        before = tl.dot(d_low, gram, before)
        before = tl.dot(d, gram_low, before)
    return rest - since[:, None] * before


@triton.jit
@no_type_check
def _low(new, d, PARTS: tl.constexpr):
    """Returns what rounding `new` to d lost, if PARTS is 2. Else returns d, which is then not used."""
    return (new - d.to(tl.float32)).to(d.dtype) if PARTS == 2 else d


@triton.jit
@no_type_check
def _taken(d, d_low, PARTS: tl.constexpr):
    """The step that d and d_low add up to."""
    return d.to(tl.float32) + d_low.to(tl.float32) if PARTS == 2 else d.to(tl.float32)


@triton.jit
@no_type_check
def _chebyshev(
    rest, low, iterations, key, gram, gram_low, within, since, PARTS: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """Computes `deltalab.ridge.chebyshev` for eigenvalues in [low, 1].

    Each step d is rounded before it is added to x, and A d is subtracted from the rest.
    """
    step = 2 / (1 + low)
    rho_squared = (1 - low) / (1 + low)
    rho_squared *= rho_squared
    omega = tl.full(low.shape, 2.0, tl.float32)
    new = step[:, None] * rest
    d = new.to(key.dtype)
    d_low = _low(new, d, PARTS)
    x = _taken(d, d_low, PARTS)
    for _ in range(iterations - 1):
        rest = _less_product(rest, d, d_low, key, gram, gram_low, within, since, PARTS, ALONG)
        taken = _taken(d, d_low, PARTS)
        rest -= low[:, None] * taken
        omega = 4 / (4 - rho_squared * omega)
        new = (omega * step)[:, None] * rest + (omega - 1)[:, None] * taken
        d = new.to(key.dtype)
        d_low = _low(new, d, PARTS)
        x += _taken(d, d_low, PARTS)
    rest = _less_product(rest, d, d_low, key, gram, gram_low, within, since, PARTS, ALONG)
    taken = _taken(d, d_low, PARTS)
    omega = 4 / (4 - rho_squared * omega)
    return x + (omega * step)[:, None] * (rest - low[:, None] * taken) + (omega - 1)[:, None] * taken


@triton.jit
@no_type_check
def _conjugate_gradient(
    rest, low, iterations, key, gram, gram_low, within, since, PARTS: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """Runs `deltalab.ridge.conjugate_gradient`, with the same rounded directions in x and in its residual."""
    x = tl.zeros(rest.shape, tl.float32)
    d = rest.to(key.dtype)
    d_low = _low(rest, d, PARTS)
    squared = tl.sum(rest * rest, 1)
    enough = 1.4e-14 * squared
    for _ in range(iterations):
        none = tl.zeros(rest.shape, tl.float32)
        product = -_less_product(none, d, d_low, key, gram, gram_low, within, since, PARTS, ALONG)
        taken = _taken(d, d_low, PARTS)
        product += low[:, None] * taken
        curvature = tl.sum(taken * product, 1)
        going = (squared > enough) & (curvature > 0)
        alpha = tl.where(going, squared / tl.where(going, curvature, 1.0), 0.0)[:, None]
        x += alpha * taken
        rest -= alpha * product
        before = squared
        squared = tl.sum(rest * rest, 1)
        new = rest + (squared / tl.where(going, before, 1.0))[:, None] * taken
        d = new.to(key.dtype)
        d_low = _low(new, d, PARTS)
    return x


@kernel
@no_type_check
def measure(
    k, g, grams, gram_norms, norm_out, T, H, K, from_chunk, span,
    BT: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr, FULL: tl.constexpr,
    PARTS: tl.constexpr, IN: tl.constexpr, DTYPE: tl.constexpr, HALF: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """Stores ||H_t|| for each chunk and head, or 0 if H_t counts as empty."""
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    batch, chunk = program // span, from_chunk + program % span
    slot = program * H + head
    row, valid = batch.to(tl.int64) * T + chunk * BT, T - chunk * BT
    i, column = tl.arange(0, BT), tl.arange(0, BK)
    blocks: tl.constexpr = BK // BG
    sums, _ = log_decays(g, row, valid, head, H, BT, FP32)
    at, mask = rows(k, row, valid, head, H, column, K, BT, FULL)
    key, key_power = scaled(tl.load(at, mask=mask, other=0.0), HALF)
    overlap = tl.dot(key, tl.trans(key), input_precision="ieee")
    overlap *= key_power[:, None] * key_power[None, :]
    within = decay_between(sums[:, None], sums[None, :], i[:, None], i[None, :], False)
    squares = tl.sum(product(within, overlap * overlap, 2, 2, DTYPE) * within, 1)
    across = tl.zeros([BT], tl.float32)
    start = 0.0
    for block in tl.static_range(blocks):
        norm = tl.load(gram_norms + slot * blocks + block)
        start += norm * norm
        moved = times(key, key, grams, slot, 0, block, blocks, BK, BK, BG, 1, PARTS, False)
        at, mask = rows(k, row, valid, head, H, block * BG + tl.arange(0, BG), K, BT, FULL)
        across += tl.sum(moved * tl.load(at, mask=mask, other=0.0).to(tl.float32), 1) * key_power * norm
    since = tl.exp2(sums.to(tl.float32))
    squares += since * since * start + 2 * since * tl.sum(within * across[None, :], 1)
    put_scalars(norm_out, tl.where(squares > EMPTY, tl.sqrt(squares), 0.0), row, valid, head, H, BT)


@kernel
@no_type_check
def solve(
    rhs, k, g, norm, grams, gram_norms, x, x_half, forward, c, T, H, K, from_chunk, span, strength, iterations,
    BT: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr, FULL: tl.constexpr,
    PARTS: tl.constexpr, HALF: tl.constexpr, FP32: tl.constexpr,
    ALONG: tl.constexpr, ADAPTIVE: tl.constexpr, CHEBYSHEV: tl.constexpr,
):  # fmt: skip
    """Stores x for each chunk and head, with (H_t + lambda_t I) x_t = rhs_t, in fp32.

    In the backward, `rhs` is dx, so x is dq, and `x_half` receives x in q's dtype. `forward` is then the x of the
    forward. If ADAPTIVE, `solve` also stores c_t, where c_t / 2 is the gradient of ||H_t||^2 through lambda_t. The
    system is divided by a bound of its largest eigenvalue, and rhs by its largest element, so that all numbers fit
    fp16.
    """
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    batch, chunk = program // span, from_chunk + program % span
    slot = program * H + head
    row, valid = batch.to(tl.int64) * T + chunk * BT, T - chunk * BT
    i, channel = tl.arange(0, BT), tl.arange(0, BK)
    at, mask = rows(k, row, valid, head, H, channel, K, BT, FULL)
    key, key_power = scaled(tl.load(at, mask=mask, other=0.0), HALF)
    # One scale for all columns.
    norms = tl.load(gram_norms + slot * (BK // BG) + channel // BG)
    unit = tl.max(norms, 0)
    norms /= tl.where(unit > 0, unit, 1.0)
    gram = tl.load(stored(grams, slot, 0, 0, 0, 1, BK, BK, BK, PARTS)).to(tl.float32)
    if PARTS == 2:
        gram += tl.load(stored(grams, slot, 1, 0, 0, 1, BK, BK, BK, PARTS)).to(tl.float32)
    gram *= norms[None, :]
    high_gram = gram.to(HALF)
    gram_low = _low(gram, high_gram, PARTS)
    sums, _ = log_decays(g, row, valid, head, H, BT, FP32)
    norm_t = scalars(norm, row, valid, head, H, BT)
    live = (norm_t > 0) | (not ADAPTIVE)
    low = tl.where(live, strength * (norm_t if ADAPTIVE else tl.full([BT], 1.0, tl.float32)), 1.0)
    high = norm_t + low
    within = decay_between(sums[:, None], sums[None, :], i[:, None], i[None, :], False)
    within *= (key_power * key_power)[None, :] / high[:, None]
    since = tl.exp2(sums.to(tl.float32)) * (unit / high)
    at, mask = rows(rhs, row, valid, head, H, channel, K, BT, FULL)
    rest = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(rest), 1)
    largest = tl.where(largest > 0, largest, 1.0)
    rest *= tl.where(live, 1 / largest, 0.0)[:, None]
    if CHEBYSHEV:
        solution = _chebyshev(rest, low / high, iterations, key, high_gram, gram_low, within, since, PARTS, ALONG)
    else:
        solution = _conjugate_gradient(
            rest, low / high, iterations, key, high_gram, gram_low, within, since, PARTS, ALONG
        )
    solution *= (largest / high)[:, None]
    at, mask = rows(x, row, valid, head, H, channel, K, BT, FULL)
    tl.store(at, solution, mask=mask)
    if x_half is not None:
        at, mask = rows(x_half, row, valid, head, H, channel, K, BT, FULL)
        tl.store(at, solution.to(x_half.dtype.element_ty), mask=mask)
        if ADAPTIVE:
            at, mask = rows(forward, row, valid, head, H, channel, K, BT, FULL)
            due = -strength * tl.sum(solution * tl.load(at, mask=mask, other=0.0), 1)
            put_scalars(c, due / tl.where(norm_t > 0, norm_t, 1.0), row, valid, head, H, BT)


@kernel
@no_type_check
def read(
    x, k, v, g, norm, memories, memory_norms, o, T, H, K, V, from_chunk, span, scale,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FULL: tl.constexpr, FULL_V: tl.constexpr,
    PARTS: tl.constexpr, HALF: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """Stores o = scale U_t^T x_t for each chunk and head."""
    program, head = tl.program_id(0) // H, tl.program_id(0) % H
    batch, chunk = program // span, from_chunk + program % span
    slot = program * H + head
    row, valid = batch.to(tl.int64) * T + chunk * BT, T - chunk * BT
    i, channel = tl.arange(0, BT), tl.arange(0, BK)
    parts: tl.constexpr = 1 if tl.float32 == HALF else 2
    at, mask = rows(k, row, valid, head, H, channel, K, BT, FULL)
    key, key_power = scaled(tl.load(at, mask=mask, other=0.0), HALF)
    at, mask = rows(x, row, valid, head, H, channel, K, BT, FULL)
    solution = tl.load(at, mask=mask, other=0.0)
    high, power = scaled(solution, HALF)
    low = (solution / power[:, None] - high.to(tl.float32)).to(HALF)
    sums, _ = log_decays(g, row, valid, head, H, BT, FP32)
    weights = product(solution / power[:, None], tl.trans(key), 2, 1, HALF)
    # x is about 1 / ||H||, and ||H|| about the square of a key.
    root = tl.sqrt(tl.maximum(scalars(norm, row, valid, head, H, BT), 1e-30))
    weights *= decay_between(sums[:, None], sums[None, :], i[:, None], i[None, :], False)
    weights = (weights * (key_power[None, :] / root[:, None])).to(v.dtype.element_ty)
    since = tl.exp2(sums.to(tl.float32))
    for block in range(tl.cdiv(V, BV)):
        channels = block * BV + tl.arange(0, BV)
        out = times(high, low, memories, slot, 0, block, tl.cdiv(V, BV), BK, BK, BV, parts, PARTS, False)
        out *= (since * tl.load(memory_norms + slot * tl.cdiv(V, BV) + block))[:, None]
        from_v, mask_v = rows(v, row, valid, head, H, channels, V, BT, FULL_V)
        out += root[:, None] * tl.dot(held(weights), tl.load(from_v, mask=mask_v, other=0.0), input_precision="ieee")
        o_at, mask_v = rows(o, row, valid, head, H, channels, V, BT, FULL_V)
        tl.store(o_at, (scale * power[:, None] * out).to(o.dtype.element_ty), mask=mask_v)
