"""Rules of the algebra from newer papers, written again from the papers' equations, one head and one token at a time.

Nothing here knows our operands. States are [K, V], as ours are; papers that write them the other way are transposed.
Each rule runs as `recurrent` and as `chunked`, with its state carried over a split of the sequence, and as a Triton
kernel in fp32 at one small size.
"""

import math
import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, outer

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import deltalab
from deltalab.ops.backends import lacks_triton
from deltalab.rule import UpdateRule

B, T, H, K, V = 2, 11, 3, 5, 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Step = Callable[..., tuple[object, Tensor]]
"""(what the head remembers, the token's inputs) to what it remembers next, and o."""

Inputs = dict[str, Tensor]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(rule: UpdateRule, *, key_dim: int = K, value_dim: int = V, length: int = T) -> Inputs:
    """q, k, v, unit where the rule takes them so, and gates inside their ranges."""
    x = {"q": random(B, length, H, key_dim, seed=1), "k": random(B, length, H, key_dim, seed=2)}
    if rule.features == "unit":
        x = {name: F.normalize(value, dim=-1) for name, value in x.items()}
    x["v"] = 2 * random(B, length, H, value_dim, seed=3)
    for i, (name, gate) in enumerate(rule.gates.items()):
        if not gate.constant:
            low, high = max(gate.low, -2.0), min(gate.high, 2.0)
            learned = {"head": (H,), "head_channel": (H, key_dim)}
            moving = (B, length, H, key_dim) if gate.per == "channel" else (B, length, H)
            x[name] = low + (high - low) * random(*learned.get(gate.per, moving), seed=4 + i).sigmoid()
    return x


def scan(rule: UpdateRule, x: Inputs, backend: str, state=None) -> tuple[Tensor, tuple[Tensor, ...]]:
    gates = {name: value for name, value in x.items() if name not in "qkv"}
    return deltalab.scan(rule, x["q"], x["k"], x["v"], gates, scale=1.0, state=state, backend=backend, chunk_size=4)


def by_paper(step: Step, x: Inputs, start: object) -> Tensor:
    """o [B, T, H, V] by the paper's equations, each head of each sequence by itself."""
    o = torch.zeros_like(x["v"])
    for b in range(B):
        for h in range(H):
            memory = start
            for t in range(o.shape[1]):
                token = {name: value[h] if value.dim() < 3 else value[b, t, h] for name, value in x.items()}
                memory, o[b, t, h] = step(memory, SimpleNamespace(**token))
    return o


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def part(x: Inputs, start: int, stop: int | None = None) -> Inputs:
    return {name: value if value.dim() < 3 else value[:, start:stop] for name, value in x.items()}


# --- The delta rule and its kin


def efla(S, t):
    """arXiv:2512.12602, exact solution: S = (I - a k k^T) S + a k v^T, a = (1 - e^(-beta lambda)) / lambda."""
    lam = t.k @ t.k
    a = (1 - torch.exp(-t.beta * lam)) / lam
    if "g" in vars(t):
        S = t.g.exp() * S
    S = S - a * outer(t.k, t.k) @ S + a * outer(t.k, t.v)
    return S, t.q @ S


def efla_by_the_matrix_exponential(S, t):
    """Its derivation, e^(-beta A) S + int_0^beta e^(-(beta - s) A) k v^T ds with A = k k^T: one block exponential."""
    block = zeros(K + V, K + V)
    block[:K, :K] = -outer(t.k, t.k)
    block[:K, K:] = outer(t.k, t.v)
    power = torch.linalg.matrix_exp(t.beta * block)
    S = power[:K, :K] @ S + power[:K, K:]
    return S, t.q @ S


def longhorn(S, t):
    """arXiv:2407.14207, Algorithm 1: Delta = beta / (1 + beta k^T k), S = (1 - Delta k^2) S + Delta k x."""
    delta = t.beta / (1 + t.beta * (t.k @ t.k))
    S = torch.diag(1 - delta * t.k**2) @ S + delta * outer(t.k, t.v)
    return S, t.q @ S


def longhorn_exact(S, t):
    """Theorem 3.1: the minimum of |S' - S|^2 + beta |S'^T k - v|^2, by its normal equations."""
    S = torch.linalg.solve(torch.eye(K, dtype=torch.float64) + t.beta * outer(t.k, t.k), S + t.beta * outer(t.k, t.v))
    return S, t.q @ S


# --- Selective state spaces


def mamba(S, t):
    """arXiv:2312.00752, Algorithm 2 with A = -a: h = exp(Delta A) h + Delta B x, y = C h."""
    dt, a = getattr(t, "dt", 1.0), getattr(t, "a", torch.ones(K, dtype=torch.float64))
    S = torch.exp(-dt * a)[:, None] * S + dt * outer(t.k, t.v)
    return S, t.q @ S


