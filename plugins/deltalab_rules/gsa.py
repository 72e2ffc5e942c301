"""Gated slot attention: softmax attention over a fixed number of slots, each a gated average of keys and of values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.passes import Passes, Run, read_values
from deltalab.rule import Operands, State, knob
from deltalab.structure import DIAGONAL


@parameterization
def slot_decay(slots: float = 16, tau: float = 8.0) -> Gate:
    """g = log sigmoid(W x) / tau, one for each of a head's slots: near 0 for tau = 8."""
    if slots < 1 or slots != int(slots) or tau <= 0:
        raise InputError(
            f"slot_decay takes a whole number of slots and a positive tau, not slots {slots:g} and tau {tau:g}"
        )
    return Gate(per="slot", slots=int(slots), low=-torch.inf, high=0.0, value=lambda z, p: F.logsigmoid(z) / tau)


@dataclass(frozen=True, kw_only=True)
class GSA(Passes):
    """K_t = diag(alpha_t) K_{t-1} + (1 - alpha_t) k_t^T,   V_t = diag(alpha_t) V_{t-1} + (1 - alpha_t) v_t^T
    o_t = V_t^T softmax(scale K_t q_t),   alpha_t = exp(g_t)

    Zhang et al. 2024 (arXiv:2409.07146, Eq. 4-6): the rows of K and V are the slots' keys and values. q and k get SiLU,
    as in their layer. Two passes of gla: the first reads its state along the keys (`passes.read_values`), the second
    reads with the softmax of what the first found.

    Costs two passes of gla with as many key channels as slots, and the first pass's gradient once more.
    """

    name: ClassVar[str] = "gsa"
    paper: ClassVar[str] = "arXiv:2409.07146"
    published = {
        "source": "fla/layers/gsa.py of fla-org/flash-linear-attention",
        "layer": {"conv": 0, "scale": 1.0, "output_norm": "rms_all_of_silu", "output_gate": False},
    }

    g: Gate = knob(slot_decay(), slot_decay(tau=1))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "silu"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        heads, slots = (v.shape[0], v.shape[2]), self.g.slots
        return tuple(v.new_zeros(*heads, slots, width, dtype=dtype) for width in (k.shape[-1], v.shape[-1]))

    def passes(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State, run: Run
    ) -> tuple[Tensor, State]:
        g = gates["g"]
        write = -torch.expm1(g)
        logits, (keys,) = read_values(run, DIAGONAL, Operands(r=q, k=write, u=k, g=g), state=state[:1])
        weights = (scale * logits).softmax(-1)
        o, (values,) = run(DIAGONAL, Operands(r=weights, k=write, u=v, g=g), state=state[1:])
        return o, (keys, values)

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor) -> tuple[Tensor, State]:
        alpha = g.exp()[..., None]
        keys, values = (alpha * memory + (1 - alpha) * x[..., None, :] for memory, x in zip(state, (k, v), strict=True))
        weights = (scale * torch.einsum("bhmk,bhk->bhm", keys, q)).softmax(-1)
        return torch.einsum("bhm,bhmv->bhv", weights, values), (keys, values)
