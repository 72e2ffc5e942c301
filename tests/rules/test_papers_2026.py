"""Rules that were published in 2026, written again from their sources, one head and one token at a time.

A state is [K, V], as ours are. Sources that write it the other way are transposed.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.paper_loops import K, Loop, V, rule_equals, step_equals_scan
from torch import Tensor, outer

import deltalab
from deltalab.errors import InputError
from deltalab.rule import UpdateRule


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


Step = Callable[[Any, SimpleNamespace], tuple[Any, Tensor]]
EYE = torch.eye(K, dtype=torch.float64)


def one_state(step: Step) -> Loop:
    """The loop of a step whose state is one matrix."""

    def loop(tokens: list[SimpleNamespace], state: tuple[Tensor, ...]) -> Any:
        (S,), outputs = state, []
        for t in tokens:
            S, o = step(S, t)
            outputs.append(o)
        return outputs, (S,)

    loop.__name__ = step.__name__
    return loop


def erase_then_delta(S: Tensor, t: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """arXiv:2606.26560: S = (I - beta k k^T) (I - gamma e e^T) D S + beta k v^T, its factors formed."""
    decay = torch.diag(t.g.exp().expand(K))
    S = (EYE - t.beta * outer(t.k, t.k)) @ (EYE - t.gamma * outer(t.e, t.e)) @ decay @ S + t.beta * outer(t.k, t.v)
    return S, t.q @ S


def q_delta(S: Tensor, t: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """arXiv:2606.08804, in its orientation S [V, K]: S = alpha S (I - beta (k + lam q) k^T) + beta v k^T."""
    mixed = outer(t.k, t.k) + t.lam * outer(t.q, t.k)
    S = t.g.exp() * S.T @ (EYE - t.beta * mixed) + t.beta * outer(t.v, t.k)
    return S.T, S @ t.q


def kaczmarz(S: Tensor, t: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """arXiv:2605.08587: Gated DeltaNet with beta = eta / (|k|^2 + eps)."""
    beta = t.eta / (t.k @ t.k + 1e-6)
    S = t.g.exp() * S
    S = S + beta * outer(t.k, t.v - t.k @ S)
    return S, t.q @ S


def gated_oja(S: Tensor, t: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """FLA's test of its Oja rule: h = h exp(g), k - h v, h = h + (k - h v) (beta v)^T; its state is ours transposed."""
    h, v = S.T * t.g.exp(), t.v / t.v.norm()
    h = h + outer(t.k - h @ v, t.beta * v)
    return h.T, t.q @ h


def kalman_linear_attention(tokens: list[SimpleNamespace], state: tuple[Tensor, ...]) -> Any:
    """arXiv:2602.10743, Theorems 1 and 2: precision and natural parameter eta of each channel; mu = eta / precision."""
    eta, precision, o = zeros(K, V), state[1], []
    for t in tokens:
        a, p, dt = (x.expand(K) for x in (t.a, t.p, t.dt))
        abar, pbar = torch.exp(-a * dt), p**2 / (2 * a) * (1 - torch.exp(-2 * a * dt))
        rho = 1 / (abar**2 + pbar * precision)
        eta = (rho * abar)[:, None] * eta + outer(t.k * t.lam, t.v)
        precision = rho * precision + t.k**2 * t.lam
        o.append(t.q @ (eta / precision[:, None]))
    return o, (eta / precision[:, None], precision)


def mdn(tokens: list[SimpleNamespace], state: tuple[Tensor, ...]) -> Any:
    """arXiv:2605.05838, the authors' layer and its loop: the angle bounds alpha and beta, and w has the other sign."""
    S, M, o = *state, []
    for t in tokens:
        theta = torch.arctan(t.eta * t.f)
        beta, log_alpha = torch.sin(theta) ** 2 * t.beta, (torch.cos(theta) ** 2).log() + t.g
        w = -(t.v - log_alpha.exp() * t.k @ S)
        M = t.m.exp() * M + outer(t.eta * t.k, w)
        S = log_alpha.exp() * S - beta * M
        o.append(t.q @ S)
    return o, (S, M)


def memory_caching(segment: int, fresh: bool, erases: bool) -> Loop:
    """arXiv:2602.24281, Eq. 4, 9 and 10: the segments one by one, each with its tokens in a list."""

    def loop(tokens: list[SimpleNamespace], state: tuple[Tensor, ...]) -> Any:
        S, done, o = state[0], [], []
        for first in range(0, len(tokens), segment):
            mine = tokens[first : first + segment]
            S = zeros(K, V) if fresh else S
            for n, t in enumerate(mine):
                old = t.g.exp() * S
                S = old + t.beta * outer(t.k, t.v - (t.k @ old if erases else 0))
                memories = [(S, [i.k for i in mine[: n + 1]]), *done]
                weights = torch.stack([t.u @ torch.stack(keys).mean(0) for _, keys in memories]).softmax(0)
                o.append(sum(weight * (t.q @ memory) for weight, (memory, _) in zip(weights, memories, strict=True)))
            done += [(S, [i.k for i in mine])] * (len(mine) == segment)
        left = tokens[len(done) * segment :]
        now = S if left or not fresh else zeros(K, V)
        total = sum((t.k for t in left), zeros(K))
        cached = [torch.stack(part) for part in zip(*((C, torch.stack(keys).mean(0)) for C, keys in done), strict=True)]
        return o, (now, total, zeros(len(left), 0), *(cached or (zeros(0, K, V), zeros(0, K))))

    return loop


