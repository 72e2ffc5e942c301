"""Papers on attention, written again from their equations, one head and one query at a time."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import Inputs, draw
from deltalab.errors import InputError
from deltalab.ops.rotary import angles, rotate
from deltalab.rule import UpdateRule

B, T, H, K, V = 2, 11, 3, 6, 4
Query = Callable[[list[SimpleNamespace], int], Tensor]


def inputs(rule: UpdateRule) -> Inputs:
    return draw(rule, batch=B, length=T, heads=H, key_dim=K, value_dim=V, seed=3)


def by_paper(query: Query, rule: UpdateRule, x: Inputs) -> Tensor:
    """o [B, T, H, V], each head of each sequence by itself. A constant g is no decay."""
    gates = {"g": torch.zeros(H, dtype=torch.float64), **x.gates}
    o = torch.empty_like(x.v)
    for b in range(B):
        for h in range(H):
            tokens = []
            for t in range(T):
                token = {name: z[b, t, h] for name, z in (("q", x.q), ("k", x.k), ("v", x.v))}
                token |= {name: z[b, t, h] if z.dim() > 2 else z[h] for name, z in gates.items()}
                tokens.append(SimpleNamespace(**token, t=t, head=h))
            for t in range(T):
                o[b, t, h] = query(tokens, t)
    return o


def softmax_of(logits: list[Tensor], tokens: list[SimpleNamespace]) -> Tensor:
    weights = torch.stack(logits).exp()
    return sum(w * token.v for w, token in zip(weights / weights.sum(), tokens, strict=False))


def fox(tokens: list[SimpleNamespace], i: int) -> Tensor:
    """arXiv:2503.02130: the logit q_i^T k_j gets D_ij, the sum of log f_l over l = j + 1 .. i."""
    logits = []
    for j in range(i + 1):
        D = sum((tokens[n].g for n in range(j + 1, i + 1)), start=torch.zeros(()))
        logits.append(tokens[i].q @ tokens[j].k + D)
    return softmax_of(logits, tokens)


def alibi(tokens: list[SimpleNamespace], i: int) -> Tensor:
    """arXiv:2108.12409: slopes 2^(-8 h / H) for h = 1 .. H, times the distance."""
    slope = 2.0 ** (-8 * (tokens[0].head + 1) / H)
    return softmax_of([tokens[i].q @ tokens[j].k - slope * (i - j) for j in range(i + 1)], tokens)


def path(tokens: list[SimpleNamespace], i: int) -> Tensor:
    """arXiv:2505.16381: the logit is k_j^T (prod_{s = j+1 .. i} (I - beta_s w_s w_s^T)) q_i; PaTH-FoX adds FoX's D."""
    logits = []
    for j in range(i + 1):
        row, D = tokens[j].k, torch.zeros(())
        for s in tokens[j + 1 : i + 1]:
            row = row @ (torch.eye(K, dtype=torch.float64) - s.beta * torch.outer(s.w, s.w))
            D = D + s.g
        logits.append(row @ tokens[i].q + D)
    return softmax_of(logits, tokens)


def differential(init: float = 0.8, norm: bool = True, window: int = T) -> Query:
    """arXiv:2410.05258: (1 - lambda_init) norm((softmax(Q_1 K_1^T) - lambda softmax(Q_2 K_2^T)) V), Eq. 1-3."""

    def query(tokens: list[SimpleNamespace], i: int) -> Tensor:
        seen, now = tokens[max(i - window + 1, 0) : i + 1], tokens[i]
        attended, exponentials = [], []
        for channels in (range(0, K, 2), range(1, K, 2)):
            part = list(channels)
            attended.append(softmax_of([now.q[part] @ token.k[part] for token in seen], seen))
            exponentials.append(torch.exp(now.lq[part] @ now.lk[part]))
        o = attended[0] - (exponentials[0] - exponentials[1] + init) * attended[1]
        return (1 - init) * o / (o.square().mean() + 1e-5).sqrt() if norm else o

    return query


PAPERS: list[tuple[str, dict[str, Any], Query]] = [
    *(("forgetting_attention", {"g": g}, fox) for g in ("metala_decay", "head_forget", 0)),
    ("forgetting_attention", {"g": "lightning_decay"}, alibi),
    *(("path_attention", knobs, path) for knobs in ({}, {"g": "metala_decay"}, {"beta": {"sigmoid": {"max": 1}}})),
    ("differential_attention", {}, differential()),
    ("differential_attention", {"lambda_init": 0.2, "window": 4}, differential(init=0.2, window=4)),
    ("differential_attention", {"norm": False}, differential(norm=False)),
]


@pytest.mark.parametrize("split", [None, 1, 6], ids=lambda split: f"split-{split}")
@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize(
    ("name", "knobs", "query"), PAPERS, ids=lambda part: part.__name__ if callable(part) else str(part)
)
def test_rule_equals_its_paper(name: str, knobs: dict[str, Any], query: Query, backend: Any, split: int | None) -> None:
    rule = deltalab.get_rule(name, **knobs)
    x = inputs(rule)
    want = by_paper(query, rule, x)
    outputs, state = [], None
    for start, stop in [(0, T)] if split is None else [(0, split), (split, T)]:
        part = x.span(start, stop)
        o, state = deltalab.scan(rule, part.q, part.k, part.v, part.gates, scale=1.0, state=state, backend=backend)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs, dim=1), want, rtol=0, atol=1e-9)


