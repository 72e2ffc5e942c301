"""Gated Oja rule: the delta rule with keys and values exchanged, so that the value says what is erased."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.passes import Passes, Run, read_values
from deltalab.rule import Operands, State, knob
from deltalab.structure import Transition

ERASING = Transition(name="oja", decay="diagonal", low_rank="tied", reads="decayed_state")


@parameterization
def value_decay(tau: float = 16.0, rank: float = 16) -> Gate:
    """g = log sigmoid(W_1 W_2 x) / tau, one for each channel of the value: near 0 for tau = 16."""
    if tau <= 0 or rank < 1:
        raise InputError(f"value_decay takes a positive tau and a rank of at least 1, not {tau:g} and {rank:g}")
    return Gate(per="value_channel", low=-torch.inf, high=0.0, rank=int(rank), value=lambda z, p: F.logsigmoid(z) / tau)


@dataclass(frozen=True, kw_only=True)
class GatedOja(Passes):
    """S_t = S_{t-1} diag(alpha_t) (I - beta_t u_t u_t^T) + beta_t k_t u_t^T,   u_t = v_t / |v_t|
    o_t = scale S_t^T q_t,   alpha_t = exp(g_t)

    The gated Oja rule of flash-linear-attention (`fla.ops.gated_oja_rule`; Oja 1982): the state predicts k from v, and
    its error writes. As in its tests, v has unit norm, so that the transition has eigenvalues in [0, 1]. The transposed
    state follows `kda` with keys u and values k; its output is read along the values (`passes.read_values`).

    The state is S^T, [V, K]. Costs what kda costs, and its gradient once more.
    """

    name: ClassVar[str] = "gated_oja"
    paper: ClassVar[str] = "fla.ops.gated_oja_rule"

    g: Gate = knob(value_decay(), value_decay(tau=1))
    beta: Gate = knob(forms.sigmoid(), forms.const(1))

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        return (v.new_zeros(v.shape[0], v.shape[2], v.shape[-1], k.shape[-1], dtype=dtype),)

    def passes(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State, run: Run
    ) -> tuple[Tensor, State]:
        beta = gates["beta"].expand(k.shape[:3])
        # In 16 bits the norm itself would be rounded, and the erased direction not have length 1.
        unit_v = F.normalize(v.to(torch.promote_types(v.dtype, torch.float32)), dim=-1)
        o, after = read_values(run, ERASING, Operands(r=q, k=unit_v, u=k, g=gates["g"], e=beta, beta=beta), state=state)
        return scale * o, after

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        return super().lacks_kernel(v, k)  # v takes the place of the keys

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, State]:
        S = state[0].mT * g.exp()[..., None, :]
        u = v / v.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        error = k - torch.einsum("bhkv,bhv->bhk", S, u)
        S = S + error[..., None] * (beta[..., None] * u)[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S.mT,)
