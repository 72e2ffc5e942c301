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
    """The inputs of `scan` for a batch of sequences.

    Attributes:
        q: [B, T, H, K].
        k: [B, n T, H, K] for a rule with n steps per token.
        v: [B, n T, H, V].
        gates: Maps the symbol of each gate that is not constant to the gate's values. A gate that has one value `per`
            step has n T rows.
        state: The state before the first token, as a scan returned it; None for the rule's initial state.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Mapping[str, Tensor]
    state: State | None = None

    def named(self) -> dict[str, Tensor]:
        """Returns a dictionary from names to tensors. It includes the tensors of the state."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.gates, **parts(self.state)}

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """Returns new inputs: `change` of every tensor. Whole numbers in the state, such as a position, stay."""
        gates = {name: change(value) for name, value in self.gates.items()}
        state = None if self.state is None else tuple(change(x) if x.is_floating_point() else x for x in self.state)
        return Inputs(change(self.q), change(self.k), change(self.v), gates, state)

    def rows(self, x: Tensor, start: int, stop: int | None = None) -> Tensor:
        """Returns the rows of `x` for the tokens from `start` to `stop`, or all of `x` if it has no time axis."""
        if not moves(x):
            return x
        steps = x.shape[1] // self.q.shape[1]
        return x[:, steps * start : None if stop is None else steps * stop]

    def span(self, start: int, stop: int | None = None, state: State | None = None) -> "Inputs":
        """Returns the inputs of the tokens from `start` to `stop`, with `state` as the state before these tokens."""
        return replace(replace(self, state=None).map(lambda x: self.rows(x, start, stop)), state=state)


def moves(x: Tensor) -> bool:
    """Returns whether an input has a time axis. Inputs without a time axis have the axes [H] or [H, K]."""
    return x.dim() > 2


def parts(state: State | None) -> dict[str, Tensor]:
    """Returns a dictionary from names to the tensors of a state.

    A single tensor has the name `state`. Several tensors have the names `state[0]`, `state[1]` and so on.
    """
    if state is None:
        return {}
    return {"state": state[0]} if len(state) == 1 else {f"state[{i}]": part for i, part in enumerate(state)}


def learned(rule: UpdateRule) -> dict[str, Gate]:
    """Returns the gates of a rule that are not constant."""
    return {name: gate for name, gate in rule.gates.items() if not gate.constant}


def normal(*shape: int, seed: int) -> Tensor:
    """Returns normal random numbers in fp64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def within(gate: Gate, shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns uniform random values in the range of a gate, in fp64.

    An unbounded low end is replaced by min(high, 0) - 2, an unbounded high end by max(low, 0) + 2. If the gate is a
    projected vector, the values are normal random numbers instead. They are scaled to unit norm if the gate declares
    unit norm.
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
    """Draws random inputs of a rule in fp64. They have no state.

    q, k and v are normal; q and k are scaled to unit norm if the rule expects it. `within` draws the gates.
    """
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
    """Returns the shape of a gate's values."""
    moving = (batch, length * (steps if gate.per == "step" else 1)) if gate.projected else ()
    return (*moving, *gate.shape(heads, key_dim, value_dim))


def corners(rule: UpdateRule) -> list[dict[str, float]]:
    """Returns combinations of the gates' extreme values. A combination has one value for each gate.

    If there are more than `MOST_CORNERS` combinations, the function returns a random sample of `MOST_CORNERS`.

    The low extremes of a log-decay are -1000 and -inf. Any other unbounded end is replaced as in `within`.
    """
    extremes = []
    for gate in learned(rule).values():
        low = [gate.low] if math.isfinite(gate.low) else [-1000.0, -math.inf] if gate.high == 0 else [-2.0]
        extremes.append([*low, gate.high if math.isfinite(gate.high) else max(gate.low, 0.0) + 2])
    combinations = [dict(zip(learned(rule), corner, strict=True)) for corner in itertools.product(*extremes)]
    return combinations if len(combinations) <= MOST_CORNERS else random.Random(0).sample(combinations, MOST_CORNERS)


def draw_corners(rule: UpdateRule, *, batch: int, length: int, key_dim: int, value_dim: int) -> Inputs:
    """Draws inputs with one head for each corner: for each combination of gate values that `corners` returns.

    In sequence 0 every token has the gate values of its head's corner. In the other sequences only the tokens with
    (token + channel) % 3 == 0 have the corner's values, and all other values are random as in `draw`. Gates without a
    time axis have the values of the corner in all sequences. Vectors of unit norm stay random.
    """
    head_corners = corners(rule)
    x = draw(rule, batch=batch, length=length, heads=len(head_corners), key_dim=key_dim, value_dim=value_dim)
    gates = {}
    for name, gate in x.gates.items():
        if rule.gates[name].features == "unit":
            gates[name] = gate
            continue
        channels = rule.gates[name].shape(len(head_corners), key_dim, value_dim)[1:]
        extreme = torch.tensor([corner[name] for corner in head_corners], dtype=torch.float64)
        extreme = extreme.unflatten(0, (-1, *[1] * len(channels))).expand(-1, *channels)
        if moves(gate):
            diagonal = torch.arange(gate.shape[1])[:, None] + torch.arange(math.prod(channels))
            at_corner = torch.zeros_like(gate, dtype=torch.bool)
            at_corner[0], at_corner[1:] = True, (diagonal % 3 == 0).unflatten(1, (1, *channels))
            extreme = torch.where(at_corner, extreme, gate)
        gates[name] = extreme
    return replace(x, gates=gates)
