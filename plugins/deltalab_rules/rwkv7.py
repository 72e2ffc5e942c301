"""RWKV-7: diagonal decay, with the key that erases apart from the key that writes."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import Transition


@dataclass(frozen=True, kw_only=True)
class RWKV7(UpdateRule):
    """S_t = (diag(alpha_t) - (a_t * kappa_t) kappa_t^T) S_{t-1} + k~_t v_t^T,   alpha_t = exp(g_t)
    o_t = scale S_t^T q_t
    kappa_t = xi * k_t, to unit norm;   k~_t = k_t * (1 + (a_t - 1) * rho)

    Peng et al. 2025 (arXiv:2503.14456, Section 4.1), transposed to our S [K, V]: the state alone, without token shift,
    the residual to the first layer's v, and the bonus of the current token. xi and rho (alpha there) are learned for
    each channel, a_t is the in-context learning rate. The eigenvalues are those of diag(alpha) - w w^T with
    w = sqrt(a) kappa, of norm at most 1.
    """

    name: ClassVar[str] = "rwkv7"
    paper: ClassVar[str] = "arXiv:2503.14456"
    published = {
        "source": "fla/layers/rwkv7.py of fla-org/flash-linear-attention",
        "knobs": {"xi": {"head_channel": {"init": 0.71}}, "rho": {"head_channel": {"init": 1.02}}},
        "layer": {"conv": 0, "token_shift": True, "scale": 1.0, "output_norm": "group", "gate_rank": 32},
        "lacks": (
            "the bonus of the current token, the residual to the first layer's v, tanh inside the decay's projection, "
            "the bias of a, the sigmoid inside the output gate's projection in the place of outside, token shifts of "
            "their own for decay and a, an eps of the norm that is K times as large, and starts that differ by channel"
        ),
    }

    transition: Transition = Transition(name="rwkv7", decay="diagonal", low_rank="free", reads="state")
    g: Gate = knob(gates.rwkv7_decay())
    a: Gate = knob(gates.channel_sigmoid())
    xi: Gate = knob(gates.head_channel(init=0.85), gates.const(1))
    rho: Gate = knob(gates.head_channel(init=1), gates.const(0))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (math.exp(self.g.low) - 1, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, a: Tensor, xi: Tensor, rho: Tensor) -> Operands:
        xi, rho = (gate if gate.dim() > 1 else gate[..., None] for gate in (xi, rho))
        kappa = F.normalize(xi * k, dim=-1, eps=1e-6)
        return Operands(r=q, k=k * (1 + (a - 1) * rho), u=v, g=g, a=-a * kappa, b=kappa)
