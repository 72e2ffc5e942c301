"""Signed decays and windows, against loops written from their equations alone."""

import dataclasses

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


SIGNED = [
    deltalab.get_rule("signed_gla"),
    deltalab.get_rule("algebra", signed=True, decay="diagonal", low_rank="none"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", SIGNED, ids=lambda rule: rule.name)
def test_a_decay_between_minus_one_and_one_keeps_its_digits_in_16_bits(rule: UpdateRule, dtype: torch.dtype) -> None:
    x = inputs(rule)
    g = x.gates["g"].clone()
    g[0, 3] = -0.6931  # alpha is next to 0, and rounds to it in fp16
    narrow = dataclasses.replace(x, gates={**x.gates, "g": g}).map(lambda part: part.to(dtype).requires_grad_())
    last = [
        deltalab.scan(rule, y.q, y.k, y.v, y.gates, scale=1.0, backend="chunked", chunk_size=4)[1][0]
        for y in (narrow, narrow.map(torch.Tensor.double))
    ]
    torch.testing.assert_close(last[0].double(), last[1], rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(last[0].sum(), [narrow.gates["g"]])
    assert grad.isfinite().all()


@pytest.mark.parametrize("g", [-0.6931466, -0.6931472])
def test_signed_gla_has_the_gradient_of_a_decay_next_to_0(g: float) -> None:
    """alpha is 1.1e-6, and next to 0, so that an error of the gradient of log alpha counts a million times."""
    rule = deltalab.get_rule("signed_gla")
    x = inputs(rule)
    at = torch.zeros_like(x.gates["g"])
    at[:, 3] = 1
    x = dataclasses.replace(x, gates={"g": torch.where(at > 0, g, x.gates["g"])}).map(torch.Tensor.float)
    grads = []
    for y in (x, x.map(torch.Tensor.double)):
        y = y.map(lambda part: part.requires_grad_())
        o, _ = deltalab.scan(rule, y.q, y.k, y.v, y.gates, backend="chunked")
        grads += torch.autograd.grad(o.square().sum(), [y.gates["g"]])
    assert (grads[0] - grads[1])[:, 3].norm() <= 0.4 * grads[1][:, 3].norm()


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