def rodimus(S, t):
    """arXiv:2410.06577: alpha = exp(-g tau), hat alpha = g^tau; S = diag(alpha) S + (hat alpha k)^T (beta v)."""
    tau = getattr(t, "tau", torch.ones(K, dtype=torch.float64))
    S = torch.diag(torch.exp(-t.s * tau)) @ S + outer(t.s**tau * t.k / t.k.norm(), getattr(t, "beta", 1.0) * t.v)
    return S, t.q @ S


PAPERS = [
    ("efla", {}, efla),
    ("efla", {"g": "mamba2_decay", "beta": {"sigmoid": {"max": 2}}}, efla),
    ("efla", {"normalize": True}, efla_by_the_matrix_exponential),
    ("efla", {}, efla_by_the_matrix_exponential),
    ("longhorn", {}, longhorn),
    ("longhorn", {"normalize": True}, longhorn),
    ("longhorn", {"transition": "householder"}, longhorn_exact),
    ("mamba", {}, mamba),
    ("mamba", {"dt": 1}, mamba),
    ("mamba", {"a": 1}, mamba),
    ("rodimus", {}, rodimus),
    ("rodimus", {"tau": 1, "beta": 1}, rodimus),
]
"""Rules, knobs and steps whose memory starts as an empty S [K, V]."""

START: dict[str, object] = {}
"""The empty memory of a step that remembers more than S."""


def named(value: object) -> str:
    return getattr(value, "__name__", str(value or "full"))


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize(("name", "knobs", "step"), PAPERS, ids=named)
def test_rule_is_its_papers_recurrence(name, knobs, step, backend):
    rule = deltalab.get_rule(name, **knobs)
    x = draw(rule)
    wanted = by_paper(step, x, START.get(name, zeros(K, V)))
    whole, last = scan(rule, x, backend)
    close(whole, wanted)
    first, state = scan(rule, part(x, 0, 6), backend)
    second, again = scan(rule, part(x, 6), backend, state)
    close(torch.cat([first, second], dim=1), wanted)
    for one, other in zip(last, again, strict=True):
        close(one, other)


@pytest.mark.skipif(lacks_triton(DEVICE) is not None, reason="no Triton")
@pytest.mark.parametrize(("name", "step"), [(n, s) for n, k, s in PAPERS if not k], ids=named)
def test_kernel_is_its_papers_recurrence(name, step):
    rule = deltalab.get_rule(name)
    x = draw(rule, length=5)
    wanted = by_paper(step, x, START.get(name, zeros(K, V)))
    single = {key: value.float().to(DEVICE) for key, value in x.items()}
    ours, _ = scan(rule, single, "triton")
    close(ours.double().cpu(), wanted, 1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", sorted({name for name, *_ in PAPERS}))
def test_step_is_the_papers_recurrence(name):
    rule = deltalab.get_rule(name)
    x = draw(rule)
    wanted, _ = scan(rule, x, "recurrent")
    state = rule.start(x["k"], x["v"])
    for t in range(T):
        token = {key: value if value.dim() < 3 else value[:, t] for key, value in x.items()}
        q, k, v = (token.pop(key) for key in "qkv")
        constant = {n: gate.value(zeros(H), {}) for n, gate in rule.gates.items() if n not in token}
        o, state = rule.step(q, k, v, scale=1.0, state=state, **token, **constant)
        close(o, wanted[:, t])


def test_efla_writes_nothing_for_a_zero_key_and_differentiates_there():
    rule = deltalab.get_rule("efla")
    x = draw(rule, length=3)
    x["k"][:, 1] = 0
    x = {name: value.requires_grad_() for name, value in x.items()}
    o, _ = scan(rule, x, "chunked")
    assert o.isfinite().all()
    for gradient in torch.autograd.grad(o.sum(), list(x.values())):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("norm", [1e-12, 1e-6, 1e-3, 0.029, 0.031, 1.0, 30.0])
def test_eflas_strength_and_gradient_are_exact_for_short_and_long_keys(norm):
    """Against (1 - e^(-z)) / z in fp64 by its Taylor series or quotient, whichever converges."""
    rule = deltalab.get_rule("efla")
    k = torch.full((1, 1, 1, 1), math.sqrt(norm), dtype=torch.float32)
    beta = torch.ones(1, 1, 1, dtype=torch.float32, requires_grad=True)
    e = rule.operands(k, k, k, g=torch.zeros(1), beta=beta).e
    (slope,) = torch.autograd.grad(e.sum(), beta)
    assert math.isclose(e.item(), -math.expm1(-norm) / norm, rel_tol=2e-6)
    assert math.isclose(slope.item(), math.exp(-norm), rel_tol=2e-5, abs_tol=1e-7)
