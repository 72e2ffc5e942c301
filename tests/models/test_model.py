"""Models: decoding equals the whole sequence, layers stand where the layout says, nothing sees the future."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import deltalab
from deltalab.errors import InputError
from deltalab.models.layer import LayerCache
from deltalab.models.model import Model, build_model, head_loss, parameter_groups
from deltalab.models.spec import ModelSpec

SMALL = {"vocab_size": 16, "d_model": 16, "layers": 2, "heads": 2, "chunk_size": 8}
RULES = deltalab.list_rules()
MODELS = {
    **{rule: {"rule": rule} for rule in RULES},
    "hybrid": {"rule": "comba", "attention": [1]},
    "hybrid with a window": {"rule": "comba", "attention": [0], "window": 3},
    "mamba block": {"rule": "mamba2", "block": "mamba", "layers": 1},
    "mamba block, hybrid": {"rule": "comba", "block": "mamba", "attention": [2]},
    "bare": {
        "rule": "comba",
        "conv": 0,
        "output_norm": False,
        "output_gate": False,
        "mlp": False,
        "tie_embeddings": False,
    },
    "conv of 1": {"rule": "deltanet", "conv": 1},
    "rotary positions": {"rule": "gated_deltanet", "rope": True},
    "rotary positions, several steps": {"rule": "delta_product", "rope": 50},
    "grouped values": {"rule": "gated_deltanet", "heads": 4, "qk_heads": 2},
    "grouped keys and values": {"rule": "gla", "heads": 4, "kv_heads": 2},
    "latents": {"rule": "attention", "conv": 0, "rope": True, "rope_dim": 4, "kv_rank": 6, "q_rank": 5},
    "latents, several steps": {"rule": "delta_product", "rope": True, "rope_dim": 4, "kv_rank": 6},
    "qk norm": {"rule": "kda", "qk_norm": True},
    "token shift": {"rule": "rwkv7", "token_shift": True, "conv": 0, "output_norm": "group"},
    "gate before the norm": {"rule": "mamba2", "output_norm": "rms_all", "output_gate": "silu_before_norm"},
    "Transformer++": {
        "rule": "attention",
        "heads": 4,
        "kv_heads": 2,
        "rope": True,
        "conv": 0,
        "output_norm": False,
        "output_gate": False,
    },
    "a rule for each layer": {
        "rule": "gated_deltanet",
        "layers": [
            {"repeat": 2, "pattern": ["rule", "kda"]},
            {"name": "attention", "window": 4, "layer": {"rope": True, "heads": 4, "kv_heads": 2, "conv": 0}},
        ],
    },
    "wide values, narrow keys": {"rule": "gated_deltanet", "key_dim": 3, "expand_v": 1.5},
}


def built(**given: object) -> Model:
    model = build_model({**SMALL, **given}, seed=3).double()
    with torch.no_grad():  # away from the start, where gates are alike and norms are one
        for i, value in enumerate(model.parameters()):
            value += 0.2 * torch.randn(value.shape, generator=torch.Generator().manual_seed(i), dtype=value.dtype)
    return model


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(16, (batch, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow(keep="comba")
@pytest.mark.parametrize("given", MODELS.values(), ids=MODELS)
def test_prefill_and_decoding_equal_the_whole_sequence(given: dict[str, object]) -> None:
    model = built(**given)
    x = tokens(21)
    with torch.no_grad():
        whole = model(x)
        for prefill in (0, 1, 13):
            cache, parts = None, []
            cuts = [0, *([prefill] if prefill else []), *range(prefill + 1, 22)]
            for start, end in pairwise(cuts):
                logits, cache = model.step(x[:, start:end], cache)
                parts.append(logits)
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.slow(keep="comba")
@pytest.mark.parametrize("given", MODELS.values(), ids=MODELS)
def test_no_position_sees_a_later_token(given: dict[str, object]) -> None:
    model = built(**given)
    x = tokens(20, batch=1)
    for changed in (1, 9, 19):
        other = x.clone()
        other[0, changed] = (other[0, changed] + 1) % 16
        with torch.no_grad():
            before, after = model(x), model(other)
        assert torch.equal(before[:, :changed], after[:, :changed])
        assert not torch.allclose(before[:, changed], after[:, changed])


@pytest.mark.parametrize("given", MODELS.values(), ids=MODELS)
def test_cache_size_is_that_of_the_tensors_held(given: dict[str, object]) -> None:
    model = built(**given)
    with torch.no_grad():
        _, cache = model.step(tokens(11, batch=1))

    def elements(held: object) -> int:
        if isinstance(held, torch.Tensor):
            return held.numel()
        if isinstance(held, LayerCache):
            return elements((held.conv, held.state, held.place, held.last))
        assert isinstance(held, list | tuple)
        return sum(map(elements, held))

    size = model.cache_size(11)
    assert sum(size) == elements(cache)
    assert size.conv == sum(elements((layer.conv, layer.place, layer.last)) for layer in cache)
    grows = sum(model.cache_size(12)) > sum(size)
    assert size.kv > 0 or not grows


@pytest.mark.slow
def test_only_rules_that_keep_their_past_remember_more_the_longer_they_read() -> None:
    sizes = {name: [sum(built(**given).cache_size(n)) for n in (8, 16)] for name, given in MODELS.items()}
    assert {name for name, (short, long) in sizes.items() if short != long} == {
        "attention",
        "differential_attention",
        "forgetting_attention",
        "path_attention",
        "hyena",
        "landmark_attention",
        "memory_caching",
        "moba",
        "nsa",
        "reformer",
        "hybrid",
        "mamba block, hybrid",
        "latents",
        "Transformer++",
    }


def test_second_to_last_of_every_eight() -> None:
    model = build_model({**SMALL, "rule": "comba", "layers": 16, "attention": "second_to_last_of_every_eight"})
    names = [block.mixer.rule.name for block in model.blocks]
    assert [i for i, name in enumerate(names) if name == "attention"] == [6, 14]
    assert set(names) == {"attention", "comba"}


def test_layers_are_listed_one_by_one_or_by_a_pattern() -> None:
    attention = {"name": "attention", "window": 3, "layer": {"conv": 0, "heads": 4}}
    pattern = [{"repeat": 2, "pattern": ["comba", "kda"]}, attention, {"pattern": ["rule"]}]
    model = build_model({**SMALL, "rule": {"name": "comba", "d": 0}, "layers": pattern})
    assert [block.mixer.rule.name for block in model.blocks] == ["comba", "kda", "comba", "kda", "attention", "comba"]
    assert all(block.mixer.rule.d.kind == "const" for block in model.blocks if block.mixer.rule.name == "comba")
    assert model.blocks[4].mixer.rule.window == 3
    assert [block.mixer.width for block in model.blocks] == [4, 4, 4, 4, 0, 4]
    assert [block.mixer.heads for block in model.blocks] == [2, 2, 2, 2, 4, 2]
    one_by_one = ["rule", "kda", "rule", "kda", attention, "rule"]
    assert model.spec == ModelSpec.of({**SMALL, "rule": {"name": "comba", "d": 0}, "layers": one_by_one})
    assert model.spec == ModelSpec.of({**SMALL, "rule": {"name": "comba", "d": 0}, "layers": model.spec.layers})


def test_a_list_is_the_hybrid_that_attention_and_window_say() -> None:
    said = build_model({**SMALL, "rule": "comba", "attention": [1], "window": 3}, seed=1)
    listed = build_model({**SMALL, "rule": "comba", "layers": ["rule", {"name": "attention", "window": 3}]}, seed=1)
    assert said.state_dict().keys() == listed.state_dict().keys()
    assert torch.equal(said(tokens(9)), listed(tokens(9)))


def test_a_rules_knobs_are_its_own_in_an_entry() -> None:
    """An entry with knobs is another rule than the model's, though it may have the same name."""
    spec = ModelSpec.of({**SMALL, "rule": {"name": "comba", "d": 0}, "layers": ["rule", {"name": "comba", "d": 0.5}]})
    assert [str(spec.at(layer).make_rule().d) for layer in (0, 1)] == ["const(value=0)", "const(value=0.5)"]


