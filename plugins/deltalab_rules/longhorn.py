"""Longhorn: the update that solves online regression implicitly, kept to the diagonal of its key's outer product."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DIAGONAL, HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class Longhorn(UpdateRule):
    """S_t = diag(1 - Delta_t k_t^2) S_{t-1} + Delta_t k_t v_t^T      (diagonal, the paper's layer)
    S_t = (I - Delta_t k_t k_t^T) S_{t-1} + Delta_t k_t v_t^T        (householder, the exact minimum)
    Delta_t = beta_t / (1 + beta_t |k_t|^2),   o_t = scale S_t^T q_t

    Liu et al. 2024 (arXiv:2407.14207, Theorem 3.1): S_t minimizes |S - S_{t-1}|^2 + beta |S^T k - v|^2, and the paper
    keeps the diagonal of k k^T so that a parallel scan applies. It has one beta for each channel of v. Here each head
    has one, so the two agree where a head has one value channel; a decay for each pair of channels is outside the
    algebra. Decays lie in (0, 1] for keys of any norm. normalize gives q and k unit norm; the paper's keys keep theirs.

    Costs what gla costs, without its gate of K numbers; the exact form costs what deltanet costs.
    """

    name: ClassVar[str] = "longhorn"
    paper: ClassVar[str] = "arXiv:2407.14207"

    transition: Transition = knob(DIAGONAL, HOUSEHOLDER)
    beta: Gate = knob(gates.sigmoid(), gates.const(1))
    normalize: bool = knob(False, True)

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "unit" if self.normalize else "raw"

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        squares = k.to(torch.promote_types(k.dtype, torch.float32)).square()
        norm = squares.sum(-1)
        delta = beta / (1 + beta * norm)
        if self.transition == HOUSEHOLDER:
            return Operands(r=q, k=k, u=v, e=delta, beta=delta)
        # The fraction (1 + beta (|k|^2 - k_c^2)) / (1 + beta |k|^2): 1 - delta k_c^2 would round to 0 for long keys.
        others = beta[..., None] * (norm[..., None] - squares).clamp_min(0)
        g = torch.log1p(others) - torch.log1p(beta * norm)[..., None]
        return Operands(r=q, k=k, u=v, g=g, beta=delta)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, beta: Tensor
    ) -> tuple[Tensor, State]:
        (S,) = state
        delta = beta[..., None] / (1 + beta[..., None] * k.square().sum(-1, keepdim=True))
        outer = k[..., :, None] * k[..., None, :]
        if self.transition == DIAGONAL:
            outer = outer * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
        S = S - delta[..., None] * outer @ S + (delta * k)[..., None] * v[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S,)
