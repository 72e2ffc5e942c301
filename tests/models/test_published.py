"""Holds `rule: NAME@published`, the whole block, to loops over tokens that were written from the authors' code.

A block is held in its start, its output, its gradients, its decoding token by token and its padding.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError
from deltalab.models.layer import RuleLayer
from deltalab.models.model import Block
from deltalab.models.published import differences, presets, settings, written_out
from deltalab.models.spec import ModelSpec
from deltalab.study.specs.method_settings import resolve
from deltalab.tasks.mqar import MQAR

WIDTH, HEADS, LENGTH = 24, 3, 17


class PublishedBlock:
    """What every preset must satisfy. A subclass names the rule and writes the authors' block as a loop.

    Attributes:
        rule: The rule.
        starts: The interval in which each of these parameters starts. The name is that of the layer.
        settings: Sizes of the model beyond width and heads.
    """

    rule: ClassVar[str]
    starts: ClassVar[Mapping[str, tuple[float, float]]] = {}
    settings: ClassVar[Mapping[str, object]] = {}

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Computes y [B, T, d] from x, with the parameters p of the layer, as the authors' code does."""
        raise NotImplementedError

    def layer(self, heads: int = HEADS, d_model: int = WIDTH) -> RuleLayer:
        torch.manual_seed(1)
        size = {"vocab_size": 1, "d_model": d_model, "heads": heads, "layers": 1, **self.settings}
        mixer = Block(ModelSpec.of({"rule": f"{self.rule}@published", **size}).at(0), 1).mixer
        assert isinstance(mixer, RuleLayer)
        return mixer.double()

    @staticmethod
    def inputs() -> Tensor:
        return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def moved(self) -> RuleLayer:
        """The layer with all numbers off their start, so that a zero or a one hides no mistake."""
        layer = self.layer()
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
            assert apart <= 1e-9 * max(size, 1e-3), name
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

    def test_starts(self):
        values = dict(self.layer(heads=64, d_model=256).named_parameters())
        for name, (low, high) in self.starts.items():
            value = values[name]
            least, most, near = float(value.min()), float(value.max()), 0.3 * (high - low) + 1e-6
            assert low - 1e-6 <= least <= low + near, name
            assert high - near <= most <= high + 1e-6, name


def convolved(x: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
    """The causal convolution of x [B, T, C] by torch's own Conv1d, as the authors call it."""
    width = taps.shape[0]
    y = F.conv1d(x.mT, taps.T[:, None], bias, padding=width - 1, groups=x.shape[-1])[..., : x.shape[1]]
    return y.mT


class TestMamba2(PublishedBlock):
    """mamba_ssm/modules/mamba2.py: in_proj to z, x, B, C and dt; conv1d with bias; SSD with D; RMSNormGated."""

    rule = "mamba2"
    starts: ClassVar = {
        "gates.learned.g.log_a": (0.0, math.log(16)),
        "gates.learned.g.dt_bias": (0.001 + math.log(-math.expm1(-0.001)), 0.1 + math.log(-math.expm1(-0.1))),
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


def test_every_preset_has_its_block():
    held = {kind.rule for kind in PublishedBlock.__subclasses__()}
    assert held == set(presets())


def test_what_stands_beside_a_preset_stays():
    rule, model = written_out({"name": "mamba2@published", "beta": 1}, {"conv": 2, "d_model": 8})
    assert (rule["name"], rule["beta"]) == ("mamba2", 1)
    assert (model["conv"], model["d_model"], model["conv_bias"]) == (2, 8, True)


def test_a_configuration_says_in_what_it_differs():
    task = MQAR(length=32, pairs=4, vocab_size=64)
    config = {
        "rule": {"name": "mamba2@published"},
        "model": {"d_model": 16},
        "train": {"steps": 10, "batch_size": 1, "lr": 0.1},
    }
    assert differences(resolve(config, task)) == []
    config["model"] = {"d_model": 16, "skip": False, "scale": 1.0}  # the scale is the preset's, said in another way
    assert differences(resolve(config, task)) == ["model.skip"]
    config["rule"] = {"name": "algebra"}
    assert differences(resolve(config, task)) is None


def test_a_layer_of_a_pattern_may_be_a_preset():
    spec = ModelSpec.of(
        {"vocab_size": 8, "rule": "deltanet", "d_model": 16, "layers": ["rule", {"name": "mamba2@published"}]}
    )
    assert (spec.at(0).skip, spec.at(1).skip) == (False, True)
    assert spec.at(1).make_rule() == ModelSpec.of({"vocab_size": 8, "rule": settings("mamba2")["rule"]}).make_rule()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("algebra@published", "rule 'algebra' has no preset 'published'"),
        ("mamba2@publishd", "rule 'mamba2': unknown preset 'publishd'; did you mean 'published'?"),
        ("mamba3x@published", "unknown rule 'mamba3x'"),
    ],
)
def test_refuses(name, message):
    with pytest.raises(InputError) as error:
        ModelSpec.of({"vocab_size": 8, "rule": name})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
