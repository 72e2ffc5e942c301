"""Planted bug: an element-wise recurrence mixes neighbouring tokens, but does not keep the last one for later calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.elementwise import Elementwise, Terms
from deltalab.gates import Gate
from deltalab.rule import State, knob


@dataclass(frozen=True, kw_only=True)
class ForgottenToken(Elementwise):
    name: ClassVar[str] = "planted_forgotten_token"
    paper: ClassVar[str] = "none"
    ignores: ClassVar[frozenset[str]] = frozenset({"q", "k"})

    z: Gate = knob(forms.value_sigmoid(rank=0))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def kept(self, k: Tensor, v: Tensor) -> State:
        return (torch.zeros_like(v[:, 0], dtype=torch.promote_types(v.dtype, torch.float32)),)

    def terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], kept: State) -> Terms:
        before = torch.cat([kept[0][:, None], v[:, :-1]], dim=1)
        return Terms(a=gates["z"], b=(v + before) / 2, output=lambda h: h, kept=kept)
