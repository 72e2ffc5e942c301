"""The delta rule on the Huber loss: large errors write no more than a bound."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class HuberDeltaNet(UpdateRule):
    """S_t = alpha_t S_{t-1} + beta_t k_t clip(v_t - S_{t-1}^T k_t, -c, c)^T,   alpha_t = exp(g_t)
    o_t = scale S_t^T q_t

    "Enhancing linear attention with residual learning", App. B: one step down the Huber loss, which the paper sets
    aside as not linear in S, and answers with `rla`. Theirs has neither alpha nor beta: g const(0), beta const(1). An
    error is clipped by channel of the value. clip: as large as the errors, it is DeltaNet.

    Costs a loop over the tokens: the clip stands between them, so that it has no parallel form and no kernel.
    """

    name: ClassVar[str] = "huber_deltanet"
    paper: ClassVar[str] = "Enhancing linear attention with residual learning"

    g: Gate = knob(forms.const(0), forms.mamba2_decay())
    beta: Gate = knob(forms.sigmoid(), forms.const(1))
    clip: float = knob(1.0, 0.5, 2.0)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Any
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x.to(state.dtype) for x in (q, k, v))
        alpha, beta = (gates[name].expand(q.shape[:3])[..., None] for name in ("g", "beta"))
        alpha = alpha.exp()[..., None]
        out = []
        for t in range(q.shape[1]):
            error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            write = beta[:, t] * error.clamp(-self.clip, self.clip)
            state = alpha[:, t] * state + k[:, t, ..., None] * write[..., None, :]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return scale * torch.stack(out, dim=1), state

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, State]:
        (S,) = state
        error = (v - (k[..., None] * S).sum(-2)).clip(-self.clip, self.clip)
        S = g.exp()[..., None, None] * S + beta[..., None, None] * k[..., None] * error[..., None, :]
        return scale * (q[..., None] * S).sum(-2), (S,)
