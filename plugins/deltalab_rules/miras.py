"""MIRAS: the delta rule for errors measured in the l_p norm, with a retention gate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.fast_weights import Descent, FastWeights, Learner, Linear, Regression
from deltalab.gates import Gate
from deltalab.rule import knob


@dataclass(frozen=True, kw_only=True)
class Miras(FastWeights):
    """S_t = alpha_t S_{t-1} - beta_t k_t (sign(e_t) |e_t|^(p - 1))^T,   o_t = scale S_t^T q_t,   alpha_t = exp(g_t)
    e_t = S_{t'}^T k_t - v_t,   t' the last token before t's mini-batch

    Behrouz et al. 2025 (arXiv:2504.13173, Eq. 11): gradient descent on the l_p attentional bias 1/p |e_t|_p^p, with a
    decay for retention gate, on a linear memory; the paper's factor p is in beta. |e| is (e^2 + smooth)^(1/2), as
    there, and sign(e) |e|^(p - 1) is e |e|^(p - 2), so p = 2 is exact and all else is smooth at e = 0. It reads the
    undecayed state: p = 2 is alpha S - beta k (S^T k - v)^T, the gated delta rule as SPLR.

    reads, for mini-batches of one token: `decayed_state` takes e_t of alpha_t S_{t-1}, so that p = 2 is Gated DeltaNet.
    `written_state` takes e_t of S_t, at which arXiv:2506.02475, Table 1, states the objective: S_t is the minimum over
    S of beta_t/p |S^T k_t - v_t|_p^p + 1/2 |S - alpha_t S_{t-1}|^2, which no beta makes diverge.

    p = 1 wants more smoothing than the paper's 1e-6, whose slope of 1000 at e = 0 blows the outer gradients up. p above
    2 is taken, but its steps outgrow the error: unless it reads the written state, it diverges where beta |e|^(p - 2)
    exceeds 2, so give p = 3 a beta of at most 0.1 or so. The paper's Moneta, p = 3, has a normalized MLP and an l_q
    retention against that, which are not here.
    """

    name: ClassVar[str] = "miras"
    paper: ClassVar[str] = "arXiv:2504.13173"

    g: Gate = knob(gates.mamba2_decay(), gates.gla_decay(), gates.const(0))
    beta: Gate = knob(gates.sigmoid())
    p: float = knob(1.5, 1.0, 2.0)
    smooth: float = knob(1e-6, 1e-2)
    reads: str = knob("state", "decayed_state", "written_state")
    mini_batch: int = knob(1, 16)

    def __post_init__(self) -> None:
        if self.p == 2 and self.smooth != 1e-6:
            raise InputError(f"{self.name}.smooth has no effect with p 2, which is smooth as it is")
        if self.reads != "state" and self.mini_batch > 1:
            raise InputError(f"{self.name}.reads {self.reads} takes mini_batch 1: a mini-batch has one state to read")

    @property
    def learner(self) -> Learner:
        return Linear(Regression(p=self.p, smooth=self.smooth))

    def descent(self, gates: Mapping[str, Tensor]) -> Descent:
        return Descent(
            theta=gates["beta"],
            alpha=gates["g"].exp(),
            late=self.reads != "state",
            implicit=self.reads == "written_state",
        )
