"""The forms of delta rules with one decay a head, or none."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from deltalab import gates
from deltalab.errors import InputError
from deltalab.export.fla.layer_form import (
    CONVS,
    QKV,
    Form,
    Part,
    beta_of,
    conv_from,
    conv_of,
    fixed,
    gate_of,
    idle,
    needs_features,
    norm_and_gate,
    of_rule,
    plain,
    projections,
    ratio,
    same,
    twice,
    widths_from,
)
from deltalab.models.spec import ModelSpec
from deltalab.structure import SPLR

# Gated delta rule, delta rule and Comba: each has heads of `head_dim`, SiLU and unit norm.


def heads_of(spec: ModelSpec) -> dict[str, Any]:
    """Returns FLA's options of heads with `head_dim`, and of the short convolution."""
    key_dim, value_dim = spec.head_dims
    grouped = spec.own_qk_heads != spec.heads
    return {
        "head_dim": key_dim,
        "num_heads": spec.own_qk_heads,
        "num_v_heads": spec.heads if grouped else None,
        "expand_v": ratio(value_dim, key_dim),
        **conv_of(spec),
    }


def heads_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our settings of heads for the options of `heads_of`."""
    heads = options.get("num_v_heads") or options["num_heads"]
    return {
        "heads": heads,
        "qk_heads": None if heads == options["num_heads"] else options["num_heads"],
        "key_dim": options["head_dim"],
        "expand_v": int(options["head_dim"] * options["expand_v"]) / options["head_dim"],
        "conv": conv_from(options),
    }


def decay_of(gate: str = "g", suffix: str = "", projection: str = "a_proj") -> list[Part]:
    """Returns the parameters of a `mamba2_decay` for each head.

    Args:
        gate: Our name of the decay.
        suffix: What FLA's names of its learned numbers end in.
        projection: FLA's name of its projection.
    """
    learned = f"gates.learned.{gate}"
    return [
        same(f"gates.project.{gate}.weight", f"{projection}.weight"),
        same(f"{learned}.log_a", f"A_log{suffix}"),
        same(f"{learned}.dt_bias", f"dt_bias{suffix}"),
    ]


def beta_part() -> Part:
    """Returns the projection of beta."""
    return same("gates.project.beta.weight", "b_proj.weight")


def _gated_deltanet(spec: ModelSpec, *, decays: bool = True) -> dict[str, Any]:
    name = "gated_deltanet"
    plain(spec, name)
    needs_features(spec, name, "unit")
    rule = of_rule(spec, name, **{"g": ("mamba2_decay",)} if decays else {})
    gated = gate_of(spec, name, True, "silu")
    return {
        **heads_of(spec),
        "use_gate": gated,
        "output_gate_activation": "sigmoid" if spec.output_gate is True else "swish",
        "allow_neg_eigval": twice(rule.beta, name),  # type: ignore[attr-defined]
    }


def _from_gated_deltanet(options: Mapping[str, Any]) -> dict[str, Any]:
    gate: bool | str = "sigmoid" if options["output_gate_activation"] == "sigmoid" else "silu"
    return {
        **heads_from(options),
        "rule": {"name": "gated_deltanet", "beta": beta_of(options["allow_neg_eigval"])},
        "output_gate": gate if options["use_gate"] else False,
    }


GATED_DELTANET = Form(
    "gated_deltanet",
    "GatedDeltaNetForCausalLM",
    "gated_deltanet",
    options={
        "num_hidden_layers": 21,
        "head_dim": 256,
        "num_heads": 6,
        "num_v_heads": None,
        "expand_v": 2.0,
        "use_short_conv": True,
        "conv_size": 4,
        "use_gate": True,
        "output_gate_activation": "swish",
        "allow_neg_eigval": False,
    },
    fixed={},
    config=_gated_deltanet,
    settings=_from_gated_deltanet,
    parts=lambda spec: [*projections(spec, QKV, CONVS), *decay_of(), beta_part(), *norm_and_gate(spec)],
)


def _deltanet(spec: ModelSpec) -> dict[str, Any]:
    name = "delta_net"
    plain(spec, name, qk_heads=(None, spec.heads))
    needs_features(spec, name, "unit")
    rule = of_rule(spec, name)
    key_dim, value_dim = spec.head_dims
    return {
        "num_heads": spec.heads,
        "expand_k": ratio(spec.heads * key_dim, spec.d_model),
        "expand_v": ratio(spec.heads * value_dim, spec.d_model),
        **conv_of(spec),
        "use_gate": gate_of(spec, name, "silu"),
        "allow_neg_eigval": twice(rule.beta, name),  # type: ignore[attr-defined]
    }


def _from_deltanet(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **widths_from(options),
        "rule": {"name": "deltanet", "beta": beta_of(options["allow_neg_eigval"])},
        "output_gate": "silu" if options["use_gate"] else False,
    }


DELTANET = Form(
    "delta_net",
    "DeltaNetForCausalLM",
    "deltanet",
    options={
        "num_heads": 16,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "use_short_conv": True,
        "conv_size": 4,
        "use_gate": False,
        "allow_neg_eigval": False,
        "use_beta": True,
        "use_output_norm": True,
        "qk_norm": "l2",
        "qk_activation": "silu",
    },
    fixed={"use_beta": True, "use_output_norm": True, "qk_norm": "l2", "qk_activation": "silu"},
    config=_deltanet,
    settings=_from_deltanet,
    parts=lambda spec: [*projections(spec, QKV, CONVS), beta_part(), *norm_and_gate(spec)],
)


def _preconditioned(spec: ModelSpec) -> dict[str, Any]:
    name = "precond_gated_deltanet"
    plain(spec, name, qk_heads=(None, spec.heads))
    needs_features(spec, name, "unit")
    rule = of_rule(
        spec, name, transition=("scalar",), g_p=("mamba2_decay",), beta_p=(gates.sigmoid(),), center=("head",)
    )  # fmt: skip
    return {
        **heads_of(spec),
        "use_gate": gate_of(spec, name, "silu"),
        "allow_neg_eigval": twice(rule.beta, name),  # type: ignore[attr-defined]
        "squash_x": rule.squash,  # type: ignore[attr-defined]
    }


def _from_preconditioned(options: Mapping[str, Any]) -> dict[str, Any]:
    beta = beta_of(options["allow_neg_eigval"])
    return {
        **heads_from(options),
        "rule": {"name": "preconditioned_gated_deltanet", "beta": beta, "squash": float(options["squash_x"])},
        "output_gate": "silu" if options["use_gate"] else False,
    }


def center_part() -> list[Part]:
    """Returns the parameters of the preconditioner besides its decay."""
    return [
        same("gates.project.beta_p.weight", "b_atk_proj.weight"),
        same("gates.learned.center.value", "log_atk_scale"),
    ]


PRECONDITIONED = Form(
    "precond_gated_deltanet",
    "PrecondGatedDeltaNetForCausalLM",
    "preconditioned_gated_deltanet",
    options={
        "num_hidden_layers": 21,
        "head_dim": 256,
        "num_heads": 6,
        "num_v_heads": None,
        "expand_v": 2.0,
        "use_short_conv": True,
        "conv_size": 4,
        "use_gate": True,
        "allow_neg_eigval": False,
        "squash_x": 1.5,
        "squash_eps": 1e-6,
    },
    fixed={"num_v_heads": None, "squash_eps": 1e-6},
    config=_preconditioned,
    settings=_from_preconditioned,
    parts=lambda spec: [
        *projections(spec, QKV, CONVS),
        *decay_of(),
        *decay_of("g_p", "_atk", "a_atk_proj"),
        beta_part(),
        *center_part(),
        *norm_and_gate(spec),
    ],
    takes=lambda spec: str(spec.make_rule().transition) == "scalar",
    idle=("log_atk_scale_init", "a_log_init_lower"),
)


def _no_decay(spec: ModelSpec) -> list[Part]:
    none = torch.zeros(spec.heads)
    return [
        fixed("a_proj.weight", torch.zeros(spec.heads, spec.d_model), "deltanet has no decay"),
        fixed("A_log", none - math.inf, "deltanet has no decay"),
        fixed("dt_bias", none, "deltanet has no decay"),
    ]


UNDECAYED = replace(
    GATED_DELTANET,
    rule="deltanet",
    config=lambda spec: _gated_deltanet(spec, decays=False),
    parts=lambda spec: [*projections(spec, QKV, CONVS), *_no_decay(spec), beta_part(), *norm_and_gate(spec)],
)
"""DeltaNet as FLA's Gated DeltaNet without decay, for the sigmoid gates and shared q and k that FLA's DeltaNet lacks.

