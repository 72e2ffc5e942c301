"""Two mixers side by side: the mean of their normed outputs, with both memories, in every form of a model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.decoding import read_in_every_way

from deltalab import InputError, get_task
from deltalab.export.modules import plugins
from deltalab.models.block import Block
from deltalab.models.costs import CostCounter
from deltalab.models.dead_parameters import dead_parameters
from deltalab.models.model import Model, build_model
from deltalab.models.spec import ModelSpec
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

SIZES: dict[str, Any] = {"rule": "mamba2", "vocab_size": 16, "d_model": 8, "heads": 2}
BESIDE: dict[str, Any] = {
    "a rule": "gated_deltanet",
    "attention of a window": {"name": "attention", "window": 4, "layer": {"conv": 0, "output_gate": False}},
    "the rule once more": {"name": "rule", "layer": {"conv": 0}},
}
CASES = pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)


def net(beside: Any, **settings: Any) -> Model:
    return build_model({**SIZES, "beside": beside, **settings}, seed=1).double()


@CASES
def test_a_block_is_its_statement(beside: Any) -> None:
    model = net(beside, layers=1, mlp=False)
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert block.beside is not None
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    normed = block.norm(x, None)[1]

    def rms(y: torch.Tensor) -> torch.Tensor:
        return y / (y.square().mean(-1, keepdim=True) + model.spec.norm_eps).sqrt()

    want = 0.5 * 2**-0.5 * (rms(block.mixer(normed)) + rms(block.beside.mixer(normed)))
    found, branch, _ = block(x, None)
    torch.testing.assert_close(found, x)
    torch.testing.assert_close(branch, want)


@CASES
def test_tokens_one_by_one_and_packed_are_the_whole(beside: Any) -> None:
    model, tokens = net(beside, canon=["A"]), torch.arange(20).reshape(2, 10) * 7 % 16
    cache = read_in_every_way(model, tokens)
    swapped, _ = model.step(tokens[:1, :1], [part.rows(torch.tensor([1])) for part in cache])
    plain, _ = model.step(tokens[:1, :1].expand(2, 1), cache)
    torch.testing.assert_close(swapped[0], plain[1])


def test_costs_and_plugins_have_both() -> None:
    spec, alone = ModelSpec.of({**SIZES, "beside": "gla"}), ModelSpec.of(SIZES)
    other = ModelSpec.of({**SIZES, "rule": "gla"})
    both, first, second = (CostCounter().costs(given, 20) for given in (spec, alone, other))
    assert both.cache.state == first.cache.state + second.cache.state
    assert both.parameters == sum(p.numel() for p in build_model(spec).parameters())
    assert [rule.name for rule in spec.rules()] == ["mamba2", "gla"]
    assert [plugin.kind.name for plugin in plugins(spec)] == ["mamba2", "gla"]
    assert dead_parameters(spec, 20) == 0


def test_an_entry_of_layers_may_have_one() -> None:
    layers = ["rule", {"name": "rule", "layer": {"beside": "gla"}}, "attention"]
    model = build_model({**SIZES, "layers": layers})
    assert [block.beside is not None for block in model.blocks] == [False, True, False]
    again = ModelSpec.of(
        {**SIZES, "layers": ["rule", {"name": "rule", "layer": {"beside": {"name": "gla"}}}, "attention"]}
    )
    assert again == model.spec
    places = build_model({**SIZES, "layers": 3, "attention": [1], "beside": "gla"})
    assert [block.beside is not None for block in places.blocks] == [True, False, True]


def test_a_preset_may_stand_beside() -> None:
    spec = ModelSpec.of({**SIZES, "beside": {"name": "comba@published"}})
    second = spec.second()
    assert second is not None
    assert (second.make_rule().name, second.conv, second.beside) == ("comba", 4, None)
    assert replace(spec, layers=spec.layers) == spec


def test_a_stack_is_as_each_alone() -> None:
    task = get_task("mqar", length=16, pairs=2, vocab_size=32)
    spec = TrainSpec(steps=4, batch_size=4, lr=1e-2, evaluations=1, eval_batches=1)
    model = ModelSpec.of({**SIZES, "vocab_size": 32, "beside": "gla"})
    together, alone = train(task, model, spec, [1, 2]).runs[1], train(task, model, spec, [2]).runs[0]
    for name, value in alone.weights.items():
        torch.testing.assert_close(together.weights[name], value, rtol=1e-4, atol=1e-5)


WRONG: list[tuple[Any, str]] = [
    ("glaa", "model.beside: unknown rule 'glaa'; did you mean 'gla'?"),
    (3, "model.beside must be a rule's name"),
    ({"name": "gla", "layer": {"beside": "comba"}}, "model.beside: a third mixer does not go beside two"),
    ({"name": "gla", "layer": {"cnv": 0}}, "model.beside: unknown setting of a layer 'cnv'; did you mean 'conv'?"),
    ({"name": "gla", "conv": 0}, "conv is a setting of the layer"),
    ({"name": "gla", "layer": {"heads": 3}}, "model.beside: model.d_model 8 must be a multiple of heads 3"),
]


@pytest.mark.parametrize(("beside", "message"), WRONG)
def test_wrong_mixers_are_one_line(beside: Any, message: str) -> None:
    with pytest.raises(InputError) as raised:
        ModelSpec.of({**SIZES, "beside": beside})
    assert message in str(raised.value)
