"""The form of RWKV-7, whose blocks have other norms and MLPs than those of FLA's other models."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.export.fla.layer_form import Form, Part, channels, features, of_rule, plain, same, setting, shaped
from deltalab.models.parts.gates import own_reader
from deltalab.models.spec import ModelSpec

OF_ITS_BLOCKS: dict[str, object] = {
    "norm": "layer",
    "mlp": "relu2",
    "mlp_shift": True,
    "conv": 0,
    "token_shift": "each",
    "output_norm": "group",
    "output_gate": "linear",
    "low_rank_activation": {"g": "tanh", "output_gate": "sigmoid"},
    "low_rank_bias": ("a",),
    "bonus": True,
}
"""The settings that FLA's model has no other values of. `first_norm` may be either, and ranks any."""


def _lacking(spec: ModelSpec) -> list[str]:
    """The settings of a model that lacks some of what FLA's blocks have, as `--set` gives them."""
    wanted = {**OF_ITS_BLOCKS, "gate_rank": 128 if spec.gate_rank is None else spec.gate_rank}
    lacking = [f"{name}={_text(value)}" for name, value in wanted.items() if getattr(spec, name) != value]
    if "rank" not in (spec.value_residual or {}):
        lacking.append("value_residual={rank: 32}")
    return lacking


def _text(value: object) -> str:
    """A value in YAML."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {part}' for name, part in value.items())}}}"
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else setting(value)


def _rwkv7(spec: ModelSpec) -> dict[str, Any]:
    name, (key_dim, value_dim) = "rwkv7", spec.head_dims
    if lacking := _lacking(spec):
        add = " ".join(f"--set 'model.{text}'" if " " in text else f"--set model.{text}" for text in lacking)
        raise InputError(
            f"export to fla: FLA's {name} has the blocks of `preset: rwkv7`, and two of them or more; this model lacks "
            f"{', '.join(lacking)}; add `{add}`, and the model starts untrained"
        )
    own = {key: (getattr(spec, key),) for key in ("token_shift", "output_norm", "gate_rank")}
    plain(spec, name, qk_heads=(None, spec.heads), scale=(None, key_dim**-0.5), **own)
    if features(spec) != "raw":
        raise InputError(f"export to fla: FLA's {name} has no equal of features {features(spec)!r}; it needs raw")
    rule = of_rule(spec, name, xi=("head_channel",), rho=("head_channel",))
    if spec.heads * key_dim != spec.d_model or value_dim % key_dim:
        raise InputError(
            f"export to fla: the heads of FLA's {name} share the model's width, with values of a multiple of it: "
            f"{spec.heads} of {key_dim} and {value_dim} do not share {spec.d_model}"
        )
    assert spec.value_residual is not None
    return {
        "head_dim": key_dim,
        "num_heads": spec.heads,
        "value_dim": spec.heads * value_dim,
        "decay_low_rank_dim": rule.gates["g"].rank,
        "a_low_rank_dim": rule.gates["a"].rank,
        "v_low_rank_dim": spec.value_residual["rank"],
        "gate_low_rank_dim": spec.gate_rank or value_dim,
        "norm_first": spec.first_norm,
        "norm_bias": True,
        # The penalty of the largest logits, which we have not. It is no part of the logits, and would be of a training.
        "use_l2warp": False,
    }


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
        **OF_ITS_BLOCKS,
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


def _block() -> list[Part]:
    return [
        *_of_norm("norm", "attn_norm"),
        *_of_norm("mlp_norm", "ffn_norm"),
        same("shift.share.into", "ffn.x_k"),
        same("mlp.into.weight", "ffn.key.weight"),
        same("mlp.out.weight", "ffn.value.weight"),
    ]


def _ends(spec: ModelSpec) -> list[Part]:
    first = _of_norm("first_norm", "layers.0.pre_norm") if spec.first_norm else []
    return [*first, same("norm.bias", "norm.bias")]


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
        "hidden_act": "sqrelu",
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": 1e-5,
    },
    fixed={"hidden_act": "sqrelu", "norm_bias": True, "attn": None},
    config=_rwkv7,
    settings=_from_rwkv7,
    parts=_layer,
    hybrid=False,
    own=(*OF_ITS_BLOCKS, "first_norm", "value_residual"),
    block_parts=_block,
    end_parts=_ends,
    mlp_width=lambda d_model, ratio: -(-int(d_model * (ratio or 4)) // 32) * 32,
)
