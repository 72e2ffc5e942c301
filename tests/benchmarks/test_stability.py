"""What benchmarks/stability.py measures, on systems and transitions whose figures are known."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.scripts import loaded

import deltalab
from deltalab.authoring.inputs import Inputs, draw, normal
from deltalab.authoring.rule_checks.number_checks import outside
from deltalab.models.layer import RuleLayer
from deltalab.models.model import build_model

stability = loaded("stability")
SIZES = {"batch": 1, "length": 5, "heads": 2, "key_dim": 4, "value_dim": 4}


def test_the_delta_rule_shrinks_the_keys_direction_alone() -> None:
    rule = deltalab.get_rule("deltanet")
    x = draw(rule, **SIZES)
    values = stability.spectrum(rule, x).real.view(5, 2, 4).sort(-1).values
    assert values[..., 1:] == pytest.approx(torch.ones(5, 2, 3).numpy())
    assert values[..., 0].numpy() == pytest.approx((1 - x.gates["beta"][0]).numpy())


def test_the_second_state_has_its_own_strength() -> None:
    rule = deltalab.get_rule("rdn")
    x = draw(rule, **SIZES)
    least = stability.spectrum(rule, x).real.view(5, 2, 2, 4).min(-1).values  # token, state, head
    alpha = x.gates["g"][0].exp()
    for state, gate in enumerate(("beta", "gamma")):
        assert least[:, state].numpy() == pytest.approx((alpha * (1 - x.gates[gate][0])).numpy())


def test_what_a_rule_carries_comes_from_the_tokens_before() -> None:
    """lightnet's decay is Z_{t-1} / Z_t: the first token's is 0, and all would be 0 if a carry were lost."""
    rule = deltalab.get_rule("lightnet")
    values = stability.spectrum(rule, draw(rule, **SIZES)).real.view(5, -1)
    assert values[0].abs().max() < 1e-9
    assert values[1:].min() > 0


def test_a_key_that_is_too_long_leaves_the_range() -> None:
    rule = deltalab.get_rule("deltanet")
    x = draw(rule, **SIZES)
    longer = Inputs(x.q, 3 * x.k, x.v, {"beta": torch.ones_like(x.gates["beta"])})
    assert float(outside(rule, stability.spectrum(rule, longer)).max()) == pytest.approx(8.0)  # 1 - 9 is 8 below 0


@pytest.mark.parametrize(("knobs", "ridge"), [({}, 0.02), ({"ridge": 0.25, "adaptive": False}, 0.25)])
def test_condition_numbers_are_those_of_the_formed_systems(knobs: dict[str, Any], ridge: float) -> None:
    k, g = F.normalize(normal(1, 70, 2, 4, seed=1), dim=-1), F.logsigmoid(2 + normal(1, 70, 2, seed=2))
    rule = replace(deltalab.get_rule("gka"), **knobs)
    found = stability.conditions(rule, Inputs(k, k, k, {"g": g}))
    at = dict(enumerate(found.permute(0, 2, 1).reshape(-1, 2)))  # by token, for both heads
    for head in range(2):
        H = torch.zeros(4, 4, dtype=torch.float64)
        for t in range(70):
            H = g[0, t, head].exp() * H + torch.outer(k[0, t, head], k[0, t, head])
            strength = ridge if knobs else ridge * H.norm()
            system = H + strength * torch.eye(4, dtype=torch.float64)
            assert float(at[t][head]) == pytest.approx(float(torch.linalg.cond(system)), rel=1e-6)
            assert knobs or float(at[t][head]) <= 1.02 / 0.02


def test_the_size_of_a_length_is_that_of_its_second_half() -> None:
    spec = {"rule": "rla", "vocab_size": 8, "d_model": 8, "heads": 1, "layers": 2}
    model = build_model(spec, seed=0)
    tokens = torch.randint(8, (1, stability.LENGTHS[-1]), generator=torch.Generator().manual_seed(0))
    outputs: list[torch.Tensor] = []
    for layer in model.modules():
        if isinstance(layer, RuleLayer):
            layer.norm.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    found = stability.sizes(model, tokens, bf16=False)
    wanted = [max(float(o[:, n // 2 : n].square().mean().sqrt()) for o in outputs[:2]) for n in stability.LENGTHS]
    assert found == pytest.approx(wanted)
    for parameter in model.parameters():
        parameter.data.mul_(1e30)
    assert None in stability.sizes(model, tokens, bf16=False)
