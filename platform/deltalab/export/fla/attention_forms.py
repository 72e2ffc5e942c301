"""The forms of softmax attention over tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.export.fla.layer_form import (
    CONVS,
    QKV,
    Form,
    Part,
    fixed,
    needs_features,
    of_rule,
    plain,
    projections,
    same,
)
from deltalab.models.settings.spec_checks import ROPE
from deltalab.models.spec import ModelSpec
from deltalab.ops.fused.norm import EPS

# Softmax attention, as a whole model or as single layers of another model.


def attention(spec: ModelSpec, model_type: str = "transformer") -> dict[str, Any]:
    """Returns the options of FLA's attention layer, whose heads share the model's width.

    Args:
        spec: Our layer.
        model_type: FLA's type of the model that the layer belongs to.

    Raises:
        InputError: If FLA has no equal of the layer.
    """
    key_dim, value_dim = spec.head_dims
    plain(
        spec,
        model_type,
        qk_norm=(True, False),
        rope=tuple({spec.rope} - {False}) or (True,),
        output_norm=(False,),
        output_gate=(False,),
        kv_heads=(spec.kv_heads,),
        qk_heads=(None, spec.heads),
        conv=(0,),
    )
    needs_features(spec, model_type, "raw")
    if (spec.heads * key_dim, value_dim) != (spec.d_model, key_dim):
        raise InputError(
            f"export to fla: the heads of FLA's attention share the model's width: {spec.heads} of {key_dim} and "
            f"{value_dim} are not {spec.d_model}"
        )
    if spec.qk_norm and (model_type != "transformer" or spec.norm_eps != EPS):
        raise InputError(
            "export to fla: FLA's attention has no equal of model.qk_norm true; add `--set model.qk_norm=false`, "
            f"or let all layers be attention with model.norm_eps {EPS:g}"
        )
    window = getattr(spec.make_rule(), "window")  # noqa: B009
    return {
        "num_heads": spec.heads,
        "num_kv_heads": spec.kv_heads or spec.heads,
        "qkv_bias": False,
        "window_size": window or None,
        "rope_theta": ROPE if spec.rope is True else float(spec.rope),
        **({"qk_norm": spec.qk_norm} if model_type == "transformer" else {}),
    }


def from_attention(options: Mapping[str, Any], d_model: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns our rule and our settings for the options of FLA's attention layer."""
    heads = options["num_heads"]
    shared = options.get("num_kv_heads") or heads
    base = float(options.get("rope_theta", ROPE))
    rule = {"name": "attention", "window": options.get("window_size") or 0}
    return rule, {
        "heads": heads,
        "kv_heads": None if shared == heads else shared,
        "qk_heads": None,
        "key_dim": d_model // heads,
        "expand_v": 1.0,
        "conv": 0,
        "rope": True if base == ROPE else base,
        "qk_norm": bool(options.get("qk_norm", False)),
        "output_norm": False,
        "output_gate": False,
    }


def _from_transformer(options: Mapping[str, Any]) -> dict[str, Any]:
    rule, settings = from_attention(options, options["hidden_size"])
    return {"rule": rule, **settings}


def attention_parts(spec: ModelSpec) -> list[Part]:
    """Returns the parameters of a layer of attention."""
    norms = [same(f"{x}_norm.weight", f"{x}_norm.weight") for x in "qk"] if spec.qk_norm else []
    return [*projections(spec, QKV, CONVS), *norms, same("out.weight", "o_proj.weight")]


TRANSFORMER = Form(
    "transformer",
    "TransformerForCausalLM",
    "attention",
    options={
        "num_heads": 32,
        "num_kv_heads": None,
        "qkv_bias": False,
        "qk_norm": False,
        "window_size": None,
        "rope_theta": ROPE,
    },
    fixed={"qkv_bias": False},
    config=attention,
    settings=_from_transformer,
    parts=attention_parts,
    takes=lambda spec: spec.kv_rank is None,
    hybrid=False,
)


def _fading(spec: ModelSpec) -> dict[str, Any]:
    name, (key_dim, value_dim) = "forgetting_transformer", spec.head_dims
    plain(
        spec, name, qk_heads=(None, spec.heads), conv=(0,), output_norm=(False,), output_gate=(False, True),
        kv_heads=(spec.kv_heads,),
    )  # fmt: skip
    needs_features(spec, name, "raw")
    of_rule(spec, name, g=("metala_decay", "biased_decay"))
    if (spec.heads * key_dim, value_dim) != (spec.d_model, key_dim):
        raise InputError(
            f"export to fla: the heads of FLA's {name} share the model's width: {spec.heads} of {key_dim} and "
            f"{value_dim} are not {spec.d_model}"
        )
    return {
        "num_heads": spec.heads,
        "num_kv_heads": spec.kv_heads,
        "use_output_gate": spec.output_gate is True,
    }


def _from_fading(options: Mapping[str, Any]) -> dict[str, Any]:
    _, settings = from_attention(options, options["hidden_size"])
    return {
        **settings,
        "rule": {"name": "forgetting_attention", "g": "biased_decay"},
        "rope": False,
        "output_gate": options["use_output_gate"],
    }


