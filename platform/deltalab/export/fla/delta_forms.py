"""The forms of delta rules."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

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
    shaped,
    twice,
    widths_from,
)
from deltalab.models.spec import ModelSpec
from deltalab.structure import SPLR

# Gated delta rule, delta rule, Comba and KDA: each has heads of `head_dim`, SiLU and unit norm.


def _heads_of(spec: ModelSpec) -> dict[str, Any]:
    key_dim, value_dim = spec.head_dims
    grouped = spec.own_qk_heads != spec.heads
    return {
        "head_dim": key_dim,
        "num_heads": spec.own_qk_heads,
        "num_v_heads": spec.heads if grouped else None,
        "expand_v": ratio(value_dim, key_dim),
        **conv_of(spec),
    }


def _heads_from(options: Mapping[str, Any]) -> dict[str, Any]:
    heads = options.get("num_v_heads") or options["num_heads"]
    return {
        "heads": heads,
        "qk_heads": None if heads == options["num_heads"] else options["num_heads"],
        "key_dim": options["head_dim"],
        "expand_v": int(options["head_dim"] * options["expand_v"]) / options["head_dim"],
        "conv": conv_from(options),
    }


def _decay(gate: str = "g", suffix: str = "") -> list[Part]:
    learned = f"gates.learned.{gate}"
    return [
        same(f"gates.project.{gate}.weight", f"a{suffix}_proj.weight"),
        same(f"{learned}.log_a", f"A_log{suffix}"),
        same(f"{learned}.dt_bias", f"dt_bias{suffix}"),
    ]


def _beta() -> Part:
    return same("gates.project.beta.weight", "b_proj.weight")


def _gated_deltanet(spec: ModelSpec, *, decays: bool = True) -> dict[str, Any]:
    name = "gated_deltanet"
    plain(spec, name)
    needs_features(spec, name, "unit")
    rule = of_rule(spec, name, **{"g": ("mamba2_decay",)} if decays else {})
    gated = gate_of(spec, name, True, "silu")
    return {
        **_heads_of(spec),
        "use_gate": gated,
        "output_gate_activation": "sigmoid" if spec.output_gate is True else "swish",
        "allow_neg_eigval": twice(rule.beta, name),  # type: ignore[attr-defined]
    }


def _from_gated_deltanet(options: Mapping[str, Any]) -> dict[str, Any]:
    gate: bool | str = "sigmoid" if options["output_gate_activation"] == "sigmoid" else "silu"
    return {
        **_heads_from(options),
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
    parts=lambda spec: [*projections(spec, QKV, CONVS), *_decay(), _beta(), *norm_and_gate(spec)],
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
    parts=lambda spec: [*projections(spec, QKV, CONVS), _beta(), *norm_and_gate(spec)],
)


def _preconditioned(spec: ModelSpec) -> dict[str, Any]:
    name = "precond_gated_deltanet"
    plain(spec, name, qk_heads=(None, spec.heads))
    needs_features(spec, name, "unit")
    rule = of_rule(
        spec, name, transition=("scalar",), g_p=("mamba2_decay",), beta_p=(gates.sigmoid(),), center=("head",)
    )  # fmt: skip
    return {
        **_heads_of(spec),
        "use_gate": gate_of(spec, name, "silu"),
        "allow_neg_eigval": twice(rule.beta, name),  # type: ignore[attr-defined]
        "squash_x": rule.squash,  # type: ignore[attr-defined]
    }


def _from_preconditioned(options: Mapping[str, Any]) -> dict[str, Any]:
    beta = beta_of(options["allow_neg_eigval"])
    return {
        **_heads_from(options),
        "rule": {"name": "preconditioned_gated_deltanet", "beta": beta, "squash": float(options["squash_x"])},
        "output_gate": "silu" if options["use_gate"] else False,
    }


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
        *_decay(),
        *_decay("g_p", "_atk"),
        _beta(),
        same("gates.project.beta_p.weight", "b_atk_proj.weight"),
        same("gates.learned.center.value", "log_atk_scale"),
        *norm_and_gate(spec),
    ],
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
    parts=lambda spec: [*projections(spec, QKV, CONVS), *_no_decay(spec), _beta(), *norm_and_gate(spec)],
)
"""DeltaNet as FLA's Gated DeltaNet without decay, for the sigmoid gates and shared q and k that FLA's DeltaNet lacks.

A_log is -inf, so that g = -exp(A_log) softplus(W_a x + dt_bias) = 0. Its gradient is 0 too, so training keeps it.
"""


# Comba, except for settings that FLA computes in another way.


def _comba(spec: ModelSpec) -> dict[str, Any]:
    name = "comba"
    plain(spec, name)
    needs_features(spec, name, "unit")
    rule = of_rule(spec, name, transition=(SPLR,), g=("mamba2_decay",))
    # FLA normalizes p = b k, which cancels b, and takes q - d p before the norm of q.
    of_rule(spec, f"{name} (it normalizes b k to k)", b=(gates.const(1),))
    of_rule(spec, f"{name} (it corrects q before the norm of q)", d=(gates.const(0),))
    if twice(rule.beta, name):  # type: ignore[attr-defined]
        raise InputError("export to fla: FLA's comba has no equal of beta sigmoid(max=2); it needs sigmoid(max=1)")
    return {**_heads_of(spec), "use_output_gate": gate_of(spec, name, True)}


def _from_comba(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_heads_from(options),
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
        *_decay(),
        _beta(),
        fixed("D", torch.zeros(spec.own_qk_heads), "FLA takes q - D b k before the norm of q, ours after it"),
        idle("decay", torch.ones(spec.own_qk_heads)),
        *norm_and_gate(spec),
    ],
    # FLA's layer has these options, but its model does not pass them on.
    idle=("use_output_correction", "use_inner_decay", "correction_factor"),
)


# KDA: FLA's decay has one number a for each head, and a projection of rank head_v_dim, as our kda_decay has.

LOW_RANK = ("kda_decay", "kda_bounded_decay")
"""The decays that have the parameters of FLA's."""


