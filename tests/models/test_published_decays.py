"""Holds the presets of rules that decay, and of attention, to the blocks of the authors' code."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from tests.support.published_block import (
    HEADS,
    STEP_SIZES,
    WIDTH,
    PublishedBlock,
    convolved,
    projected,
    recurrent,
    rms,
)
from torch import Tensor


class TestMamba2(PublishedBlock):
    """mamba_ssm/modules/mamba2.py: in_proj to z, x, B, C and dt; conv1d with bias; SSD with D; RMSNormGated."""

    rule = "mamba2"
    starts: ClassVar = {
        "gates.learned.g.log_a": (0.0, math.log(16)),
        "gates.learned.g.dt_bias": STEP_SIZES,
        "skip": (1.0, 1.0),
        "conv": (-0.5, 0.5),
        "conv_bias": (-0.5, 0.5),
    }

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        z = x @ p["gate.weight"].T
        xbc = F.silu(convolved(x @ p["qkv.weight"].T, p["conv"], p["conv_bias"]))
        state_dim = WIDTH // HEADS
        c, b, values = xbc.split([state_dim, state_dim, xbc.shape[-1] - 2 * state_dim], dim=-1)
        values = values.unflatten(-1, (HEADS, -1))
        dt = F.softplus(x @ p["gates.project.g.weight"].T + p["gates.learned.g.dt_bias"])
        a = -p["gates.learned.g.log_a"].exp()
        h, outputs = x.new_zeros(len(x), HEADS, values.shape[-1], state_dim), []
        for t in range(x.shape[1]):
            h = h * torch.exp(dt[:, t] * a)[..., None, None]
            h = h + torch.einsum("bh,bn,bhp->bhpn", dt[:, t], b[:, t], values[:, t])
            outputs.append(torch.einsum("bhpn,bn->bhp", h, c[:, t]) + p["skip"][:, None] * values[:, t])
        y = torch.stack(outputs, 1).flatten(-2) * F.silu(z)  # norm_before_gate=False
        y = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * p["norm.weight"]
        return y @ p["out.weight"].T


class TestLogLinearAttention(PublishedBlock):
    """fla/layers/log_linear_mamba2.py: Mamba2 whose past is read level by level, at softplus(L dl), a from 1 to H."""

    rule = "log_linear_attention"
    starts: ClassVar = {
        "gates.learned.g.log_a": (0.0, math.log(128)),
        "gates.learned.g.dt_bias": STEP_SIZES,
        "gates.learned.strength.scale": (1.0, 1.0),
        "skip": (1.0, 1.0),
    }

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        z = x @ p["gate.weight"].T
        xbc = F.silu(convolved(x @ p["qkv.weight"].T, p["conv"], p["conv_bias"]))
        c, b, values = xbc.split([WIDTH // HEADS, WIDTH // HEADS, WIDTH], dim=-1)
        values = values.unflatten(-1, (HEADS, -1))
        dt = F.softplus(x @ p["gates.project.g.weight"].T + p["gates.learned.g.dt_bias"])
        faded = (-p["gates.learned.g.log_a"].exp() * dt).cumsum(1)
        dl = (x @ p["gates.project.strength.weight"].T).unflatten(-1, (HEADS, 15))
        strength = F.softplus(p["gates.learned.strength.scale"] * dl)
        outputs = []
        for t in range(x.shape[1]):
            o = p["skip"][:, None] * values[:, t]
            for i in range(t + 1):
                weight = (faded[:, t] - faded[:, i]).exp() * strength[:, t, :, level(t, i)] * dt[:, i]
                o = o + (weight * (c[:, t] * b[:, i]).sum(-1, keepdim=True))[..., None] * values[:, i]
            outputs.append(o)
        y = torch.stack(outputs, 1).flatten(-2) * F.silu(z)
        return rms(y, p["norm.weight"]) @ p["out.weight"].T


def level(t: int, i: int) -> int:
    """The level of token i at time t, by construct_level_mask of fla/ops/log_linear_attn/naive.py."""
    if t == i:
        return 0
    for one in range(1, 15):
        half = 1 << (one - 1)
        if t % (2 * half) >= half and t - t % half - half <= i < t - t % half:
            return one
    raise AssertionError


class TestMamba3(PublishedBlock):
    """mamba_ssm/modules/mamba3.py, SISO without is_outproj_norm: neighbouring channels turn by tanh(angle) pi dt."""

    rule = "mamba3"
    starts: ClassVar = {
        "gates.learned.dt.dt_bias": STEP_SIZES,
        "gates.learned.b.value": (1.0, 1.0),
        "gates.learned.c.value": (1.0, 1.0),
        "skip": (1.0, 1.0),
    }

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        c, b, values = (x @ p["qkv.weight"].T).split([WIDTH // HEADS, WIDTH // HEADS, WIDTH], dim=-1)
        values = values.unflatten(-1, (HEADS, -1))
        gates = {name: x @ p[f"gates.project.{name}.weight"].T for name in ("dt", "a", "lam", "theta")}
        dt, trap = F.softplus(gates["dt"] + p["gates.learned.dt.dt_bias"]), gates["lam"].sigmoid()
        rate = torch.where(gates["a"] >= 0, 1 + gates["a"], 1 / (1 - gates["a"].clamp_max(0)))
        assert gates["theta"].shape[-1] == 2, "all heads share K / 4 angles"
        b = rms(b, p["k_norm.weight"])[:, :, None] + p["gates.learned.b.value"]
        c = rms(c, p["q_norm.weight"])[:, :, None] + p["gates.learned.c.value"]
        angle = ((gates["theta"].tanh() * math.pi)[:, :, None] * dt[..., None]).cumsum(1)
        b, c = pairwise(b, angle), pairwise(c, angle)
        h, last, outputs = x.new_zeros(len(x), HEADS, b.shape[-1], values.shape[-1]), 0.0, []
        for t in range(x.shape[1]):
            alpha = (-rate * dt)[:, t].exp()[..., None, None]
            new = b[:, t, :, :, None] * values[:, t, :, None]
            gamma, past = ((share * dt)[:, t, :, None, None] for share in (trap, 1 - trap))
            h, last = alpha * h + past * alpha * last + gamma * new, new
            outputs.append(torch.einsum("bhk,bhkv->bhv", c[:, t], h) + p["skip"][:, None] * values[:, t])
        return (torch.stack(outputs, 1).flatten(-2) * F.silu(x @ p["gate.weight"].T)) @ p["out.weight"].T


class TestMamba3MIMO(PublishedBlock):
    """The token loop of their MIMO tests, without what `lacks` names: two ranks of four channels, one pair turns."""

    rule = "mamba3_mimo"
    starts: ClassVar = {
        "gates.learned.dt.dt_bias": STEP_SIZES,
        "gates.learned.b.value": (1.0, 1.0),
        "gates.learned.m.value": (0.5, 0.5),
        "gates.learned.w.value": (0.5, 0.5),
        "skip": (1.0, 1.0),
    }

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        ranks, width = 2, WIDTH // HEADS
        c, b, values = (x @ p["qkv.weight"].T).split([width, width, WIDTH], dim=-1)
        b, c = (
            rms(z.unflatten(-1, (ranks, -1)), torch.ones(()))[:, :, None]
            + p[f"gates.learned.{name}.value"].unflatten(-1, (ranks, -1))
            for name, z in (("b", b), ("c", c))
        )
        shares = {name: p[f"gates.learned.{name}.value"].unflatten(-1, (width, ranks)).mT for name in "mw"}
        gates = {name: x @ p[f"gates.project.{name}.weight"].T for name in ("dt", "a", "lam", "theta")}
        dt, trap = F.softplus(gates["dt"] + p["gates.learned.dt.dt_bias"]), gates["lam"].sigmoid()
        rate = torch.where(gates["a"] >= 0, 1 + gates["a"], 1 / (1 - gates["a"].clamp_max(0)))
        values = values.unflatten(-1, (HEADS, -1))
        h, past = x.new_zeros(len(x), HEADS, width, width // ranks), 0.0
        phase, outputs = x.new_zeros(len(x), HEADS, 1), []
        for t in range(x.shape[1]):
            phase = phase + gates["theta"][:, t, None].tanh() * math.pi * dt[:, t, :, None]
            cos, sin = phase.cos()[..., None], phase.sin()[..., None]
            now_b, now_c = (
                torch.cat([z[..., :1] * cos - z[..., 1:2] * sin, z[..., :1] * sin + z[..., 1:2] * cos, z[..., 2:]], -1)
                for z in (b[:, t], c[:, t])
            )
            new = torch.einsum("bhrd,bhrp->bhpd", now_b, values[:, t, :, None] * shares["m"])
            alpha, gamma, beta = (
                part[:, t, :, None, None] for part in ((-rate * dt).exp(), trap * dt, (1 - trap) * dt)
            )
            h, past = alpha * h + beta * alpha * past + gamma * new, new
            y = torch.einsum("bhpd,bhrd,hrp->bhp", h, now_c, shares["w"])
            outputs.append(y + p["skip"][:, None] * values[:, t])
        return (torch.stack(outputs, 1).flatten(-2) * F.silu(x @ p["gate.weight"].T)) @ p["out.weight"].T


def pairwise(x: Tensor, angle: Tensor) -> Tensor:
    """Turns channels 2 p and 2 p + 1, as theirs, after our channels p and p + 2 were laid side by side."""
    pairs = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([torch.view_as_real(pairs).flatten(-2), x[..., 4:]], dim=-1)


class TestGLA(PublishedBlock):
    """fla/layers/gla.py: gk_proj through 16 channels with a bias, swish gate after the norm of each head."""

    rule = "gla"
    starts: ClassVar = {"gates.project.g.1.bias": (0.0, 0.0), "norm.weight": (1.0, 1.0)}

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = projected(p, x, convolves=False)
        gk = x @ p["gates.project.g.0.weight"].T @ p["gates.project.g.1.weight"].T + p["gates.project.g.1.bias"]
        g = F.logsigmoid(gk).unflatten(-1, (HEADS, -1)) / 16
        o = rms(recurrent(q, k, v, g), p["norm.weight"]).flatten(-2)
        return (o * F.silu(x @ p["gate.weight"].T)) @ p["out.weight"].T


class TestLinearAttention(PublishedBlock):
    """causal_linear_attention.py and attention_layer.py: elu(x) + 1, and 1e-6 in the denominator; without biases."""

    rule = "linear_attention"

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = projected(p, x, convolves=False)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        z = 1 / (torch.einsum("nlhi,nlhi->nlh", q, k.cumsum(1)) + 1e-6)
        o = recurrent(q, k, v, torch.zeros_like(q[..., :1]), read=1.0) * z[..., None]
        return o.flatten(-2) @ p["out.weight"].T


class TestRetNet(PublishedBlock):
    """fla/layers/multiscale_retention.py: rotary positions, gamma = 1 - 2 ** (-5 - h), swish gate after the norm."""

    rule = "retnet"

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = projected(p, x, convolves=False)
        gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64))
        o = recurrent(rotary(q), rotary(k), v, gamma.log()[:, None].expand(*q.shape[:3], 1))
        return (rms(o, p["norm.weight"]).flatten(-2) * F.silu(x @ p["gate.weight"].T)) @ p["out.weight"].T


class TestHGRN2(PublishedBlock):
    """fla/layers/hgrn2.py: k = 1 - f, RMSNorm over all heads, no gate. k has no projection there, so ours is unread."""

    rule = "hgrn2"

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, _, i = projected(p, x, convolves=False)
        g = F.logsigmoid(x @ p["gates.project.g.weight"].T).unflatten(-1, (HEADS, -1))
        o = recurrent(F.silu(q), 1 - g.exp(), i, g)
        return rms(o.flatten(-2), p["norm.weight"]) @ p["out.weight"].T


class TestLightNet(PublishedBlock):
    """fla/layers/lightnet.py: z = logcumsumexp(k), gate through 128 channels, norm over all heads with eps 1e-6."""

    rule = "lightnet"

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = projected(p, x, convolves=False)
        z = k.logcumsumexp(1)
        g = torch.cat([z[:, :1], z[:, :-1]], 1) - z
        o = rms(recurrent(F.silu(q), (k - z).exp(), v, g).flatten(-2), p["norm.weight"], eps=1e-6)
        return (o * F.silu(x @ p["gate.0.weight"].T @ p["gate.1.weight"].T)) @ p["out.weight"].T


class TestGSA(PublishedBlock):
    """fla/layers/gsa.py: scale 1, gates of the slots over 8, and the RMSNorm of SiLU(o) over all heads."""

    rule = "gsa"

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = map(F.silu, projected(p, x, convolves=False))
        f = F.logsigmoid(x @ p["gates.project.g.weight"].T).unflatten(-1, (HEADS, -1)) / 8
        s = 1 - f.exp()
        keys = values = x.new_zeros(len(x), HEADS, s.shape[-1], q.shape[-1])
        outputs = []
        for t in range(x.shape[1]):
            keys = keys * f[:, t, :, :, None].exp() + s[:, t, :, :, None] * k[:, t, :, None]
            values = values * f[:, t, :, :, None].exp() + s[:, t, :, :, None] * v[:, t, :, None]
            weights = torch.einsum("bhmk,bhk->bhm", keys, q[:, t]).softmax(-1)
            outputs.append(torch.einsum("bhm,bhmv->bhv", weights, values))
        return rms(F.silu(torch.stack(outputs, 1).flatten(-2)), p["norm.weight"]) @ p["out.weight"].T


class TestAttention(PublishedBlock):
    """fla/layers/attn.py: causal softmax attention with rotary positions, without norm and gate (Transformer++)."""

    rule = "attention"

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = projected(p, x, convolves=False)
        q, k, outputs = rotary(q), rotary(k), []
        for t in range(x.shape[1]):
            weights = (torch.einsum("bhk,bnhk->bhn", q[:, t], k[:, : t + 1]) * q.shape[-1] ** -0.5).softmax(-1)
            outputs.append(torch.einsum("bhn,bnhv->bhv", weights, v[:, : t + 1]))
        return torch.stack(outputs, 1).flatten(-2) @ p["out.weight"].T


class TestMoBA(TestAttention):
    """moba_naive.py in Llama's attention. Of at most 32 tokens both blocks of 16 are chosen: softmax attention."""

    rule = "moba"


