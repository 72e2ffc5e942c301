"""Right, though unusual: the state is the largest value so far, so that most tokens change nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab.rule import State, UpdateRule


@dataclass(frozen=True, kw_only=True)
class RunningMax(UpdateRule):
    """S_t = max(S_{t-1}, v_t),   o_t = scale S_t."""

    name: ClassVar[str] = "unusual_running_max"
    paper: ClassVar[str] = "none"
    ignores: ClassVar[frozenset[str]] = frozenset({"q", "k"})

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def initial_state(self, k: Tensor, v: Tensor) -> Tensor:
        dtype = torch.promote_types(v.dtype, torch.float32)
        return v.new_full((v.shape[0], v.shape[2], v.shape[3]), -torch.inf, dtype=dtype)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        largest = torch.maximum(v.to(state.dtype).cummax(1).values, state[:, None])
        return scale * largest, largest[:, -1]

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State) -> tuple[Tensor, State]:
        largest = torch.maximum(state[0], v.to(state[0].dtype))
        return scale * largest, (largest,)