def _kda(spec: ModelSpec) -> dict[str, Any]:
    name, (_, value_dim) = "kda", spec.head_dims
    plain(spec, name, gate_rank=(value_dim, 0), output_gate=(True,))
    needs_features(spec, name, "unit")
    rule = of_rule(spec, name, g=("mamba2_decay", *LOW_RANK))
    numbers = dict(rule.g.options)  # type: ignore[attr-defined]
    if numbers.get("rank", 0) not in (0, value_dim):
        raise InputError(f"export to fla: FLA's kda has no equal of g {rule.g}; it needs rank 0 or {value_dim}")  # type: ignore[attr-defined]
    return {
        **_heads_of(spec),
        "allow_neg_eigval": twice(rule.beta, name),  # type: ignore[attr-defined]
        "safe_gate": "least" in numbers,
        "lower_bound": numbers.get("least"),
    }


def _from_kda(options: Mapping[str, Any]) -> dict[str, Any]:
    # Without safe_gate, FLA's kernels still bound the decay where there is a lower_bound.
    least = options["lower_bound"]
    decay: dict[str, Any] = {"kda_decay": {}} if least is None else {"kda_bounded_decay": {"least": float(least)}}
    return {
        **_heads_from(options),
        "rule": {"name": "kda", "beta": beta_of(options["allow_neg_eigval"]), "g": decay},
        "gate_rank": 0,
        "low_rank_bias": True,
    }


def _kda_decay(spec: ModelSpec) -> list[Part]:
    key_dim, value_dim = spec.head_dims

    def factors(ours: Sequence[Tensor]) -> Sequence[Tensor]:
        """Splits our matrix into W = W_2 W_1 with the rank of FLA's projection."""
        u, s, v = torch.linalg.svd(ours[0].double(), full_matrices=False)
        if (s[value_dim:] > 1e-5 * s[0]).any():
            raise InputError(
                f"export to fla: FLA's kda projects its decay through {value_dim} channels (the width of a head's "
                f"values), and the projection of g has a higher rank"
            )
        root = F.pad(s[:value_dim], (0, max(0, value_dim - len(s)))).sqrt()
        first, second = (F.pad(x[:value_dim], (0, 0, 0, max(0, value_dim - len(s)))) for x in (v, u.t()))
        return [(first * root[:, None]).to(ours[0].dtype), (second.t() * root).to(ours[0].dtype)]

    def one_a(ours: Sequence[Tensor]) -> Sequence[Tensor]:
        if not torch.equal(ours[0], ours[0][:, :1].expand_as(ours[0])):
            raise InputError(
                "export to fla: FLA's kda has one a for each head, and these differ from channel to channel"
            )
        return [ours[0][:, 0]]

    bias = torch.zeros(spec.heads * value_dim)
    if spec.make_rule().gates["g"].kind in LOW_RANK:
        decay = [
            same("gates.project.g.0.weight", "f_proj.0.weight"),
            same("gates.project.g.1.weight", "f_proj.1.weight"),
            same("gates.learned.g.log_a", "A_log"),
        ]
    else:
        decay = [
            Part(
                ("gates.project.g.weight",),
                ("f_proj.0.weight", "f_proj.1.weight"),
                factors,
                lambda theirs: [(theirs[1].double() @ theirs[0].double()).float()],
            ),
            Part(("gates.learned.g.log_a",), ("A_log",), one_a, lambda theirs: [theirs[0][:, None].repeat(1, key_dim)]),
        ]
    return [
        *decay,
        shaped("gates.learned.g.dt_bias", "dt_bias", (spec.heads, key_dim), (spec.heads * key_dim,)),
        same("gate.0.weight", "g_proj.0.weight"),
        same("gate.1.weight", "g_proj.1.weight"),
        same("gate.1.bias", "g_proj.1.bias")
        if spec.low_rank_bias
        else fixed("g_proj.1.bias", bias, "the output gate has no bias without low_rank_bias"),
        same("norm.weight", "o_norm.weight"),
        same("out.weight", "o_proj.weight"),
    ]


KDA = Form(
    "kda",
    "KDAForCausalLM",
    "kda",
    options={
        "head_dim": 128,
        "num_heads": 16,
        "num_v_heads": None,
        "expand_v": 1.0,
        "use_short_conv": True,
        "conv_size": 4,
        "allow_neg_eigval": False,
        "safe_gate": False,
        "lower_bound": None,
    },
    fixed={},
    config=_kda,
    settings=_from_kda,
    parts=lambda spec: [*projections(spec, QKV, CONVS), _beta(), *_kda_decay(spec)],
)


def _delta_product(spec: ModelSpec) -> dict[str, Any]:
    name = "gated_deltaproduct"
    plain(spec, name, qk_heads=(None, spec.heads))
    needs_features(spec, name, "unit")
    rule = of_rule(spec, name, g=("mamba2_decay", gates.const(0)))
    heads = _heads_of(spec)
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
        **_heads_from(options),
        "rule": {"name": "delta_product", "n_h": options["num_householder"], "beta": beta, "g": decay},
        "output_gate": "silu" if options["use_output_gate"] else False,
    }


def _delta_product_parts(spec: ModelSpec) -> list[Part]:
    decays = not spec.make_rule().gates["g"].constant
    return [*projections(spec, QKV, CONVS), *(_decay() if decays else []), _beta(), *norm_and_gate(spec)]


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
