"""MoBA: softmax attention to a few blocks of the past, which each query chooses by their mean keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.rule import State, UpdateRule, knob
from deltalab.softmax import attend_to_blocks, block_means, nothing_seen, remembered, strongest


@dataclass(frozen=True, kw_only=True)
class MoBA(UpdateRule):
    """o_t = sum_i softmax_i(scale q_t^T k_i) v_i over the i <= t of the blocks that t chooses: its own, and the
    top - 1 blocks before it with the largest q_t^T m_j,   m_j the mean of k over block j of `block` tokens

    Lu et al. 2025 (arXiv:2502.13189, Section 2.2), as in their code: the own block counts as one of `top`, the others
    are whole and lie before it, and the choice passes no gradient. Theirs have blocks of 512 tokens and top 3. Within
    the first top x block tokens it is softmax attention. Of equal blocks the earlier one is chosen; blocks that are
    equal but for rounding may be chosen otherwise in another form or batch.

    The state is all keys and values, [B, H, n, K] and [B, H, n, V]. No kernel computes it: all logits are computed and
    then masked, so that it shows what the choice costs in quality, and saves no time.
    """

    name: ClassVar[str] = "moba"
    paper: ClassVar[str] = "arXiv:2502.13189"
    published = {
        "source": "moba_naive.py of MoonshotAI/MoBA, in the attention of Llama",
        "layer": {"conv": 0, "rope": True, "output_norm": False, "output_gate": False},
    }

    block: int = knob(16, 4)
    top: int = knob(3, 1)

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        return nothing_seen(k, v)[:2]

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        keys, values = remembered(state, k, v)
        q = q.to(keys.dtype).transpose(1, 2)
        places = torch.arange(keys.shape[2], device=q.device)
        own, blocks = places[-q.shape[2] :, None] // self.block, places[:: self.block] // self.block
        score = q @ block_means(keys, self.block).mT
        score = F.pad(score, (0, len(blocks) - score.shape[-1]))
        score = score.masked_fill(blocks > own, -torch.inf).masked_fill(blocks == own, torch.inf)
        o = attend_to_blocks(q, keys, values, strongest(score, self.top), size=self.block, scale=scale)
        return o.transpose(1, 2), (keys, values)

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State) -> tuple[Tensor, State]:
        keys, values = (torch.cat([past, new[:, :, None]], dim=2) for past, new in zip(state, (k, v), strict=True))
        own = (keys.shape[2] - 1) // self.block
        before = [keys[:, :, j * self.block : (j + 1) * self.block].mean(2) for j in range(own)]
        seen = torch.zeros_like(keys[..., 0], dtype=torch.bool)
        seen[:, :, own * self.block :] = True
        if before:
            scores = torch.stack([(q * m).sum(-1) for m in before], dim=-1)
            for j in scores.sort(descending=True, stable=True).indices[..., : self.top - 1].unbind(-1):
                seen |= torch.arange(keys.shape[2], device=q.device) // self.block == j[..., None]
        logits = scale * torch.einsum("bhk,bhnk->bhn", q, keys)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("bhn,bhnv->bhv", weights, values), (keys, values)
