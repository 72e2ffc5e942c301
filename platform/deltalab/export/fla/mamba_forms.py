"""The forms of Mamba-2, log-linear Mamba-2 and Mamba-3, which have one matrix for all projections."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.export.fla.layer_form import (
    Form,
    Part,
    channels,
    expanded,
    fixed,
    needs,
    needs_features,
    of_rule,
    plain,
    ratio,
    same,
)
from deltalab.models.spec import ModelSpec


def _mamba(spec: ModelSpec, model_type: str) -> dict[str, Any]:
    """FLA's options of both models."""
    key_dim, value_dim = spec.head_dims
    plain(
        spec, model_type, qk_heads=(None, 1), output_norm=("rms_all",), output_gate=("silu_before_norm",),
        scale=(None, 1.0) if model_type == "mamba2" else (1.0,), conv_bias=(False, True), skip=(False, True),
    )  # fmt: skip
    needs_features(spec, model_type, "silu")
    if not spec.conv:
        raise InputError(f"export to fla: FLA's {model_type} has no equal of model.conv 0; it needs a convolution")
    return {
        "expand": ratio(spec.heads * value_dim, spec.d_model),
        "head_dim": value_dim,
        "state_size": key_dim,
        "n_groups": 1,
        "conv_kernel": spec.conv,
        "use_conv_bias": spec.conv_bias,
        "hidden_act": "silu",
    }


def _from_mamba(options: Mapping[str, Any]) -> dict[str, Any]:
    heads = expanded(options["hidden_size"], options["expand"]) // options["head_dim"]
    return {
        "heads": heads,
        "key_dim": options["state_size"],
        "expand_v": options["head_dim"] / options["state_size"],
        "conv": options["conv_kernel"],
        "conv_bias": options["use_conv_bias"],
        "skip": True,
        "output_norm": "rms_all",
        "output_gate": "silu_before_norm",
    }


def _mamba_parts(spec: ModelSpec, *gates: tuple[str, int]) -> list[Part]:
    """The parameters of both models.

    Args:
        spec: Our layer.
        gates: Our names of the gates whose matrices FLA has at the end of `in_proj`, in this order, each with its
            channels.
    """
    heads, (q, k, v) = spec.heads, channels(spec)
    widths = [width for _, width in gates]

    def split(ours: Sequence[Tensor]) -> Sequence[Tensor]:
        gate, qkv, *rest = ours
        return [torch.cat([gate, *reversed(qkv.split([q, k, v])), *rest])]

    def join(theirs: Sequence[Tensor]) -> Sequence[Tensor]:
        gate, *parts = theirs[0].split([v, v, k, q, *widths])
        return [gate, torch.cat(parts[2::-1]), *parts[3:]]

    bias = Part(
        ("conv_bias",),
        ("conv1d.bias",),
        lambda ours: [torch.cat(ours[0].split([q, k, v])[::-1])],
        lambda theirs: [torch.cat(theirs[0].split([v, k, q])[::-1])],
    )
    return [
        Part(
            ("gate.weight", "qkv.weight", *(f"gates.project.{name}.weight" for name, _ in gates)),
            ("in_proj.weight",),
            split,
            join,
        ),
        Part(
            ("conv",),
            ("conv1d.weight",),
            lambda ours: [torch.cat(ours[0].split([q, k, v], dim=1)[::-1], dim=1).t().unsqueeze(1).contiguous()],
            lambda theirs: [torch.cat(theirs[0].squeeze(1).split([v, k, q])[::-1]).t().contiguous()],
        ),
        same("gates.learned.g.log_a", "A_log"),
        same("gates.learned.g.dt_bias", "dt_bias"),
        *([bias] if spec.conv_bias else []),
        same("skip", "D")
        if spec.skip
        else fixed("D", torch.zeros(heads), "our layer has no skip from v to the output"),
        same("norm.weight", "norm.weight"),
        same("out.weight", "out_proj.weight"),
    ]


