"""The forms of RWKV-7 and RWKV-6, whose blocks have other norms and MLPs than those of FLA's other models."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.export.fla.layer_form import (
    Form,
    Part,
    channels,
    features,
    of_rule,
    plain,
    same,
    setting,
    shaped,
    shares_of,
    widths_from,
)
from deltalab.models.rule_inputs.gates import own_reader
from deltalab.models.spec import ModelSpec

OF_BOTH: dict[str, object] = {"norm": "layer", "mlp_shift": True, "conv": 0, "output_norm": "group"}
"""The settings that FLA's models have no other values of. `first_norm` may be either, and ranks any."""

OF_RWKV7: dict[str, object] = {
    **OF_BOTH,
    "mlp": "relu2",
    "token_shift": "each",
    "output_gate": "linear",
    "low_rank_activation": {"g": "tanh", "output_gate": "sigmoid"},
    "low_rank_bias": ("a",),
    "bonus": True,
}
"""Those of RWKV-7."""

OF_RWKV6: dict[str, object] = {
    **OF_BOTH,
    "mlp": "gated_relu2",
    "output_gate": "silu",
    "scale": 1.0,
    "low_rank_activation": {"g": "tanh"},
    "low_rank_bias": False,
    "bonus": False,
}
"""Those of RWKV-6."""


def _checked(spec: ModelSpec, name: str, wanted: Mapping[str, object], more: str = "") -> None:
    """Raises an `InputError` that has all settings in which a model differs from the blocks of FLA's model `name`."""
    lacking = [f"{key}={_text(value)}" for key, value in wanted.items() if getattr(spec, key) != value]
    if lacking:
        # A shell reads brackets and braces that are not quoted.
        add = " ".join(f"--set 'model.{text}'" if text[-1] in "]}" else f"--set model.{text}" for text in lacking)
        raise InputError(
            f"export to fla: FLA's {name} has the blocks of `preset: {name}`{more}; this model lacks "
            f"{', '.join(lacking)}; add `{add}`, and the model starts untrained"
        )
    if features(spec) != "raw":
        raise InputError(f"export to fla: FLA's {name} has no equal of features {features(spec)!r}; it needs raw")


