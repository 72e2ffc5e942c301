"""Memory caching: a state for each segment of the past, read with weights that depend on the token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.passes import Passes, Run
from deltalab.rule import Operands, State, knob
from deltalab.structure import DECAY, IPLR, Transition


@dataclass(frozen=True, kw_only=True)
class MemoryCaching(Passes):
    """S_t = alpha_t S_{t-1} + beta_t k_t v_t^T, or alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T (iplr)
    o_t = scale (w_t0 S_t + sum_i w_ti C_i)^T q_t,   C_i = S after segment i,   alpha_t = exp(g_t)
    w_t = softmax(m_t^T u_t, c_1^T u_t, c_2^T u_t, ...),   c_i the mean of k over segment i, m_t so far in t's segment

    Behrouz et al. 2026 (arXiv:2602.24281): gated residual memory, over segments of `segment` tokens. Theirs have 256;
    in a sequence of one segment u has no effect. fresh: each segment begins with S = 0 (independent compressors), else
    with the last state (checkpoints). u is a vector that the layer projects. The paper pools the tokens of a segment,
    here their keys are pooled; how the pool of the segment at hand stays causal is ours. The equations are taken from
    readers' notes of the paper. Its memories that are MLPs, and reading the best few segments alone, are left out.

    The state grows by K V + K numbers with every segment: S, its sum of keys, an empty tensor [B, H, n, 0] that counts
    the tokens of the segment, then the C and c. A token costs what the plain rule does, and K V for each segment.
    """

    name: ClassVar[str] = "memory_caching"
    paper: ClassVar[str] = "arXiv:2602.24281"

    memory: Transition = knob(DECAY, IPLR)
    g: Gate = knob(forms.mamba2_decay(), forms.const(0))
    beta: Gate = knob(forms.sigmoid(), forms.const(1))
    u: Gate = knob(forms.vector(), forms.vector(rank=16))
    segment: int = knob(8, 4, 2)
    fresh: bool = knob(True, False)

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        batch, _, heads, key_dim = k.shape
        dtype, value_dim = torch.promote_types(v.dtype, torch.float32), v.shape[-1]
        sizes = ((key_dim, value_dim), (key_dim,), (0, 0), (0, key_dim, value_dim), (0, key_dim))
        return tuple(v.new_zeros(batch, heads, *size, dtype=dtype) for size in sizes)

    def passes(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State, run: Run
    ) -> tuple[Tensor, State]:
        S, total, passed, memories, means = state
        u, (g, beta) = gates["u"].to(S.dtype), (gates[name].expand(k.shape[:3]) for name in ("g", "beta"))
        out, start, transition = [], 0, self.memory
        while start < q.shape[1]:
            here = passed.shape[2]
            part = slice(start, start := min(start + self.segment - here, q.shape[1]))
            q_p, k_p, u_p = q[:, part].to(S.dtype), k[:, part].to(S.dtype), u[:, part]
            erase = beta[:, part] if transition is IPLR else None
            given = Operands(r=q[:, part], k=k[:, part], u=v[:, part], g=g[:, part], beta=beta[:, part], e=erase)
            o, (S,) = run(transition, given, state=(S,))
            sums = total[:, None] + k_p.cumsum(1)
            counts = here + torch.arange(1, q_p.shape[1] + 1, device=q.device, dtype=S.dtype)
            own = (u_p * sums).sum(-1, keepdim=True) / counts[:, None, None]
            weights = torch.cat([own, torch.einsum("bthk,bhnk->bthn", u_p, means)], dim=-1).softmax(-1)
            cached = torch.einsum("bthn,bthk,bhnkv->bthv", weights[..., 1:], q_p, memories)
            out.append(weights[..., :1] * o + cached)
            total, here = sums[:, -1], here + q_p.shape[1]
            if here == self.segment:
                memories = torch.cat([memories, S.unsqueeze(2)], dim=2)
                means = torch.cat([means, (total / here).unsqueeze(2)], dim=2)
                total, here = torch.zeros_like(total), 0
                S = torch.zeros_like(S) if self.fresh else S
            passed = passed.new_zeros(*passed.shape[:2], here, 0)
        return scale * torch.cat(out, dim=1), (S, total, passed, memories, means)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, beta: Tensor, u: Tensor
    ) -> tuple[Tensor, State]:
        S, total, passed, memories, means = state
        S = g.exp()[..., None, None] * S
        error = v - torch.einsum("bhk,bhkv->bhv", k, S) * (self.memory is IPLR)
        S = S + beta[..., None, None] * k[..., None] * error[..., None, :]
        total, count = total + k, passed.shape[2] + 1
        every, places = torch.cat([S[:, :, None], memories], 2), torch.cat([total[:, :, None] / count, means], 2)
        weights = torch.einsum("bhk,bhnk->bhn", u, places).softmax(-1)
        o = scale * torch.einsum("bhn,bhk,bhnkv->bhv", weights, q, every)
        if count == self.segment:
            memories, means, count = (
                torch.cat([memories, every[:, :, :1]], 2),
                torch.cat([means, places[:, :, :1]], 2),
                0,
            )
            S, total = torch.zeros_like(S) if self.fresh else S, torch.zeros_like(total)
        return o, (S, total, passed.new_zeros(*passed.shape[:2], count, 0), memories, means)
