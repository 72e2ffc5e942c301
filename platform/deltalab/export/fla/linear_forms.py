"""The forms of linear attention with and without decay."""

from collections.abc import Mapping
from typing import Any

import torch

from deltalab import gates
from deltalab.errors import InputError
from deltalab.export.fla.layer_form import (
    CONVS,
    QKV,
    Form,
    Part,
    conv_from,
    conv_of,
    features,
    fixed,
    gate_of,
    needs_features,
    norm_and_gate,
    of_rule,
    plain,
    projections,
    ratio,
    same,
    shares_of,
    widths_from,
)
from deltalab.models.spec import ModelSpec
from deltalab.ops.fused.norm import EPS

# Linear attention without and with decay: q and k as they are, or through SiLU.


def _maps_of(spec: ModelSpec, model_type: str) -> dict[str, Any]:
    """FLA's options of features. Its convolution applies SiLU. Without one, the feature map is for q and k alone."""
    kinds = ("silu",) if spec.conv else ("raw", "silu_qk")
    needs_features(spec, model_type, *kinds)
    return {**conv_of(spec), "feature_map": "swish" if features(spec) == "silu_qk" else None}


def _maps_from(options: Mapping[str, Any]) -> dict[str, Any]:
    feature_map = options["feature_map"]
    if feature_map not in (None, "swish", "silu") or (feature_map and options["use_short_conv"]):
        raise InputError(
            f"option 'feature_map' {feature_map!r} has no equal here; it needs null, or swish without convolution"
        )
    return {"features": "silu" if options["use_short_conv"] else "silu_qk" if feature_map else "raw"}


def _swish_parts(spec: ModelSpec) -> list[Part]:
    return norm_and_gate(spec, "g_norm_swish_gate" if spec.output_gate else "g_norm")


def _gla(spec: ModelSpec) -> dict[str, Any]:
    name = "gla"
    plain(spec, name, qk_heads=(None, spec.heads))
    rule = of_rule(spec, name, g=("gla_decay",))
    numbers = dict(rule.g.options)  # type: ignore[attr-defined]
    if numbers["tau"] != 16.0 or numbers["rank"] != 16.0:
        raise InputError(f"export to fla: FLA's gla has no equal of {rule.name}.g {rule.g}; it needs tau and rank 16")  # type: ignore[attr-defined]
    return {**shares_of(spec), **_maps_of(spec, name), "use_output_gate": gate_of(spec, name, "silu")}


def _from_gla(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **widths_from(options),
        **_maps_from(options),
        "rule": "gla",
        "low_rank_bias": True,
        "output_gate": "silu" if options["use_output_gate"] else False,
    }


def _gla_decay(spec: ModelSpec) -> list[Part]:
    key_dim, _ = spec.head_dims
    bias = torch.zeros(spec.heads * key_dim)
    return [
        same("gates.project.g.0.weight", "gk_proj.0.weight"),
        same("gates.project.g.1.weight", "gk_proj.1.weight"),
        same("gates.project.g.1.bias", "gk_proj.1.bias")
        if spec.low_rank_bias
        else fixed("gk_proj.1.bias", bias, "the decay has no bias without low_rank_bias"),
    ]


GLA = Form(
    "gla",
    "GLAForCausalLM",
    "gla",
    options={
        "num_heads": 4,
        "num_kv_heads": None,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "use_short_conv": False,
        "conv_size": 4,
        "feature_map": None,
        "use_output_gate": True,
        "clamp_min": None,
        "use_gk": True,
        "use_gv": False,
        "fuse_norm": True,
    },
    fixed={"num_kv_heads": None, "clamp_min": None, "use_gk": True, "use_gv": False, "fuse_norm": True},
    config=_gla,
    settings=_from_gla,
    parts=lambda spec: [*projections(spec, QKV, CONVS), *_gla_decay(spec), *_swish_parts(spec)],
)


def _retnet(spec: ModelSpec) -> dict[str, Any]:
    name = "retnet"
    plain(spec, name, qk_heads=(None, spec.heads), kv_heads=(spec.kv_heads,), rope=(True,), conv=(0,))
    of_rule(spec, name, g=("retnet_decay",))
    return {
        **shares_of(spec),
        **_maps_of(spec, name),
        "num_kv_heads": spec.kv_heads,
        "use_output_gate": gate_of(spec, name, "silu"),
    }


