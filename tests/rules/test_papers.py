"""The papers' recurrences written again from their text, one head and one token at a time, against our two forms.

Nothing here knows our operands. A state is the papers' S [V, K], the transpose of ours, except where a paper writes
it the other way; K and V differ, so that a transposition cannot pass.

The rules whose state learns online are in test_nonlinear.py. 000 is Comba (arXiv:2506.02475), 001 "Enhancing linear
attention with residual learning", 002 "What's next for Mamba?", 004 Gated KalmaNet (arXiv:2511.21016).
"""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.support.papers import (
    B,
    H,
    Inputs,
    K,
    T,
    V,
    by_paper,
    chebyshev,
    clip,
    close,
    comba_dplr,
    comba_iplr,
    comba_splr,
    conjugate_gradient,
    deltanet,
    draw,
    exact,
    eye,
    gated,
    gated_deltanet,
    gka,
    kda,
    l2,
    miras,
    pair,
    plain_sum,
    random,
    rdn,
    residual_agrees,
    rla,
    rule,
    scalar_gated,
    scan,
    ungated,
    without_fitting,
)
from torch import Tensor, outer

import deltalab


def only(x: Inputs, *names: str, **values: Tensor) -> Inputs:
    return {name: x[name] for name in ("q", "k", "v", *names)} | values


# --- Linear family


def linear_attention(S, t):
    """001 Section 2.1, 002."""
    S = S + outer(t.v, t.k)
    return S, S @ t.q


def elu_attention(S, t):
    """arXiv:2006.16236 Eq. 7, phi(x) = elu(x) + 1, without the normalizer."""
    S = S + outer(t.v, F.elu(t.k) + 1)
    return S, S @ (F.elu(t.q) + 1)


def retnet(S, t):
    """arXiv:2307.08621 Eq. 6 and 8, in its own orientation S_n = gamma S_{n-1} + K_n^T V_n, gamma = 1 - 2^(-5 - h)."""
    S = (1 - 2.0 ** (-5 - t.head)) * S.T + outer(t.k, t.v)
    return S.T, t.q @ S


def lightning(S, t):
    """002: fixed gamma; the slopes are ALiBi's, gamma = exp(-2^(-8 h / H)) for h = 1 .. H."""
    S = math.exp(-(2 ** (-8 * (t.head + 1) / H))) * S + outer(t.v, t.k)
    return S, S @ t.q


def gla(S, t):
    """000 Table 1; 002: G_t = 1 alpha_t^T, so that a column, a channel of the key, decays as one."""
    S = S @ torch.diag(t.alpha) + outer(t.v, t.k)
    return S, S @ t.q


def hgrn2(S, t):
    """000 Table 1: the key is 1 - alpha."""
    S = S @ torch.diag(t.alpha) + outer(t.v, 1 - t.alpha)
    return S, S @ t.q


# --- Bilinear family


def deltanet_reads_and_writes(S, t):
    """arXiv:2406.06484 Section 2: what k held is taken out, and a mixture of it and v put in."""
    old = S @ t.k
    new = t.beta * t.v + (1 - t.beta) * old
    S = S - outer(old, t.k) + outer(new, t.k)
    return S, S @ t.q


def delta_product(S, t):
    """arXiv:2502.10297: n_h delta rules on one token, A = g prod_j (I - beta_j k_j k_j^T); g = 1 without a gate."""
    S = getattr(t, "alpha", 1.0) * S
    for k, v, beta in zip(t.k.reshape(-1, K), t.v.reshape(-1, V), t.beta.reshape(-1), strict=True):
        S = S @ (eye() - beta * outer(k, k)) + beta * outer(v, k)
    return S, S @ t.q


