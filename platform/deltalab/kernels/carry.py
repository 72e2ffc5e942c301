"""Carries a pair of states from chunk to chunk, for `deltalab.coupled`: one kernel, forward and in reverse."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.compilations import launch
from deltalab.kernels.register import eager, register

WIDTH = 32
"""Channels of the value of a program, whose states stay in registers."""


@triton.jit(do_not_specialize=["N"])
@no_type_check
def carry_kernel(
    u, e, b, turn, add, start, w, states, last,
    N, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes w_c = u_c + e_c Z, and Z = turn_c Z + b_c^T w_c (+ add_c), for Z = [S; M], and stores each Z before it.

    In reverse it goes from the last chunk to the first, and takes the transpose of turn.
    """
    group = tl.program_id(0).to(tl.int64)
    row, key, column = tl.arange(0, BC)[:, None], tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)[None, :]
    tile, inside = key[:, None] * V + column, (key < K)[:, None] & (column < V)
    rows, narrow = (row < C) & (key < K)[None, :], (row < C) & (column < V)
    S = tl.load(start + group * 2 * K * V + tile, mask=inside, other=0.0)
    M = tl.load(start + group * 2 * K * V + K * V + tile, mask=inside, other=0.0)
    for i in range(N):
        chunk = group * N + (N - 1 - i if REVERSE else i)
        tl.store(states + chunk * 2 * K * V + tile, S, mask=inside)
        tl.store(states + chunk * 2 * K * V + K * V + tile, M, mask=inside)
        at = chunk * C * 2 * K + row * (2 * K) + key[None, :]
        w_c = tl.load(u + chunk * C * V + row * V + column, mask=narrow, other=0.0)
        w_c += tl.dot(tl.load(e + at, mask=rows, other=0.0), S, input_precision=PRECISION)
        w_c += tl.dot(tl.load(e + at + K, mask=rows, other=0.0), M, input_precision=PRECISION)
        tl.store(w + chunk * C * V + row * V + column, w_c, mask=narrow)
        t_ss, t_mm = tl.load(turn + chunk * 4), tl.load(turn + chunk * 4 + 3)
        t_sm, t_ms = (
            tl.load(turn + chunk * 4 + (2 if REVERSE else 1)),
            tl.load(turn + chunk * 4 + (1 if REVERSE else 2)),
        )
        moved = t_ss * S + t_sm * M
        M = t_ms * S + t_mm * M
        moved += tl.dot(tl.trans(tl.load(b + at, mask=rows, other=0.0)), w_c, input_precision=PRECISION)
        M += tl.dot(tl.trans(tl.load(b + at + K, mask=rows, other=0.0)), w_c, input_precision=PRECISION)
        S = moved
        if add is not None:
            S += tl.load(add + chunk * 2 * K * V + tile, mask=inside, other=0.0)
            M += tl.load(add + chunk * 2 * K * V + K * V + tile, mask=inside, other=0.0)
    tl.store(last + group * 2 * K * V + tile, S, mask=inside)
    tl.store(last + group * 2 * K * V + K * V + tile, M, mask=inside)


def _run(
    u: Tensor, e: Tensor, b: Tensor, turn: Tensor, start: Tensor, *, add: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Launches the kernel, and returns w, the states before each chunk, and the last state."""
    groups, chunks, size, value_dim = u.shape
    key_dim = start.shape[1] // 2
    outputs = _outputs(u=u, start=start)
    given = {"u": u, "e": e, "b": b, "turn": turn, "add": add, "start": start}
    operands = {name: None if x is None else x.contiguous() for name, x in given.items()}
    operands |= dict(zip(("w", "states", "last"), outputs, strict=True))
    sizes = {
        "N": chunks, "C": size, "K": key_dim, "V": value_dim, "BC": max(16, triton.next_power_of_2(size)),
        "BK": max(16, triton.next_power_of_2(key_dim)), "BV": WIDTH, "REVERSE": reverse, "PRECISION": "tf32x3",
    }  # fmt: skip
    launch(carry_kernel, (groups, triton.cdiv(value_dim, WIDTH)), operands, sizes, num_warps=4, num_stages=1)
    return outputs


@torch.library.custom_op("deltalab::carry", mutates_args=())
def carry(u: Tensor, e: Tensor, b: Tensor, turn: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `deltalab.coupled.carried` in fp32, for tensors that begin with the heads of all sequences.

    Args:
        u: [G, N, C, V].
        e: [G, N, C, 2 K].
        b: [G, N, C, 2 K].
        turn: [G, N, 2, 2].
        start: [G, 2 K, V].

    Returns:
        w [G, N, C, V], the states before each chunk [G, N, 2 K, V], and the last state.
    """
    return _run(u, e, b, turn, start)


def _outputs(*, u: Tensor, start: Tensor, **_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(u, memory_format=torch.contiguous_format),
        start.new_empty(*u.shape[:2], *start.shape[1:]),
        torch.empty_like(start, memory_format=torch.contiguous_format),
    )


@torch.library.custom_op("deltalab::carry_backward", mutates_args=())
def _backward(
    e: Tensor,
    b: Tensor,
    turn: Tensor,
    w: Tensor,
    states: Tensor,
    d_w: Tensor | None,
    d_states: Tensor | None,
    d_last: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of u, e, b, turn and start: the same recurrence in reverse, with e and b exchanged."""
    d_w = torch.zeros_like(w) if d_w is None else d_w
    d_last = torch.zeros_like(states[:, 0]) if d_last is None else d_last
    d_u, after, d_start = _run(d_w, b, e, turn, d_last, add=d_states, reverse=True)
    pairs = (x.unflatten(2, (2, -1)).flatten(3) for x in (after, states))
    d_after, before = pairs
    return d_u, d_u @ states.mT, w @ after.mT, d_after @ before.mT, d_start


def _gradients(
    *, e: Tensor, b: Tensor, turn: Tensor, w: Tensor, states: Tensor, **_: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    empty = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (w, e, b, turn)]
    return empty[0], empty[1], empty[2], empty[3], states.new_empty(states.shape[0], *states.shape[2:])


register(_backward, shapes=_gradients)
register(carry, shapes=_outputs, backward=_backward, outputs=["w", "states", "last"])
carries = eager(carry)
