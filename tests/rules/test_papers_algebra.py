"""Rules of the algebra from newer papers, written again from the papers' equations, one head and one token at a time.

Nothing here knows our operands. States are [K, V], as ours are; papers that write them the other way are transposed.
Each rule runs as `recurrent` and as `chunked`, with its state carried over a split of the sequence. test_kernels.py
and the check `kernel` hold its Triton kernel to `recurrent`.
"""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, outer

import deltalab
from deltalab.rule import UpdateRule

B, T, H, K, V = 2, 11, 3, 5, 4
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
            moving = (B, length) if gate.projected else ()
            shape = (*moving, *gate.shape(H, key_dim, value_dim))
            x[name] = low + (high - low) * random(*shape, seed=4 + i).sigmoid()
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


def pre_state_sgla(S, t):
    """Of studies/discover.yaml, of no paper: a token reads what those before it wrote."""
    value, d = getattr(t, "value", 1.0), getattr(t, "d", 0.0)
    alpha = t.g.exp()
    return alpha * S + t.beta * outer(t.k, value * t.v), (alpha * t.q - d * t.k) @ S


def pre_state_deltanet(S, t):
    """Of studies/discover.yaml, of no paper: a write erases b times as much as it writes, after the token has read."""
    erased = S - getattr(t, "b", 1.0) * t.beta * outer(t.k, t.k) @ S
    return erased + t.beta * outer(t.k, t.v), (t.q - getattr(t, "d", 0.0) * t.k) @ S


def gated_deltanet2(S, t):
    """arXiv:2605.22791: S = (I - k (b * k)^T) Diag(alpha) S + k (w * v)^T."""
    S = torch.diag(t.g.exp()) @ S
    S = S - outer(t.k, t.b * t.k) @ S + outer(t.k, getattr(t, "w", 1.0) * t.v)
    return S, t.q @ S


def mixture_of_memories(memory, t, top=2, shared=True):
    """arXiv:2502.13685: gated delta rules, each on the tokens that are sent to it; softmax weights of the top ones."""
    memory = memory if isinstance(memory, list) else [zeros(K, V)] * (len(t.p) + 1)
    chosen = t.p.argsort(descending=True)[:top].tolist()
    weights = dict(zip(chosen, torch.softmax(t.p[chosen], dim=0), strict=True)) | ({len(t.p): 1.0} if shared else {})
    after = list(memory)
    for m in weights:
        S = t.g.exp() * memory[m]
        after[m] = S + t.beta * outer(t.k, t.v - t.k @ S)
    return after, sum(weight * (t.q @ after[m]) for m, weight in weights.items())


def boosted(memory, t, stages=2, base="rla", residual=lambda e: torch.clip(e, -1, 1)):
    """Residual linear attention, A.1, with more weak learners: each fits the residual of the sum before it."""
    alpha, beta, gamma = t.g.exp() if "g" in vars(t) else 1.0, getattr(t, "beta", 1.0), getattr(t, "gamma", 1.0)
    memory = memory if isinstance(memory, list) else [zeros(K, V)] * (1 + stages)
    keep = [alpha * (torch.eye(K, dtype=torch.float64) - (base == "rdn") * x * outer(t.k, t.k)) for x in (beta, gamma)]
    after = [keep[0] @ memory[0] + beta * outer(t.k, t.v)]
    for i in range(1, stages + 1):
        error = residual(t.v - t.k @ sum(memory[:i]))
        after.append(keep[1] @ memory[i] + gamma * outer(t.k, error))
    return after, alpha * t.q @ memory[0] + gamma * t.q @ sum(after[1:])


def huber(S, t, c=1.0):
    """The same paper, App. B: S - d Huber(v - S k) / d S, by autograd; without gates in print."""
    leaf = S.clone().requires_grad_()
    loss = F.huber_loss(t.k @ leaf, t.v, reduction="sum", delta=c)
    S = (t.g.exp() if "g" in vars(t) else 1.0) * S - getattr(t, "beta", 1.0) * torch.autograd.grad(loss, leaf)[0]
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


