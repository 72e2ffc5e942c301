"""Holds the presets of delta rules to the blocks of the authors' code."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from tests.support.published_block import (
    HEADS,
    STEP_SIZES,
    PublishedBlock,
    decay,
    projected,
    rms,
    unit,
)
from torch import Tensor

DECAY_FROM_0: Mapping[str, tuple[float, float]] = {
    "gates.learned.g.log_a": (-math.inf, math.log(16)),
    "gates.learned.g.dt_bias": STEP_SIZES,
    "conv": (-0.5, 0.5),
    "norm.weight": (1.0, 1.0),
}


def delta(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """A write of FLA's fused_recurrent_delta_rule: state [B, H, K, V] += k (beta (v - state^T k))^T."""
    error = v - torch.einsum("bhk,bhkv->bhv", k, state)
    return state + k[..., None] * (beta[..., None] * error)[..., None, :]


def read(state: Tensor, q: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", q, state) * q.shape[-1] ** -0.5


class TestGatedDeltaNet(PublishedBlock):
    """fla/layers/gated_deltanet.py: a from 0 to 16, SiLU and l2 norm of q and k, swish gate after the norm."""

    rule = "gated_deltanet"
    starts: ClassVar = DECAY_FROM_0

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = map(F.silu, projected(p, x))
        q, k = unit(q), unit(k)
        beta, alpha = (x @ p["gates.project.beta.weight"].T).sigmoid(), decay(p, x).exp()
        state, outputs = x.new_zeros(len(x), HEADS, q.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            state = delta(alpha[:, t, :, None, None] * state, k[:, t], v[:, t], beta[:, t])
            outputs.append(read(state, q[:, t]))
        o = rms(torch.stack(outputs, 1), p["norm.weight"]).flatten(-2)
        return (o * F.silu(x @ p["gate.weight"].T)) @ p["out.weight"].T


class TestDeltaNet(PublishedBlock):
    """fla/layers/delta_net.py: no decay and no output gate."""

    rule = "deltanet"

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = map(F.silu, projected(p, x))
        q, k, beta = unit(q), unit(k), (x @ p["gates.project.beta.weight"].T).sigmoid()
        state, outputs = x.new_zeros(len(x), HEADS, q.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            state = delta(state, k[:, t], v[:, t], beta[:, t])
            outputs.append(read(state, q[:, t]))
        return rms(torch.stack(outputs, 1), p["norm.weight"]).flatten(-2) @ p["out.weight"].T


class TestDeltaProduct(PublishedBlock):
    """fla/layers/gated_deltaproduct.py: two writes for each token, beta up to 2, the decay before the first of them."""

    rule = "delta_product"
    starts: ClassVar = DECAY_FROM_0

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = map(F.silu, projected(p, x, steps=2))
        q, k, v = unit(q), unit(k).unflatten(2, (2, HEADS)), v.unflatten(2, (2, HEADS))
        beta = 2 * (x @ p["gates.project.beta.weight"].T).sigmoid().unflatten(-1, (2, HEADS))
        alpha = decay(p, x).exp()
        state, outputs = x.new_zeros(len(x), HEADS, q.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            state = alpha[:, t, :, None, None] * state
            for n in range(2):
                state = delta(state, k[:, t, n], v[:, t, n], beta[:, t, n])
            outputs.append(read(state, q[:, t]))
        o = rms(torch.stack(outputs, 1), p["norm.weight"]).flatten(-2)
        return (o * F.silu(x @ p["gate.weight"].T)) @ p["out.weight"].T


class TestComba(PublishedBlock):
    """fla/layers/comba.py: p = sigmoid(decay) k, q - D p, with both norms before them (see `lacks`)."""

    rule = "comba"
    starts: ClassVar = {
        **DECAY_FROM_0,
        "gates.learned.b.logit": (1.0, 1.0),
        "gates.learned.d.value": (1.0, 1.0),
    }

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = map(F.silu, projected(p, x))
        q, k = unit(q), unit(k)
        fed = k * p["gates.learned.b.logit"].sigmoid()[:, None]
        q = q - p["gates.learned.d.value"][:, None] * fed
        beta, alpha = (x @ p["gates.project.beta.weight"].T).sigmoid(), decay(p, x).exp()
        state, outputs = x.new_zeros(len(x), HEADS, q.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            predicted = torch.einsum("bhk,bhkv->bhv", fed[:, t], state)  # of the undecayed state
            new = beta[:, t, :, None] * (v[:, t] - predicted)
            state = alpha[:, t, :, None, None] * state + k[:, t, :, :, None] * new[:, :, None, :]
            outputs.append(read(state, q[:, t]))
        o = rms(torch.stack(outputs, 1), p["norm.weight"]).flatten(-2)
        return (o * (x @ p["gate.weight"].T).sigmoid()) @ p["out.weight"].T


class TestKDA(PublishedBlock):
    """fla/layers/kda.py: the decay has an a for each head and goes through V channels, as the output gate does."""

    rule = "kda"
    starts: ClassVar = {
        "gates.learned.g.log_a": (0.0, math.log(16)),
        "gates.learned.g.dt_bias": STEP_SIZES,
        "gate.1.bias": (0.0, 0.0),
    }
    settings: ClassVar = {"expand_v": 1.5}

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v, alpha = channel_decayed(p, x)
        beta = (x @ p["gates.project.beta.weight"].T).sigmoid()
        state, outputs = x.new_zeros(len(x), HEADS, q.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            state = delta(alpha[:, t, ..., None] * state, k[:, t], v[:, t], beta[:, t])
            outputs.append(read(state, q[:, t]))
        return low_rank_gated(p, x, torch.stack(outputs, 1))


class TestGatedDeltaNet2(PublishedBlock):
    """fla/layers/gdn2.py: KDA's decay and gate, an erase gate b of K channels and a write gate w of V channels."""

    rule = "gated_deltanet2"
    starts: ClassVar = TestKDA.starts
    settings: ClassVar = {"expand_v": 1.5}

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v, alpha = channel_decayed(p, x)
        b, w = ((x @ p[f"gates.project.{n}.weight"].T).sigmoid().unflatten(-1, (HEADS, -1)) for n in "bw")
        state, outputs = x.new_zeros(len(x), HEADS, q.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            state = alpha[:, t, ..., None] * state
            error = w[:, t] * v[:, t] - torch.einsum("bhk,bhkv->bhv", b[:, t] * k[:, t], state)
            state = state + k[:, t, ..., None] * error[:, :, None]
            outputs.append(read(state, q[:, t]))
        return low_rank_gated(p, x, torch.stack(outputs, 1))


def channel_decayed(p: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = map(F.silu, projected(p, x))
    f = x @ p["gates.project.g.0.weight"].T @ p["gates.project.g.1.weight"].T
    a, c = p["gates.learned.g.log_a"].exp(), p["gates.learned.g.dt_bias"]
    assert a.shape == (HEADS,)
    assert len(p["gates.project.g.0.weight"]) == v.shape[-1]
    return unit(q), unit(k), v, (-a[:, None] * F.softplus(f.unflatten(-1, (HEADS, -1)) + c)).exp()


def low_rank_gated(p: Mapping[str, Tensor], x: Tensor, o: Tensor) -> Tensor:
    assert len(p["gate.0.weight"]) == o.shape[-1]
    gate = x @ p["gate.0.weight"].T @ p["gate.1.weight"].T + p["gate.1.bias"]
    return (rms(o, p["norm.weight"]).flatten(-2) * gate.sigmoid()) @ p["out.weight"].T


class TestMesaNet(PublishedBlock):
    """fla/layers/mesa_net.py, with naive_mesa_net_exact: scale 1, g and beta with a bias, no SiLU on v, no gate."""

    rule = "mesa_net"
    starts: ClassVar = {
        "gates.learned.g.bias": (0.0, 0.0),
        "gates.learned.beta.bias": (0.0, 0.0),
        "gates.learned.ridge.c": (math.log(math.expm1(0.75)), math.log(math.expm1(0.75))),
    }

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = projected(p, x)
        q, k = unit(F.silu(q)), unit(F.silu(k))
        g, beta = (x @ p[f"gates.project.{n}.weight"].T + p[f"gates.learned.{n}.bias"] for n in ("g", "beta"))
        alpha, beta, ridge = g.sigmoid(), beta.sigmoid(), F.softplus(p["gates.learned.ridge.c"]) + 0.25
        h_kk = h_kv = x.new_zeros(len(x), HEADS, q.shape[-1], q.shape[-1])
        outputs = []
        for t in range(x.shape[1]):
            kept, written = alpha[:, t, :, None, None], (beta[:, t, :, None] * k[:, t])[..., None]
            h_kk, h_kv = kept * h_kk + written * k[:, t, :, None], kept * h_kv + written * v[:, t, :, None]
            solved = torch.linalg.solve(h_kk + torch.diag_embed(ridge), q[:, t])
            outputs.append(torch.einsum("bhk,bhkv->bhv", solved, h_kv))
        return rms(torch.stack(outputs, 1), p["norm.weight"]).flatten(-2) @ p["out.weight"].T


class TestGKA(PublishedBlock):
    """Algorithm 1 of arXiv:2511.21016, 30 iterations from 2 q / (L + mu), with lambda = .02 |H|_F and mu = lambda."""

    rule = "gka"
    # The rule has the gradient of the exact solution, and the loop that of its iterations: up to 1.7e-2 apart.
    gradient_error = 2e-2

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = map(F.silu, projected(p, x))
        q, k, alpha = unit(q), unit(k), decay(p, x).exp()
        gram = memory = x.new_zeros(len(x), HEADS, q.shape[-1], q.shape[-1])
        outputs = []
        for t in range(x.shape[1]):
            kept, key = alpha[:, t, :, None, None], k[:, t, ..., None]
            gram, memory = kept * gram + key * k[:, t, :, None], kept * memory + key * v[:, t, :, None]
            norm = gram.square().sum((-2, -1)).sqrt()[..., None]
            least, most = 0.02 * norm, 1.02 * norm
            rho, omega = (most - least) / (most + least), 2.0
            before, xi = torch.zeros_like(q[:, t]), 2 * q[:, t] / (most + least)
            for _ in range(30):
                omega = 4 / (4 - rho**2 * omega)
                slope = torch.einsum("bhkj,bhj->bhk", gram, xi) + least * xi - q[:, t]
                before, xi = xi, xi - 2 * omega / (most + least) * slope + (omega - 1) * (xi - before)
            outputs.append(read(memory, xi))
        o = rms(torch.stack(outputs, 1), p["norm.weight"]).flatten(-2)
        return (o * (x @ p["gate.weight"].T).sigmoid()) @ p["out.weight"].T


class ResidualBlock(PublishedBlock):
    """Listing 1 of "Enhancing linear attention with residual learning", with SiLU on q and k alone."""

    erases: ClassVar[bool]
    starts: ClassVar = {"gates.learned.g.log_a": (0.0, math.log(16)), "gates.learned.g.dt_bias": STEP_SIZES}

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = projected(p, x)
        q, k, alpha = unit(F.silu(q)), unit(F.silu(k)), decay(p, x).exp()[..., None, None]
        beta, gamma = ((x @ p[f"gates.project.{n}.weight"].T).sigmoid() for n in ("beta", "gamma"))
        state = second = x.new_zeros(len(x), HEADS, q.shape[-1], v.shape[-1])
        outputs = []
        for t in range(x.shape[1]):
            r = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)).clip(-1, 1)
            o = alpha[:, t, ..., 0] * read(state, q[:, t])
            second = alpha[:, t] * self.written(second, k[:, t], r, gamma[:, t], alpha[:, t])
            outputs.append(o + gamma[:, t, :, None] * read(second, q[:, t]))
            state = alpha[:, t] * self.written(state, k[:, t], v[:, t], beta[:, t], alpha[:, t])
        o = rms(torch.stack(outputs, 1), p["norm.weight"]).flatten(-2)
        return (o * (x @ p["gate.weight"].T).sigmoid()) @ p["out.weight"].T

    def written(self, state: Tensor, k: Tensor, v: Tensor, strength: Tensor, alpha: Tensor) -> Tensor:
        """The state before its decay: alpha (I - beta k k^T) S + beta k v^T is alpha times this."""
        rate = strength[..., None, None] * k[..., None]
        erased = state - rate * torch.einsum("bhk,bhkv->bhv", k, state)[:, :, None] if self.erases else state
        return erased + rate * v[:, :, None] / alpha


class TestTTTLinear(PublishedBlock):
    """TTTLinear of ttt.py without what `lacks` names: f(x) = x + LN(x W), and mini-batches of 16 tokens."""

    rule = "ttt_linear"

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        xq, xk, xv = projected(p, x, convolves=False)
        lr = (x @ p["gates.project.beta.weight"].T).sigmoid()
        (start, *_) = self.layer().rule.start(xk, xv)
        w, first, outputs = start, start, []
        for t in range(x.shape[1]):
            first = w if t % 16 == 0 else first
            z = torch.einsum("bhk,bhkv->bhv", xk[:, t], first)
            z_hat = F.layer_norm(z, z.shape[-1:], eps=1e-6)
            dim, std = z.shape[-1], (z.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
            grad = z_hat - (xv - xk)[:, t]  # ln_fused_l2_bwd
            grad = dim * grad - grad.sum(-1, keepdim=True) - z_hat * (grad * z_hat).sum(-1, keepdim=True)
            w = w - (lr[:, t, :, None] * xk[:, t])[..., None] * (grad / (dim * std))[..., None, :]
            z = torch.einsum("bhk,bhkv->bhv", xq[:, t], w)
            outputs.append(xq[:, t] + F.layer_norm(z, z.shape[-1:], eps=1e-6))
        o = F.layer_norm(torch.stack(outputs, 1), z.shape[-1:], p["norm.weight"], p["norm.bias"], eps=1e-6)
        return o.flatten(-2) @ p["out.weight"].T


class TestLearnedTTT(PublishedBlock):
    """TTTLinear of ttt.py. The inner gradient is autograd's, of the loss as the paper states it."""

    rule = "learned_ttt"
    starts: ClassVar = {
        "gates.learned.beta.bias": (0.0, 0.0),
        "gates.learned.b0.value": (0.0, 0.0),
        "gates.learned.w.value": (1.0, 1.0),
        "gates.learned.b.value": (0.0, 0.0),
        "gates.learned.c.value": (0.0, 0.0),
    }

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        batch = 16
        xq, xk, xv = projected(p, x, convolves=False)
        width = xk.shape[-1]
        lr = (x @ p["gates.project.beta.weight"].T + p["gates.learned.beta.bias"]).sigmoid() / width
        weight, bias = p["gates.learned.w.value"], p["gates.learned.b.value"]
        token = (1 / torch.arange(1, batch + 1, dtype=x.dtype) + p["gates.learned.c.value"]).clamp_min(0.0)
        rates = 1 / 10000 ** (torch.arange(0, width, 2, dtype=x.dtype) / width)

        def rotated(z: Tensor, place: int) -> Tensor:
            emb = torch.cat([place * rates] * 2).to(z)
            half = torch.cat([-z[..., width // 2 :], z[..., : width // 2]], dim=-1)
            return z * emb.cos() + half * emb.sin()

        def model(z: Tensor, w: Tensor, b: Tensor) -> Tensor:
            inner = torch.einsum("bhk,bhkv->bhv", z, w) + b
            return z + F.layer_norm(inner, inner.shape[-1:], eps=1e-6) * weight + bias

        w = p["gates.learned.s0.value"].unflatten(-1, (width, -1)).expand(len(x), -1, -1, -1)
        b = p["gates.learned.b0.value"].expand(len(x), -1, -1)
        grad_w, grad_b, outputs = torch.zeros_like(w), torch.zeros_like(b), []
        for t in range(x.shape[1]):
            i = t % batch
            q, k = rotated(xq[:, t], i), rotated(xk[:, t], i)
            loss = (model(k, w, b) - xv[:, t]).square().sum() / 2
            slopes = torch.autograd.grad(loss, (w, b), create_graph=True)
            grad_w, grad_b = (
                total + lr[:, t].view(*lr.shape[::2], *[1] * (slope.dim() - 2)) * slope
                for total, slope in zip((grad_w, grad_b), slopes, strict=True)
            )
            now = w - token[:, i, None, None] * grad_w, b - token[:, i, None] * grad_b
            outputs.append(model(q, *now))
            if i == batch - 1:
                (w, b), grad_w, grad_b = now, torch.zeros_like(w), torch.zeros_like(b)
        o = torch.stack(outputs, 1).flatten(-2)
        return F.layer_norm(o, o.shape[-1:], p["norm.weight"], p["norm.bias"], eps=1e-6) @ p["out.weight"].T


class TestRLA(ResidualBlock):
    rule = "rla"
    erases = False


class TestRDN(ResidualBlock):
    rule = "rdn"
    erases = True


class TestRWKV7(PublishedBlock):
    """fla/layers/rwkv7.py without what `lacks` names: token shift, kk = k k_k to unit norm, k (1 + (a - 1) k_a)."""

    rule = "rwkv7"
    starts: ClassVar = {
        "gates.learned.xi.value": (0.71, 0.71),
        "gates.learned.rho.value": (1.02, 1.02),
        "gates.learned.g.bias": (-6.0, -1.0),
    }

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        shifted = {n: x + (before - x) * p[f"shift.share.{n}"] for n in ("q", "k", "v", "gates", "gate")}
        weights = zip("qkv", p["qkv.weight"].chunk(3), strict=True)
        r, k, v = ((shifted[n] @ weight.T).unflatten(-1, (HEADS, -1)) for n, weight in weights)
        low, a = (
            (shifted["gates"] @ p[f"gates.project.{n}.0.weight"].T @ p[f"gates.project.{n}.1.weight"].T).unflatten(
                -1, (HEADS, -1)
            )
            for n in "ga"
        )
        w, a = -0.6065306597126334 * (low + p["gates.learned.g.bias"]).sigmoid(), a.sigmoid()
        kk = unit(k * p["gates.learned.xi.value"])
        k = k * (1 + (a - 1) * p["gates.learned.rho.value"])
        state, outputs = x.new_zeros(len(x), HEADS, k.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            read_by_kk = torch.einsum("bhk,bhkv->bhv", -kk[:, t], state)
            state = w[:, t, ..., None].exp() * state + (kk * a)[:, t, ..., None] * read_by_kk[:, :, None]
            state = state + k[:, t, ..., None] * v[:, t, :, None]
            outputs.append(torch.einsum("bhk,bhkv->bhv", r[:, t], state))
        o = torch.stack(outputs, 1)
        o = F.group_norm(o.flatten(0, 1).flatten(-2), HEADS, p["norm.weight"], p["norm.bias"], 1e-5).view(x.shape)
        gate = (shifted["gate"] @ p["gate.0.weight"].T @ p["gate.1.weight"].T).sigmoid()
        return (o * gate) @ p["out.weight"].T
