"""Right, though unusual: keys and queries through features that a fixed generator draws, other ones for each head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.rule import Operands, UpdateRule
from deltalab.structure import ADDITIVE, Transition


@dataclass(frozen=True, kw_only=True)
class RandomFeatures(UpdateRule):
    name: ClassVar[str] = "unusual_random_features"
    paper: ClassVar[str] = "none"

    transition: Transition = ADDITIVE

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        heads, width = q.shape[2:]
        drawn = torch.randn(heads, width, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        q, k = (torch.einsum("bthi,hij->bthj", x, drawn.to(x.dtype)).tanh() for x in (q, k))
        return Operands(r=q, k=k, u=v)