A_log is -inf, so that g = -exp(A_log) softplus(W_a x + dt_bias) = 0. Its gradient is 0 too, so training keeps it.
"""


# Comba, except for settings that FLA computes in another way.


def _comba(spec: ModelSpec) -> dict[str, Any]:
    name = "comba"
    plain(spec, name)
    rule = of_rule(
        spec, name, transition=(SPLR,), g=("mamba2_decay",), beta=(gates.sigmoid(),), silu=("qkv",), normalize=(True,)
    )  # fmt: skip
    needs_features(spec, name, "unit")
    lacks = {
        "b": (1, "b in the feedback (it divides p = b k by its norm, which cancels b)"),
        "d": (0, "d after the norm of q (it subtracts d p from q before that norm)"),
    }
    missing = {knob: text for knob, text in lacks.items() if getattr(rule, knob) != gates.const(text[0])}
    if missing:
        raise InputError(
            f"export to fla: FLA's comba lacks {' and '.join(why for _, why in missing.values())}; add "
            f"`{' '.join(f'--set rule.{knob}={value}' for knob, (value, _) in missing.items())}`, and the model starts "
            "untrained"
        )
    return {**heads_of(spec), "use_output_gate": gate_of(spec, name, True)}


def _from_comba(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **heads_from(options),
        "rule": {"name": "comba", "b": {"const": {"value": 1.0}}, "d": {"const": {"value": 0.0}}},
        "output_gate": options["use_output_gate"],
    }


COMBA = Form(
    "comba",
    "CombaForCausalLM",
    "comba",
    options={
        "num_hidden_layers": 21,
        "head_dim": 256,
        "num_heads": 6,
        "num_v_heads": None,
        "expand_v": 2.0,
        "use_short_conv": True,
        "conv_size": 4,
        "use_output_gate": True,
    },
    fixed={},
    config=_comba,
    settings=_from_comba,
    parts=lambda spec: [
        *projections(spec, QKV, CONVS),
        *decay_of(),
        beta_part(),
        fixed("D", torch.zeros(spec.own_qk_heads), "FLA takes q - D b k before the norm of q, ours after it"),
        idle("decay", torch.ones(spec.own_qk_heads)),
        *norm_and_gate(spec),
    ],
    # FLA's layer has these options, but its model does not pass them on.
    idle=("use_output_correction", "use_inner_decay", "correction_factor"),
)


def _delta_product(spec: ModelSpec) -> dict[str, Any]:
    name = "gated_deltaproduct"
    plain(spec, name, qk_heads=(None, spec.heads))
    needs_features(spec, name, "unit")
    rule = of_rule(spec, name, g=("mamba2_decay", gates.const(0)))
    heads = heads_of(spec)
    del heads["num_v_heads"]
    return {
        **heads,
        "use_output_gate": gate_of(spec, name, "silu"),
        "use_forget_gate": not rule.g.constant,  # type: ignore[attr-defined]
        "allow_neg_eigval": twice(rule.beta, name),  # type: ignore[attr-defined]
        "num_householder": rule.steps,
    }


def _from_delta_product(options: Mapping[str, Any]) -> dict[str, Any]:
    decay: dict[str, Any] = {"mamba2_decay": {}} if options["use_forget_gate"] else {"const": {"value": 0.0}}
    beta = beta_of(options["allow_neg_eigval"])
    return {
        **heads_from(options),
        "rule": {"name": "delta_product", "n_h": options["num_householder"], "beta": beta, "g": decay},
        "output_gate": "silu" if options["use_output_gate"] else False,
    }


def _delta_product_parts(spec: ModelSpec) -> list[Part]:
    decays = not spec.make_rule().gates["g"].constant
    return [*projections(spec, QKV, CONVS), *(decay_of() if decays else []), beta_part(), *norm_and_gate(spec)]


DELTA_PRODUCT = Form(
    "gated_deltaproduct",
    "GatedDeltaProductForCausalLM",
    "delta_product",
    options={
        "num_hidden_layers": 21,
        "head_dim": 256,
        "num_heads": 6,
        "expand_v": 2.0,
        "use_short_conv": True,
        "conv_size": 4,
        "use_output_gate": True,
        "use_forget_gate": False,
        "allow_neg_eigval": False,
        "num_householder": 1,
    },
    fixed={},
    config=_delta_product,
    settings=_from_delta_product,
    parts=_delta_product_parts,
)
