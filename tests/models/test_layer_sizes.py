"""Layers of several sizes in one model: heads, keys and MLPs that each layer has for itself."""

from typing import Any

import pytest
import torch

from deltalab import InputError, get_task
from deltalab.export.fla.conversion import to_fla
from deltalab.export.scales import SCALES, widened
from deltalab.models.block import Block, SwiGLU
from deltalab.models.costs import CostCounter
from deltalab.models.layer import RuleLayer
from deltalab.models.model import Model, build_model
from deltalab.models.spec import ModelSpec
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

WIDE = {"heads": 4, "key_dim": 4, "mlp_width": 40}
LAYERS = ["rule", {"name": "rule", "layer": WIDE}, {"name": "attention", "layer": {"mlp_width": 16}}]
SIZES: dict[str, Any] = {"rule": "comba", "vocab_size": 16, "d_model": 8, "heads": 2, "layers": LAYERS}


def sizes(model: Model) -> list[tuple[int, int, int]]:
    found = []
    for block in model.blocks:
        assert isinstance(block, Block)
        assert isinstance(block.mixer, RuleLayer)
        assert isinstance(block.mlp, SwiGLU)
        found.append((block.mixer.heads, block.mixer.key_dim, block.mlp.hidden))
    return found


def test_each_layer_has_its_own_sizes() -> None:
    model, tokens = build_model(SIZES, seed=1), torch.arange(18).reshape(2, 9) * 7 % 16
    assert sizes(model) == [(2, 4, 24), (4, 4, 40), (2, 4, 16)]
    assert sizes(build_model({**SIZES, "mlp_width": 32})) == [(2, 4, 32), (4, 4, 40), (2, 4, 16)]
    logits, cache = model.step(tokens[:, :4])
    torch.testing.assert_close(torch.cat([logits, model.step(tokens[:, 4:], cache)[0]], 1), model(tokens))
    costs = CostCounter().costs(model.spec, 40)
    assert costs.parameters == sum(p.numel() for p in model.parameters())


def test_a_stack_is_as_each_alone() -> None:
    task = get_task("mqar", length=16, pairs=2, vocab_size=32)
    spec = TrainSpec(steps=3, batch_size=4, lr=1e-2, evaluations=1, eval_batches=1)
    model = ModelSpec.of({**SIZES, "vocab_size": 32})
    together, alone = train(task, model, spec, [1, 2]).runs[1], train(task, model, spec, [2]).runs[0]
    for name, value in alone.weights.items():
        torch.testing.assert_close(together.weights[name], value, rtol=1e-4, atol=1e-5)


def test_experts_of_a_layer_have_its_width_together() -> None:
    model = build_model({**SIZES, "experts": {"count": 4, "top": 2, "shared": 0}})
    hidden = [block.mlp.into.weight.shape[-1] // 2 for block in model.blocks]  # type: ignore[union-attr]
    assert hidden == [16, 24, 8], "the widths 24, 40 and 16 over two experts, rounded up to multiples of 8"


def test_a_scale_keeps_the_ratios_of_each_layer() -> None:
    wide = widened(ModelSpec.of(SIZES), SCALES["340M"], 100)
    factor = wide["d_model"] // 8
    assert wide["layers"][1]["layer"]["mlp_width"] == 40 * factor
    assert wide["layers"][2]["layer"]["mlp_width"] == 16 * factor


def test_folders_of_fla_have_one_width() -> None:
    attention = {"rule": "gated_deltanet@published", "vocab_size": 16, "d_model": 8, "heads": 2}
    for layers, message in (
        (
            ["rule", {"name": "attention", "layer": {"conv": 0, "mlp_width": 16}}],
            "MLPs of one width, that of model.mlp",
        ),
        ([{"name": "rule", "layer": {"mlp_width": 16}}] * 2, "MLPs of one width, that of model.mlp_width"),
        (["rule", {"name": "rule", "layer": {"mlp_width": 16}}], "FLA's layers are alike"),
    ):
        with pytest.raises(InputError, match=message):
            to_fla(ModelSpec.of({**attention, "layers": layers}), None)
    with pytest.raises(InputError, match="value_residual"):
        to_fla(ModelSpec.of({**attention, "value_residual": {}}), None)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"layer": {"mlp_widht": 8}}, "model.layers: unknown setting of a layer 'mlp_widht'; did you mean 'mlp_width'?"),
    ({"layer": {"mlp_width": 0}}, "model.layers[1]: model.mlp_width must be a whole number of at least 1, not 0"),
    ({"layer": {"d_model": 16}}, "model.layers: unknown setting of a layer 'd_model'"),
    (
        {"layer": {"beside": {"name": "gla", "layer": {"mlp_width": 8}}}},
        "model.beside: unknown setting of a layer 'mlp_",
    ),
    ({"mlp_width": 8}, "mlp_width is a setting of the layer: say {name: comba, layer: {mlp_width: ...}}"),
]


@pytest.mark.parametrize(("entry", "message"), WRONG)
def test_wrong_sizes_are_one_line(entry: dict[str, Any], message: str) -> None:
    name = "comba" if "mlp_width" in entry else "rule"
    with pytest.raises(InputError) as raised:
        ModelSpec.of({**SIZES, "layers": ["rule", {"name": name, **entry}]})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    with pytest.raises(InputError, match=r"model\.layers\[1\]: model\.mlp_width has no effect without an MLP"):
        ModelSpec.of({**SIZES, "mlp": False})
