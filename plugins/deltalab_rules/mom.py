"""MoM: a mixture of memories, of which each token writes to a few and to one that all share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.passes import Passes, Run
from deltalab.rule import Operands, State, knob
from deltalab.structure import IPLR


@parameterization
def memory_logit(memories: float = 4) -> Gate:
    """W x, one for each of a head's memories: the logit of sending the token there."""
    if memories < 1 or memories != int(memories):
        raise InputError(f"memory_logit.memories must be a whole number of at least 1, not {memories:g}")
    return Gate(per="slot", slots=int(memories), low=-torch.inf, high=torch.inf, value=lambda z, p: z)


@dataclass(frozen=True, kw_only=True)
class MoM(Passes):
    """w_t = softmax(p_t) of the `top` largest, with sum 1, and 0 for the other memories
    S^m_t = alpha_t (I - beta_t k_t k_t^T) S^m_{t-1} + beta_t k_t v_t^T where w_tm > 0, else S^m_{t-1}
    o_t = scale (S^0_t + sum_m w_tm S^m_t)^T q_t,   alpha_t = exp(g_t)

    Du et al. 2025 (arXiv:2502.13685, with the gated delta rule of FLA's layer): the token is routed to `top` memories,
    which leaves the others untouched, and to S^0, which all tokens share. Here the memories share k, v and gates
    (`single_kv_proj`), and a router belongs to each head, where theirs belongs to the layer. p is `p`. shared: False
    leaves S^0 out. top is at least 2: the only memory's weight would be 1, and the router could not learn.

    Costs a pass of gated_deltanet for each memory: all tokens pass through every memory, masked, not gathered.
    """

    name: ClassVar[str] = "mom"
    paper: ClassVar[str] = "arXiv:2502.13685"

    g: Gate = knob(forms.mamba2_decay())
    beta: Gate = knob(forms.sigmoid())
    p: Gate = knob(memory_logit(), memory_logit(memories=8))
    top: int = knob(2, 3)
    shared: bool = knob(True, False)

    def __post_init__(self) -> None:
        if self.top >= self.p.slots:
            raise InputError(f"{self.name}.top must be less than the {self.p.slots} memories, not {self.top}")

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        shape = (v.shape[0], v.shape[2], self.p.slots + self.shared, k.shape[-1], v.shape[-1])
        return (v.new_zeros(shape, dtype=torch.promote_types(v.dtype, torch.float32)),)

    def passes(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State, run: Run
    ) -> tuple[Tensor, State]:
        weights = self._routed(gates["p"])
        here, memories = weights > 0, weights.shape[-1]
        r, key, u = (x.unsqueeze(3).expand(-1, -1, -1, memories, -1).flatten(2, 3) for x in (q, k, v))
        g, beta = (torch.where(here, gates[name][..., None], 0.0).flatten(2) for name in ("g", "beta"))
        given = Operands(r=r, k=key, u=u, g=g, beta=beta, e=beta)
        o, (last,) = run(IPLR, given, state=(state[0].flatten(1, 2),), scale=scale)
        o = (weights[..., None] * o.unflatten(2, (-1, memories))).sum(3)
        return o, (last.unflatten(1, (-1, memories)),)

    def _routed(self, p: Tensor) -> Tensor:
        """The weight of each memory, 0 where the token is not sent, with the shared memory last."""
        scores = p.softmax(-1)
        chosen = torch.zeros_like(scores).scatter(-1, scores.topk(self.top, dim=-1).indices, 1.0) * scores
        weights = chosen / chosen.sum(-1, keepdim=True)
        return torch.cat([weights, torch.ones_like(weights[..., :1])], dim=-1) if self.shared else weights

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, beta: Tensor, p: Tensor
    ) -> tuple[Tensor, State]:
        out, memories = torch.zeros_like(v), []
        order = p.argsort(dim=-1, descending=True).argsort(dim=-1)
        exponentials = torch.where(order < self.top, p.exp(), 0.0)
        weights = exponentials / exponentials.sum(-1, keepdim=True)
        for m, S in enumerate(state[0].unbind(2)):
            sent = weights[..., m] if m < self.p.slots else torch.ones_like(g)
            after = g.exp()[..., None, None] * S
            error = v - torch.einsum("bhk,bhkv->bhv", k, after)
            after = after + beta[..., None, None] * k[..., None] * error[..., None, :]
            memories.append(torch.where(sent[..., None, None] > 0, after, S))
            out = out + sent[..., None] * torch.einsum("bhk,bhkv->bhv", q, memories[-1])
        return scale * out, (torch.stack(memories, dim=2),)
