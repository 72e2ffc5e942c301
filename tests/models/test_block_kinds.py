"""What RWKV's blocks have: a plain statement of each setting, decoding, packing, costs, stacking, and wrong inputs."""

import json
from typing import Any

import pytest
import torch
from tests.support.decoding import read_in_every_way
from torch import Tensor

from deltalab import InputError, get_task
from deltalab.models.block import Block
from deltalab.models.costs import CostCounter
from deltalab.models.dead_parameters import dead_parameters
from deltalab.models.layer import RuleLayer
from deltalab.models.model import Model, build_model
from deltalab.models.parts.squared_relu import SquaredReLU
from deltalab.models.rule_inputs.token_shift import TokenShift
from deltalab.models.spec import ModelSpec
from deltalab.ops.scan import scan
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

SIZES: dict[str, Any] = {"vocab_size": 16, "d_model": 8, "layers": 2, "heads": 2, "chunk_size": 4}
RWKV7 = {"name": "rwkv7", "g": {"rwkv7_decay": {"rank": 3}}, "a": {"channel_sigmoid": {"rank": 2}}}
SHIFTED = {"mlp": "relu2", "mlp_shift": True}
MIXER: dict[str, Any] = {
    "rule": RWKV7, "conv": 0, "token_shift": "each", "output_norm": "group", "output_gate": "linear", "gate_rank": 3,
    "low_rank_activation": {"g": "tanh", "output_gate": "sigmoid"}, "low_rank_bias": ["a"], "bonus": True,
    "value_residual": {"rank": 2},
}  # fmt: skip
WHOLE = {**MIXER, **SHIFTED, "norm": "layer", "first_norm": True, "tie_embeddings": False}
BY_TOKEN = {"rule": "rwkv6", "token_shift": {"rank": 3}, "mlp": "gated_relu2", "mlp_shift": True}
TOKENS = torch.arange(20).reshape(2, 10) * 7 % 16


def net(**settings: Any) -> Model:
    """A model in fp64, with no parameter at a value where a mistake would cancel."""
    model = build_model({"rule": "comba", **SIZES, **settings}, seed=1).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.3 * torch.randn(value.shape, generator=generator)
    return model


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return weight * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + bias


def mean_of(x: Tensor, share: Tensor) -> Tensor:
    """x_t + m (x_{t-1} - x_t), token by token."""
    rows, before = [], torch.zeros_like(x[:, 0])
    for token in x.unbind(1):
        rows.append(token + share * (before - token))
        before = token
    return torch.stack(rows, dim=1)


def mlp(block: Any, x: Tensor) -> Tensor:
    """The MLP of squared ReLU of a block, with its shift and its gate where it has them."""
    shares = {"into": torch.zeros(8), "gate": torch.zeros(8)} if block.shift is None else block.shift.share
    y = (mean_of(x, shares["into"]) @ block.mlp.into.weight.T).clamp(min=0) ** 2 @ block.mlp.out.weight.T
    if block.mlp.gate is None:
        return y
    return y / (1 + (-mean_of(x, shares["gate"]) @ block.mlp.gate.weight.T).exp())


@pytest.mark.parametrize("kind", ["relu2", "gated_relu2"])
@pytest.mark.parametrize("shift", [False, True])
def test_blocks_of_layer_norms_and_squared_relu_are_their_statement(kind: str, shift: bool) -> None:
    model = net(mlp=kind, mlp_shift=shift, norm="layer", first_norm=True, norm_eps=1e-3)

    def normed(part: Any, x: Tensor) -> Tensor:
        return layer_norm(x, part.weight, part.bias, 1e-3)

    x = normed(model.first_norm, model.embed.weight[TOKENS])
    for block in model.blocks:
        assert isinstance(block, Block)
        x = x + block.mixer(normed(block.norm, x))
        x = x + mlp(block, normed(block.mlp_norm, x))
    torch.testing.assert_close(model(TOKENS), model.logits(normed(model.norm, x)))


def test_swiglu_reads_its_mean_of_two_tokens() -> None:
    model, x = net(mlp_shift=True), torch.randn(2, 7, 8, dtype=torch.float64)
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert isinstance(block.shift, TokenShift)
    between = x + block.mixer(block.norm(x, None)[1])
    read = mean_of(block.mlp_norm(between, None)[1], block.shift.share["into"])
    found, branch, _ = block(x, None)
    torch.testing.assert_close(found + branch, between + block.mlp(read))  # type: ignore[misc]