def rwkv7(S, t):
    """arXiv:2503.14456: S (diag(w) - kappa^T (a * kappa)) + v^T k~, all vectors rows; lerp(1, a, rho) scales k~."""
    kappa = t.k * t.xi
    kappa = kappa / kappa.norm()
    replacement = t.k * torch.lerp(torch.ones(K, dtype=torch.float64), t.a, t.rho)
    S = S @ (torch.diag(t.alpha) - outer(kappa, t.a * kappa)) + outer(t.v, replacement)
    return S, S @ t.q


def comba_b1(S, t):
    """000 Listing 1 (App. B.1), whose S is [K, V]."""
    S = S.T
    q_new = t.q - t.d * t.k
    v_new = t.beta * (t.v - t.b * (S * t.k[..., None]).sum(-2))
    S = t.alpha * S + t.k.unsqueeze(-1) * v_new.unsqueeze(-2)
    return S.T, torch.einsum("d,dm->m", q_new, S)


def comba_b3(S, t):
    """000 Listing 2 (App. B.3), with p = b k."""
    S, p = S.T, t.b * t.k
    q_new = t.q - t.d * p
    v_new = t.beta * (t.v - (S * p[..., None]).sum(-2))
    S = t.alpha * S + t.k.unsqueeze(-1) * v_new.unsqueeze(-2)
    return S.T, torch.einsum("d,dm->m", q_new, S)


ONE_STATE = [
    ("linear_attention", {}, linear_attention),
    ("linear_attention", {"feature_map": "elu"}, elu_attention),
    ("retnet", {}, retnet),
    ("retnet", {"g": "lightning_decay"}, lightning),
    ("mamba2", {}, scalar_gated),
    ("sgla", {}, scalar_gated),
    ("metala", {}, scalar_gated),
    ("gla", {}, gla),
    ("hgrn2", {}, hgrn2),
    ("deltanet", {}, deltanet),
    ("deltanet", {}, deltanet_reads_and_writes),
    ("deltanet", {"beta": {"sigmoid": {"max": 2}}}, deltanet),
    ("gated_deltanet", {}, gated_deltanet),
    ("gated_deltanet", {"beta": {"sigmoid": {"max": 2}}}, gated_deltanet),
    *[("delta_product", {"n_h": n}, delta_product) for n in (1, 2, 3, 4)],
    ("delta_product", {"n_h": 3, "g": "mamba2_decay"}, delta_product),
    ("kda", {}, kda),
    ("rwkv7", {}, rwkv7),
    ("comba", {}, comba_splr),
    ("comba", {}, comba_b1),
    ("comba", {"correction": "p"}, comba_b3),
    ("comba", {"transition": "iplr"}, comba_iplr),
    ("comba", {"transition": "dplr"}, comba_dplr),
    ("comba", {"transition": "dplr", "g": "low_rank_decay"}, comba_dplr),
    ("comba", {"beta": 1}, comba_splr),
    ("comba", {"beta": "mamba2_step"}, comba_splr),
    ("comba", {"g": "metala_decay", "beta": "metala_input"}, comba_splr),
    *[("miras", {"p": p}, miras(p)) for p in (1.0, 1.5, 2.0)],
    *[("miras", {"p": p, "reads": "decayed_state"}, miras(p, "decayed")) for p in (1.5, 2.0)],
    *[("miras", {"p": p, "reads": "written_state"}, miras(p, "written")) for p in (1.0, 1.5, 2.0, 3.0)],
]


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize("given", [False, True], ids=["empty", "given"])
@pytest.mark.parametrize(("name", "knobs", "step"), ONE_STATE, ids=lambda p: getattr(p, "__name__", str(p or "full")))
def test_rule_is_its_papers_recurrence(name, knobs, step, given, backend):
    rule = deltalab.get_rule(name, **knobs)
    x = draw(rule)
    state = random(B, H, K, V, seed=99) if given else torch.zeros(B, H, K, V, dtype=torch.float64)
    o, last = by_paper(step, x, rule.steps, state.mT)
    ours, (after,) = scan(rule, x, backend, (state,) if given else None)
    close(ours, o)
    close(after, last.mT)


