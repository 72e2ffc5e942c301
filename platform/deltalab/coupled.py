"""The delta rule with momentum whose gates depend on the token: a pair of states, computed chunk by chunk.

S is moved by M, so that the pair has a transition of 2 x 2 numbers beside the low rank of the delta rule. This is
outside the algebra of `structure`, where each channel of a state decays by itself.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError
from deltalab.kernel_limits import DTYPES
from deltalab.ops.backends import available, lacks_triton
from deltalab.ops.reference import decays, from_chunks, into_chunks

CHUNK = 64

MOST_KEYS = 128
"""The largest K of the kernel: four blocks of a chunk's keys lie on the chip at a time."""


class Chunks(NamedTuple):
    """What the carry of a pair of states from chunk to chunk takes, for N chunks of C tokens.

    Z is S above M, [B H, 2 K, V]:

        w_c = u_c + e_c Z_c,   Z_{c+1} = turn_c Z_c + b_c^T w_c

    Attributes:
        u: The part of w that does not depend on Z, [N, B H, C, V].
        e: The rows that read Z, [N, B H, C, 2 K].
        b: The rows along which w is written, [N, B H, C, 2 K].
        turn: The transition of (S, M) over the chunk, [N, B H, 2, 2].
    """

    u: Tensor
    e: Tensor
    b: Tensor
    turn: Tensor


class Carry(Protocol):
    """A form of `carried`."""

    def __call__(self, chunks: Chunks, start: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what `carried` returns."""
        ...


def carried(chunks: Chunks, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Carries Z through the chunks.

    Args:
        chunks: The chunks.
        start: Z before the first chunk.

    Returns:
        w [N, B H, C, V], Z before each chunk [N, B H, 2 K, V], and Z after the last chunk.
    """
    z, written, starts = start, [], []
    for u, e, b, turn in zip(*(part.unbind() for part in chunks), strict=True):
        starts.append(z)
        w = torch.baddbmm(u, e, z)
        z = torch.baddbmm((turn @ z.unflatten(1, (2, -1)).flatten(2)).view_as(z), b.mT, w)
        written.append(w)
    return torch.stack(written), torch.stack(starts), z


def momentum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    m: Tensor,
    beta: Tensor,
    eta: Tensor,
    scale: float,
    state: tuple[Tensor, Tensor],
    chunk_size: int = CHUNK,
    carry: Carry = carried,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Computes the delta rule with momentum, in the dtype of the state.

        w_t = v_t - (alpha_t k_t)^T S_{t-1}
        M_t = mu_t M_{t-1} - eta_t k_t w_t^T
        S_t = alpha_t S_{t-1} - beta_t M_t,   o_t = scale S_t^T q_t,   alpha_t = exp(g_t), mu_t = exp(m_t)

    A_ij and F_ij are the products of alpha and of mu from token j + 1 to i. What token j writes into M reaches S_i by
    R = A diag(beta) F, a product of matrices without a division, so that mu may be as small as it likes. Within a chunk

        (I + G) w = v - diag(A') P S + diag(R') P M,   G_ij = eta_j R_{i-1,j} p_i^T k_j for j < i,   p = alpha k

    with S and M those before the chunk, A' and R' what reaches token i - 1 of them.

    Args:
        q: Queries, [B, T, H, K].
        k: Keys, [B, T, H, K].
        v: Values, [B, T, H, V].
        g: The log-decay of S, [B, T, H].
        m: The log-decay of M, [B, T, H].
        beta: How far M moves S, [B, T, H].
        eta: The step size, [B, T, H].
        scale: The factor of o.
        state: The pair S and M, [B, H, K, V] each.
        chunk_size: The tokens of a chunk.
        carry: The form that carries the states from chunk to chunk.

    Returns:
        o [B, T, H, V], and the next state.

    References:
        MDN, arXiv:2605.05838, whose chunks divide products of alpha by products of mu, and need mu above exp(-2).
    """
    batch, length = q.shape[:2]
    size, dtype = min(chunk_size, length), state[0].dtype
    q, k, v, g, m, beta, eta = (into_chunks(x.to(dtype), size) for x in (q, k, v, g, m, beta, eta))
    slow, fast = decays(g), decays(m)
    since, fading = (within[..., :1] * x[..., :1, None].exp() for within, x in ((slow, g), (fast, m)))
    moved = slow * beta[..., None, :]
    reach, drift = moved @ fast, moved @ fading
    written, p = eta[..., None] * k, g.exp()[..., None] * k
    system = _earlier(reach) * (p @ written.mT)
    right = torch.cat([v, -_earlier(since, 1.0) * p, _earlier(drift) * p], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, e = solved.split([v.shape[-1], 2 * k.shape[-1]], dim=-1)
    b = torch.cat([reach[..., -1, :, None] * written, -fast[..., -1, :, None] * written], dim=-1)
    rows = ([since, -drift], [torch.zeros_like(fading), fading])
    turn = torch.stack([torch.cat([x[..., -1, :] for x in row], dim=-1) for row in rows], dim=-2)
    w, starts, last = carry(Chunks(u, e, b, turn), torch.cat(state, dim=-2).flatten(0, 1))
    o = (reach * (q @ written.mT)) @ w + torch.cat([since * q, -drift * q], dim=-1) @ starts
    S, M = last.unflatten(0, (batch, -1)).chunk(2, dim=-2)
    return scale * from_chunks(o, batch, length), (S, M)


def fused_carried(chunks: Chunks, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `carried` by a Triton kernel, forward and backward. A rule passes it to `momentum` in its `fused`.

    Raises:
        InputError: No kernel can run.
    """
    device = start.device.type
    kernel = available(device).carry
    if kernel is None:
        raise InputError(f"the kernels need {lacks_triton(device)}: use deltalab.coupled.carried")
    u, e, b, turn = (part.transpose(0, 1) for part in chunks)
    w, starts, last = kernel(u, e, b, turn, start)
    return w.transpose(0, 1), starts.transpose(0, 1), last


def lacks_kernel(k: Tensor, v: Tensor) -> str | None:
    """Returns why `fused_carried` does not take inputs like k and v, as a clause; None if it takes them.

    A rule that uses `fused_carried` returns this value from its `lacks_kernel`.
    """
    if v.dtype not in DTYPES:
        return f"the Triton kernels take q, k and v in bf16, fp16 or fp32, not {v.dtype}"
    if k.shape[-1] > MOST_KEYS:
        return f"the Triton kernel of a pair of states takes q and k with K up to {MOST_KEYS}, not {k.shape[-1]}"
    return None


def _earlier(x: Tensor, first: float = 0.0) -> Tensor:
    """Row i of x [.., C, n] at i + 1, after a row of `first`."""
    rows: Any = F.pad(x, (0, 0, 1, 0), value=first)
    earlier: Tensor = rows[..., :-1, :]
    return earlier
