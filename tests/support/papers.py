"""The papers' recurrences, written again from their text: one head and one token at a time."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, outer

import deltalab
from deltalab.rule import UpdateRule

B, T, H, K, V = 2, 11, 3, 5, 4


Step = Callable[[Tensor, SimpleNamespace], tuple[Tensor, Tensor]]


Inputs = dict[str, Tensor]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def draw(rule: UpdateRule, seed: int = 0, key_dim: int = K, value_dim: int = V) -> Inputs:
    """q, k, v, unit where the rule takes them so, and gates inside their ranges."""
    n = rule.steps
    x = {"q": random(B, T, H, key_dim, seed=seed + 1), "k": random(B, n * T, H, key_dim, seed=seed + 2)}
    if rule.features == "unit":
        x = {name: F.normalize(value, dim=-1) for name, value in x.items()}
    x["v"] = 2 * random(B, n * T, H, value_dim, seed=seed + 3)
    shapes = {"head": (H,), "head_channel": (H, key_dim), "token": (B, T, H), "channel": (B, T, H, key_dim)}
    for i, (name, gate) in enumerate(rule.gates.items()):
        if not gate.constant:
            low, high = max(gate.low, -2.0), min(gate.high, 2.0)
            part = random(*shapes.get(gate.per, (B, n * T, H)), seed=seed + 4 + i).sigmoid()
            x[name] = low + (high - low) * part
    return x


def scan(rule: UpdateRule, x: Inputs, backend: str, state=None, scale: float = 1.0):
    gates = {name: value for name, value in x.items() if name not in "qkv"}
    return deltalab.scan(rule, x["q"], x["k"], x["v"], gates, scale=scale, state=state, backend=backend, chunk_size=4)


def by_paper(step: Step, x: Inputs, steps: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """Each head of each sequence by itself. state: the paper's, [B, H, ...]."""
    o = x["v"].new_zeros(B, T, H, x["v"].shape[-1])
    states = []
    for b in range(B):
        for h in range(H):
            S = state[b, h]
            for t in range(T):
                token = {}
                for name, value in x.items():
                    if value.dim() < 3:  # learned for a head
                        token[name] = value[h]
                    elif value.shape[1] == T:
                        token[name] = value[b, t, h]
                    else:
                        token[name] = value[b, t * steps : (t + 1) * steps, h]
                if "g" in token:
                    token["alpha"] = token.pop("g").exp()
                S, o[b, t, h] = step(S, SimpleNamespace(**token, head=h))
            states.append(S)
    return o, torch.stack(states).unflatten(0, (B, H))


def rule(name: str, **knobs) -> UpdateRule:
    return deltalab.get_rule(name, **knobs)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def eye() -> Tensor:
    return torch.eye(K, dtype=torch.float64)


def scalar_gated(S, t):
    """000 Table 1 (Mamba2), 001 Listing 1 (sGLA), MetaLA in the form of 000 Table 5."""
    S = t.alpha * S + t.beta * outer(t.v, t.k)
    return S, S @ t.q


def deltanet(S, t):
    """002: S - beta (S k - v) k^T."""
    S = S - t.beta * outer(S @ t.k - t.v, t.k)
    return S, S @ t.q


def gated_deltanet(S, t):
    """000 Table 3: v_new = v - alpha S k, then S = alpha S + beta v_new k^T."""
    new = t.v - t.alpha * S @ t.k
    S = t.alpha * S + t.beta * outer(new, t.k)
    return S, S @ t.q


def kda(S, t):
    """arXiv:2510.26692 Eq. 1, in its own orientation (I - beta k k^T) Diag(alpha) S + beta k v^T."""
    S = (eye() - t.beta * outer(t.k, t.k)) @ torch.diag(t.alpha) @ S.T + t.beta * outer(t.k, t.v)
    return S.T, S.T @ t.q


def comba_splr(S, t):
    """000 Eq. 5. Without gates: b = 1 (Table 6, beta~ = beta), d = 0, and beta = 1 (Table 5, GLA's input gate)."""
    b, beta, d = (getattr(t, name, default) for name, default in (("b", 1.0), ("beta", 1.0), ("d", 0.0)))
    S = S @ (t.alpha * eye() - b * beta * outer(t.k, t.k)) + beta * outer(t.v, t.k)
    return S, S @ (t.q - d * t.k)


def comba_iplr(S, t):
    """000 Table 4: alpha (I - 2 beta~ k k^T)."""
    S = t.alpha * S @ (eye() - 2 * t.b * t.beta * outer(t.k, t.k)) + t.beta * outer(t.v, t.k)
    return S, S @ (t.q - t.d * t.k)


def comba_dplr(S, t):
    """000 Section 3: diag(w) - beta~ k k^T."""
    S = S @ (torch.diag(t.alpha) - t.b * t.beta * outer(t.k, t.k)) + t.beta * outer(t.v, t.k)
    return S, S @ (t.q - t.d * t.k)