def mamba3_mimo(ranks: int) -> Loop:
    """arXiv:2603.15569, MIMO, as mamba3_step_fn of the authors' code computes it: each rank by itself, then summed."""

    def turned(x: Tensor, phase: Tensor) -> Tensor:
        pairs = min(len(phase), len(x) // 2)
        turned = torch.complex(x[:pairs], x[pairs : 2 * pairs]) * torch.exp(1j * phase[:pairs])
        return torch.cat([turned.real, turned.imag, x[2 * pairs :]])

    def placed(x: Tensor, bias: Tensor, phase: Tensor) -> list[Tensor]:
        parts = zip(x.chunk(ranks), bias.chunk(ranks), strict=True)
        return [turned(part / (part.square().mean() + 1e-5).sqrt() + one, phase) for part, one in parts]

    def loop(tokens: list[SimpleNamespace], state: tuple[Tensor, ...]) -> Any:
        (h, phase, *last), outputs = state, []
        B_last, x_last = list(last[0].chunk(ranks)), last[1]
        for t in tokens:
            phase = (phase + t.dt * t.theta) % (2 * torch.pi)
            B, C = placed(t.k, t.b, phase), placed(t.q, t.c, phase)
            alpha, mimo_x, mimo_o = torch.exp(-t.dt * t.a), t.m.view(V, ranks), t.w.view(V, ranks)
            h = alpha * h
            for r in range(ranks):
                h = h + (1 - t.lam) * t.dt * alpha * outer(B_last[r], mimo_x[:, r] * x_last)
                h = h + t.lam * t.dt * outer(B[r], mimo_x[:, r] * t.v)
            outputs.append(sum(mimo_o[:, r] * (C[r] @ h) for r in range(ranks)))
            B_last, x_last = B, t.v
        return outputs, (h, phase, torch.cat(B_last), x_last)

    return loop


PAPERS: list[tuple[str, dict[str, Any], Loop]] = [
    ("erase_then_delta", {}, one_state(erase_then_delta)),
    ("erase_then_delta", {"transition": "scalar", "gamma": 1}, one_state(erase_then_delta)),
    ("q_delta", {}, one_state(q_delta)),
    ("kaczmarz", {}, one_state(kaczmarz)),
    ("kaczmarz", {"g": 0, "eta": 1}, one_state(kaczmarz)),
    ("gated_oja", {}, one_state(gated_oja)),
    ("kalman_linear_attention", {}, kalman_linear_attention),
    ("kalman_linear_attention", {"lam": 1, "a": 1, "p": 1}, kalman_linear_attention),
    ("memory_caching", {}, memory_caching(8, True, False)),
    ("memory_caching", {"segment": 4}, memory_caching(4, True, False)),
    ("memory_caching", {"segment": 2, "memory": "iplr", "fresh": False}, memory_caching(2, False, True)),
    ("mdn", {}, mdn),
    ("mdn", {"g": 0, "beta": 1, "eta": 1, "f": 1}, mdn),
    ("mdn", {"m": {"momentum_decay": {"least": -200}}}, mdn),
    ("mamba3_mimo", {}, mamba3_mimo(2)),
    *(
        ("mamba3_mimo", {gate: {"rank_shares": {"ranks": ranks}} for gate in "mw"}, mamba3_mimo(ranks))
        for ranks in (1, 3)
    ),
]


@pytest.mark.parametrize("split", [None, 6], ids=lambda split: f"split-{split}")
@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize(("name", "knobs", "loop"), PAPERS, ids=lambda part: "" if callable(part) else str(part))
def test_rule_equals_its_paper(name: str, knobs: dict[str, Any], loop: Loop, backend: Any, split: int | None) -> None:
    rule_equals(name, knobs, loop, backend, split)


EXTREMES = {"g": 0.0, "m": 0.0, "beta": 1.0, "eta": 2.0}
SETTINGS = [rule for name in sorted({name for name, *_ in PAPERS}) for rule in deltalab.get_rule(name).variants()]


@pytest.mark.parametrize("rule", SETTINGS, ids=lambda rule: f"{rule.name} [{type(rule)().turned(rule)}]")
def test_step_says_the_same_as_scan(rule: UpdateRule) -> None:
    step_equals_scan(rule)


def test_ranks_that_do_not_divide_the_keys_are_refused() -> None:
    shares = {"rank_shares": {"ranks": 3}}
    rule, x = deltalab.get_rule("mamba3_mimo", m=shares, w=shares), zeros(1, 2, 1, 4)
    with pytest.raises(InputError, match=r"^mamba3_mimo: m.ranks 3 must divide the key channels of a head, 4$"):
        rule.start(x, x)
    with pytest.raises(InputError, match="m and w must have as many ranks, not 3 and 2"):
        deltalab.get_rule("mamba3_mimo", m=shares)


@pytest.mark.parametrize("f", [0.05, 1.0, 50.0])
@pytest.mark.parametrize("keys", ["equal", "random"])
def test_mdn_keeps_a_state_for_unit_keys(f: float, keys: str) -> None:
    """alpha + b is at most 1: without decay and with the strongest steps nothing grows, over 1024 tokens."""
    length = 1024
    start = torch.randn(1, length, 1, K, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k = torch.nn.functional.normalize(start[:, :1].expand_as(start) if keys == "equal" else start, dim=-1)
    gates = {name: torch.full((1, length, 1), value, dtype=torch.float64) for name, value in EXTREMES.items()}
    state = (torch.ones(1, 1, K, 1, dtype=torch.float64),) * 2
    gates["f"] = torch.full((1,), f, dtype=torch.float64)
    o, (S, M) = deltalab.scan(deltalab.get_rule("mdn"), k, k, torch.zeros_like(k[..., :1]), gates, state=state, scale=1)
    assert max(o.abs().max(), S.abs().max(), M.abs().max()) < 10
