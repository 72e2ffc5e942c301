"""Planted bug: the kernel, which takes bf16 alone, forgets the decay of the first token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class KernelInItsDtype(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_kernel_in_its_dtype"
    paper: ClassVar[str] = "none"

    g: Gate = knob(forms.mamba2_decay())
    shape: str = knob("plain", "squared")

    def _q(self, q: Tensor) -> Tensor:
        return q * q if self.shape == "squared" else q

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = state.dtype
        q, k, v, g = (x.to(dtype) for x in (self._q(q), k, v, gates["g"].expand(k.shape[:3])))
        out = []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return scale * torch.stack(out, dim=1), state

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        g = gates["g"].expand(k.shape[:3]).clone()
        g[:, 0] = 0.0
        return self.mix(q, k, v, {"g": g}, scale=scale, state=state)

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        return None if v.dtype == torch.bfloat16 else f"the kernel takes bf16, not {v.dtype}"