def miras(p, reads="state", smooth=1e-6):
    """000 Table 1: S_t = alpha S_{t-1} - beta grad |S_{t-1} k - v|_p^p, with g and psi the identity.

    Its factor p is in our beta, and |e| is (e^2 + smooth)^(1/2), as in arXiv:2504.13173. The column of objectives has
    beta |v - S_t k|_p^p, of the state that is written: there, S_t is the minimum of beta/p |S k - v|_p^p +
    1/2 |S - alpha S_{t-1}|^2. The column's alpha/2 |S_t|^2 would forget S_{t-1} altogether if S_t were its minimum.
    """

    def slope(e):
        return e * (e**2 + (0 if p == 2 else smooth)) ** (p / 2 - 1)

    def step(S, t):
        if reads == "state":
            leaf = S.detach().requires_grad_()
            error = leaf @ t.k - t.v
            size = (error**2 + (0 if p == 2 else smooth)) ** (p / 2) / p
            (gradient,) = torch.autograd.grad(size.sum(), leaf)
            S = t.alpha * S - t.beta * gradient
        elif reads == "decayed":
            S = t.alpha * S
            S = S - t.beta * outer(slope(S @ t.k - t.v), t.k)
        else:
            # Setting the gradient to 0 leaves one equation for each channel's error: e + beta |k|^2 slope(e) = start.
            start = t.alpha * S @ t.k - t.v
            low, high = start.clamp(max=0), start.clamp(min=0)
            for _ in range(80):
                middle = (low + high) / 2
                beyond = middle + t.beta * (t.k @ t.k) * slope(middle) > start
                low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
            S = t.alpha * S - t.beta * outer(slope((low + high) / 2), t.k)
        return S, S @ t.q

    return step


def rla(S, R, t, pseudo_residual):
    """001 Section 3.4, left."""
    r = pseudo_residual(t.v - S @ t.k)
    R = t.alpha * R + t.gamma * outer(r, t.k)
    return t.alpha * S + t.beta * outer(t.v, t.k), R


def rdn(S, R, t, pseudo_residual):
    """001 Section 3.4, right."""
    r = pseudo_residual(t.v - S @ t.k)
    R = t.alpha * R @ (eye() - t.gamma * outer(t.k, t.k)) + t.gamma * outer(r, t.k)
    return t.alpha * S @ (eye() - t.beta * outer(t.k, t.k)) + t.beta * outer(t.v, t.k), R


def without_fitting(base):
    """001 Section 4.3: R_t = (v - S_{t-1} k) k^T holds one token, and no gamma: the output brings it."""

    def update(S, R, t, pseudo_residual):
        return base(S, R, t, pseudo_residual)[0], outer(pseudo_residual(t.v - S @ t.k), t.k)

    return update


def gated(S, R, t):
    return t.alpha * S @ t.q + t.gamma * R @ t.q


def plain_sum(S, R, t):
    """001 Table 5."""
    return S @ t.q + R @ t.q


def ungated(base):
    """001 Section 3.1, App. B: R + r k^T and S + v k^T, or (App. A.2) a whole step of the delta rule; S q + R q."""

    def update(S, R, t, pseudo_residual):
        t = SimpleNamespace(**vars(t), alpha=1.0, beta=1.0, gamma=1.0)
        return base(S, R, t, pseudo_residual)

    return update


def coupled(base):
    """001 Section 3.2, before the correction factor: beta updates both states."""

    def update(S, R, t, pseudo_residual):
        return base(S, R, SimpleNamespace(**vars(t) | {"gamma": t.beta}), pseudo_residual)

    return update


def l2(error):
    return error


def clip(c):
    """001 Section 3.3 and App. B: minus the gradient of the Huber loss."""
    return lambda error: torch.clip(error, -c, c)


def pair(update, pseudo_residual, output) -> Step:
    """The output reads S before the token and R after it (001 Section 3.1)."""

    def step(SR, t):
        S, R = SR
        after, R = update(S, R, t, pseudo_residual)
        return torch.stack([after, R]), output(S, R, t)

    return step


def residual_agrees(rule: UpdateRule, step: Step, x: Inputs, *, given: bool = True) -> None:
    state = random(2, B, H, K, V, seed=98) * given
    o, last = by_paper(step, x, 1, state.movedim(0, 2).mT)
    for backend in ("recurrent", "chunked"):
        ours, (S, R) = scan(rule, x, backend, tuple(state) if given else None)
        close(ours, o)
        close(S, last[:, :, 0].mT)
        close(R, last[:, :, 1].mT)


def chebyshev(M, q, low, high, r):
    """004 Algorithm 1."""
    rho, omega = (high - low) / (high + low), 2.0
    before, xi = torch.zeros_like(q), 2 * q / (high + low)
    for _ in range(r):
        omega = 4 / (4 - rho**2 * omega)
        after = xi - 2 * omega / (high + low) * (M @ xi - q)
        after = after + (omega - 1) * (xi - before)
        before, xi = xi, after
    return xi


def conjugate_gradient(M, q, low, high, r):
    x, residual, p = torch.zeros_like(q), q, q
    for _ in range(r):
        step = residual @ residual / (p @ M @ p)
        x, after = x + step * p, residual - step * M @ p
        p, residual = after + after @ after / (residual @ residual) * p, after
    return x


def exact(M, q, low, high, r):
    return torch.linalg.inv(M) @ q


def gka(solver, r, a=0.02, adaptive=True) -> Step:
    """004 (CH), its H [K, K] above its U [V, K]. gamma decays H and not the new k k^T, as 4.2.1 prints in passing."""

    def step(HU, t):
        alpha = getattr(t, "alpha", 1.0)
        H = alpha * HU[:K] + outer(t.k, t.k)
        U = alpha * HU[K:] + outer(t.v, t.k)
        norm = (H * H).sum().sqrt()
        ridge = a * norm if adaptive else a
        x = solver(H + ridge * eye(), t.q, ridge, norm + ridge, r)
        return torch.cat([H, U]), U @ x

    return step
