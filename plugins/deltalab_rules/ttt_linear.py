"""TTT-Linear: the state is a linear model that is trained on the keys and values as they come."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.fast_weights import Descent, FastWeights, Learner, Linear, Regression
from deltalab.gates import Gate
from deltalab.rule import knob


@dataclass(frozen=True, kw_only=True)
class TTTLinear(FastWeights):
    """S_t = S_{t-1} - beta_t grad_S 1/2 |f(k_t; S_{t'}) - v_t|^2,   o_t = scale f(q_t; S_t)
    f(x; S) = x + LN(S^T x),   t' the last token before t's mini-batch

    Sun et al. 2024 (arXiv:2407.04620, Section 2.7), Hu et al. 2025 (arXiv:2506.02475, Eq. 4), whose factor 2 is in
    beta here. Without norm and residual and with mini-batches of one token it is DeltaNet. LN has no scale or shift,
    and S_0 is not learned: a gate has no value channels. With norm S_0 is the same small random matrix for every
    sequence, drawn as TTT initializes it, since LN near 0 would blow the first gradient up; without norm it is 0.
    The residual cuts x, or fills it with zeros, where K and V differ.
    """

    name: ClassVar[str] = "ttt_linear"
    paper: ClassVar[str] = "arXiv:2407.04620"
    published = {
        "source": "TTTLinear in ttt.py of test-time-training/ttt-lm-pytorch",
        "layer": {
            "conv": 0, "features": "raw", "scale": 1.0, "output_norm": "layer", "output_gate": False, "norm_eps": 1e-6,
        },
        "lacks": "S_0, its bias and the scale and shift of LN, which are learned there; the step's factors 1 / K and "
        "1 / i + c_i at token i of a mini-batch, and its bias; RoPE inside of each mini-batch; and the last norm over "
        "all heads together: learned_ttt@published has them",
    }  # fmt: skip

    beta: Gate = knob(gates.sigmoid())
    mini_batch: int = knob(16, 1)
    norm: bool = knob(True, False)
    residual: bool = knob(True, False)

    @property
    def learner(self) -> Learner:
        return Linear(Regression(norm=self.norm, residual=self.residual))

    def descent(self, gates: Mapping[str, Tensor]) -> Descent:
        return Descent(theta=gates["beta"])
