"""Linear attention: the plain sum of key-value pairs, which forgets nothing."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import ADDITIVE, Transition

LEAST = 1e-6
"""What is added to the denominator, as in the authors' code."""


@dataclass(frozen=True, kw_only=True)
class LinearAttention(UpdateRule):
    """S_t = S_{t-1} + phi(k_t) v_t^T,   o_t = scale S_t^T phi(q_t)
    with normalize: n_t = n_{t-1} + phi(k_t),   o_t = scale S_t^T phi(q_t) / (scale n_t^T phi(q_t) + 1e-6)

    Katharopoulos et al. 2020 (arXiv:2006.16236, Eq. 7-12). By default phi gives unit-norm SiLU features and there is no
    normalizer, as in later papers. feature_map: elu is the paper's phi(x) = elu(x) + 1, whose sums cannot be 0, so that
    normalize goes with it alone. n is a last column of S, with value 1.
    """

    name: ClassVar[str] = "linear_attention"
    paper: ClassVar[str] = "arXiv:2006.16236"
    published = {
        "source": "fast_transformers/attention/causal_linear_attention.py of idiap/fast-transformers",
        "knobs": {"feature_map": "elu", "normalize": True},
        "layer": {"conv": 0, "scale": 1.0, "output_norm": False, "output_gate": False},
        "lacks": "the biases of the four projections",
    }

    transition: Transition = ADDITIVE
    feature_map: str = knob("unit", "elu")
    normalize: bool = knob(False, True)

    def __post_init__(self) -> None:
        if self.normalize and self.feature_map != "elu":
            raise InputError("linear_attention: normalize divides by a sum of features: set feature_map to elu")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw" if self.feature_map == "elu" else "unit"

    def value_width(self, value_dim: int) -> int:
        return value_dim + self.normalize

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        if self.feature_map == "elu":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        if self.normalize:
            return Operands(r=q, k=k, u=F.pad(v, (0, 1), value=1.0), output=_normalized)
        return Operands(r=q, k=k, u=v)


def _normalized(o: Tensor) -> Tensor:
    return o[..., :-1] / (o[..., -1:] + LEAST)
