"""Papers whose memory is outside of the algebra, written again from their equations, one head and token at a time.

A state is the paper's, [V, K], the transpose of ours. K and V differ, so that a transposition cannot pass.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.paper_loops import B, H, K, Loop, V, inputs, rule_equals, step_equals_scan
from torch import Tensor, outer

import deltalab
from deltalab.authoring.inputs import draw, normal
from deltalab.rule import UpdateRule


def mesa_net(tokens: list[SimpleNamespace], state: tuple[Tensor, ...]) -> Any:
    """arXiv:2506.05233: o = G linsolve(H + Lambda, q), G = gamma G + beta v k^T, H = gamma H + beta k k^T."""
    gram, G = state[0], state[1].T
    o = []
    for t in tokens:
        gram = t.g.exp() * gram + t.beta * outer(t.k, t.k)
        G = t.g.exp() * G + t.beta * outer(t.v, t.k)
        o.append(G @ torch.linalg.solve(gram + torch.diag(t.ridge.expand(K)), t.q))
    return o, (gram, G.T)


def atlas(window: int) -> Loop:
    """arXiv:2505.23735: M_t = alpha_t M_{t-1} - eta_t sum of gamma_i grad 1/2 |M_{t-1} k_i - v_i|^2 over the window."""

    def loop(tokens: list[SimpleNamespace], state: tuple[Tensor, ...]) -> Any:
        M = state[0].T
        before = [SimpleNamespace(k=k, v=v, gamma=gamma[0]) for k, v, gamma in zip(*state[1:], strict=True)]
        seen, o = [*before, *tokens], []
        for n, t in enumerate(tokens):
            at = M.detach().requires_grad_()
            last = seen[: len(before) + n + 1][-window:]
            error = sum(i.gamma * (at @ i.k - i.v).square().sum() / 2 for i in last)
            (gradient,) = torch.autograd.grad(error, at)
            M = t.g.exp() * M - t.eta / window * gradient
            o.append(M @ t.q)
        kept = seen[max(len(seen) + 1 - window, 0) :]
        none = torch.zeros(0, dtype=torch.float64)
        rows = [torch.stack([getattr(i, name) for i in kept]) if kept else none for name in ("k", "v", "gamma")]
        return o, (M.T, *rows)

    return loop


def memora(sums: str, c: float = 1.0) -> Loop:
    """arXiv:2504.13173, Eq. 21 and 27: W = c Softmax(alpha log W - eta grad 1/2 |W k - v|^2), over what `sums` says."""

    def loop(tokens: list[SimpleNamespace], state: tuple[Tensor, ...]) -> Any:
        def softmax(x: Tensor) -> Tensor:
            x = (x - x.max()).exp()
            return x / {"all": x.sum(), "rows": x.sum(1, keepdim=True), "columns": x.sum(0, keepdim=True)}[sums]

        mass = {"all": c * V, "rows": c, "columns": c * V / K}[sums]
        W, o = mass * softmax(torch.zeros(V, K, dtype=torch.float64)), []
        for t in tokens:
            at = W.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((at @ t.k - t.v).square().sum() / 2, at)
            W = mass * softmax(t.g.exp() * W.log() - t.beta * gradient)
            o.append(W @ t.q)
        return o, ((W / mass).log().T,)

    return loop


def fenwick(t: int) -> list[list[int]]:
    """arXiv:2506.04761, Section 3.1: the tokens of each level at time t, by stripping the lowest set bits of t."""
    levels, b = [[t]], t
    while b > 0:
        lowest = (b & -b).bit_length() - 1
        levels += [[] for _ in range(lowest + 2 - len(levels))]
        levels[lowest + 1] = list(range(b - 2**lowest, b))
        b -= 2**lowest
    return levels


def log_linear(erases: bool, levels: int = 12) -> Loop:
    """arXiv:2506.04761: o_t = sum_l lambda_t^(l) S_t^(l) q_t, each state the plain rule's on the level's tokens."""

    def loop(tokens: list[SimpleNamespace], _: tuple[Tensor, ...]) -> Any:
        def state(t: int, members: list[int]) -> Tensor:
            S = torch.zeros(V, K, dtype=torch.float64)
            for i, token in enumerate(tokens[: t + 1]):
                moved = token.g.exp() * torch.eye(K, dtype=torch.float64)
                if erases:
                    moved = moved - token.g.exp() * token.beta * outer(token.k, token.k)
                S = S @ moved + (token.beta * outer(token.v, token.k) if i in members else 0)
            return S

        o = []
        for t, token in enumerate(tokens):
            now = fenwick(t)
            now = [*now[: levels - 1], [i for members in now[levels - 1 :] for i in members]]
            states = [state(t, members) for members in now]
            strength = token.strength.expand(levels)
            o.append(sum(weight * S @ token.q for weight, S in zip(strength, states, strict=False)))
        last = [S.T for S in states] + [torch.zeros(K, V, dtype=torch.float64)] * (levels - len(states))
        return o, (torch.stack(last), torch.zeros(len(tokens), 0, dtype=torch.float64))

    return loop


PAPERS: list[tuple[str, dict[str, Any], Loop]] = [
    *(("mesa_net", knobs, mesa_net) for knobs in ({}, {"g": 0}, {"beta": 1}, {"ridge": 1}, {"iterations": K})),
    *(("atlas", {"window": n}, atlas(n)) for n in (1, 2, 4, 20)),
    *(("log_linear_attention", {"erases": erases}, log_linear(erases)) for erases in (False, True)),
    ("log_linear_attention", {"g": 0, "beta": 1, "strength": "head_level_strength"}, log_linear(False)),
    *(("log_linear_attention", {"strength": {"level_strength": {"levels": n}}}, log_linear(False, n)) for n in (2, 3)),
    ("log_linear_attention", {"strength": 1, "erases": True}, log_linear(True, 2)),
    ("atlas", {"g": 0, "eta": 1, "gamma": 1}, atlas(4)),
    ("memora", {}, memora("all")),
    ("memora", {"simplex": "value", "g": "gla_decay"}, memora("rows")),
    ("memora", {"simplex": "key", "g": 0, "c": 8.0}, memora("columns", c=8.0)),
]


@pytest.mark.parametrize("split", [None, 1, 6], ids=lambda split: f"split-{split}")
@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize(("name", "knobs", "loop"), PAPERS, ids=lambda part: "" if callable(part) else str(part))
def test_rule_equals_its_paper(name: str, knobs: dict[str, Any], loop: Loop, backend: Any, split: int | None) -> None:
    rule_equals(name, knobs, loop, backend, split)


def test_mesa_net_has_a_gradient_where_nothing_is_written() -> None:
    """beta = 0 stands under a root; the output is smooth in it there."""
    rule = deltalab.get_rule("mesa_net")
    x = inputs(rule).span(0, 3)

    def o(beta: Tensor) -> Tensor:
        state = (torch.eye(K, dtype=torch.float64).expand(B, H, K, K), normal(B, H, K, V, seed=1))
        return deltalab.scan(rule, x.q, x.k, x.v, {**x.gates, "beta": beta}, state=state)[0].sum()

    beta = torch.zeros(B, 3, H, dtype=torch.float64).requires_grad_()
    (got,) = torch.autograd.grad(o(beta), beta)
    torch.testing.assert_close(got.sum(), (o(torch.full_like(beta, 1e-6)) - o(beta)) / 1e-6, rtol=1e-4, atol=0)


@pytest.mark.parametrize("simplex", ["matrix", "value", "key"])
def test_memora_stays_on_its_simplex_under_the_strongest_steps(simplex: str) -> None:
    rule = deltalab.get_rule("memora", simplex=simplex, g=0, c=3.0)
    x = draw(rule, batch=1, length=300, heads=1, key_dim=K, value_dim=V, seed=2)
    beta = torch.full((1, 300, 1), 4.0, dtype=torch.float64)
    o, (log,) = deltalab.scan(rule, x.q, x.k, 100 * x.v, {"beta": beta}, scale=1.0)
    axes = {"matrix": (2, 3), "value": (2,), "key": (3,)}[simplex]
    torch.testing.assert_close(log.exp().sum(axes), torch.ones_like(log.exp().sum(axes)))
    assert o.abs().max() <= 3.0 * V


@pytest.mark.parametrize("window", [1, 4])
def test_atlas_does_not_grow_for_unit_keys(window: int) -> None:
    """The strongest steps on equal keys: what was stored along them is gone, and nothing overshoots."""
    rule = deltalab.get_rule("atlas", window=window, g=0, eta=1, gamma=1)
    k = torch.nn.functional.normalize(torch.ones(1, 6, 1, K, dtype=torch.float64), dim=-1)
    start = rule.start(k, torch.zeros(1, 6, 1, V, dtype=torch.float64))
    state = (torch.ones(1, 1, K, V, dtype=torch.float64), *start[1:])
    o, _ = deltalab.scan(rule, k, k, torch.zeros(1, 6, 1, V, dtype=torch.float64), {}, state=state, scale=1.0)
    norms = o.norm(dim=-1).flatten()
    assert (norms.diff() <= 1e-12).all()
    assert norms[-1] < 0.1 * K**0.5


@pytest.mark.parametrize(("erases", "plain"), [(False, "sgla"), (True, "gated_deltanet")])
def test_log_linear_attention_with_equal_strengths_is_the_plain_rule(erases: bool, plain: str) -> None:
    """Over more than one chunk, and from a state in the middle of one."""
    rule = deltalab.get_rule("log_linear_attention", erases=erases)
    x = draw(rule, batch=1, length=150, heads=2, key_dim=K, value_dim=V, seed=1)
    gates = {**x.gates, "strength": torch.ones(1, 150, 2, 12, dtype=torch.float64)}
    o, (levels, tokens) = deltalab.scan(rule, x.q, x.k, x.v, gates)
    want, (S,) = deltalab.scan(deltalab.get_rule(plain), x.q, x.k, x.v, {name: gates[name] for name in ("g", "beta")})
    torch.testing.assert_close(o, want)
    torch.testing.assert_close(levels.sum(2), S)
    assert tokens.shape == (1, 2, 150, 0)


def test_log_linear_attention_keeps_each_stretch_of_tokens_by_itself() -> None:
    """After 7 tokens: the last, and stretches of 2 and 4 before it; 6 is 110 in binary."""
    rule = deltalab.get_rule("log_linear_attention", g=0, beta=1)
    k = torch.eye(8, dtype=torch.float64)[None, :7, None]
    _, (levels, _) = deltalab.scan(
        rule, k, k, torch.ones(1, 7, 1, 1, dtype=torch.float64), {"strength": torch.ones(1, 7, 1, 12)}
    )
    held = [level.nonzero()[:, 0].tolist() for level in levels[0, 0]]
    assert held[:5] == [[6], [], [4, 5], [0, 1, 2, 3], []]


SETTINGS = [
    (name, setting) for name in ("atlas", "log_linear_attention") for setting in deltalab.get_rule(name).variants()
]


@pytest.mark.parametrize(("name", "rule"), SETTINGS, ids=lambda part: part if isinstance(part, str) else "")
def test_step_says_the_same_as_scan(name: str, rule: UpdateRule) -> None:
    step_equals_scan(rule)
