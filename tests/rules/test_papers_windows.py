"""Signed decays and windows, against loops written from their equations alone."""

import pytest
import torch
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import Inputs, draw
from deltalab.rule import UpdateRule

B, T, H, K, V = 2, 13, 2, 4, 3


def inputs(rule: UpdateRule) -> Inputs:
    return draw(rule, batch=B, length=T, heads=H, key_dim=K, value_dim=V)


def scan(rule: UpdateRule, x: Inputs, backend: str) -> Tensor:
    return deltalab.scan(rule, x.q, x.k, x.v, x.gates, scale=1.0, backend=backend, chunk_size=4)[0]


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize("negative", [True, False])
def test_signed_gla(backend: str, negative: bool) -> None:
    rule = deltalab.get_rule("signed_gla", negative=negative)
    x = inputs(rule)
    o = torch.zeros_like(x.v)
    for b in range(B):
        for h in range(H):
            S = torch.zeros(V, K, dtype=torch.float64)
            for t in range(T):
                alpha = x.gates["g"][b, t, h].exp()
                alpha = 2 * alpha - 1 if negative else alpha
                S = S * alpha + torch.outer(x.v[b, t, h], x.k[b, t, h])
                o[b, t, h] = S @ x.q[b, t, h]
    torch.testing.assert_close(scan(rule, x, backend), o)


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize("window", [2, 4, 16])
@pytest.mark.parametrize("g", ["const", "mamba2_decay"])
def test_window_linear_is_a_sum_over_the_window(backend: str, window: int, g: str) -> None:
    rule = deltalab.get_rule("window_linear", window=window, g=0 if g == "const" else g)
    x = inputs(rule)
    decays = x.gates.get("g", torch.zeros(B, T, H, dtype=torch.float64))
    o = torch.zeros_like(x.v)
    for t in range(T):
        for i in range(max(0, t - window + 1), t + 1):
            weight = decays[:, i + 1 : t + 1].sum(1).exp() * (x.q[:, t] * x.k[:, i]).sum(-1)
            o[:, t] += weight[..., None] * x.v[:, i]
    torch.testing.assert_close(scan(rule, x, backend), o)