def test_a_mamba_block_has_twice_the_depth_one_query_and_key_and_no_mlp() -> None:
    model = build_model({**SMALL, "rule": "mamba2", "block": "mamba"})
    assert len(model.blocks) == 4
    assert all(block.mlp is None for block in model.blocks)
    assert model.blocks[0].mixer.qkv.weight.shape == (8 + 8 + 16, 16)
    assert not model.spec.mlp


def test_logits_where_asked_are_those_of_the_whole() -> None:
    model = built(rule="comba")
    x = tokens(12)
    where = torch.rand(2, 12, generator=torch.Generator().manual_seed(1)) < 0.3
    assert where.any()
    torch.testing.assert_close(model(x, where=where), model(x)[where], rtol=1e-12, atol=1e-12)


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    """Targets of -100 do not count, also not in the mean."""
    model = build_model({"rule": "comba", "vocab_size": 11, "d_model": 8, "heads": 2}).double()
    tokens, targets = torch.randint(11, (2, 2, 7), generator=torch.Generator().manual_seed(0)).unbind()
    targets[0, :3] = -100
    wanted = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    found = model.loss(tokens, targets)
    torch.testing.assert_close(found, wanted)
    parameters = list(model.parameters())
    for one, other in zip(*(torch.autograd.grad(x, parameters) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(model.loss(tokens, targets), wanted)


def test_the_loss_computes_no_gradient_that_nobody_asks_for() -> None:
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
            return func(*args, **(kwargs or {}))

    features, head = torch.randn(1, 5, 4, requires_grad=True), torch.randn(9, 4)
    targets = torch.zeros(1, 5, dtype=torch.long)
    with Products() as asked:
        head_loss(features, head, targets)
    with Products() as unasked, torch.no_grad():
        head_loss(features, head, targets)
    assert (asked.count, unasked.count) == (3, 1)


def test_one_seed_one_start() -> None:
    a, b, c = (build_model({**SMALL, "rule": "comba"}, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["embed.weight"], c["embed.weight"])


@pytest.mark.parametrize(
    "change",
    [
        {"rule": {"name": "comba", "d": {"head": {"init": 1.0}}}},
        {"rule": {"name": "comba", "d": 0}},
        {"rule": {"name": "comba", "transition": "iplr"}},
        {"rule": {"name": "comba", "g": "gla_decay"}},
        {"rule": "deltanet"},
        {"output_gate": False},
        {"mlp": False},
        {"attention": [1]},
    ],
    ids=str,
)
def test_arms_start_from_equal_values_in_all_that_they_share(change: dict[str, object]) -> None:
    base = build_model({**SMALL, "rule": "comba"}, seed=5).state_dict()
    other = build_model({**SMALL, "rule": "comba", **change}, seed=5).state_dict()
    # What the change itself is about may start elsewhere.
    own = {name for name in base if ".d." in name} if "rule" in change else set()
    shared = {name for name in base.keys() & other.keys() if base[name].shape == other[name].shape} - own
    assert {"embed.weight", "blocks.0.mixer.qkv.weight", "blocks.1.mixer.out.weight"} <= shared
    assert all(torch.equal(base[name], other[name]) for name in shared)


def test_parameters_that_are_not_matrices_do_not_decay() -> None:
    model = build_model({**SMALL, "rule": "comba"})
    decayed, free = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    names = {id(value): name for name, value in model.named_parameters()}
    of = [{names[id(value)] for value in group["params"]} for group in (decayed, free)]
    assert of[0] | of[1] == set(names.values())
    assert not of[0] & of[1]
    learned = {name for name in names.values() if "norm" in name or ".learned." in name}
    assert of[1] == learned
    assert any(name.endswith(("log_a", "dt_bias", "logit", "value")) for name in of[1])


REFUSED = [
    ({"d_modl": 3}, "did you mean 'd_model'"),
    ({"vocab_size": None}, "model.vocab_size"),
    ({"d_model": True}, "model.d_model"),
    ({"d_model": 16.0}, "model.d_model"),
    ({"layers": 0}, "model.layers"),
    ({"heads": -1}, "model.heads"),
    ({"heads": 3}, "multiple of heads"),
    ({"key_dim": 0}, "model.key_dim"),
    ({"conv": -1}, "model.conv"),
    ({"mlp": 1}, "model.mlp"),
    ({"expand_v": 0}, "model.expand_v"),
    ({"expand_v": float("nan")}, "model.expand_v"),
    ({"expand_v": float("inf")}, "model.expand_v"),
    ({"block": "mmba"}, "did you mean 'mamba'"),
    ({"attention": [2]}, "0 to 1"),
    ({"attention": [True]}, "layer True"),
    ({"attention": 1}, "model.attention"),
    ({"attention": None}, "model.attention"),
    ({"attention": "second_to_last"}, "did you mean 'second_to_last_of_every_eight'"),
    ({"attention": "second_to_last_of_every_eight"}, "at least 7 layers"),
    ({"window": 4}, "no effect without attention"),
    ({"rule": "comb"}, "did you mean 'comba'"),
    ({"rule": {"d": 0}}, "rule must be"),
    ({"rule": 3}, "rule must be"),
    ({"rule": {"name": "comba", "dd": 0}}, "did you mean 'd'"),
    ({"rule": {"name": "comba", "d": "heads"}}, "did you mean 'head'"),
    ({"rule": {"name": "comba", "d": {"head": {"init": True}}}}, "finite number"),
    ({"rule": {"name": "comba", "d": {"head": {"int": 1}}}}, "did you mean 'init'"),
    ({"rule": {"name": "comba", "d": [0]}}, "takes one gate"),
    ({"rule": {"name": "comba", "transition": True}}, "unknown option"),
    ({"rule": {"name": "attention", "window": -1}}, "at least 0"),
    ({"qk_heads": 3}, "model.qk_heads must divide heads 2"),
    ({"kv_heads": 0}, "model.kv_heads must be a whole number"),
    ({"qk_heads": 1, "kv_heads": 1}, "model.kv_heads: a layer shares k and v, or q and k"),
    ({"block": "mamba", "kv_heads": 1}, "1 in mamba blocks"),
    ({"rope": "yes"}, "model.rope must be true, false or a base"),
    ({"rope": 0}, "model.rope must be true, false or a base"),
    ({"rope": True, "key_dim": 3}, "key_dim must be even, not 3"),
    ({"qk_norm": 1}, "model.qk_norm must be true or false"),
    ({"token_shift": "no"}, "model.token_shift: unknown token_shift 'no'; allowed: each, {rank: r}, true, false"),
    ({"output_norm": "rsm"}, "model.output_norm: unknown norm 'rsm'; did you mean 'rms'?"),
    ({"output_gate": "slu"}, "model.output_gate: unknown gate 'slu'; did you mean 'silu'?"),
    ({"output_gate": "silu_before_norm", "output_norm": "none"}, "no effect without output_norm"),
    ({"gate_rank": -1}, "model.gate_rank must be a whole number"),
    ({"gate_rank": 2, "output_gate": False}, "model.gate_rank has no effect without output_gate"),
    ({"layers": []}, "model.layers must list at least one layer"),
    ({"layers": "comba"}, "model.layers must be a whole number"),
    ({"layers": ["attention"]}, "rule 'comba' stands in no layer; list `rule`"),
    ({"layers": ["rule", "atention"]}, "did you mean 'attention'?"),
    ({"layers": ["rule", 3]}, "a layer is a rule's name"),
    ({"layers": ["rule", {"nam": "kda"}]}, "did you mean 'name'?"),
    ({"layers": ["rule", {"repeat": 2}]}, "needs pattern"),
    ({"layers": {"repeat": 0, "pattern": ["rule"]}}, "model.layers repeat must be a whole number"),
    ({"layers": {"repeat": 2, "pattern": []}}, "model.layers pattern must list at least one layer"),
    ({"layers": ["rule", {"name": "attention", "windo": 3}]}, "did you mean 'window'?"),
    ({"layers": ["rule", {"name": "attention", "rope": True}]}, "say {name: attention, layer: {rope: ...}}"),
    ({"layers": ["rule", {"name": "attention", "layer": {"rop": True}}]}, "did you mean 'rope'?"),
    ({"layers": ["rule", {"name": "attention", "layer": {"kv_heads": 3}}]}, "model.layers[1]: model.kv_heads must"),
    ({"layers": ["rule", {"name": "attention", "layer": True}]}, "layer takes {setting: ...}"),
    ({"layers": ["rule", {"name": "rule", "d": 0}]}, "takes no d"),
    ({"layers": ["rule"], "attention": [0]}, "model.attention does not go with a list"),
    ({"layers": ["rule"], "window": 3}, "model.window does not go with a list"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=lambda x: str(x))
def test_what_makes_no_model_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(InputError) as raised:
        build_model({**SMALL, "rule": "comba", **given})
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("given", [None, "comba", {"rule": "comba"}, {"vocab_size": 8}])
def test_a_model_needs_a_mapping_with_rule_and_vocabulary(given: object) -> None:
    with pytest.raises(InputError):
        build_model(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("expand_v", (2, 2.0)),
        ("rope", (True, 10000, 1e4)),
        ("output_norm", (True, "rms")),
        ("output_norm", (False, "none")),
        ("output_gate", (True, "sigmoid")),
    ],
)
def test_values_that_are_equal_are_one_model(key: str, values: tuple[object, ...]) -> None:
    assert len({repr(ModelSpec.of({**SMALL, "rule": "comba", key: value})) for value in values}) == 1


@pytest.mark.parametrize("width", [128, 512, 1024])
@pytest.mark.parametrize("tied", [True, False])
def test_no_width_starts_worse_than_a_narrow_model(width: int, tied: bool) -> None:
    """The token that was just read gets the largest logit of a tied model: sqrt(d), if it grows with the width d."""
    losses = []
    for d_model in (64, width):
        sizes = {"vocab_size": 512, "d_model": d_model, "heads": d_model // 32, "layers": 1}
        model = build_model({"rule": "gated_deltanet", "tie_embeddings": tied, **sizes})
        read = torch.randint(512, (4, 33), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            losses.append(F.cross_entropy(model(read[:, :-1]).flatten(0, 1), read[:, 1:].flatten()).item())
    assert losses[1] < losses[0] + 0.1


def test_tied_logits_of_width_64_and_less_have_the_factor_of_the_first_release() -> None:
    for d_model in (16, 48, 64):
        model = build_model({"rule": "gated_deltanet", "vocab_size": 16, "d_model": d_model})
        hidden = torch.randn(3, d_model)
        assert torch.equal(model.logits(hidden), F.linear(hidden * d_model**-0.5, model.embed.weight))


def test_matrices_start_at_one_spread() -> None:
    spec = {"rule": "comba", "vocab_size": 16, "d_model": 128, "heads": 2, "layers": 3, "init_std": 0.02}
    model = build_model(spec, seed=1)
    spreads = {
        name: float(p.detach().std())
        for name, p in model.named_parameters()
        if name.endswith("weight") and p.dim() == 2
    }
    for name, spread in spreads.items():
        last = name.endswith(("mixer.out.weight", "mlp.out.weight"))
        want = 1.0 if name == "embed.weight" else 0.02 / 6**0.5 if last else 0.02
        assert spread == pytest.approx(want, rel=0.1), name
    plain = build_model({key: value for key, value in spec.items() if key != "init_std"}, seed=1)
    ratio = plain.blocks[0].mixer.qkv.weight / model.blocks[0].mixer.qkv.weight
    torch.testing.assert_close(ratio, torch.full_like(ratio, 128**-0.5 / 0.02))
    with pytest.raises(InputError, match=r"model\.init_std must be a positive number"):
        build_model({**spec, "init_std": -1})