def mixed(mixer: RuleLayer, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output and the values of an RWKV-7 layer, whose rule alone is deltalab's."""
    assert mixer.shift is not None
    heads = (mixer.heads, mixer.key_dim)
    own = {name: mean_of(x, share) for name, share in mixer.shift.share.items()}
    weights = dict(mixer.named_parameters())

    def low_rank(name: str, of: str, inside: Any = lambda z: z) -> Tensor:
        return inside(own[of] @ weights[f"{name}.0.weight"].T) @ weights[f"{name}.1.weight"].T

    q, k, v = (own[name] @ w.T for name, w in zip("qkv", mixer.qkv.weight.split(8), strict=True))  # type: ignore[operator]
    if first is not None:
        low = own["v"] @ weights["value_residual.into.weight"].T
        share = (low @ weights["value_residual.out.weight"].T + weights["value_residual.out.bias"]).sigmoid()
        v = v + share * (first - v)
    q, k, v_heads = (y.unflatten(-1, heads) for y in (q, k, v))
    a = (low_rank("gates.project.a", "a_own") + weights["gates.project.a.1.bias"]).sigmoid().unflatten(-1, heads)
    decay = low_rank("gates.project.g", "g_own", torch.tanh).unflatten(-1, heads) + weights["gates.learned.g.bias"]
    g = -(torch.tensor(-0.5, dtype=x.dtype).exp()) * decay.sigmoid()
    xi, rho = weights["gates.learned.xi.value"], weights["gates.learned.rho.value"]
    o, _ = scan(mixer.rule, q, k, v_heads, {"g": g, "a": a, "xi": xi, "rho": rho}, scale=mixer.scale)
    centred = o - o.mean(-1, keepdim=True)
    o = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    o = o * weights["norm.weight"].view(heads) + weights["norm.bias"].view(heads)
    written = k * (1 + (a - 1) * rho)
    o = o + (q * written * weights["bonus.weight"].view(heads)).sum(-1, keepdim=True) * v_heads
    return (o.flatten(-2) * low_rank("gate", "gate", torch.sigmoid)) @ weights["out.weight"].T, v


def test_a_layer_of_rwkv7_is_its_statement() -> None:
    model, x = net(**MIXER), torch.randn(2, 7, 8, dtype=torch.float64)
    first: Tensor | None = None
    for block in model.blocks:
        mixer = block.mixer
        assert isinstance(mixer, RuleLayer)
        want, values = mixed(mixer, x, first)
        given = None if first is None else first.unflatten(-1, (2, 4))
        torch.testing.assert_close(mixer.advance(x, first=given)[0], want)
        first = values if first is None else first


def test_means_that_depend_on_the_token_are_their_statement() -> None:
    shift = net(rule="rwkv6", token_shift={"rank": 3}).blocks[0].mixer.shift  # type: ignore[union-attr]
    assert isinstance(shift, TokenShift)
    x, before = torch.randn(2, 6, 8, dtype=torch.float64), torch.randn(2, 1, 8, dtype=torch.float64)
    found = shift(x, before)
    assert sorted(found) == ["g_own", "gate", "k", "q", "v"]
    for n, name in enumerate(shift.readers):
        into, last = shift.into.weight[3 * n : 3 * n + 3], before[:, 0]
        for t, token in enumerate(x.unbind(1)):
            change = last - token
            share = shift.share[name] + torch.tanh((token + shift.mean * change) @ into.T) @ shift.out[n]
            torch.testing.assert_close(found[name][:, t], token + share * change)
            last = token


def test_means_that_depend_on_the_token_start_as_those_that_do_not() -> None:
    plain, other = (
        build_model({"rule": "rwkv6", **SIZES, "token_shift": given}, seed=1) for given in ("each", {"rank": 3})
    )
    assert torch.equal(other(TOKENS), plain(TOKENS))


@pytest.mark.parametrize("rule", ["comba", "gla", "rwkv6", "gated_deltanet", "rla"])
def test_a_bonus_reads_the_operands_of_any_rule_of_the_algebra(rule: str) -> None:
    layer, x = net(rule=rule, bonus=True, output_gate=False).blocks[0].mixer, torch.randn(1, 5, 8).double()
    weight = layer.bonus.weight.detach().clone()  # type: ignore[union-attr]
    seen: dict[str, Tensor] = {}

    def spy(q: Tensor, k: Tensor, v: Tensor, gates: Any) -> Tensor:
        made = layer.rule.operands(q, k, v, **gates)  # type: ignore[union-attr]
        seen["bonus"] = torch.einsum("bthk,bthk,hk->bth", made.r, made.k, weight.view(2, -1))[..., None] * v
        return seen["bonus"]

    want = layer(x)
    layer.bonus.forward = spy  # type: ignore[union-attr]
    torch.testing.assert_close(layer(x), want)
    assert seen["bonus"].abs().max() > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        WHOLE,
        {**SHIFTED, "canon": ["A", "C", "D"]},
        {"mlp": "gated_relu2", "mlp_shift": True, "rule": "attention"},
        {"mlp_shift": True, "beside": "gla"},
        {"token_shift": "each", "rule": "erase_then_delta"},
        {"token_shift": {"rank": 3}, "rule": "rwkv6", "low_rank_activation": {"g": "tanh"}, **SHIFTED},
        {"bonus": True, "qk_heads": 1, "output_norm": "none"},
    ],
    ids=str,
)
def test_tokens_one_by_one_and_packed_are_the_whole(settings: dict[str, Any]) -> None:
    model = net(**settings)
    cache = read_in_every_way(model, TOKENS)
    if model.spec.mlp_shift:
        assert cache[0].tails[-1].shape == (2, 1, 8)
    padded, mask = torch.cat([TOKENS[:, :3] * 0, TOKENS], dim=1), torch.ones(2, 13, dtype=torch.long)
    mask[:, :3] = 0
    torch.testing.assert_close(model(padded, attention_mask=mask)[:, 3:], model(TOKENS))


