"""What a state update may be, as data: the reference, the kernels and the checks all read it from here."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Transition:
    """The transition of one head's state `S [K, V]`.

        S_t = D_t S_{t-1} + k_t (u_t - e_t X_{t-1}^T k_t)^T

    decay: `none` is D = I, `scalar` is D = exp(g_t) with g_t <= 0.
    low_rank: `none` is e = 0; `tied` erases along the direction it writes, with strength e_t.
    reads: the state that the erasure sees, `state` is X = S_{t-1}, `decayed_state` is X = D_t S_{t-1}.
        Papers name the two IPLR or SPLR; the labels hide this choice, and published code disagrees on it.
    """

    name: str
    decay: Literal["none", "scalar"] = "none"
    low_rank: Literal["none", "tied"] = "none"
    reads: Literal["state", "decayed_state"] = "state"

    def __str__(self) -> str:
        return self.name


ADDITIVE = Transition(name="additive")
"""S_{t-1}: nothing is forgotten (linear attention)."""

DECAY = Transition(name="decay", decay="scalar")
"""alpha_t S_{t-1} (RetNet, Mamba2)."""

HOUSEHOLDER = Transition(name="householder", low_rank="tied")
"""(I - e k k^T) S_{t-1} (DeltaNet)."""

IPLR = Transition(name="iplr", decay="scalar", low_rank="tied", reads="decayed_state")
"""alpha_t (I - e k k^T) S_{t-1}: identity plus low rank (Gated DeltaNet, Comba-iplr)."""

SPLR = Transition(name="splr", decay="scalar", low_rank="tied", reads="state")
"""(alpha_t I - e k k^T) S_{t-1}: scalar plus low rank (Comba)."""