# --- Residual family


RESIDUAL = [
    ({}, clip(1), gated),
    ({"clip": 0.5}, clip(0.5), gated),
    ({"loss": "log_cosh"}, torch.tanh, gated),
    ({"loss": "l2"}, l2, gated),
    ({"output": "sum"}, clip(1), plain_sum),
    ({"normalize": False}, clip(1), gated),
]


@pytest.mark.parametrize("given", [False, True], ids=["empty", "given"])
@pytest.mark.parametrize(
    ("knobs", "pseudo_residual", "output"), RESIDUAL, ids=[str(knobs or "full") for knobs, *_ in RESIDUAL]
)
@pytest.mark.parametrize("update", [rla, rdn])
def test_residual_rule_is_its_papers_recurrence(update, knobs, pseudo_residual, output, given):
    rule = deltalab.get_rule(update.__name__, **knobs)
    x = draw(rule)
    if not knobs.get("normalize", True):
        x["k"] = x["k"] / 2  # (I - gamma k k^T) is a contraction up to |k|^2 = 2
    residual_agrees(rule, pair(update, pseudo_residual, output), x, given=given)


@pytest.mark.parametrize(("knobs", "pseudo_residual"), [({"loss": "l2"}, l2), ({}, clip(1))], ids=["3.1", "App. B"])
@pytest.mark.parametrize("update", [rla, rdn])
def test_without_gates_it_is_the_rule_of_section_3_1(update, knobs, pseudo_residual):
    rule = deltalab.get_rule(update.__name__, g=0, beta=1, gamma=1, **knobs)
    residual_agrees(rule, pair(ungated(update), pseudo_residual, plain_sum), draw(rule))


@pytest.mark.parametrize(("name", "loss"), [("rla", "l2"), ("rla", "huber"), ("rdn", "l2"), ("rdn", "log_cosh")])
def test_without_gates_it_is_gradient_boosting(name, loss):
    """001 App. A.2: both states descend an inner loss, R on the pseudo-residual of an outer loss; f(x; S) = S x.

    Inner: -<v, f(k)> (App. B), and half the squared error for the delta rule (Section 2.2). Outer: App. B.
    """
    outer_losses = {
        "l2": lambda f, v: (f - v).square().sum() / 2,
        "huber": lambda f, v: F.huber_loss(f, v, reduction="sum"),
        "log_cosh": lambda f, v: (v - f).cosh().log().sum(),
    }

    def descended(W, k, v):
        W = W.detach().requires_grad_()
        inner = -(v @ (W @ k)) if name == "rla" else (W @ k - v).square().sum() / 2
        return W.detach() - torch.autograd.grad(inner, W)[0]

    def step(SR, t):
        S, R = SR
        f = (S @ t.k).requires_grad_()
        r = -torch.autograd.grad(outer_losses[loss](f, t.v), f)[0]
        R = descended(R, t.k, r)
        return torch.stack([descended(S, t.k, t.v), R]), S @ t.q + R @ t.q

    rule = deltalab.get_rule(name, g=0, beta=1, gamma=1, loss=loss)
    residual_agrees(rule, step, draw(rule))


@pytest.mark.parametrize("update", [rla, rdn])
def test_without_fitting_the_correction_is_the_current_tokens(update):
    rule = deltalab.get_rule(update.__name__, fitting=False, loss="l2")
    residual_agrees(rule, pair(without_fitting(update), l2, gated), draw(rule))


