"""Multi-head latent attention: a plain loop, decoding, packing, stacking, its cache, and what has no effect."""

from typing import Any

import pytest
import torch
from torch import Tensor

from deltalab import InputError, get_rule, get_task
from deltalab.export.fla.conversion import to_fla
from deltalab.export.scales import SCALES, widened
from deltalab.models.costs import CostCounter
from deltalab.models.dead_parameters import dead_parameters
from deltalab.models.layer import RuleLayer
from deltalab.models.model import Model, build_model
from deltalab.models.spec import ModelSpec
from deltalab.ops.scan import scan
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

SIZES: dict[str, Any] = {"rule": "attention", "vocab_size": 16, "d_model": 16, "heads": 2, "conv": 0}
MLA: dict[str, Any] = {"rope": True, "rope_dim": 4, "kv_rank": 6, "q_rank": 5}
"""Heads of 8 keys: 4 from the latent, and 4 with positions, which all heads share."""
LATENTS: dict[str, dict[str, Any]] = {
    "mla": MLA,
    "no positions": {"kv_rank": 6},
    "shared keys without positions": {"kv_rank": 6, "rope_dim": 3},
    "all keys shared": {"kv_rank": 6, "rope": True, "rope_dim": 8},
    "window": {**MLA, "rule": {"name": "attention", "window": 4}},
    "window of one": {**MLA, "rule": {"name": "attention", "window": 1}},
    "scale and skip": {**MLA, "scale": 0.3, "skip": True},
    "wide values": {**MLA, "expand_v": 1.5},
}
"""Layers whose cache holds latents."""
OTHERS: dict[str, dict[str, Any]] = {
    "q alone": {"q_rank": 5, "rope": True, "rope_dim": 4},
    "positions on all channels": {"kv_rank": 6, "rope": True},
    "norms of q and k": {**MLA, "qk_norm": True},
    "convolution": {**MLA, "conv": 4},
    "activation": {**MLA, "features": "silu"},
    "another rule": {**MLA, "rule": "comba"},
    "several steps": {**MLA, "rule": "delta_product", "conv": 4},
    "differences": {**MLA, "rule": "differential_attention"},
    "mamba block": {**MLA, "rule": "mamba2", "block": "mamba", "qk_heads": 2},
}
"""Layers whose cache is what it would be without them."""
TOKENS = torch.arange(20).reshape(2, 10) * 7 % 16


def net(**settings: Any) -> Model:
    model = build_model({**SIZES, **settings}, seed=1).double()
    with torch.no_grad():  # away from norms of one
        for i, value in enumerate(model.parameters()):
            value += 0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(i), dtype=value.dtype)
    return model


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean() + 1e-5).sqrt()


def turned(x: Tensor, place: int) -> Tensor:
    """x [R] as R/2 complex numbers, each times e^(i place / 10000^(2j / R))."""
    half = len(x) // 2
    angle = place * 10000 ** (-2 * torch.arange(half, dtype=torch.float64) / len(x))
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half, dtype=torch.float64), angle)
    return torch.cat([z.real, z.imag])


def statement(layer: RuleLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [T, H, .] of x [T, d], token by token as the paper says (Eq. 9 to 19); heads of 8, MLA's sizes."""
    w = {name: value.detach() for name, value in layer.qkv.named_parameters()}
    of_k, of_v = w["kv.weight"].split([2 * 4, 2 * 8])
    of_c, of_shared = w["down.weight"].split([6, 4])
    q, k, v = [], [], []
    for t, token in enumerate(x):
        c = rms(of_c @ token, w["norm.weight"])
        heads = (w["q.2.weight"] @ rms(w["q.0.weight"] @ token, w["q.1.weight"])).view(2, 8)
        q.append(torch.stack([torch.cat([head[:4], turned(head[4:], t)]) for head in heads]))
        shared = turned(of_shared @ token, t)
        k.append(torch.stack([torch.cat([head, shared]) for head in (of_k @ c).view(2, 4)]))
        v.append((of_v @ c).view(2, 8))
    return torch.stack(q), torch.stack(k), torch.stack(v)


@pytest.mark.parametrize("rule", ["attention", "gated_deltanet"])
def test_a_layer_is_its_statement(rule: str) -> None:
    layer = net(**MLA, rule=rule, features="raw", output_norm=False, output_gate=False, layers=1).blocks[0].mixer
    assert isinstance(layer, RuleLayer)
    x = torch.randn(7, 16, dtype=torch.float64)
    q, k, v = statement(layer, x)
    if rule == "attention":
        want = torch.stack([
            torch.stack([((q[t, h] @ k[: t + 1, h].T) * 8**-0.5).softmax(-1) @ v[: t + 1, h] for h in range(2)])
            for t in range(7)
        ])  # fmt: skip
    else:
        gates = layer.gates(x[None])
        want = scan(get_rule(rule), *(part[None] for part in (q, k, v)), gates, backend="recurrent")[0][0]
    torch.testing.assert_close(layer(x[None])[0], layer.out(want.flatten(1)))


@pytest.mark.parametrize("settings", [*LATENTS.values(), *OTHERS.values()], ids=[*LATENTS, *OTHERS])
def test_tokens_one_by_one_and_packed_are_the_whole(settings: dict[str, Any]) -> None:
    model = net(**settings)
    want = model(TOKENS)
    logits, cache = model.step(TOKENS[:, :2])
    parts = [logits]
    for i, j in [(2, 3), (3, 4), (4, 7), (7, 8), (8, 9), (9, 10)]:
        logits, cache = model.step(TOKENS[:, i:j], cache)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), want)
    row = TOKENS.reshape(1, 20)
    packed = model(row, cu_seqlens=torch.tensor([0, 10, 20]))
    torch.testing.assert_close(packed.reshape(want.shape), want)
    # Sequences of several lengths have states apart, which one call reads token by token and another packed.
    _, caches = model.step(row[:, :13], cu_seqlens=torch.tensor([0, 10, 13]))
    after, packed_caches = model.step(TOKENS[:, 3:5].reshape(1, 4), caches, cu_seqlens=torch.tensor([0, 2, 4]))
    torch.testing.assert_close(after[0, 2:], want[1, 3:5])
    more, _ = model.step(TOKENS[:, 5:6], packed_caches)
    torch.testing.assert_close(more[1], want[1, 5:6])
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, 7:] = 0
    torch.testing.assert_close(model(TOKENS, attention_mask=mask)[1], want[1])


