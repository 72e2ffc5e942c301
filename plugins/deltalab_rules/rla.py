"""Residual linear attention: a second state learns what the first one predicts wrongly."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.rule import Fit, Operands, UpdateRule, knob
from deltalab.structure import DECAY, ResidualState, Transition


@dataclass(frozen=True, kw_only=True)
class RLA(UpdateRule):
    """r_t = clip(v_t - S_{t-1}^T k_t, -c, c)
    R_t = alpha_t R_{t-1} + gamma_t k_t r_t^T
    S_t = alpha_t S_{t-1} + beta_t k_t v_t^T
    o_t = scale (alpha_t S_{t-1}^T q_t + gamma_t R_t^T q_t),   alpha_t = exp(g_t)

    "Enhancing linear attention with residual learning" (Section 3.4, Listing 1; losses in App. B). The residual
    reads the undecayed S_{t-1}. loss: huber clips the residual to [-clip, clip], log_cosh is its tanh, l2 leaves it as
    it is. output: `sum` reads without alpha and gamma (Table 5). fitting: without it R_t = k_t r_t^T holds the current
    token alone (Section 4.3, with l2: it does not clip), and l2 at alpha = 1 corrects by one step of the delta rule on
    S_{t-1}. g 0, beta 1 and gamma 1 make the rule without gates (Section 3.1, App. B). silu: which of q, k and v get
    SiLU; the paper names q and k alone (Section 3.4). normalize: whether q and k have unit norm (Section 3.3).
    """

    name: ClassVar[str] = "rla"
    paper: ClassVar[str] = "Enhancing linear attention with residual learning"
    published = {
        "source": "Sections 3.3 and 3.4 and Listing 1 of the paper, whose code is not public",
        "knobs": {"silu": "qk"},
        "lacks": "the convolution, norm and gate around the rule, which Figure 1 of the paper draws and no text states",
    }

    transition: Transition = DECAY
    g: Gate = knob(gates.mamba2_decay(), gates.const(0))
    beta: Gate = knob(gates.sigmoid(), gates.const(1))
    gamma: Gate = knob(gates.sigmoid(), gates.like_beta(), gates.const(1))
    loss: str = knob("huber", "log_cosh", "l2")
    clip: float = knob(1.0, 0.5, 2.0)
    output: str = knob("gated", "sum")
    fitting: bool = knob(True, False)
    silu: str = knob("qkv", "qk")
    normalize: bool = knob(True, False)

    def __post_init__(self) -> None:
        if self.loss != "huber" and self.clip != 1.0:
            raise InputError(f"{self.name}.clip has no effect with loss {self.loss}: it is huber's")
        if self.gamma.of is not None and self.beta.constant:
            raise InputError(f"{self.name}.gamma like_beta shares beta's projection, which a constant beta lacks")
        if self.output == "sum" and not self.fitting:
            raise InputError(
                f"{self.name}: without fitting, gamma acts in the output alone, which `sum` reads without it"
            )

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "unit" if self.normalize else "silu"

    @property
    def silu_of_v(self) -> bool:
        return self.silu == "qkv"

    @property
    def second_state(self) -> bool:
        return True

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, gamma: Tensor) -> Operands:
        gated = self.output == "gated"
        fit = Fit(
            residual=ResidualState(loss=cast(Any, self.loss), clip=self.clip),
            r=q,
            read=gamma if gated else None,
            v=v,
            # Without fitting R_t = k_t r_t^T: it forgets all, and gamma is left to the output.
            strength=gamma if self.fitting else torch.ones_like(gamma),
            g=None if self.fitting else torch.full_like(g, -torch.inf),
            e=None,
        )
        return Operands(r=q, k=k, u=v, g=g, beta=beta, read=g.exp() if gated else None, fit=fit)
