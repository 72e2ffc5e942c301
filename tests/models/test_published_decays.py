"""Holds the presets of rules that decay, and of attention, to the blocks of the authors' code."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

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