def test_rla_is_listing_1_of_its_paper():
    rule = deltalab.get_rule("rla")
    x = draw(rule)
    o, (S_last, R_last) = scan(rule, x, "chunked")
    for b in range(B):
        for h in range(H):
            q, k, v = (x[name][b, :, h] for name in "qkv")
            alpha, beta, gamma = x["g"][b, :, h].exp(), x["beta"][b, :, h], x["gamma"][b, :, h]
            S = R = torch.zeros(K, V, dtype=torch.float64)
            for t in range(T):
                qt, kt, vt = q[t : t + 1], k[t : t + 1], v[t : t + 1]
                qt, kt = F.normalize(qt, dim=-1), F.normalize(kt, dim=-1)
                rt = torch.clip(vt - kt @ S, min=-1, max=1)
                R = alpha[t] * R + gamma[t] * kt.T @ rt
                close(o[b, t, h], (alpha[t] * qt @ S + gamma[t] * qt @ R)[0])
                S = alpha[t] * S + beta[t] * kt.T @ vt
            close(S_last[b, h], S)
            close(R_last[b, h], R)


# --- Ridge regression


GKA = [
    ({}, gka(chebyshev, 30)),
    ({"iterations": 1}, gka(chebyshev, 1)),
    ({"iterations": 10, "ridge": 0.2}, gka(chebyshev, 10, a=0.2)),
    ({"iterations": 10, "adaptive": False, "ridge": 0.25}, gka(chebyshev, 10, a=0.25, adaptive=False)),
    ({"iterations": 10, "g": 0}, gka(chebyshev, 10)),
    ({"iterations": 3, "solver": "cg"}, gka(conjugate_gradient, 3)),
    ({"solver": "exact"}, gka(exact, 0)),
]


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize("given", [False, True], ids=["empty", "given"])
@pytest.mark.parametrize(("knobs", "step"), GKA, ids=[str(knobs or "full") for knobs, _ in GKA])
def test_gka_is_its_papers_recurrence(knobs, step, given, backend):
    rule = deltalab.get_rule("gka", **knobs)
    x = draw(rule)
    keys = given * random(B, H, K, K, seed=95)
    state = keys @ keys.mT / K, given * random(B, H, K, V, seed=94)
    o, last = by_paper(step, x, 1, torch.cat([state[0], state[1].mT], dim=2))
    ours, (gram, memory) = scan(rule, x, backend, state if given else None)
    close(ours, o)
    close(gram, last[:, :, :K])
    close(memory, last[:, :, K:].mT)


@pytest.mark.parametrize("ridge", [1.0, 0.01])
def test_kalman_is_the_papers_recursion(ridge):
    """004 (KF): S - (S k - v) k^T Phi / (1 / eta + k^T Phi k), with Phi the inverse Hessian of Eq. 3, inverted anew."""

    def step(HS, t):
        hessian, S = HS[:K], HS[K:]
        phi = torch.linalg.inv(hessian)
        S = S - outer(S @ t.k - t.v, t.k) @ phi / (1 / t.eta + t.k @ phi @ t.k)
        return torch.cat([hessian + t.eta * outer(t.k, t.k), S]), S @ t.q

    rule = deltalab.get_rule("kalman", ridge=ridge)
    x = draw(rule)
    start = torch.cat([ridge * eye(), torch.zeros(V, K, dtype=torch.float64)]).expand(B, H, -1, -1)
    o, last = by_paper(step, x, 1, start)
    ours, (inverse, memory) = scan(rule, x, "chunked")
    close(ours, o)
    close(inverse, torch.linalg.inv(last[:, :, :K]))
    close(memory, last[:, :, K:].mT)


# --- Attention


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize("window", [0, 1, 4])
def test_attention_appends_and_drops(window, backend):
    """000 Table 1: S.append(k_t, v_t).drop(k_{t-M}, v_{t-M}); 004 (Attn): weights exp(k_i^T q_t / sqrt(D))."""
    rule = deltalab.get_rule("attention", window=window)
    x = draw(rule)
    ours, (keys, values) = scan(rule, x, backend, scale=None)
    for b in range(B):
        for h in range(H):
            memory = []
            for t in range(T):
                memory.append((x["k"][b, t, h], x["v"][b, t, h]))
                memory = memory[-window:] if window else memory
                weights = [torch.exp(k @ x["q"][b, t, h] / math.sqrt(K)) for k, _ in memory]
                close(ours[b, t, h], sum(w * v for w, (_, v) in zip(weights, memory, strict=True)) / sum(weights))
            later = memory[1:] if window else memory  # what the next token will still see
            assert keys.shape[2] == values.shape[2] == len(later)
            for i, (k, v) in enumerate(later):
                close(keys[b, h, i], k)
                close(values[b, h, i], v)