def _from_retnet(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **widths_from(options),
        **_maps_from(options),
        "rule": "retnet",
        "rope": True,
        "kv_heads": options["num_kv_heads"],
        "output_gate": "silu" if options["use_output_gate"] else False,
    }


RETNET = Form(
    "retnet",
    "RetNetForCausalLM",
    "retnet",
    options={
        "hidden_ratio": 2,
        "num_heads": 8,
        "num_kv_heads": None,
        "expand_k": 1.0,
        "expand_v": 2.0,
        "use_short_conv": False,
        "feature_map": None,
        "use_output_gate": True,
        "fuse_norm": True,
    },
    # FLA's layer can have a short convolution, but FLA's model does not pass the option on to the layer.
    fixed={"use_short_conv": False, "fuse_norm": True},
    config=_retnet,
    settings=_from_retnet,
    parts=lambda spec: [*projections(spec, QKV, CONVS), *_swish_parts(spec)],
    idle=("conv_size",),
)


def _linear_attention(spec: ModelSpec) -> dict[str, Any]:
    name = "linear_attn"
    plain(spec, name, qk_heads=(None, spec.heads), kv_heads=(spec.kv_heads,), conv=(0,), output_gate=(False,))
    of_rule(spec, name, feature_map=("unit",))
    needs_features(spec, name, "raw")
    return {**shares_of(spec), "num_kv_heads": spec.kv_heads, "feature_map": "identity"}


LINEAR_ATTENTION = Form(
    "linear_attn",
    "LinearAttentionForCausalLM",
    "linear_attention",
    options={
        "num_heads": 4,
        "num_kv_heads": None,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "feature_map": "elementwise_product",
        "tie_feature_map_qk": False,
        "norm_q": False,
        "norm_k": False,
        "norm_feature_map": False,
    },
    fixed={"feature_map": "identity", "norm_q": False, "norm_k": False, "norm_feature_map": False},
    config=_linear_attention,
    settings=lambda options: {
        **widths_from({**options, "use_short_conv": False}),
        "rule": "linear_attention",
        "features": "raw",
        "kv_heads": options["num_kv_heads"],
        "output_gate": False,
    },
    parts=lambda spec: [*projections(spec, QKV, CONVS), *norm_and_gate(spec, "norm")],
    idle=("tie_feature_map_qk",),
)


def _hgrn2(spec: ModelSpec) -> dict[str, Any]:
    name, (key_dim, value_dim) = "hgrn2", spec.head_dims
    plain(
        spec, name, qk_heads=(None, spec.heads), conv=(0,), output_norm=("rms_all",), output_gate=(False,),
        norm_eps=(EPS,),
    )  # fmt: skip
    needs_features(spec, name, "silu_qk")
    of_rule(spec, name, g=("metala_decay",))
    if (spec.heads * key_dim, value_dim) != (spec.d_model, key_dim):
        raise InputError(
            f"export to fla: the heads of FLA's hgrn2 share the model's width: {spec.heads} of {key_dim} and "
            f"{value_dim} are not {spec.d_model}"
        )
    return {"num_heads": spec.heads, "expand_ratio": key_dim, "use_lower_bound": False}


def _from_hgrn2(options: Mapping[str, Any]) -> dict[str, Any]:
    width = options["expand_ratio"] or options["hidden_size"] // options["num_heads"]
    if options["hidden_size"] % width:
        raise InputError(f"option 'expand_ratio' {width} has no equal here where it does not divide hidden_size")
    return {
        "heads": options["hidden_size"] // width,
        "key_dim": width,
        "conv": 0,
        "rule": "hgrn2",
        "features": "silu_qk",
        "output_norm": "rms_all",
        "output_gate": False,
    }


HGRN2 = Form(
    "hgrn2",
    "HGRN2ForCausalLM",
    "hgrn2",
    options={
        "num_heads": 16,
        "expand_ratio": 128,
        "use_short_conv": False,
        "conv_size": 4,
        "use_lower_bound": True,
    },
    # FLA's layer ignores the option: the norm of its heads always has this eps.
    fixed={"use_short_conv": False, "use_lower_bound": False, "norm_eps": EPS},
    config=_hgrn2,
    settings=_from_hgrn2,
    parts=lambda spec: [
        *projections(spec, ("q_proj", None, "i_proj"), CONVS),
        same("gates.project.g.weight", "f_proj.weight"),
        *norm_and_gate(spec, "g_norm"),
    ],
    idle=("conv_size",),
)