@pytest.mark.parametrize(
    "settings", [WHOLE, SHIFTED, {"mlp": "gated_relu2"}, {**WHOLE, "tie_embeddings": True}, BY_TOKEN], ids=str
)
def test_costs_are_counted(settings: dict[str, Any]) -> None:
    spec = ModelSpec.of({"rule": "comba", **SIZES, "layers": 3, **settings})
    costs, model = CostCounter().costs(spec, 40), Model(spec)
    assert costs.parameters == sum(p.numel() for p in model.parameters())
    assert sum(costs.cache) == sum(model.cache_size(40))
    assert dead_parameters(spec, 40) == 0
    without = CostCounter().costs(ModelSpec.of({**vars(spec), "mlp_shift": False}), 40)
    assert costs.cache.conv - without.cache.conv == (3 * 8 if spec.mlp_shift else 0)
    assert costs.cache.state == without.cache.state


def test_a_gate_of_the_first_values_is_in_the_flops() -> None:
    with_gate, without = (
        CostCounter().costs(ModelSpec.of({**SIZES, **WHOLE, "layers": 3, "value_residual": given}), 40)
        for given in ({"rank": 2}, None)
    )
    assert with_gate.flops_per_token - without.flops_per_token == 2 * 2 * 2 * (8 + 8)
    assert with_gate.parameters - without.parameters == 2 * (2 * (8 + 8) + 8)


@pytest.mark.parametrize("settings", [WHOLE, BY_TOKEN], ids=["rwkv7", "rwkv6"])
def test_a_stack_is_as_each_alone(settings: dict[str, Any]) -> None:
    task = get_task("mqar", length=16, pairs=2, vocab_size=32)
    spec = TrainSpec(steps=4, batch_size=4, lr=1e-2, evaluations=1, eval_batches=1)
    model = ModelSpec.of({**SIZES, **settings, "vocab_size": 32})
    together, alone = train(task, model, spec, [1, 2]).runs[1], train(task, model, spec, [2]).runs[0]
    for name, value in alone.weights.items():
        torch.testing.assert_close(together.weights[name], value, rtol=1e-4, atol=1e-5)
    start = dict(build_model(model, seed=2).named_parameters())
    assert [name for name, value in alone.weights.items() if torch.equal(value, start[name])] == []


