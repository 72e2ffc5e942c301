"""Values of the first layer in later ones: a plain statement for every rule, decoding, packing, stacking, export."""

from functools import partial
from typing import Any

import pytest
import torch
from tests.support.decoding import read_in_every_way
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deltalab import InputError, get_task
from deltalab.models.block import Block
from deltalab.models.costs import CostCounter
from deltalab.models.layer import RuleLayer
from deltalab.models.model import Model, build_model
from deltalab.models.spec import ModelSpec
from deltalab.ops.fused.convolution import features
from deltalab.ops.scan import scan
from deltalab.registry import list_rules
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

SIZES: dict[str, Any] = {"rule": "comba", "vocab_size": 16, "d_model": 8, "layers": 3, "heads": 2, "chunk_size": 4}
HYBRID = {"rule": "gated_deltanet", "attention": [1], "rope": True}


def net(**settings: Any) -> Model:
    model = build_model({**SIZES, "value_residual": {}, **settings}, seed=1).double()
    with torch.no_grad():  # each layer has shares of its own
        for name, value in model.named_parameters():
            if name.endswith("value_residual.share"):
                value += torch.randn(2, generator=torch.Generator().manual_seed(len(name)), dtype=value.dtype) * 0.3
    return model


def stated(model: Model, tokens: Tensor, shares: list[Any]) -> Tensor:
    """The logits of a model whose layer l reads `own` v_l + `first` v_1."""
    x, first = model.embed(tokens), None
    for block, share in zip(model.blocks, shares, strict=True):
        assert isinstance(block, Block)
        mixer = block.mixer
        assert isinstance(mixer, RuleLayer)
        z = block.norm(x, None)[1]
        q, k, v, _ = features(mixer.qkv(z), mixer.conv, None, mixer.channels)
        vectors = {} if mixer.vectors is None else mixer.vectors(z, None)[0]
        if first is None:
            first = v
        else:
            of_first, own = share
            v = own * v + of_first * first
        o, _ = scan(mixer.rule, q, k, v, {**mixer.gates(z), **vectors}, scale=mixer.scale, chunk_size=mixer.chunk_size)
        x = x + mixer.out(mixer.norm(o, None if mixer.gate is None else mixer.gate(z)))
        if block.mlp is not None:
            x = x + block.mlp(block.mlp_norm(x, None)[1])
    return model.logits(model.norm(x, None)[1])


@pytest.mark.parametrize("rule", list_rules())
def test_a_model_of_any_rule_is_its_statement(rule: str) -> None:
    model, tokens = net(rule=rule), torch.arange(18).reshape(2, 9) * 7 % 16
    shares = [getattr(block.mixer.value_residual, "share", None) for block in model.blocks]
    assert shares[0] is None
    torch.testing.assert_close(model(tokens), stated(model, tokens, shares))


def test_fixed_shares_are_no_parameters() -> None:
    model = net(value_residual={"first": 0.25, "own": 2, "learned": False})
    tokens = torch.arange(18).reshape(2, 9) * 7 % 16
    torch.testing.assert_close(model(tokens), stated(model, tokens, [None, *[(0.25, 2.0)] * 2]))
    assert model.state_dict().keys() == build_model(SIZES).state_dict().keys()


def test_learned_shares_begin_at_what_is_given() -> None:
    model = build_model({**SIZES, "value_residual": {"first": 0.25}}, seed=1)
    found = {name: value.tolist() for name, value in model.named_parameters() if "value_residual" in name}
    assert found == {f"blocks.{i}.mixer.value_residual.share": [0.25, 0.5] for i in (1, 2)}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        HYBRID,
        {"rule": "delta_product"},
        {"rule": "attention", "conv": 0},
        {"canon": ["A", "B"]},
        {"block": "mamba"},
    ],
    ids=str,
)
def test_tokens_one_by_one_and_packed_are_the_whole(settings: dict[str, Any]) -> None:
    model, tokens = net(**settings), torch.arange(20).reshape(2, 10) * 7 % 16
    cache = read_in_every_way(model, tokens)
    assert all(layer.values is None for layer in cache), "values of tokens that were read are no memory"


def test_gradients_are_those_of_the_statement_and_of_checkpoints() -> None:
    model, x = net(), torch.randn(2, 7, 8, dtype=torch.float64)
    weights = dict(model.named_parameters())
    found = []
    for how in (None, partial(checkpoint, use_reentrant=False)):
        hidden, _ = model.transform(x, checkpoint=how)
        found.append(torch.autograd.grad(hidden.square().sin().sum(), [*weights.values()], allow_unused=True))
    for name, one, other in zip(weights, *found, strict=True):
        if name != "embed.weight":
            assert one is not None, name
            assert one.abs().max() > 0, name
            torch.testing.assert_close(one, other)


def test_costs_are_counted() -> None:
    for settings in ({}, {"block": "mamba"}, HYBRID, {"value_residual": {"learned": False}}):
        spec = ModelSpec.of({**SIZES, "value_residual": {}, **settings})
        costs = CostCounter().costs(spec, 40)
        assert costs.parameters == sum(p.numel() for p in Model(spec).parameters())
        assert sum(costs.cache) == sum(Model(spec).cache_size(40))


@pytest.mark.parametrize("given", [{}, {"learned": False}], ids=str)
def test_a_stack_is_as_each_alone(given: dict[str, Any]) -> None:
    task = get_task("mqar", length=16, pairs=2, vocab_size=32)
    spec = TrainSpec(steps=4, batch_size=4, lr=1e-2, evaluations=1, eval_batches=1)
    model = ModelSpec.of({**SIZES, "vocab_size": 32, "value_residual": given})
    together, alone = train(task, model, spec, [1, 2]).runs[1], train(task, model, spec, [2]).runs[0]
    for name, value in alone.weights.items():
        torch.testing.assert_close(together.weights[name], value, rtol=1e-4, atol=1e-5)
    moved = [value for name, value in alone.weights.items() if "value_residual" in name]
    assert len(moved) == (2 if given == {} else 0)
    assert all((value != 0.5).all() for value in moved)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"value_residual": 0.5}, "model.value_residual must be {first, own, learned}, {rank}, or null, not 0.5"),
    ({"value_residual": {"frist": 1}}, "model.value_residual: unknown key 'frist'; did you mean 'first'?"),
    ({"value_residual": {"own": True}}, "model.value_residual.own must be a number, not True"),
    ({"value_residual": {"own": float("nan")}}, "model.value_residual.own must be a number, not nan"),
    ({"value_residual": {"learned": 1}}, "model.value_residual.learned must be true or false, not 1"),
    ({"value_residual": {"first": 0, "learned": False}}, "model.value_residual.first 0 that is not learned mixes noth"),
    ({"layers": 1}, "model.value_residual has no effect in one layer"),
    ({"beside": "gla"}, "model.value_residual mixes one v, and model.beside has a second v: leave one out"),
    ({"kv_rank": 4}, "model.value_residual mixes one v, and model.kv_rank has a latent in place of v: leave one out"),
    ({"rule": "torch.nn.Identity"}, "model.value_residual mixes the v of rules, which module 'torch.nn.Identity' does"),
    (
        {"layers": ["rule", {"name": "gla", "layer": {"heads": 4, "key_dim": 4}}]},
        "the values of layer 0 to those of layer 1, which differ in number: 1 of 2 heads x 4 and 1 of 4 heads x 4",
    ),
    ({"rule": "delta_product", "attention": [1]}, "differ in number: 2 of 2 heads x 4 and 1 of 2 heads x 4 for each"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_what_does_not_go_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        ModelSpec.of({**SIZES, "value_residual": {}, **settings})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
