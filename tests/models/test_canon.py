"""Canon layers: a plain loop over tokens, decoding, packing, stacking, and what has no effect."""

from typing import Any

import pytest
import torch
from tests.support.decoding import read_in_every_way
from torch import Tensor, nn

from deltalab import InputError, get_task
from deltalab.models.block import CANON, Block, Canon
from deltalab.models.costs import CostCounter
from deltalab.models.dead_parameters import dead_parameters
from deltalab.models.layer import RuleLayer
from deltalab.models.model import Model, build_model
from deltalab.models.spec import ModelSpec
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

SIZES: dict[str, Any] = {"rule": "comba", "vocab_size": 16, "d_model": 8, "heads": 2}
ALL = ("A", "B", "C", "D")


def net(*places: str, **settings: Any) -> Model:
    return build_model({**SIZES, "canon": places, **settings}, seed=1).double()


def test_a_canon_layer_is_its_sum() -> None:
    layer, x = Canon(6).double(), torch.randn(2, 9, 6, dtype=torch.float64)
    want = x.clone()
    for t in range(9):
        for back in range(min(t + 1, CANON)):
            want[:, t] += layer.taps[back] * x[:, t - back]
    torch.testing.assert_close(layer(x, None, None)[0], want)


def test_a_block_is_its_statement() -> None:
    model = net(*ALL, layers=1)
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert block.mlp is not None
    x = torch.randn(2, 7, 8, dtype=torch.float64)

    def canon(place: str, z: Tensor) -> Tensor:
        y: Tensor = block.canon[place](z, None, None)[0]
        return y

    after = x + block.mixer(canon("A", block.norm(x, None)[1]))
    gate, up = canon("D", block.mlp.into(canon("C", block.mlp_norm(after, None)[1]))).chunk(2, -1)
    want = after + block.mlp.out(torch.nn.functional.silu(gate) * up)
    found, branch, _ = block(x, None)
    torch.testing.assert_close(found + branch, want)


class Before(nn.Module):
    """The projections of a layer, and a canon layer on them, token by token."""

    def __init__(self, project: nn.Module, taps: Tensor) -> None:
        super().__init__()
        self.project, self.taps, self.in_features = project, taps, project.in_features

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.project(x)
        want = qkv.clone()
        for t in range(x.shape[1]):
            for back in range(min(t + 1, CANON)):
                want[:, t] += self.taps[back] * qkv[:, t - back]
        return want


@pytest.mark.parametrize("rule", ["comba", "attention", "erase_then_delta", "hgrn"])
@pytest.mark.parametrize("conv", [{"conv": 0}, {"conv": 3}, {"conv": 4, "conv_bias": True}], ids=str)
def test_b_stands_on_q_k_and_v_before_the_convolution(rule: str, conv: dict[str, Any]) -> None:
    mixer = net("B", rule=rule, layers=1, **conv).blocks[0].mixer
    plain = net(rule=rule, layers=1, **conv).blocks[0].mixer
    assert isinstance(mixer, RuleLayer)
    assert isinstance(plain, RuleLayer)
    assert mixer.canon is not None
    missing = plain.load_state_dict(mixer.state_dict(), strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == ([], ["canon"])
    plain.qkv = Before(plain.qkv, mixer.canon)  # type: ignore[assignment]
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    torch.testing.assert_close(mixer(x), plain(x))


LATENT = {"rule": "attention", "rope": True, "rope_dim": 2, "kv_rank": 4, "conv": 0, "features": None}
READERS: list[dict[str, Any]] = [
    {},
    {"conv": 0},
    {"rule": "erase_then_delta"},
    {"rule": "path_attention", "conv": 0},
    LATENT,
    {"beside": "gla"},
]


@pytest.mark.parametrize(
    ("places", "settings"),
    [(("A",), {}), (("C", "D"), {}), (ALL, {}), *((("B",), given) for given in READERS)],
    ids=str,
)
def test_tokens_one_by_one_and_packed_are_the_whole(places: tuple[str, ...], settings: dict[str, Any]) -> None:
    model, tokens = net(*places, **settings), torch.arange(20).reshape(2, 10) * 7 % 16
    cache = read_in_every_way(model, tokens)
    torch.testing.assert_close(cache[0].rows(torch.tensor([1])).conv, cache[0].conv[1:])
    for row, both in zip(cache[0].rows(torch.tensor([1])).tails, cache[0].tails, strict=True):
        torch.testing.assert_close(row, both[1:])


def test_models_without_are_as_before() -> None:
    assert net().state_dict().keys() == build_model(SIZES).state_dict().keys()
    assert [name for name in net("A").state_dict() if "canon" in name] == [f"blocks.{i}.canon.A.taps" for i in range(2)]
    assert [name for name in net("B").state_dict() if "canon" in name] == [f"blocks.{i}.mixer.canon" for i in range(2)]


def test_costs_are_counted_and_nothing_is_dead() -> None:
    spec, plain = ModelSpec.of({**SIZES, "canon": ALL}), ModelSpec.of(SIZES)
    found, before = (CostCounter().costs(given, 40) for given in (spec, plain))
    hidden = 24
    assert found.parameters - before.parameters == 2 * CANON * (8 + 3 * 8 + 8 + 2 * hidden)
    assert found.cache.conv - before.cache.conv == 2 * (CANON - 1) * (8 + 3 * 8 + 8 + 2 * hidden)
    assert dead_parameters(spec, 40) == 0


def test_a_stack_is_as_each_alone() -> None:
    task = get_task("mqar", length=16, pairs=2, vocab_size=32)
    spec = TrainSpec(steps=4, batch_size=4, lr=1e-2, evaluations=1, eval_batches=1)
    model = ModelSpec.of({**SIZES, "vocab_size": 32, "canon": ALL})
    together, alone = train(task, model, spec, [1, 2]).runs[1], train(task, model, spec, [2]).runs[0]
    for name, value in alone.weights.items():
        torch.testing.assert_close(together.weights[name], value, rtol=1e-4, atol=1e-5)


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"canon": ["B"], "rule": "torch.nn.Identity"},
        "model.canon B stands on q, k and v of a rule, which a module does",
    ),
    ({"canon": ["E"]}, "model.canon: unknown place 'E'; allowed: A, B, C, D"),
    ({"canon": ["A", "A"]}, "model.canon A, A names a place twice"),
    ({"canon": "A"}, "model.canon must be a list of A, B, C, D"),
    ({"canon": ["A", "C"], "mlp": False}, "model.canon C has no effect without an MLP"),
    ({"canon": ["D"], "block": "mamba"}, "model.canon D has no effect without an MLP"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_places_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        ModelSpec.of({**SIZES, **settings})
    assert message in str(raised.value)
