"""TTT-Linear with all that its authors learn: the first state and its bias, the inner norm, and the steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate, parameterization
from deltalab.ops.rotary import angles, rotate
from deltalab.rule import State, UpdateRule, knob

EPS = 1e-6
"""Added to the variance in the inner norm."""
BASE = 10000.0
"""The base of the rotary positions."""


@parameterization
def first_state(std: float = 0.02) -> Gate:
    """A learned matrix for each head, from the channels of the key to those of the value; it starts normal."""
    return Gate(
        per="head_matrix",
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": lambda shape, generator: torch.empty(shape).normal_(std=std, generator=generator)},
        value=lambda z, p: z + p["value"],
    )


@parameterization
def head_value(init: float) -> Gate:
    """A learned number for each head and channel of the value, without bounds, starting at `init`."""
    return Gate(
        per="head_value_channel",
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": lambda shape, generator: torch.full(shape, float(init))},
        value=lambda z, p: z + p["value"],
    )


@parameterization
def biased_sigmoid() -> Gate:
    """sigmoid(W x + c) in [0, 1]; c starts at 0."""
    return Gate(
        per="token",
        low=0.0,
        high=1.0,
        parameters={"bias": lambda shape, generator: torch.zeros(shape)},
        value=lambda z, p: (z + p["bias"]).sigmoid(),
    )


@parameterization
def place_scale(slots: float = 16) -> Gate:
    """max(1/i + c_i, 0) at place i = 1, 2, ... of a mini-batch of `slots` tokens, with a learned c_i from 0 on."""
    return Gate(
        per="head_slot",
        slots=int(slots),
        low=0.0,
        high=torch.inf,
        parameters={"value": lambda shape, generator: torch.zeros(shape)},
        value=lambda z, p: (z + 1 / torch.arange(1, z.shape[-1] + 1).to(z) + p["value"]).clamp_min(0),
    )


@dataclass(frozen=True, kw_only=True)
class LearnedTTT(UpdateRule):
    """S_t = S_t' - c_i / K sum_{s = t'+1}^t beta_s grad_S 1/2 |f(k_s; S_t') - v_s|^2,   o_t = scale f(q_t; S_t)
    f(x; S) = x + w * LN(S^T [x, 1]) + b,   t' the last token before t's mini-batch,   i = t - t'

    Sun et al. 2024 (arXiv:2407.04620, Section 2.7), as in their code: S_0 with its bias, w, b and c are learned, and q
    and k get rotary positions that begin anew with each mini-batch. A mini-batch has as many tokens as c has slots.
    The state is S - S_0, the sum, and an empty tensor with a row for each token of a mini-batch that is not full.
    Their c is the same for all heads, and ours is not. They turn neighbouring channels, we turn i and i + K/2: a
    permutation. The residual cuts x, or fills it with zeros, where K and V differ.
    """

    name: ClassVar[str] = "learned_ttt"
    paper: ClassVar[str] = "arXiv:2407.04620"
    published = {
        "source": "TTTLinear in ttt.py of test-time-training/ttt-lm-pytorch",
        "layer": {"conv": 0, "output_norm": "layer_all", "output_gate": False, "norm_eps": 1e-6},
        "lacks": "one c for all heads",
    }

    beta: Gate = knob(biased_sigmoid(), forms.sigmoid())
    c: Gate = knob(place_scale(), place_scale(slots=1))
    s0: Gate = knob(first_state())
    b0: Gate = knob(head_value(init=0), forms.const(0))
    w: Gate = knob(head_value(init=1), forms.const(1))
    b: Gate = knob(head_value(init=0), forms.const(0))
    rope: bool = knob(True, False)

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def scale(self, key_dim: int) -> float:
        return 1.0

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        empty = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1] + 1, v.shape[-1], dtype=dtype)
        return empty, empty.clone(), empty.new_empty(*empty.shape[:2], 0, 0)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        change, total, row = state
        dtype, passed, size = change.dtype, row.shape[2], self.c.slots
        c, s0, b0, w, b = (_channels(gates[name].to(dtype)) for name in ("c", "s0", "b0", "w", "b"))
        if self.rope:
            angle = angles((passed + torch.arange(q.shape[1], device=q.device)) % size, q.shape[-1], BASE)[None]
            q, k = rotate(q.to(dtype), angle), rotate(k.to(dtype), angle)
        q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        steps = gates["beta"].to(dtype).transpose(1, 2) / k.shape[-1]
        start = torch.cat([s0.unflatten(-1, k.shape[-1:] + v.shape[-1:]), b0.expand(len(b0), v.shape[-1])[:, None]], 1)
        out, t = [], 0
        while t < q.shape[2]:
            tokens = slice(t, t + size - passed)
            asked, keys = (F.pad(x[:, :, tokens], (0, 1), value=1.0) for x in (q, k))
            weights = start + change
            slope = _slope(keys @ weights, v[:, :, tokens] - _fitted(k[:, :, tokens], v), w[:, None], b[:, None])
            slope = steps[:, :, tokens, None] * slope
            count = slope.shape[2]
            moved = (asked @ keys.mT).tril() @ slope + asked @ total
            z = asked @ weights - c[:, passed : passed + count, None] * moved
            out.append(_fitted(q[:, :, tokens], v) + w[:, None] * _normed(z)[0] + b[:, None])
            total = total + keys.mT @ slope
            t, passed = t + count, passed + count
            if passed == size:
                change, total, passed = change - c[:, -1, None, None] * total, torch.zeros_like(total), 0
        return scale * torch.cat(out, dim=2).transpose(1, 2), (change, total, row.new_empty(*row.shape[:2], passed, 0))

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, **gates: Tensor
    ) -> tuple[Tensor, State]:
        change, total, row = state
        i, size = row.shape[2], self.c.slots
        c, s0, b0, w, b = (_channels(gates[name]) for name in ("c", "s0", "b0", "w", "b"))
        if self.rope:
            angle = angles(q.new_full((1, 1), i), q.shape[-1], BASE)
            q, k = (rotate(x[:, None], angle)[:, 0] for x in (q, k))
        S = s0.view(-1, k.shape[-1], v.shape[-1]) + change[:, :, :-1]
        bias = b0 + change[:, :, -1]
        z = torch.einsum("bhk,bhkv->bhv", k, S) + bias
        deviation = (z.var(-1, correction=0, keepdim=True) + EPS).sqrt()
        normed = (z - z.mean(-1, keepdim=True)) / deviation
        error = w * (_fitted(k, v) + w * normed + b - v)
        slope = (error - error.mean(-1, keepdim=True) - normed * (error * normed).mean(-1, keepdim=True)) / deviation
        move = gates["beta"][..., None, None] / k.shape[-1] * F.pad(k, (0, 1), value=1.0)[..., None] * slope[:, :, None]
        total = total + move
        now = change - c[:, i, None, None] * total
        z = torch.einsum("bhk,bhkv->bhv", q, s0.view(S.shape[1:]) + now[:, :, :-1]) + b0 + now[:, :, -1]
        o = _fitted(q, v) + w * F.layer_norm(z, z.shape[-1:], eps=EPS) + b
        if i + 1 == size:
            return scale * o, (now, torch.zeros_like(total), row[:, :, :0])
        return scale * o, (change, total, row.new_empty(*row.shape[:2], i + 1, 0))


def _channels(gate: Tensor) -> Tensor:
    """A gate of the heads as [H, channels], with one channel if it is constant."""
    return gate if gate.dim() > 1 else gate[:, None]


def _fitted(x: Tensor, v: Tensor) -> Tensor:
    """x [.., K] cut, or filled with zeros, to the V channels of v."""
    return F.pad(x, (0, v.shape[-1] - x.shape[-1]))


def _normed(z: Tensor) -> tuple[Tensor, Tensor]:
    """LN(z), and the deviation that it divides by."""
    centered = z - z.mean(-1, keepdim=True)
    deviation = (centered.square().mean(-1, keepdim=True) + EPS).sqrt()
    return centered / deviation, deviation


def _slope(z: Tensor, target: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The gradient of 1/2 |w * LN(z) + b - target|^2 with respect to z [.., V]."""
    normed, deviation = _normed(z)
    error = w * (w * normed + b - target)
    return (error - error.mean(-1, keepdim=True) - normed * (error * normed).mean(-1, keepdim=True)) / deviation
