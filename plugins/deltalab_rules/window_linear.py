"""Linear attention over the last tokens alone: each write is taken back when it leaves the window."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DECAY, Transition

WRITE_AND_TAKE_BACK = replace(DECAY, name="window", steps=2)


@dataclass(frozen=True, kw_only=True)
class WindowLinear(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T - (alpha_{t-w+1} ... alpha_t) k_{t-w} v_{t-w}^T,   o_t = scale S_t^T q_t

    So S_t is the sum over the last w = `window` tokens, each decayed since: linear attention on the window of softmax
    attention, for an ablation of what the rest of the past is worth. alpha_t = exp(g_t). The recurrence is that of
    Katharopoulos et al. 2020 (arXiv:2006.16236); the window is ours. The last w keys, values and decays are carried.
    A token costs two writes.
    """

    name: ClassVar[str] = "window_linear"
    paper: ClassVar[str] = "arXiv:2006.16236"

    transition: Transition = WRITE_AND_TAKE_BACK
    g: Gate = knob(gates.const(0), gates.mamba2_decay(), gates.retnet_decay())
    window: int = knob(16, 4, 2)

    @property
    def steps(self) -> int:
        return 1

    def carried(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(v.dtype, torch.float32)
        lead = k.shape[0], k.shape[2], self.window
        keys, values = (x.new_zeros(*lead, x.shape[-1], dtype=dtype) for x in (k, v))
        return keys, values, k.new_ones(lead, dtype=dtype)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, carry: tuple[Tensor, ...], g: Tensor) -> Operands:
        length = k.shape[1]
        g = g.expand(k.shape[:3])
        alpha = g.to(carry[-1].dtype).exp()
        seen_k, seen_v, seen_alpha = (
            torch.cat([past.transpose(1, 2), now.to(past.dtype)], dim=1)
            for past, now in zip(carry, (k, v, alpha), strict=True)
        )
        lost = seen_alpha[:, 1:].unfold(1, self.window, 1).prod(-1)
        ones, still = torch.ones_like(lost), torch.zeros_like(lost)

        def rows(first: Tensor, second: Tensor) -> Tensor:
            return torch.stack([first, second], dim=2).flatten(1, 2)

        return Operands(
            r=q,
            k=rows(seen_k[:, :length].to(k.dtype), k),
            u=rows(seen_v[:, :length].to(v.dtype), v),
            g=rows(g, still),
            beta=rows(-lost, ones),
            carry=tuple(seen[:, length:].transpose(1, 2) for seen in (seen_k, seen_v, seen_alpha)),
        )

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor) -> tuple[Tensor, State]:
        _, *past = state
        now = k, v, g.exp().expand(k.shape[:2])
        keys, values, alpha = (
            torch.cat([old, new.unsqueeze(2)], dim=2)[:, :, 1:] for old, new in zip(past, now, strict=True)
        )
        later = torch.cat([alpha[..., 1:], torch.ones_like(alpha[..., :1])], dim=-1).flip(-1).cumprod(-1).flip(-1)
        S = (later[..., None] * keys).mT @ values
        return scale * (q[..., None] * S).sum(-2), (S, keys, values, alpha)
