"""Models of ours as models of flash-linear-attention, and back: names, shapes, options and logits.

`fla` holds what FLA's own models say, of `python benchmarks/fla_logits.py --names tests/export/fla`. That script
compares the logits with FLA's on a GPU.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.folders import DOCS
from torch import Tensor

from deltalab.errors import InputError
from deltalab.export.fla.conversion import FORMS, SHARED, WHY_NOT, from_fla, to_fla, why_not
from deltalab.models.model import Model, build_model
from deltalab.models.spec import ModelSpec
from deltalab.registry import list_rules

save_file = pytest.importorskip("safetensors.torch").save_file

THEIRS = {file.stem: json.loads(file.read_text()) for file in sorted((Path(__file__).parent / "fla").glob("*.json"))}
SIZES = {"vocab_size": 20, "d_model": 16, "heads": 2}
ATTENTION = {"conv": 0, "rope": True, "output_norm": False, "output_gate": False}
RAW = {"features": "raw", "conv": 0, "output_gate": False}
SLOTS = {"features": "silu", "conv": 0, "scale": 1.0, "output_norm": "rms_all_of_silu", "output_gate": False}

OURS: dict[str, dict[str, Any]] = {
    "gated deltanet": {"rule": "gated_deltanet", "output_gate": "silu"},
    "wide, tied": {"rule": "gated_deltanet", "d_model": 128},
    "tied, of a base width": {"rule": "gated_deltanet", "base_width": 4},
    "gated deltanet of width": {"rule": "gated_deltanet", "mlp_width": 24, "norm_eps": 1e-6, "tie_embeddings": False},
    "shared keys": {"rule": {"name": "gated_deltanet", "beta": {"sigmoid": {"max": 2}}}, "qk_heads": 1, "expand_v": 2},
    "without convolution": {"rule": "gated_deltanet", "conv": 0, "output_gate": False},
    "deltanet": {"rule": "deltanet", "output_gate": "silu", "key_dim": 4},
    "kda": {"rule": "kda@published"},
    "kda with a bounded decay": {"rule": {"name": "kda@published", "g": {"kda_bounded_decay": {"least": -4}}}},
    "deltanet of a sigmoid": {"rule": "deltanet"},
    "comba": {"rule": {"name": "comba", "b": 1, "d": 0}},
    "delta product": {"rule": {"name": "delta_product", "g": "mamba2_decay", "n_h": 3}, "output_gate": "silu"},
    "delta product without decay": {"rule": "delta_product", "output_gate": False},
    "gla": {"rule": "gla", "features": "silu", "output_gate": "silu", "low_rank_bias": True},
    "gla without convolution": {"rule": "gla", "features": "silu_qk", "conv": 0, "output_gate": False},
    "retnet": {"rule": "retnet", **RAW, "rope": True, "kv_heads": 1},
    "hgrn": {
        "rule": "min_gru", "features": "silu", "conv": 0, "scale": 1.0, "output_norm": "rms_all", "output_gate": "silu",
        "heads": 1, "key_dim": 1, "expand_v": 32.0,
    },
    "hgrn2": {"rule": "hgrn2", "features": "silu_qk", "conv": 0, "output_norm": "rms_all", "output_gate": False},
    "linear attention": {"rule": "linear_attention", **RAW},
    "mamba2": {
        "rule": "mamba2", "block": "mamba", "features": "silu", "scale": 1.0, "output_norm": "rms_all",
        "output_gate": "silu_before_norm",
    },
    "mamba2, published": {"rule": "mamba2@published", "block": "mamba"},
    "mamba3": {
        "rule": {"name": "mamba3@published", "a": "rate"}, "block": "mamba", "key_dim": 8, "expand_v": 2.0,
    },
    "lightnet": {
        "rule": "lightnet", "output_norm": "rms_all", "output_gate": "silu", "gate_rank": 3, "norm_eps": 1e-6,
    },
    "abc": {"rule": {"name": "abc", "s": {"slot_logit": {"slots": 8}}}, "output_gate": "silu", "rope": True},
    "forgetting attention": {"rule": "forgetting_attention", "conv": 0, "output_norm": False, "kv_heads": 1},
    "forgetting attention, published": {"rule": "forgetting_attention@published"},
    "preconditioned": {"rule": "preconditioned_gated_deltanet", "output_gate": "silu"},
    "gsa": {"rule": "gsa@published", "features": "silu"},
    "raven": {"rule": "raven", **SLOTS},
    "rwkv7": {"preset": "rwkv7", "layers": 2},
    "rwkv6": {"preset": "rwkv6", "layers": 2, "key_dim": 4, "expand_v": 2.0},
    "rwkv7, tied": {"preset": "rwkv7", "layers": 3, "tie_embeddings": True, "first_norm": False, "gate_rank": 0},
    "log-linear": {"rule": "log_linear_attention@published", "mlp_width": 256, "key_dim": 64, "expand_v": 0.5},
    "latent attention": {
        "rule": {"name": "attention", "window": 5}, **ATTENTION, "key_dim": 12, "expand_v": 0.5, "kv_rank": 4,
        "q_rank": 6, "rope_dim": 8,
    },
    "latent attention, whole queries": {"rule": "attention", **ATTENTION, "kv_rank": 4, "rope_dim": 2},
    "transformer": {"rule": "attention", **ATTENTION, "qk_norm": True, "kv_heads": 1},
    "hybrid": {
        "rule": "gla", "features": "silu", "output_gate": "silu", "low_rank_bias": True,
        "layers": ["rule", {"name": "attention", "window": 5, "layer": {**ATTENTION, "features": "raw"}}, "rule"],
    },
}  # fmt: skip


def written(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return folder


def shaken(spec: dict[str, Any]) -> Model:
    model = build_model({**SIZES, **spec}, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=generator))
    return model


def of_fla(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A model of FLA: its options, and weights in its names and shapes."""
    generator = torch.Generator().manual_seed(0)
    shapes = THEIRS[name]["parameters"]
    weights = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    # Comba's correction of q has no equal here, and neither have the weights of Raven's norms of q and k.
    for key, value in weights.items():
        if key.endswith(".attn.D"):
            value.zero_()
        if name == "raven" and key.endswith(("q_norm.weight", "k_norm.weight")):
            value.fill_(1)
    if THEIRS[name]["config"]["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    return THEIRS[name]["config"], weights


def loaded(folder: Path) -> Model:
    spec, weights, _ = from_fla(folder)
    model = Model(spec)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("spec", OURS.values(), ids=OURS)
def test_a_model_comes_back_from_fla_with_its_logits_to_the_bit(spec: dict[str, Any], tmp_path: Path) -> None:
    model = shaken(spec)
    tokens = torch.arange(24).reshape(2, 12) % 20
    back = loaded(written(tmp_path, *to_fla(model.spec, model.state_dict())))
    assert torch.equal(back(tokens), model(tokens))


@pytest.mark.parametrize("name", THEIRS)
def test_a_model_of_fla_comes_back_with_its_names_shapes_and_values(name: str, tmp_path: Path) -> None:
    config, weights = of_fla(name)
    model = loaded(written(tmp_path, config, weights))
    ours, found = to_fla(model.spec, model.state_dict())
    assert {key: value.shape for key, value in found.items()} == {key: value.shape for key, value in weights.items()}
    for key, value in found.items():
        if name == "preconditioned_kda" and ".f_proj." in key:  # one matrix here, whose factors are not unique
            continue
        assert key.endswith("attn.decay") or torch.equal(value, weights[key]), key
    changed = {"bos_token_id", "eos_token_id", "pad_token_id", "hidden_ratio", "chunk_size", "use_short_conv"}
    changed |= {"add_gumbel_noise", "use_l2warp"}  # in training alone
    changed |= {"value_dim"}  # one number for all layers, of which FLA makes a list
    assert {
        key: (ours[key], config[key]) for key in ours.keys() & config.keys() - changed if ours[key] != config[key]
    } == {}


@pytest.mark.parametrize("name", THEIRS)
def test_the_defaults_are_those_of_fla(name: str) -> None:
    form = next(form for form in FORMS if form.model_type == THEIRS[name]["config"]["model_type"])
    defaults = {**SHARED, **form.options}
    if name == "rwkv7":  # FLA follows them from head_dim and hidden_size where a file has none, and so do we
        defaults |= {"num_heads": 2048 // 64, "value_dim": [2048] * 24}
    assert {key: value for key, value in THEIRS[name]["defaults"].items() if defaults[key] != value} == {}


@pytest.mark.parametrize("rule", ["gated_deltanet", "mamba2@published"])
def test_tied_embeddings_stay_tied_and_the_last_norm_holds_their_factor(rule: str) -> None:
    name = "backbone.norm_f" if "mamba" in rule else "model.norm"
    for width, factor in ((16, 1 / 4), (128, 1 / 16)):
        model = shaken({"rule": rule, "d_model": width, **({"block": "mamba"} if "mamba" in rule else {})})
        config, weights = to_fla(model.spec, model.state_dict())
        assert config["tie_word_embeddings"] is True
        assert "lm_head.weight" not in weights
        assert torch.equal(weights[f"{name}.weight"], model.norm.weight * factor)
    own = shaken({"rule": rule, "tie_embeddings": False, **({"block": "mamba"} if "mamba" in rule else {})})
    config, weights = to_fla(own.spec, own.state_dict())
    assert config["tie_word_embeddings"] is False
    assert torch.equal(weights["lm_head.weight"], own.state_dict()["unembed.weight"])


def test_no_weights_give_the_options_alone() -> None:
    config, weights = to_fla(ModelSpec.of({**SIZES, "rule": "deltanet"}), None)
    assert (config["model_type"], config["intermediate_size"], weights) == ("gated_deltanet", 48, {})


@pytest.mark.parametrize("in_the_file", [True, False])
def test_tied_embeddings_of_fla_stay_tied(in_the_file: bool, tmp_path: Path) -> None:
    config, weights = of_fla("gla")
    weights["lm_head.weight"] = weights["model.embeddings.weight"].clone()
    untied = loaded(written(tmp_path, config, weights))
    if not in_the_file:
        del weights["lm_head.weight"]
    # An option that is off and that FLA 0.6 does not know has no effect.
    tied = loaded(written(tmp_path, {**config, "tie_word_embeddings": True, "share_conv_kernel": False}, weights))
    assert (untied.spec.tie_embeddings, tied.spec.tie_embeddings) == (False, True)
    tokens = torch.arange(12)[None] % 20
    assert torch.equal(tied(tokens), untied(tokens))


def test_shards_are_read_with_their_index(tmp_path: Path) -> None:
    config, weights = of_fla("gla")
    written(tmp_path, config, weights)
    names = sorted(weights)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, keys in parts.items():
        save_file({key: weights[key] for key in keys}, tmp_path / file)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(from_fla(tmp_path)[1]["embed.weight"], weights["model.embeddings.weight"])


def rows(page: str, header: str) -> list[list[str]]:
    """The cells of the rows of a table of `docs/reference/fla.md`, without backquotes."""
    table = page.split(f"| {header}", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split(" | ")] for row in table]


def test_the_page_lists_the_forms_and_the_rules_without_one() -> None:
    page = (DOCS / "reference/fla.md").read_text(encoding="utf-8")
    listed = [tuple(row[:2]) for row in rows(page, "rule | model of FLA")]
    assert sorted(listed) == sorted((form.rule, form.model_type) for form in FORMS)
    assert dict(rows(page, "rule without an equal")) == WHY_NOT


def test_each_rule_has_an_equal_in_fla_or_a_reason_in_one_line() -> None:
    taken = {form.rule for form in FORMS}
    for rule in list_rules():
        if rule in taken:
            assert why_not(rule) is None
            continue
        with pytest.raises(InputError, match=f"^export to fla: rule '{rule}': .*FLA[^\n]*$"):
            to_fla(ModelSpec.of({**SIZES, "rule": rule}), None)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"rule": "comba"},
            r"FLA's comba lacks b in the feedback \(.*cancels b\) and d after the norm of q \(.*before that norm\); "
            "add `--set rule.b=1 --set rule.d=0`, and the model starts untrained$",
        ),
        ({"rule": {"name": "comba", "b": 1}}, "FLA's comba lacks d .*; add `--set rule.d=0`, and"),
        ({"rule": {"name": "comba", "d": 0}}, "FLA's comba lacks b .*; add `--set rule.b=1`, and"),
        ({"rule": {"name": "comba", "transition": "iplr"}}, "no equal of comba.transition iplr; add `--set rule.tran"),
        (
            {"rule": {"name": "linear_attention", "feature_map": "elu"}, "conv": 0, "output_gate": False},
            "FLA's linear_attn has no equal of linear_attention.feature_map elu",
        ),
        ({"rule": {"name": "comba", "g": "metala_decay"}}, "no equal of .*; add `--set rule.g=mamba2_decay`, and"),
        ({"rule": {"name": "comba", "beta": 1}}, "no equal of .*; add `--set rule.beta=sigmoid`, and"),
        ({"rule": {"name": "comba", "silu": "qk"}}, "no equal of comba.silu qk; add `--set rule.silu=qkv`, and"),
        (
            {"rule": {"name": "comba", "normalize": False}},
            "comba.normalize False; add `--set rule.normalize=true`, and",
        ),
        ({"rule": {"name": "comba", "b": 1, "d": 0}, "output_gate": "silu"}, "no equal of model.output_gate silu; add"),
        (
            {"rule": "gla", "output_gate": "silu"},
            "FLA's gla has no equal of features 'unit' where conv is 4; set model.f",
        ),
        ({"rule": "kda"}, "FLA's kda has no equal of model.gate_rank null; add `--set model.gate_rank=8`"),
        (
            {"rule": "gated_deltanet", "output_norm": "layer"},
            "no equal of model.output_norm layer; add `--set model.output",
        ),
        ({"rule": "gated_deltanet", "mlp": False}, "no equal of model.mlp false; add `--set model.mlp=true`, and"),
        ({"rule": {"name": "gated_deltanet", "g": "gla_decay"}}, "no equal of gated_deltanet.g gla_decay"),
        ({"rule": "gated_deltanet", "layers": ["rule", "deltanet"]}, "FLA's layers are alike, but for those of att"),
        ({"rule": "attention", **ATTENTION, "key_dim": 4}, "the heads of FLA's attention share the model's width"),
        (
            {"rule": "log_linear_attention@published", "mlp_width": 256, "scale": 1.0},
            "takes keys of a multiple of 64 and values of a power of 2, not 8 and 8 channels; give model.key_dim",
        ),
        (
            {"rule": "log_linear_attention"},
            "FLA's log_linear_mamba2 has no equal of model.output_norm true; add `--set",
        ),
        ({"rule": "attention", **ATTENTION, "kv_rank": 4}, "FLA's mla has no equal of model.rope_dim null; add"),
        (
            {"rule": "mamba2@published", "block": "mamba", "layers": 2, "attention": [1]},
            "FLA's mamba2 takes no layers of attention; layer 1 is",
        ),
        ({"rule": "mamba3@published", "block": "mamba"}, "no equal of mamba3.a heavy_tailed_rate.*=rate`"),
        ({"rule": "mamba3", "block": "mamba"}, "no equal of model.qk_norm false; add `--set model.qk_norm=true`"),
        (
            {"rule": {"name": "mamba3@published", "a": "rate"}, "block": "mamba", "key_dim": 16},
            r"an even number of pairs, .*the 16 channels of a key, .*pairs=2.* does not; it needs pairs: 4 or 8$",
        ),
        (
            {"rule": {"name": "mamba3@published", "a": "rate"}, "block": "mamba", "key_dim": 12},
            "FLA's mamba3 takes keys and values of a power of 2, not 12 and 12 channels; give model.key_dim",
        ),
        (
            {"rule": {"name": "mamba3@published", "a": "rate", "theta": "angular_velocity"}, "block": "mamba"},
            "no equal of mamba3.theta angular_velocity.*=shared_angular_velocity`",
        ),
        ({"rule": {"name": "mesa_net@published", "ridge": 1}}, "no equal of mesa_net.ridge const.*=channel_ridge`"),
        ({"rule": "mesa_net@published", "expand_v": 2}, "FLA's mesa_net has values as wide as keys: 16 is not 8"),
        ({"rule": "mesa_net@published", "conv": 0}, "FLA's mesa_net has no equal of model.conv 0; add `--set model.co"),
        ({"rule": "retnet", **RAW}, "no equal of model.rope false; add `--set model.rope=true`"),
        (
            {"rule": "rwkv7@published"},
            r"FLA's rwkv7 has the blocks of `preset: rwkv7`, and two of them or more; this model lacks norm=layer, "
            r"mlp_shift=true, mlp=relu2, token_shift=each, output_gate=linear, low_rank_activation=\{g: tanh, "
            r"output_gate: sigmoid\}, low_rank_bias=\[a\], bonus=true, value_residual=\{rank: 32\}; add `--.* "
            r"--set 'model.low_rank_activation=\{g: tanh, output_gate: sigmoid\}' --set .*, and the model starts",
        ),
        (
            {"preset": "rwkv7", "layers": 2, "gate_rank": None, "low_rank_activation": {"g": "tanh"}},
            "lacks low_rank_a",
        ),
        (
            {"preset": "rwkv7", "layers": 2, "bonus": False},
            "this model lacks bonus=true; add `--set model.bonus=true`, and",
        ),
        ({"preset": "rwkv7", "layers": 2, "scale": 1.0}, "no equal of model.scale 1.0; add `--set model.scale=null`"),
        ({"preset": "rwkv7", "layers": 2, "key_dim": 4}, "share the model's width, with values of a multiple of it: 2"),
        ({"preset": "rwkv7", "layers": 2, "features": "silu"}, "no equal of features 'silu'; it needs raw"),
        (
            {"rule": "rwkv6"},
            "FLA's rwkv6 has the blocks of `preset: rwkv6`; this model lacks norm=layer, mlp_shift=true, conv=0, "
            r"output_norm=group, mlp=gated_relu2, output_gate=silu, scale=1.0, low_rank_activation=\{g: tanh\}, "
            r"token_shift=\{rank: 32\}; add `--set model.norm=layer ",
        ),
        (
            {"preset": "rwkv6", "layers": 2, "bonus": True},
            "this model lacks bonus=false; add `--set model.bonus=false`",
        ),
        ({"preset": "rwkv6", "layers": 2, "gate_rank": 4}, "no equal of model.gate_rank 4; add"),
        ({"rule": "gla", "features": "silu", "bonus": True}, "FLA's gla has no equal of model.bonus true; add `--set"),
        ({"rule": "gated_deltanet", "norm": "layer"}, "no equal of model.norm layer; add `--set model.norm=rms`"),
        ({"rule": "gated_deltanet", "mlp": "relu2"}, "no equal of model.mlp relu2; add `--set model.mlp=true`"),
        ({"rule": "gated_deltanet", "mlp_shift": True}, "no equal of model.mlp_shift true; add"),
        (
            {"rule": "gated_deltanet", "layers": [{"name": "rule", "layer": {"bonus": True}}]},
            "FLA's gated_deltanet has no equal of model.bonus true",
        ),
    ],
)
def test_settings_without_an_equal_are_named(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        to_fla(ModelSpec.of({**SIZES, **spec}), None)


@pytest.mark.parametrize("rule", ["kda", {"name": "preconditioned_gated_deltanet", "transition": "channel"}])
def test_kda_goes_to_fla_where_its_decay_has_fewer_channels_and_one_rate_a_head(rule: Any, tmp_path: Path) -> None:
    model = shaken({"rule": rule, "gate_rank": 8})
    with pytest.raises(InputError, match="projects its decay through 8 channels"):
        to_fla(model.spec, model.state_dict())
    weights = model.state_dict()
    for block in range(2):
        weights[f"blocks.{block}.mixer.gates.project.g.weight"][:, 8:] = 0
    with pytest.raises(InputError, match="one a for each head"):
        to_fla(model.spec, weights)
    for block in range(2):
        rates = weights[f"blocks.{block}.mixer.gates.learned.g.log_a"]
        rates.copy_(rates[:, :1].expand_as(rates).clone())
    model.load_state_dict(weights)
    tokens = torch.arange(12)[None] % 20
    back = loaded(written(tmp_path, *to_fla(model.spec, weights)))
    torch.testing.assert_close(back(tokens), model(tokens), rtol=1e-4, atol=1e-4)


def test_mesa_net_goes_to_fla_while_its_convolution_leaves_v_as_it_is(tmp_path: Path) -> None:
    model = loaded(written(tmp_path, *of_fla("mesa_net")))
    tokens = torch.arange(12)[None] % 20
    back = loaded(written(tmp_path, *to_fla(model.spec, model.state_dict())))
    assert torch.equal(back(tokens), model(tokens))
    v_of = 2 * model.spec.heads * model.spec.head_dims[0]
    for tap, channel in ((0, v_of), (-1, -1)):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        weights["blocks.1.mixer.conv"][tap, channel] += 1e-3
        with pytest.raises(InputError, match=r"no convolution of v.*its last tap is 1 and the others are 0$"):
            to_fla(model.spec, weights)
    weights = model.state_dict()
    weights["blocks.1.mixer.conv"][:, :v_of] *= 2
    to_fla(model.spec, weights)
    with pytest.raises(InputError, match=r"learns one, so that an untrained model has no equal$"):
        to_fla(model.spec, None)
    config, theirs = of_fla("mesa_net")
    with pytest.raises(InputError, match="'max_cg_step_decoding' 5 has no equal here; only max_cg_step_training, 30"):
        from_fla(written(tmp_path, {**config, "max_cg_step_decoding": 5}, theirs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "llama"}, "unknown model_type with an equal here 'llama'"),
        (
            {"model_type": "rodimus"},
            "config.json: model_type 'rodimus' has no equal here: FLA's gates read a short con",
        ),
        ({"clamp_min": -1.0}, "option 'clamp_min' -1.0 has no equal here; only None has"),
        ({"feature_map": "relu"}, "option 'feature_map' 'relu' has no equal here"),
        ({"share_conv_kernel": True}, r"option 'share_conv_kernel' \(True\) has no equal here"),
        ({"attn": {"layers": [1], "num_heads": 2, "qkv_bias": True}}, "option 'attn.qkv_bias' True has no equal here"),
        ({"num_hidden_layers": 3}, "the weights lack model.layers.2.attn_norm.weight"),
        ({"num_hidden_layers": 1}, "the weights have model.layers.1.*which config.json does not call for"),
        ({"intermediate_size": 40}, "the weights do not fit config.json.*size mismatch for blocks.0.mlp.into.weight"),
    ],
)
def test_checkpoints_without_an_equal_say_which_option_or_weight(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config, weights = of_fla("gla")
    with pytest.raises(InputError, match=message):
        from_fla(written(tmp_path, {**config, **options}, weights))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_act": "swish"}, "option 'hidden_act' 'swish' has no equal here; only 'sqrelu' has"),
        ({"norm_bias": False}, "option 'norm_bias' False has no equal here; only True has"),
        ({"attn": {"layers": [1], "num_heads": 2}}, "option 'attn' .* has no equal here; only None has"),
        ({"value_dim": [64, 128]}, r"option 'value_dim' \[64, 128\] has no equal here; our layers have values of one"),
        ({"num_hidden_layers": 1}, "model.value_residual has no effect in one layer"),
    ],
    ids=str,
)
def test_a_checkpoint_of_rwkv7_without_an_equal_says_why(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, weights = of_fla("rwkv7")
    with pytest.raises(InputError, match=message):
        from_fla(written(tmp_path, {**config, **options}, weights))


def test_a_checkpoint_of_flas_first_rwkv7_is_read_as_fla_reads_it(tmp_path: Path) -> None:
    config, weights = of_fla("rwkv7")
    new = from_fla(written(tmp_path, config, weights))[1]
    for layer in range(2):  # `RWKV7Model.load_state_dict` of FLA 0.6 takes x_x apart in this order
        prefix = f"model.layers.{layer}.attn.x_"
        weights[f"{prefix}x"] = torch.stack([weights.pop(prefix + reader).flatten() for reader in "rwkvag"])
    old = from_fla(written(tmp_path, config, weights))[1]
    assert new.keys() == old.keys()
    assert all(torch.equal(value, old[name]) for name, value in new.items())


def test_a_folder_without_weights_or_options_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: cannot be read"):
        from_fla(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(THEIRS["gla"]["config"]))
    with pytest.raises(InputError, match=r"model\.safetensors: the weights cannot be read"):
        from_fla(tmp_path)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"features": "sum"}, "unknown features 'sum'"),
        ({"scale": 0}, "model.scale must be a positive number, not 0"),
        ({"norm_eps": None}, "model.norm_eps must be a positive number, not None"),
        ({"mlp_width": 0}, "model.mlp_width must be a whole number of at least 1, not 0"),
        ({"mlp_width": 8, "mlp": False}, "model.mlp_width has no effect without an MLP"),
        ({"low_rank_bias": 1}, "model.low_rank_bias must be true, false or a list of projections, not 1"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ModelSpec.of({**SIZES, "rule": "gla", **setting})


@pytest.mark.parametrize(
    "setting", [{"features": "raw"}, {"scale": 3.0}, {"norm_eps": 0.1}, {"mlp_width": 8}, {"low_rank_bias": True}]
)
def test_settings_change_the_logits(setting: dict[str, Any]) -> None:
    tokens = torch.arange(12)[None] % 20
    plain, other = shaken({"rule": "gla"}), shaken({"rule": "gla", **setting})
    if setting.keys() & {"features", "scale", "norm_eps"}:
        other.load_state_dict(plain.state_dict())
    assert not torch.allclose(plain(tokens), other(tokens), atol=1e-4)