@pytest.mark.parametrize("settings", LATENTS.values(), ids=LATENTS)
def test_attention_holds_latents(settings: dict[str, Any]) -> None:
    spec = ModelSpec.of({**SIZES, **settings, "layers": 1})
    window = getattr(spec.make_rule(), "window") or 99  # noqa: B009
    for length in (3, 40):
        found = CostCounter().costs(spec, length).cache
        assert found.kv == min(length, window - 1) * (6 + (spec.rope_dim or 0))
        assert found == build_model(spec).cache_size(length)


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
def test_other_layers_hold_what_they_held(settings: dict[str, Any]) -> None:
    without = {**settings, "kv_rank": None, "q_rank": None, "rope_dim": None}
    found, plain = (CostCounter().costs(ModelSpec.of({**SIZES, **given}), 40) for given in (settings, without))
    assert found.cache == plain.cache


def test_costs_are_counted_and_nothing_is_dead() -> None:
    spec, plain = ModelSpec.of({**SIZES, **MLA, "layers": 1}), ModelSpec.of({**SIZES, "layers": 1})
    found, before = (CostCounter().costs(given, 40) for given in (spec, plain))
    of_q, of_kv = 16 * 5 + 5 + 5 * 16, 16 * (6 + 4) + 6 + 6 * 2 * (4 + 8)
    assert found.parameters - before.parameters == of_q + of_kv - 3 * 16 * 16
    assert (found.cache.kv, before.cache.kv) == (40 * 10, 40 * 32)
    for settings in ({}, MLA, {"kv_rank": 6, "rope_dim": 8}, OTHERS["several steps"]):
        assert dead_parameters(ModelSpec.of({**SIZES, **settings}), 40) == 0


def test_models_without_are_as_before() -> None:
    assert not [name for name in build_model(SIZES).state_dict() if "qkv." in name and "qkv.weight" not in name]
    assert ModelSpec.of(SIZES) == ModelSpec.of({**SIZES, "kv_rank": None, "q_rank": None, "rope_dim": None})
    # Positions on the last channels of all are positions on all.
    whole, last = (build_model({**SIZES, "rope": True, "rope_dim": given})(TOKENS) for given in (None, 8))
    torch.testing.assert_close(whole, last)


def test_a_stack_is_as_each_alone() -> None:
    task = get_task("mqar", length=16, pairs=2, vocab_size=32)
    spec = TrainSpec(steps=4, batch_size=4, lr=1e-2, evaluations=1, eval_batches=1)
    model = ModelSpec.of({**SIZES, **MLA, "vocab_size": 32})
    together, alone = train(task, model, spec, [1, 2]).runs[1], train(task, model, spec, [2]).runs[0]
    for name, value in alone.weights.items():
        torch.testing.assert_close(together.weights[name], value, rtol=1e-4, atol=1e-5)


def test_autocast_keeps_its_dtype() -> None:
    model = build_model({**SIZES, **MLA})
    with torch.autocast("cpu", torch.bfloat16):
        logits, cache = model.step(TOKENS[:, :6])
        assert {part.dtype for layer in cache for part in layer.state} == {torch.bfloat16}
        rest, _ = model.step(TOKENS[:, 6:], cache)
        whole = model(TOKENS)
    torch.testing.assert_close(torch.cat([logits, rest], 1), whole, rtol=0.1, atol=0.1)


