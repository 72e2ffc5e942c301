"""What every preset must satisfy: the whole block equals a loop over tokens that was written from the authors' code."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.models.block import Block
from deltalab.models.layer import RuleLayer
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_rule, rule_plugin

WIDTH, HEADS, LENGTH = 24, 3, 17

STEP_SIZES = (0.001 + math.log(-math.expm1(-0.001)), 0.1 + math.log(-math.expm1(-0.1)))
"""The interval of c where softplus(c) is in [0.001, 0.1]."""


class PublishedBlock:
    """What every preset must satisfy. A subclass names the rule and writes the authors' block as a loop.

    Attributes:
        rule: The rule.
        starts: The interval in which each of these parameters starts. The name is that of the layer.
        settings: Sizes of the model beyond width and heads.
        gradient_error: The relative error of gradients; larger where the rule solves and the loop iterates.
    """

    rule: ClassVar[str]
    starts: ClassVar[Mapping[str, tuple[float, float]]] = {}
    settings: ClassVar[Mapping[str, object]] = {}
    gradient_error: ClassVar[float] = 1e-9

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Computes y [B, T, d] from x, with the parameters p of the layer, as the authors' code does."""
        raise NotImplementedError

    def layer(self, heads: int = HEADS, d_model: int = WIDTH, without: str = "") -> RuleLayer:
        """The published layer; if `without` is a knob or a setting, the layer with that one as in a plain model."""
        torch.manual_seed(1)
        size = {"vocab_size": 1, "d_model": d_model, "heads": heads, "layers": 1, **self.settings}
        rule, plain = {"name": f"{self.rule}@published"}, get_rule(self.rule).spec()
        if without in plain:
            rule[without] = plain[without]
        elif without:
            size[without] = next(field.default for field in fields(ModelSpec) if field.name == without)
        mixer = Block(ModelSpec.of({"rule": rule, **size}).at(0), 1).mixer
        assert isinstance(mixer, RuleLayer)
        return mixer.double()

    @staticmethod
    def inputs() -> Tensor:
        return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def moved(self, without: str = "") -> RuleLayer:
        """The layer with all numbers off their start, so that a zero or a one hides no mistake."""
        layer = self.layer(without=without)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for value in layer.parameters():
                value += 0.1 * torch.randn(value.shape, dtype=value.dtype, generator=generator)
        return layer

    def test_output_and_gradients(self):
        layer, x = self.moved(), self.inputs()
        y = layer(x)
        names, parameters = zip(*layer.named_parameters(), strict=True)
        expected = self.loop(dict(zip(names, parameters, strict=True)), x)
        assert (y - expected).norm() <= 1e-10 * expected.norm()
        weigh = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(4))
        ours = torch.autograd.grad((y * weigh).sum(), parameters, allow_unused=True)
        theirs = torch.autograd.grad((expected * weigh).sum(), parameters, allow_unused=True)
        for name, one, other in zip(names, ours, theirs, strict=True):
            size = 0.0 if other is None else float(other.norm())
            apart = size if one is None else float((one if other is None else one - other).norm())
            assert apart <= self.gradient_error * max(size, 1e-3), name
        assert sum(gradient is not None and bool(gradient.any()) for gradient in theirs) == len(names)

    def test_decoding(self):
        layer, x = self.moved(), self.inputs()
        cache, outputs = None, []
        for t in range(LENGTH):
            y, cache = layer.advance(x[:, t : t + 1], cache)
            outputs.append(y)
        assert torch.allclose(torch.cat(outputs, 1), layer(x), atol=1e-10)

    def test_padding(self):
        layer, x = self.moved(), self.inputs()
        mask = torch.ones(2, LENGTH)
        mask[1, :5] = 0
        assert torch.allclose(layer(x, attention_mask=mask)[1:, 5:], layer(x[1:, 5:]), atol=1e-10)

    def test_each_setting_of_the_preset_counts(self):
        """A preset that forgot one of its settings would not be the block, or would not start as the block does."""
        published = rule_plugin(self.rule).kind.published
        for name in {**published.get("knobs", {}), **published.get("layer", {})}:
            with pytest.raises((AssertionError, KeyError, RuntimeError, ValueError)):
                self.holds(name)

    def holds(self, without: str) -> None:
        """Compares the loop and the starts with the layer that has `without` as in a plain model."""
        layer, x = self.moved(without), self.inputs()
        torch.testing.assert_close(self.loop(dict(layer.named_parameters()), x), layer(x), rtol=1e-9, atol=0)
        self.starts_of(without)

    def test_starts(self):
        self.starts_of("")

    def starts_of(self, without: str) -> None:
        values = dict(self.layer(heads=128, d_model=512, without=without).named_parameters())
        for name, (low, high) in self.starts.items():
            value, share = values[name].detach(), 0.15
            if low == -math.inf:  # the logarithm of numbers from 0 on, of which a start from 1 on must be told apart
                value, low, high, share = value.exp(), 0.0, math.exp(high), 0.05
            least, most, near = float(value.min()), float(value.max()), share * (high - low) + 1e-6
            assert low - 1e-6 <= least <= low + near, name
            assert high - near <= most <= high + 1e-6, name


def convolved(x: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """The causal convolution of x [B, T, C] by torch's own Conv1d, as the authors call it."""
    width = taps.shape[0]
    y = F.conv1d(x.mT, taps.T[:, None], bias, padding=width - 1, groups=x.shape[-1])[..., : x.shape[1]]
    return y.mT


def unit(x: Tensor) -> Tensor:
    """x [..., K] over its norm. FLA's kernels divide by sqrt(|x|^2 + 1e-6), 5e-7 off at |x| = 1."""
    return x / x.norm(dim=-1, keepdim=True)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """FLA's RMSNorm of the last axis."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def projected(p: Mapping[str, Tensor], x: Tensor, steps: int = 1, convolves: bool = True) -> tuple[Tensor, ...]:
    """q [B, T, H, K], k and v [B, T, n H, K], before any activation."""
    weight, widths = p["qkv.weight"], [WIDTH, steps * WIDTH, len(p["qkv.weight"]) - (1 + steps) * WIDTH]
    taps = p["conv"].split(widths, dim=1) if convolves else (None, None, None)
    parts = [x @ part.T for part in weight.split(widths)]
    parts = [part if tap is None else convolved(part, tap) for part, tap in zip(parts, taps, strict=True)]
    heads = (HEADS, steps * HEADS, steps * HEADS)
    return tuple(part.unflatten(-1, (count, -1)) for part, count in zip(parts, heads, strict=True))


def decay(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The log-decay -exp(A_log) softplus(W x + dt_bias) of Mamba2, [B, T, H]."""
    z = x @ p["gates.project.g.weight"].T + p["gates.learned.g.dt_bias"]
    return -p["gates.learned.g.log_a"].exp() * F.softplus(z)


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, read: float | None = None) -> Tensor:
    """The recurrence of FLA's fused_recurrent_gla with g [B, T, H, K or 1]."""
    state, outputs = q.new_zeros(*q.shape[::2], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * (read or q.shape[-1] ** -0.5))
    return torch.stack(outputs, 1)
