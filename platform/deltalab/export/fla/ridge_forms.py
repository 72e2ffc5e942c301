"""The form of MesaNet, whose tokens solve a regression."""

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
    channels,
    fixed,
    gate_of,
    needs,
    needs_features,
    norm_and_gate,
    of_rule,
    plain,
    projections,
    same,
    shaped,
)
from deltalab.models.spec import ModelSpec

OWN_TAPS = "FLA's mesa_net has no convolution of v, and deltalab's learns one"


def _mesa_net(spec: ModelSpec) -> dict[str, Any]:
    name, (key_dim, value_dim) = "mesa_net", spec.head_dims
    plain(spec, name, qk_heads=(None, spec.heads), scale=(1.0,))
    needs_features(spec, name, "unit_qk")
    rule = of_rule(spec, name, g=("biased_decay",), beta=("sigmoid", "biased_sigmoid"), ridge=("channel_ridge",))
    if not spec.conv:
        needs(spec, name, conv=(4,))
    if dict(rule.gates["beta"].options).get("max", 1.0) != 1.0:
        raise InputError(f"export to fla: FLA's {name} has no equal of beta {rule.gates['beta']}; it needs sigmoid")
    if key_dim != value_dim:
        raise InputError(f"export to fla: FLA's {name} has values as wide as keys: {value_dim} is not {key_dim}")
    iterations = rule.iterations  # type: ignore[attr-defined]
    return {
        "num_heads": spec.heads,
        "head_dim": key_dim,
        "conv_size": spec.conv,
        "use_output_gate": gate_of(spec, name, "silu"),
        "lambda_lower_bound": dict(rule.gates["ridge"].options)["least"],
        "max_cg_step_training": iterations,
        "max_cg_step_decoding": iterations,
    }


def _from_mesa_net(options: Mapping[str, Any]) -> dict[str, Any]:
    training, decoding = options["max_cg_step_training"], options["max_cg_step_decoding"]
    if training != decoding:
        raise InputError(
            f"option 'max_cg_step_decoding' {decoding} has no equal here; only max_cg_step_training, {training}, has"
        )
    ridge = {"channel_ridge": {"least": options["lambda_lower_bound"]}}
    gates = {"g": "biased_decay", "beta": "biased_sigmoid", "ridge": ridge}
    return {
        "rule": {"name": "mesa_net", **gates, "iterations": training},
        "heads": options["num_heads"],
        "key_dim": options["head_dim"],
        "expand_v": 1.0,
        "conv": options["conv_size"],
        "features": "unit_qk",
        "scale": 1.0,
        "output_gate": "silu" if options["use_output_gate"] else False,
    }


def _taps(spec: ModelSpec) -> Part:
    """The part for the convolutions of q and k. FLA has none of v, as if its last tap were 1 and the others 0."""
    widths = channels(spec)

    def split(ours: Sequence[Tensor]) -> Sequence[Tensor]:
        *convs, v = ours[0].split(widths, dim=1)
        if not torch.equal(v, unchanged(v)):
            raise InputError(f"export to fla: {OWN_TAPS}: it goes to FLA where its last tap is 1 and the others are 0")
        return [conv.t().unsqueeze(1).contiguous() for conv in convs]

    def join(values: Sequence[Tensor]) -> Sequence[Tensor]:
        convs = [conv.squeeze(1).t() for conv in values]
        return [torch.cat([*convs, unchanged(convs[0].new_empty(spec.conv, widths[2]))], dim=1).contiguous()]

    return Part(("conv",), tuple(f"{name}.weight" for name in CONVS[:2]), split, join)


def unchanged(taps: Tensor) -> Tensor:
    """Returns taps [W, C] of a convolution that changes nothing."""
    return torch.cat([torch.zeros_like(taps[:-1]), torch.ones_like(taps[-1:])])


def _parts(spec: ModelSpec) -> list[Part]:
    key_dim, _ = spec.head_dims
    matrices, *_ = projections(spec, QKV, CONVS)
    biased = spec.make_rule().gates["beta"].kind == "biased_sigmoid"
    return [
        matrices,
        _taps(spec),
        same("gates.project.g.weight", "a_proj.weight"),
        same("gates.learned.g.bias", "a_proj.bias"),
        same("gates.project.beta.weight", "b_proj.weight"),
        same("gates.learned.beta.bias", "b_proj.bias")
        if biased
        else fixed("b_proj.bias", torch.zeros(spec.heads), "the gate sigmoid has no bias"),
        shaped("gates.learned.ridge.c", "lambda_params", (spec.heads, key_dim), (spec.heads * key_dim,)),
        *norm_and_gate(spec),
    ]


MESA_NET = Form(
    "mesa_net",
    "MesaNetForCausalLM",
    "mesa_net",
    options={
        "num_heads": 16,
        "head_dim": 128,
        "use_output_gate": False,
        "conv_size": 4,
        "lambda_lower_bound": 0.25,
        "max_cg_step_training": 30,
        "max_cg_step_decoding": 30,
    },
    fixed={},
    config=_mesa_net,
    settings=_from_mesa_net,
    parts=_parts,
    idle=("use_short_conv",),
    needs_weights=OWN_TAPS,
)