def rwkv6(S, t):
    """arXiv:2404.05892: wkv = sum_{i<t} diag(prod w) k_i^T v_i + diag(u) k_t^T v_t, o = r wkv; w = exp(-exp(d))."""
    u = getattr(t, "u", torch.ones(K, dtype=torch.float64))
    o = t.q @ (S + torch.diag(u) @ outer(t.k, t.v))
    return torch.diag(t.g.exp()) @ S + outer(t.k, t.v), o


def rwkv6_without_bonus(S, t):
    """u = 0."""
    return torch.diag(t.g.exp()) @ S + outer(t.k, t.v), t.q @ S


def lightnet(memory, t):
    """arXiv:2405.21022: a_t = sum_{i<=t} exp(k_i), and row c of the state is sum exp(k_ic) v_i / a_tc."""
    total, weighed = memory
    total, weighed = total + t.k.exp(), weighed + outer(t.k.exp(), t.v)
    return (total, weighed), F.silu(t.q) @ (weighed / total[:, None])


def mlstm(memory, t):
    """arXiv:2405.04517, Eq. 19-27: C = f C + i v k^T, n = f n + i k, h = C q / max(|n^T q|, 1), unstabilized."""
    C, n = memory
    f, i = t.g.exp(), getattr(t, "i", torch.zeros((), dtype=torch.float64)).exp()
    C, n = f * C + i * outer(t.k, t.v), f * n + i * t.k
    return (C, n), t.q @ C / torch.clamp((n @ t.q).abs(), min=1)


def mlstm_stabilized(memory, t):
    """Its stabilized form: m = max(log f + m, log i), and max(|n^T q|, exp(-m)) in the output."""
    C, n, m = memory
    after = torch.maximum(t.g + m, t.i)
    f, i = torch.exp(t.g + m - after), torch.exp(t.i - after)
    C, n = f * C + i * outer(t.k, t.v), f * n + i * t.k
    return (C, n, after), t.q @ C / torch.maximum((n @ t.q).abs(), torch.exp(-after))


def preconditioned(memory, t, squash=1.5):
    """arXiv:2604.21100, the gated delta rule whose writing key is divided by the squashed curvature A = sum of k^2."""
    S, A = memory
    A = getattr(t, "g_p", torch.zeros(())).exp() * A + getattr(t, "beta_p", 1.0) * t.k**2
    r = torch.log(A + 1e-6) - getattr(t, "center", 0.0)
    key = t.k * torch.exp(-math.log(squash) * r / (1 + r.abs()))
    S = t.g.exp().reshape(-1, 1) * S  # one decay, or one for each channel (PKDA)
    S = S + t.beta * outer(key, t.v - t.k @ S)
    return (S, A), t.q @ S


def mamba3(memory, t):
    """arXiv:2603.15569, Prop. 1 and 4: h = alpha R h + beta R B_{t-1} x_{t-1} + gamma B x, the state itself turning."""
    S, last = memory
    width = t.k.shape[-1]
    B, C = (x / (x.square().mean() + 1e-5).sqrt() for x in (t.k, t.q))
    B, C = B + getattr(t, "b", 0.0), C + getattr(t, "c", 0.0)
    R = torch.eye(width, dtype=torch.float64)
    for p, theta in enumerate(getattr(t, "theta", [])):
        angle, other = theta * t.dt, p + len(t.theta)
        R[p, p] = R[other, other] = torch.cos(angle)
        R[p, other], R[other, p] = torch.sin(angle), -torch.sin(angle)
    alpha, lam = torch.exp(-t.dt * getattr(t, "a", 1.0)), getattr(t, "lam", 1.0)
    S = alpha * R @ S + (1 - lam) * t.dt * alpha * R @ last + lam * t.dt * outer(B, t.v)
    return (S, outer(B, t.v)), C @ S