class TestNSA(PublishedBlock):
    """fla/layers/nsa.py: rotary positions, and three gates for each head, by one projection without a bias."""

    rule = "nsa"

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = projected(p, x, convolves=False)
        q, k, outputs = rotary(q), rotary(k), []
        g_cmp, g_slc, g_swa = (torch.sigmoid(x @ p[f"gates.project.{name}.weight"].T)[..., None] for name in "csw")
        for t in range(x.shape[1]):
            o = g_slc[:, t] * weighed(q[:, t], k[:, : t + 1], v[:, : t + 1])  # the first block and the two last
            first = max(t - 15, 0)
            o = o + g_swa[:, t] * weighed(q[:, t], k[:, first : t + 1], v[:, first : t + 1])
            if t >= 7:
                means = (torch.stack([y[:, i : i + 8].mean(1) for i in range(0, t - 6, 4)], 1) for y in (k, v))
                o = o + g_cmp[:, t] * weighed(q[:, t], *means)
            outputs.append(o)
        return torch.stack(outputs, 1).flatten(-2) @ p["out.weight"].T


class TestForgettingAttention(PublishedBlock):
    """fla/layers/forgetting_attn.py: no positions, f = sigmoid(W x + c), without norm and gate."""

    rule = "forgetting_attention"
    starts: ClassVar = {"gates.learned.g.bias": (0.0, 0.0)}

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = projected(p, x, convolves=False)
        fades = F.logsigmoid(x @ p["gates.project.g.weight"].T + p["gates.learned.g.bias"]).cumsum(1)
        outputs = []
        for t in range(x.shape[1]):
            logits = torch.einsum("bhk,bnhk->bnh", q[:, t], k[:, : t + 1]) * q.shape[-1] ** -0.5
            weights = (logits + fades[:, t, None] - fades[:, : t + 1]).softmax(1)
            outputs.append(torch.einsum("bnh,bnhv->bhv", weights, v[:, : t + 1]))
        return torch.stack(outputs, 1).flatten(-2) @ p["out.weight"].T