def _text(value: object) -> str:
    """A value in YAML."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {part}' for name, part in value.items())}}}"
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else setting(value)


def _rwkv7(spec: ModelSpec) -> dict[str, Any]:
    name, (key_dim, value_dim) = "rwkv7", spec.head_dims
    gated = spec.value_residual if "rank" in (spec.value_residual or {}) else {"rank": 32}
    gate_rank = 128 if spec.gate_rank is None else spec.gate_rank
    _checked(
        spec, name, {**OF_RWKV7, "gate_rank": gate_rank, "value_residual": gated}, ", and two of them or more"
    )  # fmt: skip
    own = {key: (getattr(spec, key),) for key in ("token_shift", "output_norm", "gate_rank")}
    plain(spec, name, qk_heads=(None, spec.heads), scale=(None, key_dim**-0.5), **own)
    rule = of_rule(spec, name, xi=("head_channel",), rho=("head_channel",))
    if spec.heads * key_dim != spec.d_model or value_dim % key_dim:
        raise InputError(
            f"export to fla: the heads of FLA's {name} share the model's width, with values of a multiple of it: "
            f"{spec.heads} of {key_dim} and {value_dim} do not share {spec.d_model}"
        )
    assert spec.value_residual is not None
    return {
        **_of_both(spec),
        "head_dim": key_dim,
        "num_heads": spec.heads,
        "value_dim": spec.heads * value_dim,
        "decay_low_rank_dim": rule.gates["g"].rank,
        "a_low_rank_dim": rule.gates["a"].rank,
        "v_low_rank_dim": spec.value_residual["rank"],
        "gate_low_rank_dim": spec.gate_rank or value_dim,
    }


def _of_both(spec: ModelSpec) -> dict[str, Any]:
    """The options that both models have."""
    # use_l2warp is a penalty of the largest logits, which we have not: no part of the logits, but of a training.
    return {"norm_first": spec.first_norm, "norm_bias": True, "use_l2warp": False}


def _from_rwkv7(options: Mapping[str, Any]) -> dict[str, Any]:
    d_model = options["hidden_size"]
    heads = options["num_heads"] if options["head_dim"] is None else d_model // options["head_dim"]
    given = options["value_dim"]
    values = set(given) if isinstance(given, list) else {d_model if given is None else given}
    if len(values) > 1:
        raise InputError(f"option 'value_dim' {given!r} has no equal here; our layers have values of one width")
    ranks = {"g": {"rwkv7_decay": {"rank": options["decay_low_rank_dim"]}}}
    return {
        "rule": {
            "name": "rwkv7",
            **ranks,
            "a": {"channel_sigmoid": {"rank": options["a_low_rank_dim"]}},
            "xi": "head_channel",
            "rho": "head_channel",
        },
        **OF_RWKV7,
        "heads": heads,
        "expand_v": values.pop() / d_model,
        "gate_rank": options["gate_low_rank_dim"],
        "value_residual": {"rank": options["v_low_rank_dim"]},
        "first_norm": options["norm_first"],
    }


def _low_rank(ours: str, theirs: str, bias: str = "") -> list[Part]:
    """The parts for a projection through a rank, whose bias we hold under `bias`."""
    biases = [same(bias, f"{theirs}.lora.2.bias")] if bias else []
    first, second = ("into", "out") if ours == "value_residual" else ("0", "1")
    return [
        same(f"{ours}.{first}.weight", f"{theirs}.lora.0.weight"),
        same(f"{ours}.{second}.weight", f"{theirs}.lora.2.weight"),
        *biases,
    ]


def _layer(spec: ModelSpec) -> list[Part]:
    widths, (key_dim, _), d_model = channels(spec), spec.head_dims, spec.d_model
    of_heads, flat = (spec.heads, key_dim), (spec.heads * key_dim,)

    def split(ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return list(ours[0].split(widths))

    def join(theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat(list(theirs))]

    readers = {"q": "r", "k": "k", "v": "v", own_reader("g"): "w", own_reader("a"): "a", "gate": "g"}
    return [
        Part(("qkv.weight",), ("r_proj.weight", "k_proj.weight", "v_proj.weight"), split, join),
        *(
            shaped(f"shift.share.{ours}", f"x_{theirs}", (d_model,), (1, 1, d_model))
            for ours, theirs in readers.items()
        ),
        *_low_rank("gates.project.g", "w_lora"),
        shaped("gates.learned.g.bias", "w_lora.lora.2.bias", of_heads, flat),
        *_low_rank("gates.project.a", "a_lora", "gates.project.a.1.bias"),
        *_low_rank("gate", "g_lora"),
        *(_low_rank("value_residual", "v_lora", "value_residual.out.bias") if spec.value_residual else []),
        shaped("gates.learned.xi.value", "k_k", of_heads, flat),
        shaped("gates.learned.rho.value", "k_a", of_heads, flat),
        shaped("bonus.weight", "r_k", flat, of_heads),
        same("norm.weight", "g_norm.weight"),
        same("norm.bias", "g_norm.bias"),
        same("out.weight", "o_proj.weight"),
    ]


def _of_norm(ours: str, theirs: str) -> list[Part]:
    return [same(f"{ours}.{name}", f"{theirs}.{name}") for name in ("weight", "bias")]


BLOCK = [*_of_norm("norm", "attn_norm"), *_of_norm("mlp_norm", "ffn_norm")]
"""The norms of a block."""


def _newer(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Splits the token shifts x_x [6, d] of a layer, which FLA's first version of RWKV-7 holds as one tensor."""
    split: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name.endswith(".attn.x_x"):
            start = name.removesuffix("x")
            split |= {f"{start}{reader}": part.view(1, 1, -1) for reader, part in zip("rwkvag", value, strict=True)}
        else:
            split[name] = value
    return split


def _ends(spec: ModelSpec) -> list[Part]:
    first = _of_norm("first_norm", "layers.0.pre_norm") if spec.first_norm else []
    return [*first, same("norm.bias", "norm.bias")]


OF_A_BLOCK = {"hidden_act": "sqrelu", "norm_first": True, "norm_bias": True, "norm_eps": 1e-5}
"""The options of both models' blocks, with FLA's defaults."""

FIXED = {"hidden_act": "sqrelu", "norm_bias": True, "attn": None}
"""The only values of options that both models' forms take."""

