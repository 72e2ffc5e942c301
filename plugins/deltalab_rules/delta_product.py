"""DeltaProduct: several delta-rule steps for each token."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import IPLR


@dataclass(frozen=True, kw_only=True)
class DeltaProduct(UpdateRule):
    """S_{t,i} = (I - beta_{t,i} k_{t,i} k_{t,i}^T) S_{t,i-1} + beta_{t,i} k_{t,i} v_{t,i}^T,   i = 1 ... n_h
    S_{t,0} = alpha_t S_{t-1},   o_t = scale S_{t,n_h}^T q_t,   alpha_t = exp(g_t), 1 by default.

    Siems et al. 2025 (arXiv:2502.10297, Section 3). k, v and beta have n_h tokens for each token of q.
    """

    name: ClassVar[str] = "delta_product"
    paper: ClassVar[str] = "arXiv:2502.10297"
    published = {
        "source": "fla/layers/gated_deltaproduct.py of fla-org/flash-linear-attention",
        "knobs": {"g": {"mamba2_decay": {"a_min": 0.0}}},
        "layer": {"output_gate": "silu"},
    }

    per_step: ClassVar[frozenset[str]] = frozenset({"beta"})

    n_h: int = knob(2, 1, 3, 4)
    beta: Gate = knob(gates.sigmoid(max=2), gates.sigmoid(max=1))
    g: Gate = knob(gates.const(0), gates.mamba2_decay())

    def __post_init__(self) -> None:
        steps = replace(IPLR, name=f"{self.n_h} steps", steps=self.n_h)
        object.__setattr__(self, "transition", steps)

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (min(0.0, 1 - self.beta.high) if self.n_h == 1 else -1.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, g: Tensor) -> Operands:
        # g is -inf where nothing is kept, so the steps that do not decay are padded: no product with 0 would do.
        decays = F.pad(g.expand(q.shape[:3]).unsqueeze(2), (0, 0, 0, self.n_h - 1)).flatten(1, 2)
        return Operands(r=q, k=k, u=v, beta=beta, g=decays, e=beta)