# --- Slots


def gsa(memory, t):
    """arXiv:2409.07146: K~ = diag(a) K~ + (1 - a) k^T, V~ the same of v, o = V~^T softmax(K~ q); a = exp(g)."""
    keys, values = memory if isinstance(memory, tuple) else (zeros(len(t.g), K), zeros(len(t.g), V))
    a = torch.diag(t.g.exp())
    keys, values = a @ keys + outer(1 - t.g.exp(), t.k), a @ values + outer(1 - t.g.exp(), t.v)
    return (keys, values), torch.softmax(keys @ t.q, dim=0) @ values


def raven(memory, t, top=4):
    """Raven, as FLA's layer: GSA whose log-decays are those of the chosen slots, times their share of the scores."""
    keys, values = memory if isinstance(memory, tuple) else (zeros(len(t.p), K), zeros(len(t.p), V))
    chosen, f = t.p.argsort(descending=True)[:top], zeros(len(t.p))
    f[chosen] = t.g * t.p[chosen] / (t.p[chosen].sum() + 1e-9)
    q, k = (x / (x.square().mean() + 1e-5).sqrt() for x in (t.q, t.k))
    a = torch.diag(f.exp())
    keys, values = a @ keys + outer(1 - f.exp(), k), a @ values + outer(1 - f.exp(), t.v)
    return (keys, values), torch.softmax(keys @ q, dim=0) @ values


def abc(memory, t):
    """arXiv:2110.02488, Section 3.4: slots are sums of phi_i k_i^T, phi = exp(s), over the sum of all phi so far."""
    memory = [*memory, (t.s.exp(), t.k, t.v)]
    total = sum(phi for phi, _, _ in memory)
    keys = sum(outer(phi / total, k) for phi, k, _ in memory)
    values = sum(outer(phi / total, v) for phi, _, v in memory)
    return memory, torch.softmax(keys @ t.q, dim=0) @ values


# --- Feature maps


def based(memory, t):
    """arXiv:2402.18668, Section 4.1: weights 1 + x + x^2 / 2 with x = q^T k / sqrt(d), normalized."""
    x = torch.stack([t.q @ k for k, _ in [*memory, (t.k, t.v)]]) / math.sqrt(K)
    weights = 1 + x + x**2 / 2
    memory = [*memory, (t.k, t.v)]
    return memory, weights @ torch.stack([v for _, v in memory]) / weights.sum()


def based_sum(memory, t):
    """The same without a normalizer."""
    memory = [*memory, (t.k, t.v)]
    x = torch.stack([t.q @ k for k, _ in memory]) / math.sqrt(K)
    return memory, (1 + x + x**2 / 2) @ torch.stack([v for _, v in memory])