RWKV7 = Form(
    "rwkv7",
    "RWKV7ForCausalLM",
    "rwkv7",
    options={
        "head_dim": 64,
        "num_heads": None,
        "value_dim": None,
        "decay_low_rank_dim": 64,
        "gate_low_rank_dim": 128,
        "a_low_rank_dim": 64,
        "v_low_rank_dim": 16,
        **OF_A_BLOCK,
    },
    fixed=FIXED,
    config=_rwkv7,
    settings=_from_rwkv7,
    parts=_layer,
    hybrid=False,
    own=(*OF_RWKV7, "first_norm", "value_residual"),
    block_parts=lambda: [
        *BLOCK,
        same("shift.share.into", "ffn.x_k"),
        same("mlp.into.weight", "ffn.key.weight"),
        same("mlp.out.weight", "ffn.value.weight"),
    ],
    end_parts=_ends,
    newer=_newer,
    mlp_width=lambda d_model, ratio: -(-int(d_model * (4 if ratio is None else ratio)) // 32) * 32,
)


def _rwkv6(spec: ModelSpec) -> dict[str, Any]:
    name = "rwkv6"
    shift = spec.token_shift if isinstance(spec.token_shift, Mapping) else {"rank": 32}
    _checked(spec, name, {**OF_RWKV6, "token_shift": shift})
    own = {key: (getattr(spec, key),) for key in ("token_shift", "output_norm", "scale")}
    plain(spec, name, qk_heads=(None, spec.heads), **own)
    rule = of_rule(spec, name, g=("rwkv6_decay",), u=("head_channel",))
    return {
        **_of_both(spec),
        **shares_of(spec),
        "proj_low_rank_dim": shift["rank"],
        "gate_low_rank_dim": rule.gates["g"].rank,
    }


def _from_rwkv6(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **widths_from({**options, "use_short_conv": False}),
        **OF_RWKV6,
        "rule": {
            "name": "rwkv6",
            "g": {"rwkv6_decay": {"rank": options["gate_low_rank_dim"]}},
            "u": {"head_channel": {"init": 0.5}},
        },
        "token_shift": {"rank": options["proj_low_rank_dim"]},
        "first_norm": options["norm_first"],
    }


def _layer_of_rwkv6(spec: ModelSpec) -> list[Part]:
    widths, (key_dim, _) = channels(spec), spec.head_dims
    of_heads, flat = (spec.heads, key_dim), (spec.heads * key_dim,)
    readers = ("q", "k", "v", own_reader("g"), "gate")
    # FLA has r, w, k, v and g in this order.
    theirs_in_ours, ours_in_theirs = [0, 3, 1, 2, 4], [0, 2, 3, 1, 4]
    shares = tuple(f"shift.share.{readers[i]}" for i in theirs_in_ours)
    count = len(readers)

    def second(ours: Sequence[Tensor]) -> Sequence[Tensor]:
        """W_n [r, d] of each reader as one matrix [d, n r]."""
        return [ours[0][theirs_in_ours].permute(2, 0, 1).flatten(1)]

    def from_second(theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [theirs[0].unflatten(1, (count, -1)).permute(1, 2, 0)[ours_in_theirs].contiguous()]

    def first(ours: Sequence[Tensor]) -> Sequence[Tensor]:
        """V_n [r, d] of each reader as one matrix [n r, d]."""
        return [ours[0].unflatten(0, (count, -1))[theirs_in_ours].flatten(0, 1)]

    def from_first(theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [theirs[0].unflatten(0, (count, -1))[ours_in_theirs].flatten(0, 1)]

    return [
        Part(
            ("qkv.weight",),
            tuple(f"{x}_proj.linear.weight" for x in "rkv"),
            lambda ours: list(ours[0].split(widths)),
            lambda theirs: [torch.cat(list(theirs))],
        ),
        same("shift.mean", "x_proj.0.mu"),
        Part(("shift.into.weight",), ("x_proj.0.linear.weight",), first, from_first),
        Part(("shift.out",), ("x_proj.2.weight",), second, from_second),
        Part(shares, ("x_bias",), lambda ours: [torch.stack(list(ours))], lambda theirs: list(theirs[0].unbind(0))),
        *_low_rank("gates.project.g", "w_proj.linear"),
        shaped("gates.learned.g.bias", "w_proj.linear.lora.2.bias", of_heads, flat),
        same("gates.learned.u.value", "bonus"),
        same("gate.weight", "g_proj.linear.weight"),
        same("norm.weight", "g_norm.weight"),
        same("norm.bias", "g_norm.bias"),
        same("out.weight", "o_proj.weight"),
    ]


RWKV6 = Form(
    "rwkv6",
    "RWKV6ForCausalLM",
    "rwkv6",
    options={
        "num_heads": 4,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "hidden_ratio": 3.5,
        "proj_low_rank_dim": 32,
        "gate_low_rank_dim": 64,
        **OF_A_BLOCK,
    },
    fixed=FIXED,
    config=_rwkv6,
    settings=_from_rwkv6,
    parts=_layer_of_rwkv6,
    hybrid=False,
    own=(*OF_RWKV6, "first_norm"),
    block_parts=lambda: [
        *BLOCK,
        same("shift.share.into", "ffn.key.mu"),
        same("shift.share.gate", "ffn.receptance.mu"),
        same("mlp.into.weight", "ffn.key.linear.weight"),
        same("mlp.gate.weight", "ffn.receptance.linear.weight"),
        same("mlp.out.weight", "ffn.value.weight"),
    ],
    end_parts=_ends,
    mlp_width=lambda d_model, ratio: -(-int(d_model * (3.5 if ratio is None else ratio)) // 32) * 32,
)
