"""Titans: a neural memory trained online, by gradient descent with momentum and weight decay."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.fast_weights import Descent, FastWeights, Learner, Linear, Regression
from deltalab.gates import Gate
from deltalab.rule import knob


@dataclass(frozen=True, kw_only=True)
class Titans(FastWeights):
    """Z_t = eta_t Z_{t-1} - theta_t k_t (M_{t'}^T k_t - v_t)^T
    M_t = (1 - alpha_t) M_{t-1} + Z_t,   1 - alpha_t = exp(g_t),   o_t = scale M_t^T q_t
    t' the last token before t's mini-batch

    Behrouz, Zhong and Mirrokni 2024 (arXiv:2501.00663, Eq. 12 to 16): the memory alone, not the architectures around
    it, and linear; the factor 2 of the squared error's gradient is in theta. eta = 0 is without momentum, g = 0
    without decay, and both with mini-batches of one token are DeltaNet. The state is (M, Z) and, with mini-batches of
    several tokens, where the current one began.

    With mini-batches of one token and without decay, M stays bounded for all unit keys, eta in [0, h] and theta in
    [0, m], if 2 h / (1 - h)^3 + h^2 / (1 - h)^2 <= 2 / m - 1: the losses of |M|^2 by gradients then outweigh what the
    momentum adds. This allows h = 0.2 at m = 1. With decays that jump between 1 and 0, theta = 1 and eta = 0.2 grow
    by up to 1.095 per token; for theta up to 0.8 and eta up to 0.2, the ranges here, a search over 1,500 periodic
    products found no growth. The paper's ranges reach 1, where M diverges: by 1e23 in 4096 tokens at eta = 0.8. Mini-
    batches of n tokens add up n steps: they are bounded for theta <= 1 / n, or while the keys of a mini-batch are far
    from parallel.
    """

    name: ClassVar[str] = "titans"
    paper: ClassVar[str] = "arXiv:2501.00663"

    g: Gate = knob(gates.mamba2_decay(), gates.gla_decay(), gates.const(0))
    eta: Gate = knob(gates.sigmoid(max=0.2), gates.const(0))
    theta: Gate = knob(gates.sigmoid(max=0.8))
    mini_batch: int = knob(1, 16)
    momentum: bool = True

    @property
    def learner(self) -> Learner:
        return Linear(Regression())

    def descent(self, gates: Mapping[str, Tensor]) -> Descent:
        return Descent(theta=gates["theta"], alpha=gates["g"].exp(), eta=gates["eta"])
