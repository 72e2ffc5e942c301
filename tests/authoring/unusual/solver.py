"""Right, though unusual: a solver that converges before most of its iterations are used."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class Solver(UpdateRule):
    name: ClassVar[str] = "unusual_solver"
    paper: ClassVar[str] = "none"

    eta: Gate = knob(forms.sigmoid())
    iterations: int = knob(100, 200, 50)

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        empty = v.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=dtype)
        return torch.eye(k.shape[3], dtype=dtype).expand(k.shape[0], k.shape[2], -1, -1), empty

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:

        gram, memory = state
        q, k, v, eta = (x.to(memory.dtype) for x in (q, k, v, gates["eta"].expand(k.shape[:3])))
        grams, memories = [], []
        for t in range(q.shape[1]):
            write = eta[:, t, :, None, None] * k[:, t, :, :, None]
            gram = 0.9 * gram + 0.1 * torch.eye(k.shape[3], dtype=gram.dtype) + write * k[:, t, :, None, :]
            memory = 0.9 * memory + write * v[:, t, :, None, :]
            grams.append(gram)
            memories.append(memory)
        system = torch.stack(grams, dim=1)
        x, step = torch.zeros_like(q), 1 / system.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None]
        for _ in range(self.iterations):
            x = x + step * (q - (system @ x[..., None]).squeeze(-1))
        o = (x[..., None, :] @ torch.stack(memories, dim=1)).squeeze(-2)
        return scale * o, (gram, memory)