def rebased(normalize=True):
    """arXiv:2402.10644: weights (q'^T k')^2 with x' = gamma norm(x) + beta, normalized with FLA's epsilon."""

    def placed(x, gamma, beta):
        x = (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt() if normalize else x
        return gamma * x + beta

    def step(memory, t):
        q = placed(t.q, getattr(t, "gamma_q", 1.0), getattr(t, "beta_q", 0.0))
        memory = [*memory, (placed(t.k, getattr(t, "gamma_k", 1.0), getattr(t, "beta_k", 0.0)), t.v)]
        weights = torch.stack([(q @ k) ** 2 for k, _ in memory]) / K
        return memory, weights @ torch.stack([v for _, v in memory]) / (weights.sum() + 1e-5)

    return step


def heavy_ball(memory, t, eta=0.5):
    """Polyak 1964 on 1/2 |S^T k - v|^2: Z = eta Z - beta grad, S = S + Z, with the gradient by autograd."""
    S, Z = memory
    leaf = S.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((t.k @ leaf - t.v).square().sum() / 2, leaf)
    Z = getattr(t, "eta", eta) * Z - t.beta * gradient
    return (S + Z, Z), t.q @ (S + Z)


def deltanet(memory, t):
    return heavy_ball(memory, t, eta=0.0)


PAPERS = [
    ("efla", {}, efla),
    ("efla", {"g": "mamba2_decay", "beta": {"sigmoid": {"max": 2}}}, efla),
    ("efla", {"normalize": True}, efla_by_the_matrix_exponential),
    ("efla", {}, efla_by_the_matrix_exponential),
    ("longhorn", {}, longhorn),
    ("longhorn", {"normalize": True}, longhorn),
    ("longhorn", {"transition": "householder"}, longhorn_exact),
    ("preconditioned_gated_deltanet", {"transition": "channel"}, preconditioned),
    ("pre_state_sgla", {}, pre_state_sgla),
    ("pre_state_sgla", {"value": 1, "d": 0}, pre_state_sgla),
    ("pre_state_deltanet", {}, pre_state_deltanet),
    ("pre_state_deltanet", {"b": 1, "d": 0}, pre_state_deltanet),
    ("gated_deltanet2", {}, gated_deltanet2),
    ("gated_deltanet2", {"b": {"sigmoid": {"max": 2}}, "w": 1}, gated_deltanet2),
    ("mom", {}, mixture_of_memories),
    ("mom", {"top": 3, "shared": False}, partial(mixture_of_memories, top=3, shared=False)),
    ("raven", {}, raven),
    ("raven", {"top": 2, "p": {"router": {"slots": 8}}}, partial(raven, top=2)),
    ("rla_stages", {}, boosted),
    ("rla_stages", {"stages": 3, "base": "rdn"}, partial(boosted, stages=3, base="rdn")),
    ("rla_stages", {"loss": "log_cosh", "g": 0, "gamma": 1}, partial(boosted, residual=torch.tanh)),
    ("huber_deltanet", {"g": 0, "beta": 1}, huber),
    ("huber_deltanet", {}, huber),
    ("huber_deltanet", {"g": "mamba2_decay", "clip": 0.5}, partial(huber, c=0.5)),
    ("mamba", {}, mamba),
    ("mamba", {"dt": 1}, mamba),
    ("mamba", {"a": 1}, mamba),
    ("rodimus", {}, rodimus),
    ("rodimus", {"tau": 1, "beta": 1}, rodimus),
    ("rwkv6", {}, rwkv6),
    ("rwkv6", {"u": 1}, rwkv6),
    ("rwkv6", {"u": 0}, rwkv6_without_bonus),
    ("rwkv5", {}, rwkv6),  # w is the same for all tokens
    ("rwkv5", {"u": 1}, rwkv6),
    ("rwkv5", {"u": 0}, rwkv6_without_bonus),
    ("lightnet", {}, lightnet),
    ("mlstm", {}, mlstm),
    ("mlstm", {"g": {"log_gate": {"init": 3}}}, mlstm),
    ("mlstm", {"g": {"log_gate": {"init": 3}}}, mlstm_stabilized),
    ("mlstm", {"i": 0}, mlstm),
    ("preconditioned_gated_deltanet", {}, preconditioned),
    ("preconditioned_gated_deltanet", {"squash": 2.0}, partial(preconditioned, squash=2.0)),
    ("preconditioned_gated_deltanet", {"g_p": 0, "beta_p": 1, "center": 0}, preconditioned),
    ("mamba3", {}, mamba3),
    ("mamba3", {"lam": 1}, mamba3),
    ("mamba3", {"theta": 0}, mamba3),
    ("mamba3", {"lam": 1, "theta": 0, "a": 1, "b": 0, "c": 0}, mamba3),
    ("gsa", {}, gsa),
    ("gsa", {"g": {"slot_decay": {"slots": 3, "tau": 1}}}, gsa),
    ("abc", {}, abc),
    ("based", {}, based),
    ("based", {"normalize": False}, based_sum),
    ("rebased", {}, rebased()),
    ("rebased", {"normalize": False, "gamma_q": 1, "beta_k": 0}, rebased(normalize=False)),
    ("momentum_deltanet", {}, heavy_ball),
    ("momentum_deltanet", {"eta": 0.5, "beta": {"sigmoid": {"max": 2}}}, heavy_ball),
    ("momentum_deltanet", {"eta": 0}, deltanet),
]


def empty(step: object) -> object:
    """What a step remembers of nothing."""
    S, more = zeros(K, V), {"lightnet": (zeros(K), zeros(K, V)), "mlstm": (zeros(K, V), zeros(K))}
    more |= {"mlstm_stabilized": (S, zeros(K), torch.zeros((), dtype=torch.float64)), "preconditioned": (S, zeros(K))}
    more |= {
        "mamba3": (S, S),
        "heavy_ball": (S, S),
        "deltanet": (S, S),
        "abc": [],
        "based": [],
        "based_sum": [],
        "step": [],
    }
    return more.get(named(step), S)


def named(value: object) -> str:
    value = getattr(value, "func", value)
    return getattr(value, "__name__", str(value or "full"))


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize(("name", "knobs", "step"), PAPERS, ids=named)
def test_rule_is_its_papers_recurrence(name, knobs, step, backend):
    rule = deltalab.get_rule(name, **knobs)
    x = draw(rule)
    wanted = by_paper(step, x, empty(step))
    whole, last = scan(rule, x, backend)
    close(whole, wanted)
    first, state = scan(rule, part(x, 0, 6), backend)
    second, again = scan(rule, part(x, 6), backend, state)
    close(torch.cat([first, second], dim=1), wanted)
    for one, other in zip(last, again, strict=True):
        close(one, other)


@pytest.mark.parametrize("base", ["rla", "rdn"])
def test_one_stage_is_the_papers_own_rule(base):
    stages = deltalab.get_rule("rla_stages", stages=1, base=base)
    x = draw(stages)
    for ours, theirs in zip(scan(stages, x, "chunked"), scan(deltalab.get_rule(base), x, "chunked"), strict=True):
        torch.testing.assert_close(ours, theirs)


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


def test_the_phase_of_mamba3_stays_exact_over_16000_tokens() -> None:
    """In fp32 a sum of all angles would be off by 1e-4; in [0, 2 pi) the phase is off by its own rounding."""
    rule, T = deltalab.get_rule("mamba3", lam=1, b=0, c=0), 16_000
    generator = torch.Generator().manual_seed(0)
    q, dt, theta = torch.ones(1, T, 1, 4), 0.1 + torch.zeros(1, T, 1), 3 * torch.rand(1, T, 1, 2, generator=generator)
    given = {"dt": dt, "a": dt, "lam": dt, "theta": theta, "b": torch.zeros(1), "c": torch.zeros(1)}
    out = {}
    for dtype in (torch.float32, torch.float64):
        x, gates = q.to(dtype), {name: value.to(dtype) for name, value in given.items()}
        out[dtype] = rule.operands(x, x, x, **gates, carry=rule.carried(x, x))
    assert (out[torch.float32].r - out[torch.float64].r).abs().max() < 2e-6
    (phase,) = out[torch.float32].carry
    assert ((phase >= 0) & (phase < 2 * math.pi + 1e-6)).all()
    x, gates = q.to(torch.float32), given
    state = rule.start(x, x)
    for t in range(2000):
        token = {name: value[:, t] if value.dim() > 2 else value for name, value in gates.items()}
        _, state = rule.step(x[:, t], x[:, t], x[:, t], scale=1.0, state=state, **token)
    exact = (dt.double()[..., None] * theta.double())[:, :2000].sum(1).remainder(2 * math.pi)
    assert (state[1].double() - exact).abs().max() < 1e-4
