"""The forms of softmax attention over a fixed number of slots."""

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
from deltalab.models.spec import ModelSpec
from deltalab.ops.fused.norm import EPS


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


# GSA and Raven: SiLU of the output, a norm over all heads, no gate of the output, and no convolution.


def _of_all_heads(spec: ModelSpec, name: str) -> None:
    """Checks what the two layers share. Their last norm has this eps, and as many weights as the model has channels."""
    plain(
        spec, name, qk_heads=(None, spec.heads), conv=(0,), scale=(1.0,), output_norm=("rms_all_of_silu",),
        output_gate=(False,), norm_eps=(EPS,),
    )  # fmt: skip
    needs_features(spec, name, "silu")


def _from_all_heads(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **widths_from({**options, "use_short_conv": False}),
        "features": "silu",
        "scale": 1.0,
        "output_norm": "rms_all_of_silu",
        "output_gate": False,
    }


def _gsa(spec: ModelSpec) -> dict[str, Any]:
    name, (_, value_dim) = "gsa", spec.head_dims
    _of_all_heads(spec, name)
    if spec.heads * value_dim != spec.d_model:
        raise InputError(
            f"export to fla: the heads of FLA's gsa share the model's width: {spec.heads} of {value_dim} are not "
            f"{spec.d_model}"
        )
    numbers = dict(spec.make_rule().gates["g"].options)
    return {
        **shares_of(spec),
        "num_slots": int(numbers["slots"]),
        "gate_logit_normalizer": numbers["tau"],
        "feature_map": "swish",
        "use_short_conv": False,
    }


GSA = Form(
    "gsa",
    "GSAForCausalLM",
    "gsa",
    options={
        "num_heads": 4,
        "num_kv_heads": None,
        "expand_k": 1,
        "expand_v": 1,
        "num_slots": 64,
        "gate_logit_normalizer": 8,
        "feature_map": "swish",
        "use_short_conv": False,
    },
    fixed={"num_kv_heads": None, "expand_v": 1, "feature_map": "swish", "use_short_conv": False, "norm_eps": EPS},
    config=_gsa,
    settings=lambda options: {
        **_from_all_heads(options),
        "rule": {
            "name": "gsa",
            "g": {"slot_decay": {"slots": options["num_slots"], "tau": options["gate_logit_normalizer"]}},
        },
    },
    parts=lambda spec: [
        *projections(spec, QKV, CONVS),
        same("gates.project.g.weight", "f_proj.weight"),
        *norm_and_gate(spec, "g_norm"),
    ],
    idle=("clamp_max", "clamp_min", "conv_size", "use_norm", "use_output_gate"),
)


def _raven(spec: ModelSpec) -> dict[str, Any]:
    name = "raven"
    _of_all_heads(spec, name)
    rule = of_rule(spec, name, g=("mamba2_decay",), p=("router",))
    return {
        **shares_of(spec),
        "num_slots": rule.gates["p"].slots,
        "topk": rule.top,  # type: ignore[attr-defined]
        # Our rule has no noise in training.
        "add_gumbel_noise": False,
    }


def _raven_parts(spec: ModelSpec) -> list[Part]:
    key_dim, _ = spec.head_dims
    return [
        *projections(spec, QKV, CONVS),
        same("gates.project.g.weight", "a_proj.weight"),
        same("gates.learned.g.log_a", "A_log"),
        same("gates.learned.g.dt_bias", "dt_bias"),
        same("gates.project.p.weight", "r_proj.weight"),
        *(fixed(f"{x}_norm.weight", torch.ones(key_dim), "the norms of q and k have no weights") for x in "qk"),
        *norm_and_gate(spec, "g_norm"),
    ]


_OF_RAVEN = {
    "num_kv_heads": None,
    "feature_map": "swish",
    "use_output_gate": False,
    "decay_type": "Mamba2",
    "bias_rmm": False,
    "router_score": "sigmoid",
    "router_type": "lin",
    "use_rope": False,
}
"""The options of FLA's Raven whose defaults are all that our `raven` can be."""

RAVEN = Form(
    "raven",
    "RavenForCausalLM",
    "raven",
    options={
        "num_heads": 4,
        "expand_k": 1,
        "expand_v": 1,
        "num_slots": 64,
        "topk": 32,
        **_OF_RAVEN,
    },
    fixed={**_OF_RAVEN, "norm_eps": EPS},
    config=_raven,
    settings=lambda options: {
        **_from_all_heads(options),
        "rule": {"name": "raven", "p": {"router": {"slots": options["num_slots"]}}, "top": options["topk"]},
    },
    parts=_raven_parts,
    idle=("add_gumbel_noise", "gate_logit_normalizer", "rope_theta"),
)