def test_forgetting_attention_without_forgetting_is_attention() -> None:
    rule = deltalab.get_rule("forgetting_attention", g=0)
    x = inputs(rule)
    o, (keys, values, _) = deltalab.scan(rule, x.q, x.k, x.v, {})
    want, state = deltalab.scan(deltalab.get_rule("attention"), x.q, x.k, x.v, {})
    for got, known in zip((o, keys, values), (want, *state), strict=True):
        torch.testing.assert_close(got, known)


def test_path_attention_turns_nothing_without_beta() -> None:
    rule = deltalab.get_rule("path_attention")
    x = inputs(rule)
    o, _ = deltalab.scan(rule, x.q, x.k, x.v, {**x.gates, "beta": torch.zeros(B, T, H, dtype=torch.float64)})
    want, _ = deltalab.scan(deltalab.get_rule("attention"), x.q, x.k, x.v, {})
    torch.testing.assert_close(o, want)


def test_the_sum_of_g_may_stand_inside_the_scale() -> None:
    given = [deltalab.get_rule("path_attention", g="metala_decay", scaled_g=scaled) for scaled in (True, False)]
    x = inputs(given[0])
    o, _ = deltalab.scan(given[0], x.q, x.k, x.v, x.gates, scale=0.5)
    want, _ = deltalab.scan(given[1], x.q, x.k, x.v, {**x.gates, "g": 0.5 * x.gates["g"]}, scale=0.5)
    torch.testing.assert_close(o, want)
    with pytest.raises(InputError, match="scaled_g has no effect"):
        deltalab.get_rule("path_attention", scaled_g=True)


def test_a_gate_of_minus_infinity_forgets_all_that_came_before() -> None:
    rule = deltalab.get_rule("forgetting_attention")
    x = inputs(rule)
    g = x.gates["g"].clone()
    g[:, 5] = -torch.inf
    o, _ = deltalab.scan(rule, x.q, x.k, x.v, {"g": g})
    later = x.span(5)
    fresh, _ = deltalab.scan(rule, later.q, later.k, later.v, later.gates)
    torch.testing.assert_close(o[:, 5:], fresh)


def test_without_its_second_half_differential_attention_is_attention() -> None:
    rule = deltalab.get_rule("differential_attention", lambda_init=0, norm=False)
    x = inputs(rule)
    o, _ = deltalab.scan(rule, x.q, x.k, x.v, {name: torch.zeros_like(value) for name, value in x.gates.items()})
    want, _ = deltalab.scan(deltalab.get_rule("attention"), x.q[..., ::2], x.k[..., ::2], x.v, {})
    torch.testing.assert_close(o, want)


def test_differential_attention_with_rope_sees_distances_alone() -> None:
    rule = deltalab.get_rule("differential_attention")
    x = draw(rule, batch=B, length=T, heads=H, key_dim=8, value_dim=V, seed=3)
    outputs = []
    for first in (0, 7):
        angle = angles(first + torch.arange(T)[None], 8, 100.0)
        outputs.append(deltalab.scan(rule, rotate(x.q, angle), rotate(x.k, angle), x.v, x.gates)[0])
    torch.testing.assert_close(*outputs)
    assert not torch.allclose(outputs[0], deltalab.scan(rule, x.q, x.k, x.v, x.gates)[0])


def test_differential_attention_refuses_an_odd_width_and_a_factor_of_zero() -> None:
    rule = deltalab.get_rule("differential_attention")
    x = draw(rule, batch=B, length=T, heads=H, key_dim=5, value_dim=V)
    with pytest.raises(InputError, match="takes an even number of channels of the key, not 5"):
        deltalab.scan(rule, x.q, x.k, x.v, x.gates)
    with pytest.raises(InputError, match="lambda_init must be less than 1, not 1"):
        deltalab.get_rule("differential_attention", lambda_init=1)
    with pytest.raises(InputError, match="std must be positive, not 0"):
        deltalab.get_rule("differential_attention", lq={"normal_head_channel": {"std": 0}})


SETTINGS = [
    ("path_attention", deltalab.get_rule("path_attention", g="metala_decay", scaled_g=True)),
    *(
        (name, setting)
        for name in ("forgetting_attention", "path_attention", "differential_attention")
        for setting in deltalab.get_rule(name).variants()
    ),
]


@pytest.mark.parametrize(("name", "rule"), SETTINGS, ids=lambda part: part if isinstance(part, str) else "")
def test_step_says_the_same_as_scan(name: str, rule: UpdateRule) -> None:
    x = inputs(rule)
    o, after = deltalab.scan(rule, x.q, x.k, x.v, x.gates)
    constant = {n: gate.value(x.q.new_zeros(H), {}) for n, gate in rule.gates.items() if gate.constant}
    state: Any = rule.start(x.k, x.v)
    for t in range(T):
        gates = {n: value[:, t] if value.dim() > 2 else value for n, value in x.gates.items()} | constant
        got, state = rule.step(x.q[:, t], x.k[:, t], x.v[:, t], scale=rule.scale(K), state=state, **gates)
        torch.testing.assert_close(got, o[:, t])
    for got, want in zip(state, after, strict=True):
        torch.testing.assert_close(got, want)
