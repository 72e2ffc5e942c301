"""Native sparse attention: attention to block means, to a few blocks that these choose, and to a window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob
from deltalab.softmax import attend, attend_to_blocks, nothing_seen, remembered, strongest


@dataclass(frozen=True, kw_only=True)
class NSA(UpdateRule):
    """o_t = c_t A_t(means) + s_t A_t(chosen) + w_t A_t(window),   A_t(X) = sum_{i in X} softmax_i(scale q_t^T k_i) v_i
    means: those of k and of v over the tokens i stride ... i stride + pooled - 1, for each i whose tokens end by t
    chosen: the tokens up to t of t's block of `block` tokens, of the block before it, of the first block, and of the
    top - 3 others with the largest p_tj, the sum over the pieces of `stride` tokens of block j of the softmax weights
    of the means that hold the piece.   window: the last `window` tokens, t among them

    Yuan et al. 2025 (arXiv:2502.11089, Eq. 5-12). Theirs have pooled 32, stride 16, block 64, top 16 and window 512.
    As in FLA's code, the mean stands for the paper's learned map of a block, and the three branches share their keys
    and values. Each head chooses for itself, where theirs choose for all heads of a group. Without means yet, the first
    term is 0. The choice passes no gradient. Blocks that are equal but for rounding may be chosen otherwise in another
    form or batch.

    The state is all keys and values, [B, H, n, K] and [B, H, n, V]. No kernel computes it: all logits are computed and
    then masked, so that it shows what the choice costs in quality, and saves no time.
    """

    name: ClassVar[str] = "nsa"
    paper: ClassVar[str] = "arXiv:2502.11089"
    published = {
        "source": "fla/layers/nsa.py of fla-org/flash-linear-attention",
        "layer": {"conv": 0, "rope": True, "output_norm": False, "output_gate": False},
        "lacks": "one choice of blocks for all heads of a group; pooled, stride and block are sizes, equal there",
    }

    c: Gate = knob(forms.sigmoid(), forms.const(0))
    s: Gate = knob(forms.sigmoid(), forms.const(0))
    w: Gate = knob(forms.sigmoid(), forms.const(0))
    pooled: int = knob(8, 4)
    stride: int = knob(4, 2)
    block: int = knob(16, 4)
    top: int = knob(4, 3)
    window: int = knob(16, 4)

    def __post_init__(self) -> None:
        if all(gate.low == gate.high == 0 for gate in (self.c, self.s, self.w)):
            raise InputError(f"{self.name}: c, s and w are all 0, and leave no branch: one of them must not be")
        for name in ("pooled", "block"):
            if getattr(self, name) % self.stride:
                raise InputError(
                    f"{self.name}.{name} must be a multiple of stride {self.stride}, not {getattr(self, name)}"
                )

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        return nothing_seen(k, v)[:2]

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        keys, values = remembered(state, k, v)
        c, s, w = (gates[name].expand(k.shape[:3]).to(keys.dtype).transpose(1, 2)[..., None] for name in "csw")
        q = q.to(keys.dtype).transpose(1, 2)
        of_means, weights = self._attend_to_means(q, keys, values, scale)
        chosen = strongest(self._scores(weights.detach(), keys.shape[2]), self.top)
        o = c * of_means + s * attend_to_blocks(q, keys, values, chosen, size=self.block, scale=scale)
        o = o + w * attend(q, keys, values, window=self.window, scale=scale)
        return o.transpose(1, 2), (keys, values)

    def _attend_to_means(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The output of the branch of means, and its softmax weights [B, H, n, means]."""
        total, count = keys.shape[2], max((keys.shape[2] - self.pooled) // self.stride + 1, 0)
        starts = self.stride * torch.arange(count, device=q.device)
        members = starts[:, None] + torch.arange(self.pooled, device=q.device)
        mean_keys, mean_values = (x[:, :, members].mean(3) for x in (keys, values))
        ended = starts + self.pooled <= torch.arange(total - q.shape[2] + 1, total + 1, device=q.device)[:, None]
        # A finite number in place of -inf: the softmax of a row of -inf has no gradient.
        logits = (scale * q @ mean_keys.mT).masked_fill(~ended, torch.finfo(q.dtype).min)
        weights = logits.softmax(-1) * ended
        return weights @ mean_values, weights

    def _scores(self, weights: Tensor, total: int) -> Tensor:
        """p of each block [B, H, n, blocks] with inf for the blocks that are always chosen, -inf for later ones."""
        places = torch.arange(total, device=weights.device)
        own, blocks = places[-weights.shape[2] :, None] // self.block, places[:: self.block] // self.block
        pieces = torch.arange(weights.shape[-1], device=weights.device)[:, None] + torch.arange(
            self.pooled // self.stride, device=weights.device
        )
        shared = (pieces[..., None] // (self.block // self.stride) == blocks).sum(1)
        always = (blocks == 0) | (blocks == own) | (blocks == own - 1)
        return (weights @ shared.to(weights)).masked_fill(always, torch.inf).masked_fill(blocks > own, -torch.inf)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, c: Tensor, s: Tensor, w: Tensor
    ) -> tuple[Tensor, State]:
        keys, values = (torch.cat([past, new[:, :, None]], dim=2) for past, new in zip(state, (k, v), strict=True))
        total = keys.shape[2]

        def attended(keys: Tensor, values: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
            logits = scale * torch.einsum("bhk,bhnk->bhn", q, keys)
            weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
            return torch.einsum("bhn,bhnv->bhv", weights, values), weights

        own = (total - 1) // self.block
        p = torch.zeros_like(keys[..., : own + 1, 0])
        of_means = torch.zeros_like(v)
        starts = range(0, total - self.pooled + 1, self.stride)
        if starts:
            k_mean, v_mean = (
                torch.stack([x[:, :, i : i + self.pooled].mean(2) for i in starts], 2) for x in (keys, values)
            )
            of_means, weights = attended(k_mean, v_mean, torch.tensor(True, device=q.device))
            for n, start in enumerate(starts):
                for piece in range(start, start + self.pooled, self.stride):
                    p[..., piece // self.block] += weights[..., n].detach()
        p[..., [0, max(own - 1, 0), own]] = torch.inf
        seen = torch.zeros_like(keys[..., 0], dtype=torch.bool)
        for j in p.sort(descending=True, stable=True).indices[..., : self.top].unbind(-1):
            seen |= torch.arange(total, device=q.device) // self.block == j[..., None]
        last = torch.arange(total, device=q.device) >= total - self.window
        of_chosen, of_window = (attended(keys, values, mask)[0] for mask in (seen, last))
        c, s, w = (gate.expand(k.shape[:2])[..., None] for gate in (c, s, w))
        return c * of_means + s * of_chosen + w * of_window, (keys, values)
