"""Residual linear attention with several stages: each state learns what the sum of those before it predicts wrongly."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.passes import Passes, Run
from deltalab.rule import Operands, State, knob
from deltalab.structure import DECAY, IPLR, ResidualState


@dataclass(frozen=True, kw_only=True)
class RLAStages(Passes):
    """r^i_t = clip(v_t - (S_{t-1} + R^1_{t-1} + .. + R^{i-1}_{t-1})^T k_t, -c, c),   i = 1 .. stages
    S_t = alpha_t S_{t-1} + beta_t k_t v_t^T,   R^i_t = alpha_t R^i_{t-1} + gamma_t k_t (r^i_t)^T
    o_t = scale (alpha_t S_{t-1}^T q_t + gamma_t (R^1_t + .. + R^stages_t)^T q_t),   alpha_t = exp(g_t)

    "Enhancing linear attention with residual learning" derives its rule as gradient boosting with one weak learner
    (App. A.1); this goes on with more, which the paper does not, and is `rla`, or `rdn`, with stages 1. base: `rdn`
    lets every state erase alpha_t (I - beta_t k k^T), with gamma in the R^i. loss, clip: as in `rla`.

    Costs 2 stages + 1 passes, of sgla or of gated_deltanet: all states but the last are read with k and with q.
    """

    name: ClassVar[str] = "rla_stages"
    paper: ClassVar[str] = "Enhancing linear attention with residual learning"

    stages: int = knob(2, 1, 3)
    base: str = knob("rla", "rdn")
    g: Gate = knob(gates.mamba2_decay(), gates.const(0))
    beta: Gate = knob(gates.sigmoid(), gates.const(1))
    gamma: Gate = knob(gates.sigmoid(), gates.const(1))
    loss: str = knob("huber", "log_cosh", "l2")
    clip: float = knob(1.0, 0.5, 2.0)

    def __post_init__(self) -> None:
        if self.loss != "huber" and self.clip != 1.0:
            raise InputError(f"{self.name}.clip has no effect with loss {self.loss}: it is huber's")

    @property
    def residual(self) -> ResidualState:
        return ResidualState(loss=cast(Any, self.loss), clip=self.clip)

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        shape = (v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
        return tuple(v.new_zeros(shape, dtype=dtype) for _ in range(1 + self.stages))

    def passes(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State, run: Run
    ) -> tuple[Tensor, State]:
        g, beta, gamma = (gates[name].expand(q.shape[:3]) for name in ("g", "beta", "gamma"))
        after = IPLR if self.base == "rdn" else DECAY
        before = replace(after, name=f"{after.name}_before", output="before")
        erases = self.base == "rdn"
        first = Operands(r=q, k=k, u=v, g=g, beta=beta, e=beta if erases else None)
        base, (last,) = run(before, first, state=state[:1])
        o, states = g.exp()[..., None] * base, [last]
        predicted, _ = run(before, replace(first, r=k), state=state[:1])
        for i in range(1, self.stages + 1):
            error = self.residual.pseudo_residual(v - predicted)
            stage = Operands(r=q, k=k, u=error, g=g, beta=gamma, e=gamma if erases else None)
            correction, (last,) = run(after, stage, state=state[i : i + 1])
            o, states = o + gamma[..., None] * correction, [*states, last]
            if i < self.stages:
                predicted = predicted + run(before, replace(stage, r=k), state=state[i : i + 1])[0]
        return scale * o, tuple(states)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, beta: Tensor, gamma: Tensor
    ) -> tuple[Tensor, State]:
        alpha, o, predicted, after = g.exp()[..., None, None], torch.zeros_like(v), torch.zeros_like(v), []
        for i, S in enumerate(state):
            strength = (beta if i == 0 else gamma)[..., None]
            target = v if i == 0 else self.residual.pseudo_residual(v - predicted)
            predicted = predicted + torch.einsum("bhk,bhkv->bhv", k, S)
            decayed = alpha * S
            erased = torch.einsum("bhk,bhkv->bhv", k, decayed) if self.base == "rdn" else 0.0
            new = decayed + k[..., None] * (strength * (target - erased))[..., None, :]
            o = o + (torch.einsum("bhk,bhkv->bhv", q, decayed if i == 0 else new) * (1.0 if i == 0 else strength))
            after.append(new)
        return scale * o, tuple(after)