# --- The papers' own parallel forms


def test_combas_chunk_form_is_its_recurrence():
    """000 Eq. 9 to 12, the whole sequence as one chunk. alpha^{1:r} is a product, alpha^{i -> C} = alpha^{1:C} /
    alpha^{1:i}; M is strictly lower."""
    comba = rule("comba")
    x = draw(comba)
    state = random(B, H, K, V, seed=96)
    o, (last,) = scan(comba, x, "recurrent", (state,))
    for b in range(B):
        for h in range(H):
            q, k, v = (x[name][b, :, h] for name in "qkv")
            beta, tilde, S = x["beta"][b, :, h], x["b"][h] * x["beta"][b, :, h], state[b, h].T
            decay = x["g"][b, :, h].exp().cumprod(0)
            until = torch.cat([torch.ones(1, dtype=torch.float64), decay[:-1]])
            lower = torch.tril(tilde[:, None] * (until[:, None] / decay) * (k @ k.T), -1)
            M = torch.linalg.inv(torch.eye(T, dtype=torch.float64) + lower)
            W, U = M @ torch.diag(tilde * until) @ k, M @ torch.diag(beta) @ v
            q_tilde = q - x["d"][h] * k
            pseudo = U - W @ S.T
            close(last[b, h].T, decay[-1] * S + pseudo.T @ torch.diag(decay[-1] / decay) @ k)
            inner = torch.diag(decay) @ q_tilde @ S.T
            close(o[b, :, h], inner + torch.tril(q_tilde @ k.T * (decay[:, None] / decay)) @ pseudo)