def test_ranks_grow_with_the_width() -> None:
    found = widened(ModelSpec.of({**SIZES, **MLA, "key_dim": 12}), SCALES["340M"], 16)
    d_model = SCALES["340M"].d_model
    assert (found["kv_rank"], found["q_rank"]) == (6 * d_model // 16, 5 * d_model // 16)
    assert found["rope_dim"] * 3 == found["key_dim"]


def test_kimi_linear_has_the_widths_of_its_authors() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.KimiLinearConfig()
    heads, values = config.num_attention_heads, config.v_head_dim
    spec = ModelSpec.of({"preset": "kimi_linear", "vocab_size": 16, "d_model": heads * values, "heads": heads}).at(3)
    assert spec.head_dims == (config.qk_nope_head_dim + config.qk_rope_head_dim, values)
    assert (spec.kv_rank, spec.q_rank, spec.rope) == (config.kv_lora_rank, config.q_lora_rank, False)
    assert spec.rope_dim == config.qk_rope_head_dim


def test_a_layer_of_kimi_linear_is_that_of_its_authors() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearAttention

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 4}
    widths = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    config = transformers.KimiLinearConfig(**sizes, **widths, attn_implementation="eager")
    theirs = KimiLinearAttention(config, 0).double()
    spec = ModelSpec.of({"preset": "kimi_linear", "vocab_size": 16, "d_model": 32, "heads": 4, "norm_eps": 1e-6})
    ours = build_model(spec).double().blocks[3].mixer
    assert theirs.kv_a_layernorm.variance_epsilon == 1e-6
    w = {name: value.detach() for name, value in ours.named_parameters()}
    k, v = (part.unflatten(0, (4, 8)) for part in w["qkv.kv.weight"].chunk(2))  # theirs lie side by side in each head
    theirs.load_state_dict({
        "q_proj.weight": w["qkv.q.weight"],
        "kv_a_proj_with_mqa.weight": w["qkv.down.weight"],
        "kv_a_layernorm.weight": w["qkv.norm.weight"],
        "kv_b_proj.weight": torch.cat([k, v], dim=1).flatten(0, 1),
        "o_proj.weight": w["out.weight"],
    })  # fmt: skip
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    later = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)
    torch.testing.assert_close(ours(x), theirs(x, later[None, None])[0])


@pytest.mark.parametrize("rule", ["attention", "gla"])
@pytest.mark.parametrize("settings", [{"kv_rank": 6}, {"q_rank": 6}, {"rope": True, "rope_dim": 4}], ids=str)
def test_flash_linear_attention_has_no_equal(rule: str, settings: dict[str, Any]) -> None:
    kept = {"output_norm": False, "output_gate": False} if rule == "attention" else {"output_gate": "silu"}
    given = {"rope": True, **kept} if rule == "attention" else {"features": "raw", **kept}
    with pytest.raises(InputError, match="no equal of model"):
        to_fla(ModelSpec.of({**SIZES, **given, **settings, "rule": rule}), None)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"rope_dim": 4}, "rope_dim has no effect without rope or kv_rank"),
    ({"rope": True, "rope_dim": 3}, "rope_dim must be at most key_dim 8, and even if rope turns its pairs, not 3"),
    ({"rope": True, "rope_dim": 10}, "rope_dim must be at most key_dim 8"),
    ({"kv_rank": 6, "rope_dim": 9}, "rope_dim must be at most key_dim 8"),
    ({"kv_rank": 6, "kv_heads": 1}, "kv_rank gives each head its own k and v"),
    ({"kv_rank": 6, "qk_heads": 1}, "kv_rank gives each head its own k and v"),
    ({"kv_rank": 6, "token_shift": True}, "kv_rank and q_rank do not go with token_shift"),
    ({"q_rank": 6, "token_shift": True}, "kv_rank and q_rank do not go with token_shift"),
    ({"kv_rank": 0}, "kv_rank must be a whole number of at least 1, not 0"),
    ({"q_rank": 2.5}, "q_rank must be a whole number of at least 1, not 2.5"),
    ({"rope": True, "rope_dim": True}, "rope_dim must be a whole number of at least 1, not True"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_settings_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        ModelSpec.of({**SIZES, **settings})
    assert str(raised.value).startswith(f"model.{message}")
    assert "\n" not in str(raised.value)
    given = {**settings, **({"rope": 1e4} if "rope" in settings else {})}
    with pytest.raises(InputError) as raised:
        RuleLayer("attention", 16, 2, conv=0, **given)
    assert str(raised.value).startswith(message)


def test_mamba_blocks_share_q_and_k() -> None:
    with pytest.raises(InputError, match=r"leave kv_heads and qk_heads \(1 in mamba blocks\) at 2"):
        ModelSpec.of({**SIZES, "rule": "mamba2", "block": "mamba", "kv_rank": 6})
