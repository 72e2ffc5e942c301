"""The norm of the output sees numbers well above the root of its eps at the start, so that it does not damp them."""

import pytest
import torch
import torch.nn.functional as F

from deltalab import list_rules
from deltalab.models.block import Block
from deltalab.models.layer import RuleLayer
from deltalab.models.published import presets
from deltalab.models.spec import ModelSpec

LEAST = 0.75
"""The least factor by which a norm may damp its input."""

DAMPED = {
    ("mamba2", 32): 0.22,
    ("mamba", 32): 0.30,
    ("raven", 32): 0.39,
    ("s5", 32): 0.50,
    ("atlas", 1024): 0.50,
    ("pre_state_sgla", 1024): 0.54,
    ("metala", 1024): 0.60,
    ("gated_oja", 1024): 0.66,
    ("memory_caching", 1024): 0.68,
    ("mesa_net", 1024): 0.70,
    ("mdn", 1024): 0.72,
}
"""The factors of the rules whose defaults start below `LEAST`, by rule and width, as measured."""


def damping(width: int, rule: str, **settings: object) -> float:
    """The factor (m / (m + eps))^(1/2) of a layer's norm at the start, where m is the median of its mean squares."""
    torch.manual_seed(0)
    size = {"vocab_size": 1, "d_model": width, "heads": max(1, width // 64), "layers": 1}
    layer = Block(ModelSpec.of({"rule": rule, **size, **settings}).at(0), 1).mixer
    assert isinstance(layer, RuleLayer)
    normed = layer.norm._normed
    seen: list[torch.Tensor] = []
    layer.norm.has_kernel = False
    layer.norm._normed = lambda o: (seen.append(o), normed(o))[1]  # type: ignore[method-assign]
    with torch.no_grad():
        layer(torch.randn(1, 32, width))
    if not seen:
        return 1.0
    o = F.silu(seen[0]) if layer.norm.kind == "rms_all_of_silu" else seen[0]
    o = o - o.mean(-1, keepdim=True) if layer.norm.kind in ("layer", "group") else o
    squares = o.square().mean((-2, -1) if layer.norm.kind.startswith("rms_all") else -1)
    return float((squares / (squares + layer.norm.eps)).sqrt().median())


@pytest.mark.parametrize("width", [32, 1024])
@pytest.mark.parametrize("rule", presets())
def test_the_norm_of_a_published_block_does_not_damp(rule: str, width: int) -> None:
    assert damping(width, f"{rule}@published") >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("width", [32, 1024])
@pytest.mark.parametrize("rule", list_rules())
def test_the_norm_around_a_rule_damps_no_more_than_is_known(rule: str, width: int) -> None:
    found, known = damping(width, rule), DAMPED.get((rule, width))
    assert found == pytest.approx(known, abs=0.1) if known else found >= LEAST


def test_unit_norm_and_a_small_scale_drown_mamba2_in_eps() -> None:
    plain = {"features": "unit", "scale": 1 / 8, "skip": False, "output_norm": True, "output_gate": True}
    assert damping(1024, "mamba2@published", **plain) < LEAST
