"""The forms of KDA and preconditioned KDA: delta rules with a decay for each channel."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.export.fla.delta_forms import (
    PRECONDITIONED,
    beta_part,
    center_part,
    decay_of,
    heads_from,
    heads_of,
)
from deltalab.export.fla.layer_form import (
    CONVS,
    QKV,
    Form,
    Part,
    beta_of,
    fixed,
    needs_features,
    of_rule,
    plain,
    projections,
    same,
    shaped,
    twice,
)
from deltalab.models.spec import ModelSpec

# KDA: FLA's decay has one number a for each head, and a projection of rank head_v_dim, as our kda_decay has.

LOW_RANK = ("kda_decay", "kda_bounded_decay")
"""The decays that have the parameters of FLA's."""


def _bounded(spec: ModelSpec, name: str) -> dict[str, Any]:
    """FLA's options of the decay of the channels."""
    _, value_dim = spec.head_dims
    plain(spec, name, qk_heads=(None, spec.heads), gate_rank=(value_dim, 0), output_gate=(True,))
    needs_features(spec, name, "unit")
    rule = of_rule(spec, name, g=("mamba2_decay", *LOW_RANK))
    numbers = dict(rule.gates["g"].options)
    if numbers.get("rank", 0) not in (0, value_dim):
        raise InputError(
            f"export to fla: FLA's {name} has no equal of {rule.name}.g {rule.gates['g']}; it needs rank 0 or "
            f"{value_dim}"
        )
    return {
        **heads_of(spec),
        "allow_neg_eigval": twice(rule.gates["beta"], name),
        "safe_gate": "least" in numbers,
        "lower_bound": numbers.get("least"),
    }


def _decay_from(options: Mapping[str, Any]) -> dict[str, Any]:
    # Without safe_gate, FLA's kernels still bound the decay where there is a lower_bound.
    least = options["lower_bound"]
    return {"kda_decay": {}} if least is None else {"kda_bounded_decay": {"least": float(least)}}


def _from_kda(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **heads_from(options),
        "rule": {"name": "kda", "beta": beta_of(options["allow_neg_eigval"]), "g": _decay_from(options)},
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
    config=lambda spec: _bounded(spec, "kda"),
    settings=_from_kda,
    parts=lambda spec: [*projections(spec, QKV, CONVS), beta_part(), *_kda_decay(spec)],
)


def _preconditioned(spec: ModelSpec) -> dict[str, Any]:
    name = "precond_kda"
    options = _bounded(spec, name)
    rule = of_rule(spec, name, g_p=("mamba2_decay",), beta_p=(gates.sigmoid(),), center=("head",))
    return {**options, "squash_x": rule.squash}  # type: ignore[attr-defined]


def _from_preconditioned(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **heads_from(options),
        "rule": {
            "name": "preconditioned_gated_deltanet",
            "transition": "channel",
            "beta": beta_of(options["allow_neg_eigval"]),
            "squash": float(options["squash_x"]),
        },
        "gate_rank": 0,
        "low_rank_bias": True,
    }


PRECONDITIONED_KDA = Form(
    "precond_kda",
    "PrecondKDAForCausalLM",
    PRECONDITIONED.rule,
    options={**KDA.options, "num_heads": 16, "squash_x": 1.5, "squash_eps": 1e-6},
    # Our rule's decay has no bound.
    fixed={"num_v_heads": None, "squash_eps": 1e-6, "safe_gate": False, "lower_bound": None},
    config=_preconditioned,
    settings=_from_preconditioned,
    parts=lambda spec: [
        *projections(spec, QKV, CONVS),
        beta_part(),
        *_kda_decay(spec),
        *decay_of("g_p", "_atk"),
        *center_part(),
    ],
    takes=lambda spec: str(spec.make_rule().transition) == "channel",
    idle=PRECONDITIONED.idle,
)