FORGETTING = Form(
    "forgetting_transformer",
    "ForgettingTransformerForCausalLM",
    "forgetting_attention",
    options={
        "num_heads": 32,
        "num_kv_heads": None,
        "qkv_bias": False,
        "qk_norm": False,
        "window_size": None,
        "use_output_gate": False,
    },
    fixed={"qkv_bias": False, "qk_norm": False, "window_size": None},
    config=_fading,
    settings=_from_fading,
    parts=lambda spec: [
        *projections(spec, QKV, CONVS),
        same("gates.project.g.weight", "f_proj.weight"),
        same("gates.learned.g.bias", "f_proj.bias")
        if spec.make_rule().gates["g"].kind == "biased_decay"
        else fixed("f_proj.bias", torch.zeros(spec.heads), "the forget gate metala_decay has no bias"),
        *([same("gate.weight", "g_proj.weight")] if spec.output_gate else []),
        same("out.weight", "o_proj.weight"),
    ],
    hybrid=False,
)


# Multi-head latent attention.


def _latent(spec: ModelSpec) -> dict[str, Any]:
    name, (key_dim, value_dim) = "mla", spec.head_dims
    plain(
        spec, name, rope=tuple({spec.rope} - {False}) or (True,), rope_dim=(spec.rope_dim,), q_rank=(spec.q_rank,),
        kv_rank=(spec.kv_rank,), output_norm=(False,), output_gate=(False,), qk_heads=(None, spec.heads), conv=(0,),
        norm_eps=(EPS,),
    )  # fmt: skip
    needs_features(spec, name, "raw")
    if spec.rope_dim is None:
        raise InputError(
            "export to fla: FLA's mla has no equal of model.rope_dim null; add `--set model.rope_dim=64`, and the "
            "model starts untrained"
        )
    window = getattr(spec.make_rule(), "window")  # noqa: B009
    return {
        "num_heads": spec.heads,
        "q_lora_rank": spec.q_rank,
        "kv_lora_rank": spec.kv_rank,
        "qk_rope_head_dim": spec.rope_dim,
        "qk_nope_head_dim": key_dim - spec.rope_dim,
        "qk_head_dim": key_dim,
        "v_head_dim": value_dim,
        "window_size": window or None,
        "rope_theta": ROPE if spec.rope is True else float(spec.rope),
        "rope_scaling": None,
    }


def _from_latent(options: Mapping[str, Any]) -> dict[str, Any]:
    # transformers writes the options of positions once more, under this name.
    if (scaling := (options["rope_parameters"] or {}).get("rope_type", "default")) != "default":
        raise InputError(f"option 'rope_parameters' of the type {scaling!r} has no equal here; only 'default' has")
    turned = options["qk_rope_head_dim"]
    key_dim, base = options["qk_nope_head_dim"] + turned, float(options["rope_theta"])
    return {
        "rule": {"name": "attention", "window": options["window_size"] or 0},
        "heads": options["num_heads"],
        "key_dim": key_dim,
        "expand_v": options["v_head_dim"] / key_dim,
        "q_rank": options["q_lora_rank"],
        "kv_rank": options["kv_lora_rank"],
        "rope": True if base == ROPE else base,
        "rope_dim": turned,
        "conv": 0,
        "output_norm": False,
        "output_gate": False,
    }


def _latent_parts(spec: ModelSpec) -> list[Part]:
    """The parameters of a layer. FLA has k and v of each head side by side, ours has all k before all v."""
    (key_dim, value_dim), heads = spec.head_dims, spec.heads
    assert spec.kv_rank is not None
    assert spec.rope_dim is not None
    own, sizes = key_dim - spec.rope_dim, [spec.kv_rank, spec.rope_dim]

    def by_head(ours: Sequence[Tensor]) -> Sequence[Tensor]:
        k, v = ours[0].split([heads * own, heads * value_dim])
        return [torch.cat([k.unflatten(0, (heads, own)), v.unflatten(0, (heads, value_dim))], dim=1).flatten(0, 1)]

    def by_kind(theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        k, v = theirs[0].unflatten(0, (heads, own + value_dim)).split([own, value_dim], dim=1)
        return [torch.cat([k.flatten(0, 1), v.flatten(0, 1)])]

    q = [same(f"qkv.q.{i}.weight", f"q_proj.{i}.weight") for i in range(3)]
    return [
        *(q if spec.q_rank else [same("qkv.q.weight", "q_proj.weight")]),
        Part(
            ("qkv.down.weight",),
            ("kv_proj.0.weight", "k_rope.weight"),
            lambda ours: ours[0].split(sizes),
            lambda theirs: [torch.cat(list(theirs))],
        ),
        same("qkv.norm.weight", "kv_proj.1.weight"),
        Part(("qkv.kv.weight",), ("kv_proj.2.weight",), by_head, by_kind),
        same("out.weight", "o_proj.weight"),
    ]


LATENT = Form(
    "mla",
    "MLAForCausalLM",
    "attention",
    options={
        "num_heads": 16,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "window_size": None,
        "rope_theta": ROPE,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": ROPE, "rope_type": "default"},
    },
    # The norms of latents have this eps, whatever the option says.
    fixed={"rope_scaling": None, "norm_eps": EPS},
    config=_latent,
    settings=_from_latent,
    parts=_latent_parts,
    takes=lambda spec: spec.kv_rank is not None,
    idle=("qk_head_dim",),
    hybrid=False,
)
