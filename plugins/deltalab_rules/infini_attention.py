"""Infini-attention: softmax attention inside of a segment, beside a linear-attention memory of all segments before."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.ops.rotary import angles, rotate
from deltalab.rule import State, UpdateRule, knob
from deltalab.softmax import attend, nothing_seen

BASE = 10000.0


@dataclass(frozen=True, kw_only=True)
class InfiniAttention(UpdateRule):
    """o_t = b M^T f(q_t) / (z^T f(q_t)) + (1 - b) sum_i softmax_i(scale q_t^T k_i) v_i,   f(x) = elu(x) + 1
    over the i <= t of t's segment of `segment` tokens, with M and z of the segments before it:
    M' = M + sum_i f(k_i) (v_i - delta M^T f(k_i) / (z^T f(k_i)))^T,   z' = z + sum_i f(k_i) over a whole segment

    Munkhdalai et al. 2024 (arXiv:2404.07143, Eq. 3-10). delta: True is the paper's Linear + Delta, False its Linear.
    Where z = 0, in the first segment, what divides by it is 0. Theirs have segments of 2048 tokens. b is a learned
    number of the head. rope: True turns q and k by their place in the segment for the softmax alone, as theirs, whose
    memory has no positions; so the layer's own rope stays off.

    The state is M [B, H, K, V], z [B, H, K], the n < segment keys and values of the segment at hand, filled up to
    [B, H, segment - 1, K] and [B, H, segment - 1, V], and an empty tensor [B, H, n, 0] that counts them. No kernel
    computes it: segments follow each other in a loop.
    """

    name: ClassVar[str] = "infini_attention"
    paper: ClassVar[str] = "arXiv:2404.07143"

    b: Gate = knob(forms.head_sigmoid())
    delta: bool = knob(True, False)
    rope: bool = knob(True, False)
    segment: int = knob(16, 4)

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        if self.rope and k.shape[-1] % 2:
            raise InputError(
                f"rule '{self.name}' with rope takes an even number of channels of the key, not {k.shape[-1]}"
            )
        keys, values, _ = nothing_seen(k, v)
        M = keys.new_zeros(*keys.shape[:2], k.shape[-1], v.shape[-1])
        return self._packed(M, M.new_zeros(M.shape[:-1]), keys, values)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        M, z, keys, values = self._unpacked(state)
        b = gates["b"].to(M.dtype)[:, None, None]
        q, k, v = (x.to(M.dtype).transpose(1, 2) for x in (q, k, v))
        out, start = [], 0
        while start < q.shape[2]:
            part = slice(start, start := start + self.segment - keys.shape[2])
            asked = q[:, :, part]
            keys, values = torch.cat([keys, k[:, :, part]], dim=2), torch.cat([values, v[:, :, part]], dim=2)
            places = torch.arange(keys.shape[2], device=q.device)
            local = attend(
                self._turned(asked, places[-asked.shape[2] :]), self._turned(keys, places), values, scale=scale
            )
            out.append(b * _recalled(M, z, asked) + (1 - b) * local)
            if keys.shape[2] == self.segment:
                new = values - _recalled(M, z, keys) if self.delta else values
                M, z = M + _positive(keys).mT @ new, z + _positive(keys).sum(2)
                keys, values = keys[:, :, :0], values[:, :, :0]
        return torch.cat(out, dim=2).transpose(1, 2), self._packed(M, z, keys, values)

    def _packed(self, M: Tensor, z: Tensor, keys: Tensor, values: Tensor) -> State:
        count = keys.shape[2]
        filled = (F.pad(x, (0, 0, 0, self.segment - 1 - count)) for x in (keys, values))
        return M, z, *filled, M.new_empty(*M.shape[:2], count, 0)

    def _unpacked(self, state: State) -> State:
        M, z, keys, values, counted = state
        return M, z, keys[:, :, : counted.shape[2]], values[:, :, : counted.shape[2]]

    def _turned(self, x: Tensor, places: Tensor) -> Tensor:
        """x [B, H, n, K], turned by its places in the segment."""
        if not self.rope:
            return x
        return rotate(x.transpose(1, 2), angles(places, x.shape[-1], BASE)[None]).transpose(1, 2)

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, b: Tensor) -> tuple[Tensor, State]:
        M, z, keys, values = self._unpacked(state)
        keys, values = torch.cat([keys, k[:, :, None]], dim=2), torch.cat([values, v[:, :, None]], dim=2)
        i, half = keys.shape[2] - 1, k.shape[-1] // 2
        # The product of the turned q and k depends on the distance alone: q is turned by it, and k is not.
        distance = torch.arange(i, -1, -1, device=q.device, dtype=q.dtype) * self.rope
        angle = distance[:, None] * BASE ** (-torch.arange(half, device=q.device, dtype=q.dtype) / max(half, 1))
        first, second, rest = q[:, :, None].split([half, half, k.shape[-1] - 2 * half], dim=-1)
        turned = [first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()]
        rest = rest.expand(*rest.shape[:2], i + 1, rest.shape[-1])
        weights = (scale * (torch.cat([*turned, rest], dim=-1) * keys).sum(-1)).softmax(-1)
        local = torch.einsum("bhn,bhnv->bhv", weights, values)
        b = b[:, None]
        o = b * _recalled(M, z, q[:, :, None])[:, :, 0] + (1 - b) * local
        if i + 1 < self.segment:
            return o, self._packed(M, z, keys, values)
        written, norm = M, z
        for key, value in zip(keys.unbind(2), values.unbind(2), strict=True):
            f = torch.where(key > 0, key + 1, key.clamp_max(0).exp())
            known = torch.einsum("bhk,bhkv->bhv", f, M) / (f * z).sum(-1, keepdim=True) if z.any() else 0.0
            written = written + f[..., None] * (value - known * self.delta)[..., None, :]
            norm = norm + f
        return o, self._packed(written, norm, keys[:, :, :0], values[:, :, :0])


def _positive(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _recalled(M: Tensor, z: Tensor, x: Tensor) -> Tensor:
    """M^T f(x) / (z^T f(x)) for x [B, H, n, K], and 0 where z^T f(x) is 0."""
    f = _positive(x)
    norm = f @ z[..., None]
    return f @ M / torch.where(norm == 0, 1.0, norm)
