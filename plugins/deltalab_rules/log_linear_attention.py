"""Log-linear attention: the past in a logarithmic number of states, each of them read with a strength of its own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.rule import State, UpdateRule, knob
from deltalab.softmax import sums_between

CHUNK = 64


@parameterization
def level_strength(levels: float = 12) -> Gate:
    """softplus(W x + c) for each of `levels` levels and each head, around 1 at the start."""
    return _strength(levels, projected=True)


@parameterization
def head_level_strength(levels: float = 12) -> Gate:
    """softplus(c) with a learned c for each of `levels` levels of each head, 1 at the start."""
    return _strength(levels, projected=False)


@parameterization
def scaled_level_strength(levels: float = 15) -> Gate:
    """softplus(L W x) with a learned L for each of `levels` levels of each head, 1 at the start: the authors' code."""
    return replace(
        _strength(levels, projected=True),
        parameters={"scale": lambda shape, generator: torch.ones(shape)},
        value=lambda z, p: F.softplus(p["scale"] * z),
    )


@parameterization
def counted_decay() -> Gate:
    """`mamba2_decay` whose a starts at 1, 2, ... H."""
    start = forms.mamba2_decay().parameters["dt_bias"]
    counted = {"log_a": lambda shape, generator: torch.arange(1.0, 1 + shape[0]).log(), "dt_bias": start}
    return replace(forms.mamba2_decay(), parameters=counted)


def _strength(levels: float, *, projected: bool) -> Gate:
    if levels < 2 or levels != int(levels):
        raise InputError(f"a strength per level takes a whole number of levels of at least 2, not {levels:g}")
    one = torch.tensor(1.0).expm1().log().item()
    return Gate(
        per="slot" if projected else "head_slot",
        low=0.0,
        high=torch.inf,
        slots=int(levels),
        parameters={"c": lambda shape, generator: torch.full(shape, one)},
        value=lambda z, p: F.softplus(z + p["c"]),
    )


