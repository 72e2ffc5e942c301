"""Planted bug: exp of sums of decays over the whole sequence overflows in long sequences."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class SumsOfDecays(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_sums_of_decays"
    paper: ClassVar[str] = "none"

    g: Gate = knob(forms.mamba2_decay())

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = state.dtype
        q, k, v, g = (x.to(dtype).transpose(1, 2) for x in (q, k, v, gates["g"].clamp_min(-0.05).expand(k.shape[:3])))
        total = g.cumsum(-1)[..., None]
        q, k = q * total.exp(), k * (-total).exp()
        o = scale * (q @ state + (q @ k.mT).tril() @ v)
        return o.transpose(1, 2), total[:, :, -1:].exp() * (state + k.mT @ v)
