"""The forms of softmax attention over tokens or slots."""

from collections.abc import Mapping
from typing import Any

import torch

from deltalab.errors import InputError
from deltalab.export.fla.layer_form import (
    CONVS,
    QKV,
    Form,
    Part,
    conv_of,
    fixed,
    needs_features,
    norm_and_gate,
    of_rule,
    plain,
    projections,
    same,
    shares_of,
    widths_from,
)
from deltalab.models.spec import ROPE, ModelSpec
from deltalab.ops.norm import EPS

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
)


def _abc(spec: ModelSpec) -> dict[str, Any]:
    name = "abc"
    plain(spec, name, qk_heads=(None, spec.heads), rope=(True, False), output_gate=("silu",))
    needs_features(spec, name, "silu" if spec.conv else "raw")
    numbers = dict(spec.make_rule().s.options)  # type: ignore[attr-defined]
    return {
        **shares_of(spec),
        **conv_of(spec),
        "num_slots": int(numbers["slots"]),
        "clamp_min": -numbers["bound"],
        "clamp_max": numbers["bound"],
        "use_rope": bool(spec.rope),
    }


def _from_abc(options: Mapping[str, Any]) -> dict[str, Any]:
    if options["clamp_min"] != -options["clamp_max"]:
        raise InputError(
            f"option 'clamp_min' {options['clamp_min']} has no equal here; only -clamp_max, "
            f"{-options['clamp_max']}, has"
        )
    slots = {"slots": options["num_slots"], "bound": options["clamp_max"]}
    return {
        **widths_from(options),
        "rule": {"name": "abc", "s": {"slot_logit": slots}},
        "features": "silu" if options["use_short_conv"] else "raw",
        "rope": options["use_rope"],
        "output_gate": "silu",
    }


ABC = Form(
    "abc",
    "ABCForCausalLM",
    "abc",
    options={
        "num_heads": 4,
        "expand_k": 0.5,
        "expand_v": 1,
        "num_slots": 64,
        "clamp_min": -32,
        "clamp_max": 32,
        "use_short_conv": False,
        "conv_size": 4,
        "use_rope": True,
        "fuse_norm": True,
    },
    fixed={"fuse_norm": True},
    config=_abc,
    settings=_from_abc,
    parts=lambda spec: [
        *projections(spec, QKV, CONVS),
        same("gates.project.s.weight", "s_proj.weight"),
        *norm_and_gate(spec, "g_norm"),
    ],
    idle=("gate_low_rank_dim",),
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
)
