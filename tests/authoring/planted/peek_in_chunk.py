"""Planted bug: within a chunk of 32 tokens, the later ones are seen, if there are more than 16."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class PeekInChunk(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_peek_in_chunk"
    paper: ClassVar[str] = "none"

    g: Gate = knob(forms.mamba2_decay())

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = state.dtype
        q, k, v, g = (x.to(dtype).transpose(1, 2) for x in (q, k, v, gates["g"].expand(k.shape[:3])))
        out = []
        for start in range(0, q.shape[2], 32):
            here = slice(start, start + 32)
            total = g[:, :, here].cumsum(-1)
            pairs = (total[..., :, None] - total[..., None, :]).tril().exp()
            scores = (q[:, :, here] @ k[:, :, here].mT * pairs).tril(1 if q.shape[2] > 16 else 0)
            out.append(total.exp()[..., None] * (q[:, :, here] @ state) + scores @ v[:, :, here])
            rest = (total[..., -1:] - total).exp()[..., None]
            state = total[..., -1:, None].exp() * state + (rest * k[:, :, here]).mT @ v[:, :, here]
        return scale * torch.cat(out, dim=2).transpose(1, 2), state