# HGRN without lower bounds: a gated mean of each channel, which has neither keys nor heads.


def _hgrn(spec: ModelSpec) -> dict[str, Any]:
    name, (_, value_dim) = "hgrn", spec.head_dims
    plain(
        spec, name, qk_heads=(None, spec.heads), conv=(0,), scale=(1.0,), output_norm=("rms_all",),
        output_gate=("silu",),
    )  # fmt: skip
    needs_features(spec, name, "silu")
    of_rule(spec, name, z=(gates.value_sigmoid(rank=0),))
    width = spec.heads * value_dim
    return {"expand_ratio": ratio(width, spec.d_model), "use_short_conv": False, "use_lower_bound": False}


def _from_hgrn(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "heads": 1,
        "key_dim": 1,
        "expand_v": float(int(options["hidden_size"] * options["expand_ratio"])),
        "conv": 0,
        "rule": "min_gru",
        "features": "silu",
        "scale": 1.0,
        "output_norm": "rms_all",
        "output_gate": "silu",
    }


HGRN = Form(
    "hgrn",
    "HGRNForCausalLM",
    "min_gru",
    options={"expand_ratio": 1, "use_short_conv": False, "use_lower_bound": True},
    fixed={"use_short_conv": False, "use_lower_bound": False},
    config=_hgrn,
    settings=_from_hgrn,
    parts=lambda spec: [
        *projections(spec, (None, None, "i_proj"), CONVS),
        # FLA has the gate that forgets, 1 - z.
        Part(("gates.project.z.weight",), ("f_proj.weight",), lambda x: [-x[0]], lambda x: [-x[0]]),
        *norm_and_gate(spec, "g_norm"),
    ],
    idle=("conv_size",),
)


# LightNet: keys and decay from one running sum.


def _lightnet(spec: ModelSpec) -> dict[str, Any]:
    name, (key_dim, value_dim) = "lightnet", spec.head_dims
    # FLA's gated norm has this eps whatever the option says.
    plain(
        spec, name, qk_heads=(None, spec.heads), output_norm=("rms_all",), output_gate=("silu",),
        gate_rank=(spec.gate_rank,), norm_eps=(LIGHTNET_EPS,),
    )  # fmt: skip
    needs_features(spec, name, "raw")
    if spec.gate_rank is None or spec.low_rank_bias:
        raise InputError(
            "export to fla: FLA's lightnet gates its output through model.gate_rank channels, without bias"
        )
    if spec.heads * value_dim != spec.d_model:
        raise InputError(
            f"export to fla: the heads of FLA's lightnet share the model's width: {spec.heads} of {value_dim} are not "
            f"{spec.d_model}"
        )
    return {
        "num_heads": spec.heads,
        "expand_ratio": key_dim,
        "gate_low_rank_dim": spec.gate_rank,
        **conv_of(spec),
    }


def _from_lightnet(options: Mapping[str, Any]) -> dict[str, Any]:
    d_model, heads, width = options["hidden_size"], options["num_heads"], options["expand_ratio"]
    heads = heads or d_model // width
    width = width or d_model // heads
    return {
        "heads": heads,
        "key_dim": width,
        "expand_v": d_model // heads / width,
        "conv": conv_from(options),
        "rule": "lightnet",
        "output_norm": "rms_all",
        "output_gate": "silu",
        "gate_rank": options["gate_low_rank_dim"],
    }


LIGHTNET_EPS = 1e-6
"""The eps of the gated norm of FLA's LightNet."""

LIGHTNET = Form(
    "lightnet",
    "LightNetForCausalLM",
    "lightnet",
    options={
        "num_heads": None,
        "expand_ratio": 128,
        "gate_low_rank_dim": 128,
        "use_short_conv": False,
        "conv_size": 4,
    },
    fixed={"norm_eps": LIGHTNET_EPS},
    config=_lightnet,
    settings=_from_lightnet,
    parts=lambda spec: [
        *projections(spec, QKV, CONVS),
        same("gate.0.weight", "g_proj.0.weight"),
        same("gate.1.weight", "g_proj.1.weight"),
        same("norm.weight", "g_norm.weight"),
        same("out.weight", "o_proj.weight"),
    ],
)
