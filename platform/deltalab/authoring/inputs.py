"""Random inputs of a rule for checks and timings, with gates drawn from the ranges that the rule declares."""

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
    """The inputs of `scan` for a sequence. Constant gates are left out; state: None, or one that a scan returned.

    With n steps per token, k, v and gates `per` step have n times as many rows as q.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Mapping[str, Tensor]
    state: State | None = None

    def named(self) -> dict[str, Tensor]:
        return {"q": self.q, "k": self.k, "v": self.v, **self.gates, **parts(self.state)}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same with every tensor changed, except for whole numbers in the state, such as a position."""
        gates = {name: change(value) for name, value in self.gates.items()}
        state = None if self.state is None else tuple(change(x) if x.is_floating_point() else x for x in self.state)
        return Inputs(change(self.q), change(self.k), change(self.v), gates, state)

    def rows(self, x: Tensor, start: int, stop: int | None = None) -> Tensor:
        """The tokens from start to stop of an input, or of a tensor like one. An input without time stays whole."""
        if not moves(x):
            return x
        steps = x.shape[1] // self.q.shape[1]
        return x[:, steps * start : None if stop is None else steps * stop]

    def span(self, start: int, stop: int | None = None, state: State | None = None) -> "Inputs":
        """The tokens from start to stop, with a state before them."""
        return replace(replace(self, state=None).map(lambda x: self.rows(x, start, stop)), state=state)


def moves(x: Tensor) -> bool:
    """Whether an input has a value for each token, or only [H] or [H, K]."""
    return x.dim() > 2


def parts(state: State | None) -> dict[str, Tensor]:
    """The tensors of a state by names that tell them apart."""
    if state is None:
        return {}
    return {"state": state[0]} if len(state) == 1 else {f"state[{i}]": part for i, part in enumerate(state)}


def learned(rule: UpdateRule) -> dict[str, Gate]:
    """The gates that are not constant."""
    return {name: gate for name, gate in rule.gates.items() if not gate.constant}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def within(gate: Gate, shape: tuple[int, ...], seed: int) -> Tensor:
    """Uniform values in the gate's range. An unbounded side ends 2 beyond the other end, or beyond 0.

    A projected vector is normal, of unit norm where it declares that.
    """
    if gate.features is not None:
        x = normal(*shape, seed=seed)
        return F.normalize(x, dim=-1) if gate.features == "unit" else x
    low = gate.low if math.isfinite(gate.low) else min(gate.high, 0.0) - 2
    high = gate.high if math.isfinite(gate.high) else max(gate.low, 0.0) + 2
    return low + (high - low) * torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(
    rule: UpdateRule, *, batch: int, length: int, heads: int, key_dim: int, value_dim: int, seed: int = 0
) -> Inputs:
    """Inputs in fp64 without a state: normal q, k and v, of unit norm where the rule expects it, and gates `within`."""
    q = normal(batch, length, heads, key_dim, seed=100 * seed + 1)
    k = normal(batch, rule.steps * length, heads, key_dim, seed=100 * seed + 2)
    if rule.features == "unit" or rule.transition is not None:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    gates = {
        name: within(gate, _shape(gate, batch, length, heads, key_dim, value_dim, rule.steps), 100 * seed + 10 + i)
        for i, (name, gate) in enumerate(learned(rule).items())
    }
    return Inputs(q, k, normal(batch, rule.steps * length, heads, value_dim, seed=100 * seed + 3), gates)


def _shape(
    gate: Gate, batch: int, length: int, heads: int, key_dim: int, value_dim: int, steps: int
) -> tuple[int, ...]:
    moving = (batch, length * (steps if gate.per == "step" else 1)) if gate.projected else ()
    return (*moving, *gate.shape(heads, key_dim, value_dim))


def corners(rule: UpdateRule) -> list[dict[str, float]]:
    """All combinations of extreme values of the gates, or a sample of `MOST_CORNERS` of them.

    The low extremes of a log-decay are -1000 and -inf. Otherwise an unbounded side ends 2 beyond the other end, or 0.
    """
    extremes = []
    for gate in learned(rule).values():
        low = [gate.low] if math.isfinite(gate.low) else [-1000.0, -math.inf] if gate.high == 0 else [-2.0]
        extremes.append([*low, gate.high if math.isfinite(gate.high) else max(gate.low, 0.0) + 2])
    every = [dict(zip(learned(rule), corner, strict=True)) for corner in itertools.product(*extremes)]
    return every if len(every) <= MOST_CORNERS else random.Random(0).sample(every, MOST_CORNERS)


def draw_corners(rule: UpdateRule, *, batch: int, length: int, key_dim: int, value_dim: int) -> Inputs:
    """Inputs with one head for each of `corners`.

    Sequence 0: every token has the corner's gate values. Other sequences: only where (token + channel) % 3 == 0,
    random elsewhere, as in `draw`. Gates without a time axis have the corner's values. Vectors of unit norm keep it.
    """
    at = corners(rule)
    x = draw(rule, batch=batch, length=length, heads=len(at), key_dim=key_dim, value_dim=value_dim)
    gates = {}
    for name, gate in x.gates.items():
        if rule.gates[name].features == "unit":
            gates[name] = gate
            continue
        channels = rule.gates[name].shape(len(at), key_dim, value_dim)[1:]
        extreme = torch.tensor([corner[name] for corner in at], dtype=torch.float64)
        extreme = extreme.unflatten(0, (-1, *[1] * len(channels))).expand(-1, *channels)
        if moves(gate):
            diagonal = torch.arange(gate.shape[1])[:, None] + torch.arange(math.prod(channels))
            often = torch.zeros_like(gate, dtype=torch.bool)
            often[0], often[1:] = True, (diagonal % 3 == 0).unflatten(1, (1, *channels))
            extreme = torch.where(often, extreme, gate)
        gates[name] = extreme
    return replace(x, gates=gates)
