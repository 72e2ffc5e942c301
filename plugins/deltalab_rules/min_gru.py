"""minGRU: a GRU whose gate and candidate do not read the state, so that it is linear."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from deltalab import gates as forms
from deltalab.elementwise import Elementwise, Terms
from deltalab.gates import Gate
from deltalab.rule import State, knob


@dataclass(frozen=True, kw_only=True)
class MinGRU(Elementwise):
    """h_t = (1 - z_t) h_{t-1} + z_t v_t,   o_t = scale h_t

    Feng et al. 2024 (arXiv:2410.01201, Section 3.1), with v as the candidate. All is element-wise over the channels of
    v. q is not read and k is not read: key_dim 1 makes their projections small. z: const(0.5) is a moving mean.
    """

    name: ClassVar[str] = "min_gru"
    paper: ClassVar[str] = "arXiv:2410.01201"
    ignores: ClassVar[frozenset[str]] = frozenset({"q", "k"})

    z: Gate = knob(forms.value_sigmoid(rank=0), forms.const(0.5))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], kept: State) -> Terms:
        z = gates["z"].expand(v.shape)
        return Terms(a=1 - z, b=z * v, output=lambda h: h)

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, z: Tensor) -> tuple[Tensor, State]:
        z = z if z.dim() > 1 else z[:, None]
        h = (1 - z) * state[0] + z * v
        return scale * h, (h,)
