"""LightNet: the values' average so far, each weighed by exp(k), as a recurrence whose decay needs no gate."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.rule import Operands, State, UpdateRule
from deltalab.structure import DIAGONAL, Transition


@dataclass(frozen=True, kw_only=True)
class LightNet(UpdateRule):
    """z_t = log(exp(z_{t-1}) + exp(k_t)),   z_0 = -inf
    S_t = diag(exp(z_{t-1} - z_t)) S_{t-1} + exp(k_t - z_t) v_t^T,   o_t = scale S_t^T SiLU(q_t)

    Qin et al. 2024 (arXiv:2405.21022, additive decay): row c of S_t is the mean of all values so far, weighed by
    exp(k_c). What is kept and what is written add up to 1, without a gate. z is carried from token to token. Their
    positional encodings, and their scans in several directions, belong to the layer.

    Costs what gla costs without its gate, and a running log-sum of K numbers.
    """

    name: ClassVar[str] = "lightnet"
    paper: ClassVar[str] = "arXiv:2405.21022"
    published = {
        "source": "fla/layers/lightnet.py of fla-org/flash-linear-attention",
        "layer": {"conv": 0, "output_norm": "rms_all", "output_gate": "silu", "gate_rank": 128, "norm_eps": 1e-6},
    }

    transition: Transition = DIAGONAL

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def carried(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(k.dtype, torch.float32)
        return (k.new_full((k.shape[0], *k.shape[2:]), -torch.inf, dtype=dtype),)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, carry: tuple[Tensor, ...]) -> Operands:
        (before,) = carry
        logits = k.to(before.dtype)
        z = torch.logcumsumexp(torch.cat([before[:, None], logits], dim=1), dim=1)
        g = z[:, :-1] - z[:, 1:]
        return Operands(r=F.silu(q), k=(logits - z[:, 1:]).exp(), u=v, g=g, carry=(z[:, -1],))

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State) -> tuple[Tensor, State]:
        S, before = state
        z = torch.logaddexp(before, k)
        S = (before - z).exp()[..., None] * S + (k - z).exp()[..., None] * v[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", F.silu(q), S), (S, z)
