"""Planted bug: the steps of a gradient descent on a memory of several tokens are too long."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.fast_weights import Descent, FastWeights, Learner, Linear, Regression
from deltalab.gates import Gate
from deltalab.rule import knob


@dataclass(frozen=True, kw_only=True)
class DivergingDescent(FastWeights):
    name: ClassVar[str] = "planted_diverging_descent"
    paper: ClassVar[str] = "none"

    beta: Gate = knob(forms.sigmoid(max=8))
    mini_batch: int = 16

    @property
    def learner(self) -> Learner:
        return Linear(Regression())

    def descent(self, gates: Mapping[str, Tensor]) -> Descent:
        return Descent(theta=gates["beta"])