def test_the_last_matrix_of_a_squared_relu_starts_as_that_of_swiglu() -> None:
    block = build_model({"rule": "gla", **SIZES, "d_model": 64, "mlp": "relu2"}, seed=0).blocks[0]
    assert isinstance(block.mlp, SquaredReLU)
    assert (block.mlp.hidden, block.mlp.into.weight.std().item()) == (256, pytest.approx(1 / 8, rel=0.05))
    assert block.mlp.out.weight.std().item() == pytest.approx(0.5 * 256**-0.5, rel=0.05)
    gated = build_model({"rule": "gla", **SIZES, "d_model": 64, "mlp": "gated_relu2"}, seed=0).blocks[0]
    assert isinstance(gated.mlp, SquaredReLU)
    assert gated.mlp.hidden == 224


def test_two_ways_to_say_a_model_are_one_model_also_from_json() -> None:
    first = ModelSpec.of({**SIZES, **WHOLE})
    other = {**WHOLE, "low_rank_activation": {"output_gate": "sigmoid", "g": "tanh"}, "low_rank_bias": ("a",)}
    assert ModelSpec.of(json.loads(json.dumps({**SIZES, **other}))) == first
    assert ModelSpec.of({**SIZES, "rule": "gla", "mlp": "swiglu", "low_rank_activation": {}, "low_rank_bias": []}) == (
        ModelSpec.of({**SIZES, "rule": "gla"})
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"mlp": "relu"}, "model.mlp: unknown mlp 'relu'; did you mean 'relu2'?"),
    ({"mlp": 1}, "model.mlp: unknown mlp '1'"),
    ({"mlp": False, "mlp_shift": True}, "model.mlp_shift has no effect without an MLP"),
    ({"block": "mamba", "mlp_shift": True}, "model.mlp_shift has no effect without an MLP"),
    ({"mlp_shift": "yes"}, "model.mlp_shift must be true or false, not 'yes'"),
    ({"experts": {}, "mlp": "relu2"}, "model.experts are SwiGLUs that read x itself, and model.mlp relu2 is none"),
    ({"experts": {}, "mlp_shift": True}, "model.experts are SwiGLUs that read x itself, and model.mlp_shift is none"),
    ({"norm": "leyer"}, "model.norm: unknown norm 'leyer'; did you mean 'layer'?"),
    ({"norm": "layer", "attention_residuals": 1}, "model.attention_residuals has RMS norms of its own"),
    ({"token_shift": "eech"}, "model.token_shift: unknown token_shift 'eech'; did you mean 'each'?"),
    ({"token_shift": {"rank": 0}}, "model.token_shift.rank must be a whole number of at least 1, not 0"),
    ({"token_shift": {"rnak": 2}}, "model.token_shift: unknown key 'rnak'; did you mean 'rank'?"),
    ({"token_shift": {}}, "model.token_shift: needs rank"),
    ({"token_shift": {"rank": 2}, "q_rank": 4}, "kv_rank and q_rank do not go with token_shift"),
    ({"token_shift": "each", "kv_rank": 4}, "kv_rank and q_rank do not go with token_shift"),
    ({"low_rank_activation": {"g": "tanh"}}, "model.low_rank_activation: unknown projection of a rank 'g'"),
    ({"low_rank_activation": "tanh"}, "model.low_rank_activation must be {projection: function}, not 'tanh'"),
    ({"rule": "gla", "low_rank_activation": {"g": "relu"}}, "model.low_rank_activation.g: unknown function 'relu'"),
    ({"low_rank_activation": {"output_gate": "tanh"}}, "unknown projection of a rank 'output_gate'"),
    ({"low_rank_bias": ["a"]}, "model.low_rank_bias: unknown projection of a rank 'a'"),
    (
        {"rule": "attention", "bonus": True},
        "model.bonus reads r and k of a rule of the algebra, which rule 'attention'",
    ),
    ({"rule": "delta_product", "bonus": True}, "model.bonus reads one key of each token, and rule 'delta_product' has"),
    ({"bonus": True, "attention": [1]}, "model.bonus reads r and k of a rule of the algebra, which rule 'attention'"),
    ({"value_residual": {"rank": 0}}, "model.value_residual.rank must be a whole number of at least 1, not 0"),
    ({"value_residual": {"rank": 2, "own": 1}}, "model.value_residual.own has no effect beside rank"),
    ({"value_residual": {"rank": 2}, "rule": "delta_product"}, "model.value_residual.rank gates one v of each token"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[str(settings) for settings, _ in WRONG])
def test_what_does_not_go_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        ModelSpec.of({"rule": "comba", **SIZES, **settings})
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