def _mamba2(spec: ModelSpec) -> dict[str, Any]:
    options = _mamba(spec, "mamba2")
    of_rule(spec, "mamba2", beta=("mamba2_step",))
    return {**options, "chunk_size": spec.chunk_size}


MAMBA2 = Form(
    "mamba2",
    "Mamba2ForCausalLM",
    "mamba2",
    options={
        "num_hidden_layers": 48,
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "expand": 2,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "D_has_hdim": False,
        "dt_limit": [0.0, math.inf],
        "rmsnorm": True,
        "norm_before_gate": False,
    },
    fixed={
        "hidden_act": "silu",
        "n_groups": 1,
        "use_bias": False,
        "D_has_hdim": False,
        "dt_limit": [0.0, math.inf],
        "rmsnorm": True,
        "norm_before_gate": False,
    },
    config=_mamba2,
    settings=lambda options: {**_from_mamba(options), "rule": "mamba2", "block": "mamba"},
    parts=lambda spec: _mamba_parts(spec, ("g", spec.heads)),
    idle=(
        "A_init_range", "chunk_size", "conv_init", "dt_init_floor", "dt_max", "dt_min", "num_heads",
        "rescale_prenorm_residual", "residual_in_fp32",
    ),
    block="mamba",
    hybrid=False,
    trunk="backbone",
    last_norm="norm_f",
    mixer="mixer",
)  # fmt: skip


# Log-linear Mamba-2: in a block with an MLP, whose width FLA fixes.

LEVELS = 15
"""The levels of FLA's layer, which bound a sequence by 2^14 tokens."""


