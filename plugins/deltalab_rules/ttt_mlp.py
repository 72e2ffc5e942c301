"""TTT-MLP: the state is a two-layer MLP that is trained on the keys and values as they come."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.fast_weights import MLP, Descent, FastWeights, Learner, Regression
from deltalab.gates import Gate
from deltalab.rule import knob


@dataclass(frozen=True, kw_only=True)
class TTTMLP(FastWeights):
    """W_t = W_{t-1} - beta_t grad_W 1/2 |f(k_t; W_{t'}) - v_t|^2,   o_t = scale f(q_t; W_t),   W = (W_1, W_2)
    f(x; W) = x + LN(W_2^T gelu(W_1^T x)),   t' the last token before t's mini-batch

    W_1 is [K, 4K] and W_2 [4K, V]; gelu is the tanh form. Sun et al. 2024 (arXiv:2407.04620, Section 2.7), without
    biases. LN has no scale or shift, and W_0 is not learned: a gate has no value channels. W_0 is the same small
    random pair for every sequence, drawn as TTT initializes it. The residual cuts x, or fills it with zeros, where
    K and V differ. beta is at most 0.1, the paper's base learning rate here.
    """

    name: ClassVar[str] = "ttt_mlp"
    paper: ClassVar[str] = "arXiv:2407.04620"

    beta: Gate = knob(gates.sigmoid(max=0.1))
    mini_batch: int = knob(16, 1)
    norm: bool = knob(True, False)
    residual: bool = knob(True, False)

    @property
    def learner(self) -> Learner:
        return MLP(Regression(norm=self.norm, residual=self.residual))

    def descent(self, gates: Mapping[str, Tensor]) -> Descent:
        return Descent(theta=gates["beta"])
