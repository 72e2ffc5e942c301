"""A paper's loop over tokens, run on each head of each sequence by itself, against a rule.

Nothing here knows a rule's operands. K and V differ, so that a transposition cannot pass.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import Inputs, draw
from deltalab.rule import UpdateRule

B, T, H, K, V = 2, 11, 3, 6, 4
Loop = Callable[[list[SimpleNamespace], tuple[Tensor, ...]], tuple[list[Tensor], tuple[Tensor, ...]]]
"""(the head's tokens, the tensors of its state before them) to the outputs and the tensors after them."""


def inputs(rule: UpdateRule, length: int = T) -> Inputs:
    return draw(rule, batch=B, length=length, heads=H, key_dim=K, value_dim=V, seed=3)


def by_paper(loop: Loop, rule: UpdateRule, x: Inputs, state: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    """Each head of each sequence by itself; state: tensors [B, H, ...]. Constant gates are 1, and no decay."""
    gates = {"g": torch.zeros(H)} if "g" in rule.gates else {}
    gates |= {name: torch.ones(H, dtype=torch.float64) for name in rule.gates if name != "g"} | dict(x.gates)
    outputs, states = [], []
    for b in range(B):
        for h in range(H):
            tokens = []
            for t in range(x.q.shape[1]):
                token = {name: z[b, t, h] for name, z in (("q", x.q), ("k", x.k), ("v", x.v))}
                token |= {name: z[b, t, h] if z.dim() > 2 else z[h] for name, z in gates.items()}
                tokens.append(SimpleNamespace(**token))
            o, after = loop(tokens, tuple(part[b, h] for part in state))
            outputs.append(torch.stack(o))
            states.append(after)
    o = torch.stack(outputs).unflatten(0, (B, H)).transpose(1, 2)
    return o, [torch.stack(parts).unflatten(0, (B, H)) for parts in zip(*states, strict=True)]


def rule_equals(name: str, knobs: dict[str, Any], loop: Loop, backend: Any, split: int | None, length: int = T) -> None:
    """Outputs and last state of a rule, whole or with its state carried over a split, are those of the loop."""
    rule = deltalab.get_rule(name, **knobs)
    x = inputs(rule, length)
    want, states = by_paper(loop, rule, x, rule.start(x.k, x.v))
    outputs, state = [], None
    for start, stop in [(0, length)] if split is None else [(0, split), (split, length)]:
        part = x.span(start, stop)
        o, state = deltalab.scan(
            rule, part.q, part.k, part.v, part.gates, scale=1.0, state=state, backend=backend, chunk_size=4
        )
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, dim=1), want, rtol=0, atol=1e-9)
    for got, known in zip(state or (), states, strict=True):
        torch.testing.assert_close(got, known.view(got.shape), rtol=0, atol=1e-9)


def step_equals_scan(rule: UpdateRule, length: int = T) -> None:
    x = inputs(rule, length)
    o, after = deltalab.scan(rule, x.q, x.k, x.v, x.gates)
    constant = {n: gate.value(x.q.new_zeros(H), {}) for n, gate in rule.gates.items() if gate.constant}
    state: Any = rule.start(x.k, x.v)
    for t in range(length):
        gates = {n: value[:, t] if value.dim() > 2 else value for n, value in x.gates.items()} | constant
        got, state = rule.step(x.q[:, t], x.k[:, t], x.v[:, t], scale=rule.scale(K), state=state, **gates)
        torch.testing.assert_close(got, o[:, t])
    for got, want in zip(state, after, strict=True):
        torch.testing.assert_close(got, want)
