"""Error-free linear attention: the delta rule's differential equation, solved exactly over one token."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import IPLR, Transition


@dataclass(frozen=True, kw_only=True)
class EFLA(UpdateRule):
    """S_t = alpha_t (I - e_t k_t k_t^T) S_{t-1} + e_t k_t v_t^T,   o_t = scale S_t^T q_t
    e_t = (1 - exp(-beta_t |k_t|^2)) / |k_t|^2, and beta_t where k_t = 0

    Lei et al. 2025 (arXiv:2512.12602): with alpha = 1, S_t solves dS/ds = -k k^T S + k v^T exactly over a time of beta;
    DeltaNet takes one Euler step. The eigenvalue along k_t is exp(-beta |k|^2), in (0, 1] for keys of any norm, so k
    keeps its norm and says how much is written. normalize gives q and k unit norm: the rule is then DeltaNet with
    1 - exp(-beta) in place of beta. g: the paper has no decay; mamba2_decay is the same step with Gated DeltaNet's.

    Costs what deltanet costs: one write per token, state [K, V].
    """

    name: ClassVar[str] = "efla"
    paper: ClassVar[str] = "arXiv:2512.12602"

    transition: Transition = IPLR
    g: Gate = knob(gates.const(0), gates.mamba2_decay())
    beta: Gate = knob(gates.sigmoid(), gates.sigmoid(max=2))
    normalize: bool = knob(False, True)

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "unit" if self.normalize else "silu"

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> Operands:
        e = _exact(beta, k.to(torch.promote_types(k.dtype, torch.float32)).square().sum(-1))
        return Operands(r=q, k=k, u=v, g=g, e=e, beta=e)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, State]:
        (S,) = state
        S = g.exp()[..., None, None] * S
        norm = k.square().sum(-1)
        e = torch.where(norm > 0, (1 - (-beta * norm).exp()) / norm, beta)[..., None]
        S = S + e[..., None] * k[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, S))[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S,)


def _exact(beta: Tensor, norm: Tensor) -> Tensor:
    """(1 - exp(-beta norm)) / norm, with a series near 0, where the quotient's gradient would lose all digits."""
    z = beta * norm
    near = z < 0.03
    far = torch.where(near, 1.0, z)
    series = 1 - z / 2 * (1 - z / 3 * (1 - z / 4 * (1 - z / 5 * (1 - z / 6 * (1 - z / 7)))))
    return beta * torch.where(near, series, -torch.expm1(-far) / far)
