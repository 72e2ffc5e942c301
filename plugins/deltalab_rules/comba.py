"""Comba: the delta rule in closed loop, with feedback weaker than the input and a corrected output."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DPLR, IPLR, SPLR, Transition

DECAY_OF = {"mamba2_step": "mamba2_decay", "metala_input": "metala_decay"}
"""The forget gate whose projection each of these input gates shares."""


@gates.parameterization
def low_rank_decay(rank: float = 16) -> Gate:
    """g = -a softplus(W_1 W_2 x + c): Comba's forget gate through `rank` channels (LoRA), for a DPLR's channels.

    Section 3 of arXiv:2506.02475 describes RWKV-7's diagonal so. a and c start as in `mamba2_decay`.
    """
    if rank < 1:
        raise InputError(f"low_rank_decay.rank must be at least 1, not {rank:g}")
    return replace(gates.mamba2_decay(), rank=int(rank))


@dataclass(frozen=True, kw_only=True)
class Comba(UpdateRule):
    """S_t = (alpha_t I - b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   alpha_t = exp(g_t)        (SPLR)
    S_t = alpha_t (I - 2 b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T                             (IPLR)
    S_t = (diag(alpha_t) - b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T                           (DPLR)
    o_t = scale S_t^T (q_t - d k_t)   or, through p_t = b k_t,   scale S_t^T (q_t - d p_t)

    Hu et al. 2025 (arXiv:2506.02475, Eq. 5 and Table 4; App. B.3 for p), with a DPLR as Section 3 writes RWKV-7's. The
    paper calls the two forms of the output equivalent; they differ by the factor b in the correction, so they are a
    knob here. FLA's kernels normalize p, which cancels b: nothing is normalized after a gate has scaled it here.
    beta: the input gates of Table 5. Those of Mamba2 and MetaLA share the projection of their forget gate, and GLA has
    none. silu: which of q, k and v get SiLU. normalize: whether q and k have unit norm (Section 3.3); without it,
    b beta |k|^2 may exceed 2, and the state may grow.
    """

    name: ClassVar[str] = "comba"
    paper: ClassVar[str] = "arXiv:2506.02475"
    published = {
        "source": "fla/layers/comba.py of fla-org/flash-linear-attention",
        "knobs": {
            "g": {"mamba2_decay": {"a_min": 0.0}},
            "b": {"head_sigmoid": {"init": 0.7310585786300049}},
            "d": {"head": {"init": 1.0}},
            "correction": "p",
        },
        "lacks": (
            "FLA normalizes q and p after p = b k and q - d p, which cancels b in the feedback; here q and k have unit "
            "norm before, as in the paper"
        ),
    }

    transition: Transition = knob(SPLR, IPLR, DPLR)
    g: Gate = knob(gates.mamba2_decay(), gates.gla_decay(), gates.metala_decay(), low_rank_decay())
    beta: Gate = knob(gates.sigmoid(), gates.mamba2_step(), gates.metala_input(), gates.const(1))
    b: Gate = knob(gates.head_sigmoid(), gates.const(1))
    d: Gate = knob(gates.head(init=0.02), gates.head(init=1), gates.const(0))
    correction: str = knob("k", "p")
    silu: str = knob("qkv", "qk")
    normalize: bool = knob(True, False)

    def __post_init__(self) -> None:
        decay = DECAY_OF.get(self.beta.kind)
        if decay is None:
            return
        if self.g.kind != decay:
            raise InputError(f"{self.name}.beta {self.beta.kind} shares the projection of g {decay}: set g to it")
        if self.transition == DPLR:
            raise InputError(f"{self.name}.beta {self.beta.kind} is one number for each head: a DPLR's g has channels")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "unit" if self.normalize else "silu"

    @property
    def silu_of_v(self) -> bool:
        return self.silu == "qkv"

    @property
    def eigenvalues(self) -> tuple[float, float]:
        # Mamba2's input gate has no upper bound.
        return (-1.0 if self.beta.high <= 1 else -math.inf, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, b: Tensor, d: Tensor) -> Operands:
        strength = d if self.correction == "k" else d * b
        feedback = 2 * b * beta if self.transition is IPLR else b * beta
        return Operands(r=q, k=k, u=v, g=g, e=feedback, beta=beta, d=strength)