@dataclass(frozen=True, kw_only=True)
class LogLinearAttention(UpdateRule):
    """o_t = scale sum_l lambda_t^(l) S_t^(l)^T q_t
    S_t^(l) = sum of P_t P_{t-1} ... P_{i+1} beta_i k_i v_i^T over the tokens i of level l at time t
    P_t = alpha_t I,   or alpha_t (I - beta_t k_t k_t^T) where erases,   alpha_t = exp(g_t)

    Guo et al. 2025 (arXiv:2506.04761): token i is in level 0 at time t = i, and later in the level l with
    2^(l-1) <= i xor t < 2^l, tokens counted from 0, so that levels are those of a Fenwick tree: the last token, and
    stretches of at most 1, 2, 4, ... tokens before it. The highest level keeps all that is older. erases: log-linear
    Gated DeltaNet, else log-linear Mamba2; with lambda = 1 it is the plain rule. The state is the levels
    [B, H, L, K, V], and an empty tensor [B, H, n, 0] that counts tokens. The parallel form goes in chunks.
    A token costs L K V, and with `erases` as much again.
    """

    name: ClassVar[str] = "log_linear_attention"
    paper: ClassVar[str] = "arXiv:2506.04761"
    published = {
        "source": "fla/layers/log_linear_mamba2.py of fla-org/flash-linear-attention",
        "knobs": {"strength": "scaled_level_strength", "g": "counted_decay", "beta": "mamba2_step"},
        "layer": {
            "qk_heads": 1, "features": "silu", "scale": 1.0, "conv_bias": True, "skip": True,
            "output_norm": "rms_all", "output_gate": "silu_before_norm",
        },
    }  # fmt: skip
    ignores: ClassVar[frozenset[str]] = frozenset({"strength"})  # of the levels that a sequence is too short for

    strength: Gate = knob(level_strength(), head_level_strength(), forms.const(1), scaled_level_strength())
    g: Gate = knob(forms.mamba2_decay(), forms.const(0), counted_decay())
    beta: Gate = knob(forms.sigmoid(), forms.const(1), forms.mamba2_step())
    erases: bool = knob(False, True)

    def __post_init__(self) -> None:
        if self.beta.of and self.g.constant:
            raise InputError(f"{self.name}.beta mamba2_step shares g's projection, which a constant g lacks")

    @property
    def levels(self) -> int:
        """Without strengths of their own, all tokens before the last are in level 1."""
        return self.strength.slots or 2

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        batch, _, heads, key_dim = k.shape
        dtype = torch.promote_types(v.dtype, torch.float32)
        levels = v.new_zeros(batch, heads, self.levels, key_dim, v.shape[-1], dtype=dtype)
        return levels, v.new_zeros(batch, heads, 0, 0, dtype=dtype)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        levels, tokens = state
        strength = gates["strength"]
        strength = strength[:, None] if strength.shape == k.shape[2:3] else strength
        g, beta = (gates[name].expand(k.shape[:3])[..., None] for name in ("g", "beta"))
        strength = strength.expand(*k.shape[:3], self.levels)
        given = [x.to(levels.dtype).transpose(1, 2) for x in (q, k, v, g, beta, strength)]
        out = []
        for start in range(0, q.shape[1], CHUNK):
            part = [x[:, :, start : start + CHUNK] for x in given]
            o, levels = self._chunk(levels, tokens.shape[2] + start, *part)
            out.append(o)
        gone = tokens.shape[2] + q.shape[1]
        return scale * torch.cat(out, dim=2).transpose(1, 2), (levels, tokens.new_zeros(*tokens.shape[:2], gone, 0))

    def _chunk(
        self, levels: Tensor, past: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, strength: Tensor
    ) -> tuple[Tensor, Tensor]:
        """o and the next levels for tokens `past`, `past` + 1, ...: [B, H, C, ...] each."""
        now = past + torch.arange(q.shape[2], device=q.device)
        new, old = self._level(now, now), self._level(now, self._oldest(past, q.device))
        since, within = g.cumsum(2).exp(), sums_between(g[..., 0]).exp()
        # weights [B, H, C, C]: what each output has of each value. keys: what the last state has of it.
        weights, keys = (q @ k.transpose(-1, -2)) * within, within[:, :, -1, :, None] * k
        reads = since * q
        kept = since[:, :, -1, :, None, None] * levels
        if self.erases:
            overlaps = (beta * (k @ k.transpose(-1, -2)) * within).tril(-1)
            both = torch.cat([weights, keys.transpose(-1, -2)], dim=2)
            both = torch.linalg.solve_triangular(overlaps, both, upper=False, unitriangular=True, left=False)
            both = both * beta.transpose(-1, -2)
            weights, keys = both[:, :, : q.shape[2]], both[:, :, q.shape[2] :].transpose(-1, -2)
            reads = reads - weights @ (since * k)
            kept = kept - torch.einsum("bhck,bhcj,bhljv->bhlkv", keys, since * k, levels)
        else:
            weights, keys = weights * beta.transpose(-1, -2), keys * beta
        o = (weights * strength.gather(-1, new.expand_as(weights))) @ v
        of_old = strength.gather(-1, old.expand(*q.shape[:3], -1))
        o = o + torch.einsum("bhck,bhlkv,bhcl->bhcv", reads, levels, of_old)
        each = torch.arange(self.levels, device=q.device)
        into_new, into_old = ((place[-1][:, None] == each).to(v.dtype) for place in (new, old))
        after = torch.einsum("cl,bhck,bhcv->bhlkv", into_new, keys, v)
        return o, after + torch.einsum("ml,bhmkv->bhlkv", into_old, kept)

    def _level(self, now: Tensor, then: Tensor) -> Tensor:
        """The level of tokens `then` at the times `now`."""
        apart = now[:, None] ^ then[None, :]
        return (apart[..., None] >= 2 ** torch.arange(self.levels - 1, device=now.device)).sum(-1)

    def _oldest(self, past: int, device: torch.device) -> Tensor:
        """A token of each level after `past` tokens: the first for the highest, the last token for an empty one."""
        last, level = max(past - 1, 0), torch.arange(self.levels, device=device)
        above = last >> (level - 1).clamp_min(0)
        held = torch.where((level > 0) & (above % 2 == 1), (above - 1) << (level - 1).clamp_min(0), last)
        return torch.where(level == self.levels - 1, 0, held)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: Any, **gates: Tensor
    ) -> tuple[Tensor, State]:
        levels, tokens = state
        alpha, beta = (gates[name].expand(k.shape[:2])[..., None, None] for name in ("g", "beta"))
        strength = gates["strength"]
        strength = strength[:, None] if strength.shape == k.shape[1:2] else strength
        kept = list((alpha.exp()[..., None] * levels).unbind(2))
        if self.erases:
            kept = [S - beta * k[..., None] * torch.einsum("bhk,bhkv->bhv", k, S)[..., None, :] for S in kept]
        now = tokens.shape[2]
        if now:
            # Levels below that of the lowest set bit of the time become one.
            into = min((now & -now).bit_length(), self.levels - 1)
            total = torch.stack(kept[: into + 1]).sum(0)
            kept = [torch.zeros_like(total)] * into + [total] + kept[into + 1 :]
        kept[0] = beta * k[..., None] * v[..., None, :]
        after = torch.stack(kept, dim=2)
        o = scale * torch.einsum("bhk,bhlkv,bhl->bhv", q, after, strength.expand(*k.shape[:2], self.levels))
        return o, (after, tokens.new_zeros(*tokens.shape[:2], now + 1, 0))
