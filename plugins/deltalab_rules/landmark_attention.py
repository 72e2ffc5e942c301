"""Landmark attention: the last token of a block is its landmark, whose weight the block's other tokens share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab.rule import State, UpdateRule, knob
from deltalab.softmax import nothing_seen, remembered, strongest


@dataclass(frozen=True, kw_only=True)
class LandmarkAttention(UpdateRule):
    """o_t = sum_{i in own} p_i v_i + sum_{blocks j before} p_{l_j} sum_{i in j} softmax_{i in j}(scale q_t^T k_i) v_i
    p = softmax of scale q_t^T k_i over own and all l_j   own: the i <= t of t's block   l_j: the last token of block j

    Mohtashami and Jaggi 2023 (arXiv:2305.16300, Section 3.1), as landmark_grouped_softmax in their code: landmarks are
    in neither of the two sums, so that nobody reads their v, and a landmark does not see itself. Their blocks are 50
    tokens of text and a landmark token after them. Text without such tokens loses the last value of every block: for
    tasks whose blocks end in a token of their own. top: the number of blocks before that a query reads, those with the
    largest q_t^T k of their landmarks; 0 for all. Theirs are trained with all, and read with the best few.

    The state is all keys and values, [B, H, n, K] and [B, H, n, V]. No kernel computes it: all logits are computed.
    """

    name: ClassVar[str] = "landmark_attention"
    paper: ClassVar[str] = "arXiv:2305.16300"

    block: int = knob(16, 4)
    top: int = knob(0, 2)

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
        total, whole = keys.shape[2], keys.shape[2] // self.block
        logits = scale * q @ keys.mT
        places = torch.arange(total, device=q.device)
        now = places[-q.shape[2] :, None]
        text = places % self.block < self.block - 1
        own = text & (places // self.block == now // self.block) & (places <= now)
        before = torch.arange(whole, device=q.device) < now // self.block
        marks = logits[..., self.block - 1 :: self.block].masked_fill(~before, -torch.inf)
        if self.top:
            marks = marks.masked_fill(~strongest(marks.detach(), self.top), -torch.inf)
        p = torch.cat([logits.masked_fill(~own, -torch.inf), marks], dim=-1).softmax(-1)
        inside = logits[..., : whole * self.block].unflatten(-1, (whole, self.block))[..., :-1].softmax(-1)
        shared = (p[..., total:, None] * inside).flatten(-2)
        read = values[:, :, : whole * self.block].unflatten(2, (whole, self.block))[:, :, :, :-1].flatten(2, 3)
        o = p[..., :total] @ values + shared @ read
        return o.transpose(1, 2), (keys, values)

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State) -> tuple[Tensor, State]:
        keys, values = (torch.cat([past, new[:, :, None]], dim=2) for past, new in zip(state, (k, v), strict=True))
        total = keys.shape[2]
        first = (total - 1) // self.block * self.block
        own = list(range(first, min(total, first + self.block - 1)))
        logits = scale * torch.einsum("bhk,bhnk->bhn", q, keys)
        marks = logits[..., range(self.block - 1, first, self.block)]
        if self.top and marks.shape[-1] > self.top:
            best = marks.sort(descending=True, stable=True).indices[..., : self.top]
            marks = torch.full_like(marks, -torch.inf).scatter(-1, best, marks.gather(-1, best))
        p = torch.cat([logits[..., own], marks], dim=-1).softmax(-1)
        o = torch.einsum("bhn,bhnv->bhv", p[..., : len(own)], values[:, :, own])
        for j in range(marks.shape[-1]):
            part = slice(j * self.block, (j + 1) * self.block - 1)
            read = torch.einsum("bhn,bhnv->bhv", logits[..., part].softmax(-1), values[:, :, part])
            o = o + p[..., len(own) + j, None] * read
        return o, (keys, values)