def gated_deltanet_by_wy(x: Inputs, ratio: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """002, extended WY: S_t = sum_i ratio u_i k_i^T, u_t = beta_t (v_t - sum_i ratio (k_i^T k_t) u_i)."""
    states = []
    for b in range(B):
        for h in range(H):
            k, v, beta = x["k"][b, :, h], x["v"][b, :, h], x["beta"][b, :, h]
            gamma = x["g"][b, :, h].exp().cumprod(0)
            u: list[Tensor] = []
            for t in range(T):
                seen = sum(ratio(gamma[i], gamma[t]) * (k[i] @ k[t]) * u[i] for i in range(t))
                u.append(beta[t] * (v[t] - seen))
            states.append(sum(ratio(gamma[i], gamma[-1]) * outer(u[i], k[i]) for i in range(T)))
    return torch.stack(states).unflatten(0, (B, H))


# --- Where the papers contradict themselves: who is right, and what we do


def apart(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() > 1e-3)


def test_000_the_corrections_by_k_and_by_p_are_not_equivalent():
    """App. B.3 calls q - d k (Eq. 5, Listing 1) and q - d p with p = b k (Listing 2; Table 3's o = S q - d P(S)) the
    same. Their states are; their outputs are so for another d, d_k = b d_p. Both are knobs."""
    x = draw(rule("comba"))
    by_k, (S,) = scan(rule("comba"), x, "chunked")
    by_p, (S_p,) = scan(rule("comba", correction="p"), x, "chunked")
    close(S, S_p)
    assert apart(by_k, by_p)
    close(scan(rule("comba"), x | {"d": x["b"] * x["d"]}, "chunked")[0], by_p)
    one = x | {"b": torch.ones(H, dtype=torch.float64)}
    close(scan(rule("comba"), one, "chunked")[0], scan(rule("comba", correction="p"), one, "chunked")[0])


def test_000_eq_3_decays_on_one_side_alone():
    """Printed S_t = alpha S_{t-1} - beta (S_{t-1} k - v) k^T = S_{t-1} (I - beta k k^T) + beta v k^T: its left is
    Comba's SPLR at b = 1, d = 0, its right is DeltaNet, and neither is Gated DeltaNet (Table 1)."""

    def left(S, t):
        S = t.alpha * S - t.beta * outer(S @ t.k - t.v, t.k)
        return S, S @ t.q

    x = draw(rule("gated_deltanet"))
    o, _ = by_paper(left, x, 1, torch.zeros(B, H, V, K, dtype=torch.float64))
    close(scan(rule("comba", b=1, d=0), x, "chunked")[0], o)
    assert apart(scan(rule("deltanet"), only(x, "beta"), "chunked")[0], o)
    assert apart(scan(rule("gated_deltanet"), x, "chunked")[0], o)


def test_001_app_b_descends_with_the_wrong_sign():
    """App. B prints R_{t-1} - r k^T and S_{t-1} - v k^T for the inner loss -<v, f(k)>; a step down it adds, as in
    Sections 3.1 and 3.4."""
    S, k, v = random(V, K, seed=1).requires_grad_(), random(K, seed=2), random(V, seed=3)
    (gradient,) = torch.autograd.grad(-(v @ (S @ k)), S)
    close(S - gradient, S + outer(v, k))


def test_001_the_residual_reads_what_has_not_decayed_and_so_rdn_does_not_contain_gated_deltanet():
    """Table 1 splits Gated DeltaNet into alpha S q + beta R q with R = (v - alpha S k) k^T; r_t of Section 3 and
    Listing 1 is v - S_{t-1} k. We follow the latter; the two meet at alpha = 1 alone."""
    x = draw(rule("gated_deltanet"))
    theirs, (S,) = scan(rule("gated_deltanet"), x, "recurrent")
    unfitted = rule("rdn", fitting=False, loss="l2")
    ours, (S_rdn, _) = scan(unfitted, x | {"gamma": x["beta"]}, "chunked")
    close(S_rdn, S)
    assert apart(ours, theirs)

    def table_1(SR, t):
        S, _ = SR
        R = outer(t.v - t.alpha * S @ t.k, t.k)
        after = t.alpha * S @ (eye() - t.beta * outer(t.k, t.k)) + t.beta * outer(t.v, t.k)
        return torch.stack([after, R]), t.alpha * S @ t.q + t.beta * R @ t.q

    close(by_paper(table_1, x, 1, torch.zeros(B, H, 2, V, K, dtype=torch.float64))[0], theirs)


def test_001_table_1_lets_values_decay_in_gated_linear_attention():
    """It prints diag(alpha) S for S [V, K]; 000 Table 1 and 002 have S diag(alpha), the channels of the key, and so
    have GLA and we."""

    def as_printed(S, t):
        S = torch.diag(t.alpha) @ S + outer(t.v, t.k)
        return S, S @ t.q

    x = draw(rule("gla"), value_dim=K)
    empty = torch.zeros(B, H, K, K, dtype=torch.float64)
    ours, _ = scan(rule("gla"), x, "chunked")
    assert apart(ours, by_paper(as_printed, x, 1, empty)[0])
    close(ours, by_paper(gla, x, 1, empty)[0])


def test_002_prints_the_decay_of_gated_deltanets_wy_form_upside_down():
    """With gamma_t = prod alpha, what was written at i has decayed by gamma_t / gamma_i; printed gamma_i / gamma_t."""
    x = draw(rule("gated_deltanet"))
    _, (S,) = scan(rule("gated_deltanet"), x, "chunked")
    close(S.mT, gated_deltanet_by_wy(x, lambda then, now: now / then))
    assert apart(S.mT, gated_deltanet_by_wy(x, lambda then, now: then / now))