def _mlp_width(d_model: int) -> int:
    """The width of FLA's MLP, whatever the options say."""
    return -(-(8 * d_model // 3) // 256) * 256


def _log_linear(spec: ModelSpec) -> dict[str, Any]:
    name = "log_linear_mamba2"
    options = _mamba(spec, name)
    rule = of_rule(spec, name, beta=("mamba2_step",), g=("mamba2_decay", "counted_decay"), erases=(False,))
    strength = rule.gates["strength"]
    if strength.kind != "scaled_level_strength" or strength.slots != LEVELS:
        raise InputError(
            f"export to fla: FLA's {name} has no equal of {rule.name}.strength {strength}; add `--set rule.strength="
            f"scaled_level_strength`, which has {LEVELS} levels, and the model starts untrained"
        )
    needs(spec, name, mlp_width=(_mlp_width(spec.d_model),))
    key_dim, value_dim = spec.head_dims
    if key_dim % 64 or value_dim & (value_dim - 1):
        raise InputError(
            f"export to fla: FLA's {name} takes keys of a multiple of 64 and values of a power of 2, not {key_dim} and "
            f"{value_dim} channels; give model.key_dim and model.expand_v"
        )
    return {**options, "use_bias": False, "residual_in_fp32": False, "chunk_size": 64}


def _from_log_linear(options: Mapping[str, Any]) -> dict[str, Any]:
    strength = {"scaled_level_strength": {"levels": LEVELS}}
    return {
        **_from_mamba(options),
        "qk_heads": 1,
        "features": "silu",
        "scale": 1.0,
        "mlp_width": _mlp_width(options["hidden_size"]),
        "rule": {
            "name": "log_linear_attention",
            "strength": strength,
            "g": "counted_decay",
            "beta": "mamba2_step",
        },
    }


LOG_LINEAR_MAMBA2 = Form(
    "log_linear_mamba2",
    "LogLinearMamba2ForCausalLM",
    "log_linear_attention",
    options={**MAMBA2.options, "chunk_size": 64, "residual_in_fp32": False},
    fixed={**MAMBA2.fixed, "chunk_size": 64, "residual_in_fp32": False},
    config=_log_linear,
    settings=_from_log_linear,
    parts=lambda spec: [
        *_mamba_parts(spec, ("g", spec.heads), ("strength", spec.heads * LEVELS)),
        same("gates.learned.strength.scale", "L"),
    ],
    idle=tuple(name for name in MAMBA2.idle if name not in ("chunk_size", "residual_in_fp32")),
    hybrid=False,
    trunk="backbone",
    last_norm="norm_f",
    mixer="mixer",
)


# Mamba-3: no convolution, and a rotation of q and k, whose pairs of channels are neighbours.


def _shares_of_pairs(key_dim: int) -> dict[int, float]:
    """FLA's option `rope_fraction`, by the pairs of a head's key channels that it turns."""
    return {key_dim // 4: 0.5, key_dim // 2: 1.0}


def _mamba3(spec: ModelSpec) -> dict[str, Any]:
    name, (key_dim, value_dim) = "mamba3", spec.head_dims
    plain(
        spec, name, qk_heads=(spec.qk_heads,), qk_norm=(True,), conv=(0,), scale=(1.0,), skip=(True, False),
        output_norm=(False, True), output_gate=("silu",),
    )  # fmt: skip
    needs_features(spec, name, "raw")
    rule = of_rule(
        spec, name, normalize=(False,), dt=("step_size",), a=("rate",), lam=(gates.sigmoid(),),
        theta=("shared_angular_velocity",), b=("head_channel",), c=("head_channel",),
    )  # fmt: skip
    if key_dim & (key_dim - 1) or value_dim & (value_dim - 1):
        raise InputError(
            f"export to fla: FLA's {name} takes keys and values of a power of 2, not {key_dim} and {value_dim} "
            "channels; give model.key_dim and model.expand_v"
        )
    pairs, shares = rule.gates["theta"].slots, _shares_of_pairs(key_dim)
    if pairs not in shares or pairs % 2:
        allowed = [count for count in shares if count and count % 2 == 0]
        raise InputError(
            f"export to fla: FLA's {name} turns an even number of pairs, a half or a quarter as many as the {key_dim} "
            f"channels of a key, which {rule.name}.theta {rule.gates['theta']} does not; it needs pairs: "
            f"{' or '.join(map(str, allowed)) or 'of wider keys'}"
        )
    return {
        "expand": ratio(spec.heads * value_dim, spec.d_model),
        "head_dim": value_dim,
        "state_size": key_dim,
        "n_groups": spec.own_qk_heads,
        "rope_fraction": shares[pairs],
        "is_outproj_norm": spec.output_norm is True,
        "chunk_size": spec.chunk_size,
    }


def _from_mamba3(options: Mapping[str, Any]) -> dict[str, Any]:
    heads = expanded(options["hidden_size"], options["expand"]) // options["head_dim"]
    key_dim = options["state_size"]
    pairs = {share: pairs for pairs, share in _shares_of_pairs(key_dim).items()}
    if options["rope_fraction"] not in pairs:
        raise InputError(f"option 'rope_fraction' {options['rope_fraction']} has no equal here; only 0.5 and 1.0 have")
    theta = {"shared_angular_velocity": {"pairs": pairs[options["rope_fraction"]]}}
    return {
        "rule": {"name": "mamba3", "a": "rate", "theta": theta, "normalize": False},
        "block": "mamba",
        "heads": heads,
        "key_dim": key_dim,
        "expand_v": options["head_dim"] / key_dim,
        "conv": 0,
        "qk_heads": options["n_groups"],
        "qk_norm": True,
        "scale": 1.0,
        "skip": True,
        "output_norm": options["is_outproj_norm"],
        "output_gate": "silu",
    }


def _mamba3_parts(spec: ModelSpec) -> list[Part]:
    """The parameters of a layer. Ours turns channels p and p + pairs, FLA's channels 2 p and 2 p + 1."""
    heads, (key_dim, value_dim), (q, k, v) = spec.heads, spec.head_dims, channels(spec)
    pairs = spec.make_rule().gates["theta"].slots
    turned = torch.arange(2 * pairs)
    theirs = torch.cat([turned.unflatten(0, (pairs, 2)).t().flatten(), torch.arange(2 * pairs, key_dim)])
    order = theirs.argsort()
    names = ("dt", "a", "lam", "theta")

    def placed(x: Tensor, by: Tensor) -> Tensor:
        """The rows of all heads' keys, with the channels of each head in another order."""
        return x.reshape(-1, key_dim, x.shape[1])[:, by].flatten(0, 1)

    def split(ours: Sequence[Tensor]) -> Sequence[Tensor]:
        gate, qkv, *rest = ours
        of_q, of_k, of_v = qkv.split([q, k, v])
        return [torch.cat([gate, of_v, placed(of_k, order), placed(of_q, order), *rest])]

    def join(values: Sequence[Tensor]) -> Sequence[Tensor]:
        gate, of_v, of_k, of_q, *rest = values[0].split([v, v, k, q, heads, heads, heads, pairs])
        return [gate, torch.cat([placed(of_q, theirs), placed(of_k, theirs), of_v]), *rest]

    def per_channel(ours: str, their_name: str, our_shape: tuple[int, ...], their_shape: tuple[int, ...]) -> Part:
        return Part(
            (ours,),
            (their_name,),
            lambda x: [x[0][..., order].reshape(their_shape)],
            lambda x: [x[0].reshape(our_shape)[..., theirs]],
        )

    def of_one_head(values: Sequence[Tensor]) -> Sequence[Tensor]:
        weights = values[0].unflatten(0, (heads, value_dim))
        if not torch.equal(weights, weights[:1].expand_as(weights)):
            raise InputError("norm.weight has other values in each head: our norm has the same weights in all heads")
        return [weights[0].clone()]

    return [
        Part(
            ("gate.weight", "qkv.weight", *(f"gates.project.{name}.weight" for name in names)),
            ("in_proj.weight",),
            split,
            join,
        ),
        same("gates.learned.dt.dt_bias", "dt_bias"),
        per_channel("k_norm.weight", "B_norm.weight", (key_dim,), (key_dim,)),
        per_channel("q_norm.weight", "C_norm.weight", (key_dim,), (key_dim,)),
        per_channel("gates.learned.b.value", "B_bias", (heads, key_dim), (heads, 1, key_dim)),
        per_channel("gates.learned.c.value", "C_bias", (heads, key_dim), (heads, 1, key_dim)),
        same("skip", "D")
        if spec.skip
        else fixed("D", torch.zeros(heads), "our layer has no skip from v to the output"),
        *(
            [Part(("norm.weight",), ("norm.weight",), lambda x: [x[0].repeat(heads)], of_one_head)]
            if spec.output_norm
            else []
        ),
        same("out.weight", "out_proj.weight"),
    ]


MAMBA3 = Form(
    "mamba3",
    "Mamba3ForCausalLM",
    "mamba3",
    options={
        "num_hidden_layers": 48,
        "norm_eps": 1e-5,
        "hidden_act": "silu",
        "expand": 2,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 1,
        "rope_fraction": 0.5,
        "A_floor": 1e-4,
        "is_outproj_norm": False,
        "is_mimo": False,
        "use_bias": False,
    },
    fixed={"hidden_act": "silu", "A_floor": 1e-4, "is_mimo": False, "use_bias": False},
    config=_mamba3,
    settings=_from_mamba3,
    parts=_mamba3_parts,
    idle=(
        "chunk_size", "dt_init_floor", "dt_max", "dt_min", "mimo_rank", "num_heads", "rescale_prenorm_residual",
        "residual_in_fp32",
    ),
    block="mamba",
    hybrid=False,
    trunk="backbone",
    last_norm="norm_f",
    mixer="mixer",
)  # fmt: skip
