"""Inputs for a rule that no data stands behind: drawn from what its gates declare, for checks and timings."""

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule

MOST_CORNERS = 256


@dataclass(frozen=True)
class Inputs:
    """What `scan` takes of a sequence. Constant gates are left out; the state is None or one that a scan returned."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Mapping[str, Tensor]
    state: State | None = None

    def named(self) -> dict[str, Tensor]:
        return {"q": self.q, "k": self.k, "v": self.v, **self.gates, **parts(self.state)}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        gates = {name: change(value) for name, value in self.gates.items()}
        state = tuple(map(change, self.state)) if isinstance(self.state, tuple) else self.state
        state = change(state) if isinstance(state, Tensor) else state
        return Inputs(change(self.q), change(self.k), change(self.v), gates, state)

    def span(self, start: int, stop: int | None = None, state: State | None = None) -> "Inputs":
        """Some of the tokens, after a state."""
        tokens = replace(self, state=None).map(lambda x: x if x.dim() == 1 else x[:, start:stop])
        return replace(tokens, state=state)


def parts(state: State | None) -> dict[str, Tensor]:
    """The tensors of a state by names that tell them apart."""
    if isinstance(state, tuple):
        return {f"state[{i}]": part for i, part in enumerate(state)}
    return {} if state is None else {"state": state}


def learned(rule: UpdateRule) -> dict[str, Gate]:
    """The gates that are not constant."""
    return {name: gate for name, gate in rule.gates.items() if not gate.constant}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def within(gate: Gate, shape: tuple[int, ...], seed: int) -> Tensor:
    """Uniform in the gate's range; where that has no end, up to 2 beyond the other end or 0."""
    low = gate.low if math.isfinite(gate.low) else min(gate.high, 0.0) - 2
    high = gate.high if math.isfinite(gate.high) else max(gate.low, 0.0) + 2
    return low + (high - low) * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(
    rule: UpdateRule, *, batch: int, length: int, heads: int, key_dim: int, value_dim: int, seed: int = 0
) -> Inputs:
    """fp64 inputs without a state: normal, q and k of unit norm where the rule takes them so, gates `within`."""
    q, k = (normal(batch, length, heads, key_dim, seed=100 * seed + i) for i in (1, 2))
    if rule.features == "unit" or rule.transition is not None:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    gates = {
        name: within(gate, (heads,) if gate.per == "head" else (batch, length, heads), 100 * seed + 10 + i)
        for i, (name, gate) in enumerate(learned(rule).items())
    }
    return Inputs(q, k, normal(batch, length, heads, value_dim, seed=100 * seed + 3), gates)


def corners(rule: UpdateRule) -> list[dict[str, float]]:
    """Every combination of extreme values of the gates, or `MOST_CORNERS` of them.

    A log-decay goes to -1000 and -inf; another gate without an end goes 2 beyond the other end or 0.
    """
    extremes = []
    for gate in learned(rule).values():
        low = [gate.low] if math.isfinite(gate.low) else [-1000.0, -math.inf] if gate.high == 0 else [-2.0]
        extremes.append([*low, gate.high if math.isfinite(gate.high) else max(gate.low, 0.0) + 2])
    every = [dict(zip(learned(rule), corner, strict=True)) for corner in itertools.product(*extremes)]
    return every if len(every) <= MOST_CORNERS else random.Random(0).sample(every, MOST_CORNERS)


def draw_corners(rule: UpdateRule, *, batch: int, length: int, key_dim: int, value_dim: int) -> Inputs:
    """A head for each of `corners`: for the first sequence at every token, for the others at one of three."""
    at = corners(rule)
    x = draw(rule, batch=batch, length=length, heads=len(at), key_dim=key_dim, value_dim=value_dim)
    often = torch.zeros(batch, length, 1, dtype=torch.bool)
    often[0], often[1:, ::3] = True, True
    extreme = {name: torch.tensor([corner[name] for corner in at], dtype=torch.float64) for name in x.gates}
    gates = {n: extreme[n] if g.dim() == 1 else torch.where(often, extreme[n], g) for n, g in x.gates.items()}
    return replace(x, gates=gates)
