"""Checks that the products of many steps stay bounded, wherever the gates are in their declared ranges."""

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.authoring.check import Measurement, Note
from deltalab.authoring.inputs import Inputs, learned, moves, normal
from deltalab.authoring.rule_checks.rule_runs import grows, inputs, run, square
from deltalab.gates import Gate
from deltalab.rule import UpdateRule

TOKENS, EACH = 4096, 512
"""The number of tokens, and of those after which outputs are compared."""
CHUNK = 16
"""The size of chunks. The parallel form takes all pairs of tokens of a chunk, so that small chunks cost less."""
MOST_CORNERS = 4
"""The number of heads whose gates stay at the ends of their ranges. In one more head, gates change with each token."""
ALMOST = 0.01
"""The log-decay in place of an unbounded one. A state that decays faster hides what the steps do to it."""
TURN, DRIFT = 0.3, 0.3
"""The angle between two keys that turn in a plane, and the size of a random change of keys that drift."""


def products(rule: UpdateRule) -> Iterator[Measurement | Note]:
    """Measures the growth of outputs from the second 1024 of 4096 tokens to the last, in fp64.

    Keys have unit norm. They are random, turn in a plane, or drift.
    """
    if rule.transition is not None and max(map(abs, rule.eigenvalues)) > 1 + 1e-9:
        low, high = rule.eigenvalues
        yield Note(f"the rule declares eigenvalues from {low:g} to {high:g}, so that its state may grow")
        return
    if grows(rule):  # nothing is multiplied from step to step, and the cost is quadratic
        yield Note("the rule keeps its tokens")
        return
    x, ends = _extreme(rule)
    with torch.no_grad():
        o = run(rule, x, "chunked", CHUNK)[0]
    sizes = o.abs().amax(-1).unflatten(1, (-1, EACH)).amax(2).movedim(2, 0)  # [head, keys, part]
    early, late = sizes[..., 2:4].amax(-1), sizes[..., -2:].amax(-1)
    growth = (late / early.clamp_min(1e-3)).nan_to_num(math.inf)
    head, kind = divmod(int(growth.argmax()), growth.shape[1])
    gates = ", ".join(f"{name}={value:g}" for name, value in ends[head].items()) if head < len(ends) else "random gates"
    what = f"growth of outputs from token {4 * EACH} to {TOKENS} with keys that {KEYS[kind]}"
    yield Measurement(float(growth.max()), f"{what}, at {gates or 'constant gates'},")


KEYS = ("are random", "turn", "drift")


def _extreme(rule: UpdateRule) -> tuple[Inputs, list[dict[str, float]]]:
    """Returns inputs with a row for each of `KEYS`, and the gate values of each head whose gates are constant."""
    ends = [
        dict(zip(learned(rule), values, strict=True))
        for values in itertools.product(*map(_ends, learned(rule).values()))
    ]
    ends = [ends[-1], *random.Random(0).sample(ends[:-1], min(len(ends), MOST_CORNERS) - 1)]
    key_dim = 8
    x = inputs(
        rule, TOKENS, batch=len(KEYS), heads=len(ends) + 1, key_dim=key_dim, value_dim=key_dim if square(rule) else 2
    )
    k = F.normalize(_keys(x.k), dim=-1)
    gates = {}
    for name, gate in x.gates.items():
        value = gate.clone()
        if rule.gates[name].features is None:
            if rule.gates[name].high == 0:
                value = value * (ALMOST / 2)
            for head, corner in enumerate(ends):
                value.select(2 if moves(value) else 0, head).fill_(corner[name])
        gates[name] = value
    return replace(x, k=k, gates=gates), ends


def _ends(gate: Gate) -> tuple[float, float]:
    """Returns the ends of a gate's range, with `ALMOST` or 2 in place of an infinite one."""
    if gate.high == 0:
        return max(gate.low, -ALMOST), 0.0
    low = gate.low if math.isfinite(gate.low) else min(gate.high, 0.0) - 2
    return low, gate.high if math.isfinite(gate.high) else max(gate.low, 0.0) + 2


def _keys(k: Tensor) -> Tensor:
    """Returns keys like k [3, n T, H, K]: random ones, ones that turn in a plane, and ones that drift."""
    angle = TURN * torch.arange(k.shape[1], dtype=k.dtype)[:, None]
    turning = torch.zeros_like(k[1])
    turning[..., 0], turning[..., 1] = angle.cos(), angle.sin()
    drifting = DRIFT * normal(*k.shape[1:], seed=4).cumsum(0)
    return torch.stack([k[0], turning, drifting])