class TestDifferentialAttention(PublishedBlock):
    """multihead_diffattn.py with a lambda for each head and no weights of the norm.

    The halves are channels 2 i and 2 i + 1, and RoPE turns them as channels of one head.
    """

    rule = "differential_attention"

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = projected(p, x, convolves=False)
        q, k = (rotary(part).unflatten(-1, (-1, 2)) for part in (q, k))
        lambdas = p["gates.learned.lq.value"] * p["gates.learned.lk.value"]
        one, other = lambdas.unflatten(-1, (-1, 2)).sum(1).exp().unbind(-1)
        outputs = []
        for t in range(x.shape[1]):
            logits = torch.einsum("bhkc,bnhkc->cbhn", q[:, t], k[:, : t + 1]) * q.shape[3] ** -0.5
            first, second = logits.softmax(-1)
            weights = first - (one - other + 0.8)[:, None] * second
            outputs.append(torch.einsum("bhn,bnhv->bhv", weights, v[:, : t + 1]))
        o = torch.stack(outputs, 1)
        return (0.2 * rms(o, o.new_ones(o.shape[-1]))).flatten(-2) @ p["out.weight"].T


def weighed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of q [B, H, K] to k [B, n, H, K] and v [B, n, H, V]."""
    weights = (torch.einsum("bhk,bnhk->bhn", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhn,bnhv->bhv", weights, v)


def rotary(x: Tensor) -> Tensor:
    """FLA's RotaryEmbedding, which is not interleaved, as a product with e^(i t theta)."""
    half = x.shape[-1] // 2
    theta = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones(()).double(), torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * theta)
    turned = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat([turned.real, turned.imag], -1)
