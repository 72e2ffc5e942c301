"""Checks the settings of a model one by one and against one another, and writes each in its only form."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args

from deltalab.errors import InputError, unknown
from deltalab.models.parts.bonus import without_bonus
from deltalab.models.parts.canon import places_in_order
from deltalab.models.parts.experts import experts_in_full
from deltalab.models.parts.images import check_images, grid, sees_all
from deltalab.models.rule_inputs.first_values import RANK, shares_in_full
from deltalab.models.rule_inputs.latent import refusal
from deltalab.models.rule_inputs.low_rank import activations_in_full, biases_in_full, projections
from deltalab.models.rule_inputs.token_shift import token_shift_in_full
from deltalab.models.settings.layer_list import ATTENTION, OF_A_MIXER, beside_layer, listed
from deltalab.models.settings.limits import MOST_EXPANDED, whole
from deltalab.ops.fused.convolution import FEATURES
from deltalab.ops.fused.norm import HEAD_GATES, HEAD_NORMS
from deltalab.ops.recurrence import Backend
from deltalab.own_module import OwnModule

if TYPE_CHECKING:
    from deltalab.models.spec import ModelSpec

SECOND_TO_LAST_OF_EIGHT = "second_to_last_of_every_eight"

MLPS = ("swiglu", "relu2", "gated_relu2")
"""The kinds of MLPs."""

NORMS = ("rms", "layer")
"""The kinds of norms before mixers, MLPs and logits."""

ROPE = 10000.0
"""The default base of rotary positions."""


def check_spec(spec: "ModelSpec") -> None:
    """Checks a new specification, and writes its settings in their only form, so that equal models are equal values.

    Raises:
        InputError: The values make no model.
    """
    _without_idle(spec)
    _put(spec, "patches", grid(spec.patches))
    if spec.patches is not None:
        _put(spec, "tie_embeddings", False)  # patches have no row for each class
    _check_sizes(spec)
    check_images(spec)
    _check_heads(spec)
    _check_rope(spec)
    _check_output(spec)
    _check_numbers(spec)
    _check_names(spec)
    if spec.block == "mamba":
        _put(spec, "mlp", False)  # such a block has no MLP that a study could ablate
    _check_kinds(spec)
    _check_layers(spec)
    _check_values(spec)


def _put(spec: "ModelSpec", name: str, value: Any) -> None:
    """Writes a setting of a specification that is being made. Afterwards, it is frozen."""
    object.__setattr__(spec, name, value)


def _without_idle(spec: "ModelSpec") -> None:
    """Puts settings that no layer reads at their defaults, if all layers are modules: equal models are equal."""
    if spec.attention or not isinstance(spec.layers, int):
        return
    rule = spec.make_rule()
    if not isinstance(rule, OwnModule):
        return
    for setting in fields(spec):
        if setting.name in (*OF_A_MIXER, "chunk_size") and setting.name not in rule.settings:
            _put(spec, setting.name, 1 if setting.name == "heads" else setting.default)
    if sees_all(rule) and spec.beside is None:
        _put(spec, "bidirectional", False)
        _put(spec, "axes", 1)
    if spec.base_width is not None:
        raise InputError(f"model.base_width scales matrices of deltalab, and module '{rule.name}' has its own")


def _check_sizes(spec: "ModelSpec") -> None:
    for name in ("vocab_size", "d_model", "heads", "chunk_size"):
        whole(name, getattr(spec, name), least=1)
    for name in ("conv", "window", "attention_residuals"):
        whole(name, getattr(spec, name), least=0)
    if spec.key_dim is not None:
        whole("key_dim", spec.key_dim, least=1)
    elif spec.d_model % spec.heads:
        problem = f"model.d_model {spec.d_model} must be a multiple of heads {spec.heads}, or set key_dim"
        raise InputError(problem, key="model.d_model")
    for name in ("qk_norm", "conv_bias", "skip", "bonus", "mlp_shift", "first_norm", "tie_embeddings"):
        if not isinstance(getattr(spec, name), bool):
            wrong = InputError(f"model.{name} must be true or false, not {getattr(spec, name)!r}")
            raise wrong.with_fields(key=f"model.{name}", allowed=["true", "false"])
    if (
        isinstance(spec.expand_v, bool)
        or not isinstance(spec.expand_v, int | float)
        or not 0 < spec.expand_v <= MOST_EXPANDED
    ):
        raise InputError(f"model.expand_v must be a number above 0, and at most {MOST_EXPANDED}, not {spec.expand_v!r}")
    _put(spec, "expand_v", float(spec.expand_v))  # 2 and 2.0 are one model, with one identity


def _check_heads(spec: "ModelSpec") -> None:
    for name in ("qk_heads", "kv_heads"):
        count = getattr(spec, name)
        if count is None:
            continue
        whole(name, count, least=1)
        if spec.heads % count:
            raise InputError(f"model.{name} must divide heads {spec.heads}, not be {count}", key=f"model.{name}")
    if spec.kv_heads not in (None, spec.heads) and spec.own_qk_heads < spec.heads:
        raise InputError(
            "model.kv_heads: a layer shares k and v, or q and k by qk_heads (1 in mamba blocks), and not both; "
            f"leave one of them at heads {spec.heads}"
        )


def _check_rope(spec: "ModelSpec") -> None:
    if not isinstance(spec.rope, bool):
        if not isinstance(spec.rope, int | float) or not 1 < spec.rope < 1e12:
            problem = f"model.rope must be true, false or a base above 1, not {spec.rope!r}"
            raise InputError(problem, key="model.rope")
        _put(spec, "rope", True if spec.rope == ROPE else float(spec.rope))
    key_dim = spec.head_dims[0]
    if spec.rope and spec.rope_dim is None and key_dim % 2:
        raise InputError(f"model.rope turns pairs of channels: key_dim must be even, not {key_dim}")
    for name in ("rope_dim", "q_rank", "kv_rank"):
        if getattr(spec, name) is not None:
            whole(name, getattr(spec, name), least=1)
    sizes = {
        "heads": spec.heads,
        "own_heads": min(spec.own_qk_heads, spec.kv_heads or spec.heads),
        "key_dim": key_dim,
    }
    ranks = spec.q_rank, spec.kv_rank, spec.rope_dim
    if reason := refusal(*ranks, **sizes, rope=bool(spec.rope), token_shift=spec.token_shift):
        raise InputError(f"model.{reason}")


def _check_output(spec: "ModelSpec") -> None:
    kinds = {"output_norm": HEAD_NORMS, "output_gate": HEAD_GATES}
    for name, allowed in kinds.items():
        kind = getattr(spec, name)
        if isinstance(kind, bool):
            continue
        if kind not in allowed:
            raise unknown(f"{name[7:]}", kind, [*allowed, "true", "false"], where=f"model.{name}")
        # `rms` and true are one norm, and equal models are equal values. The keys of trials hold true or false.
        plain = {"none": False, "rms": True, "sigmoid": True}
        _put(spec, name, plain.get(kind, kind))
    if spec.gate_rank is not None:
        whole("gate_rank", spec.gate_rank, least=0)
        if spec.output_gate is False:
            raise InputError("model.gate_rank has no effect without output_gate: say null, or a kind of gate")
    if str(spec.output_gate).endswith("before_norm") and spec.output_norm is False:
        raise InputError(f"model.output_gate {spec.output_gate} has no effect without output_norm: say sigmoid or silu")


def _check_numbers(spec: "ModelSpec") -> None:
    if spec.features not in (None, *FEATURES):
        raise unknown("features", spec.features, FEATURES, where="model.features")
    for name in ("scale", "init_std", "logit_cap", "norm_eps"):
        value = getattr(spec, name)
        if value is None and name != "norm_eps":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise InputError(f"model.{name} must be a positive number, not {value!r}", key=f"model.{name}")
        _put(spec, name, float(value))
    if spec.base_width is not None:
        whole("base_width", spec.base_width, least=1)
    if spec.conv_bias and not spec.conv:
        raise InputError("model.conv_bias has no effect with conv 0: leave it out")
    _check_canon(spec)
    _check_experts(spec)
    if spec.mlp_width is not None:
        whole("mlp_width", spec.mlp_width, least=1)
        if not spec.mlp or spec.block == "mamba":
            raise InputError("model.mlp_width has no effect without an MLP")


def _check_names(spec: "ModelSpec") -> None:
    if spec.block not in ("transformer", "mamba"):
        raise unknown("block", spec.block, ("transformer", "mamba"), where="model.block")
    if spec.backend not in get_args(Backend):
        raise unknown("backend", spec.backend, get_args(Backend), where="model.backend")
    if spec.readout not in ("position", "last"):
        raise unknown("readout", spec.readout, ("position", "last"), where="model.readout")


def _check_kinds(spec: "ModelSpec") -> None:
    """Checks the settings whose values are names: kinds of norms, MLPs and shifts, and projections of a rank."""
    if spec.mlp not in (True, False, *MLPS) or isinstance(spec.mlp, int) != isinstance(spec.mlp, bool):
        raise unknown("mlp", spec.mlp, (*MLPS, "true", "false"), where="model.mlp")
    if spec.mlp == "swiglu":
        _put(spec, "mlp", True)  # equal models are equal values
    if spec.mlp_shift and not spec.mlp:
        raise InputError("model.mlp_shift has no effect without an MLP")
    if spec.experts is not None and (isinstance(spec.mlp, str) or spec.mlp_shift):
        key = "mlp_shift" if spec.mlp_shift else f"mlp {spec.mlp}"
        raise InputError(f"model.experts are SwiGLUs that read x itself, and model.{key} is none: leave one out")
    if spec.norm not in NORMS:
        raise unknown("norm", spec.norm, NORMS, where="model.norm")
    if spec.norm != "rms" and spec.attention_residuals:
        raise InputError("model.attention_residuals has RMS norms of its own: leave it out, or model.norm layer")
    _put(spec, "token_shift", token_shift_in_full(spec.token_shift))
    _check_low_ranks(spec)
    if spec.bonus and (reason := without_bonus(spec.make_rule())):
        raise InputError(f"model.{reason}")


def _check_low_ranks(spec: "ModelSpec") -> None:
    rule = spec.make_rule()
    projected = projections({} if isinstance(rule, OwnModule) else rule.gates, spec.gate_rank)
    _put(spec, "low_rank_bias", biases_in_full(spec.low_rank_bias, projected))
    _put(spec, "low_rank_activation", activations_in_full(spec.low_rank_activation, projected))


def _check_experts(spec: "ModelSpec") -> None:
    if spec.experts is None:
        return
    given = experts_in_full(spec.experts)
    if not spec.mlp or spec.block == "mamba":
        raise InputError("model.experts has no effect without an MLP")
    if "D" in spec.canon:
        raise InputError("model.canon D stands inside of an MLP, and model.experts has many: leave one of them out")
    if given["width"] is not None and spec.mlp_width is not None:
        raise InputError("model.mlp_width has no effect with model.experts.width: leave one of them out")
    # With every default written out, equal models are equal values.
    _put(spec, "experts", given)


def _check_values(spec: "ModelSpec") -> None:
    if spec.value_residual is None:
        return
    # With every default written out, equal models are equal values.
    _put(spec, "value_residual", shares_in_full(spec.value_residual))
    of_first = None
    alike = isinstance(spec.layers, int) and not spec.attention
    for i, block in enumerate([spec] if alike else map(spec.at, range(spec.depth))):
        rule = block.make_rule()
        for name, other in (("beside", "a second v"), ("kv_rank", "a latent in place of v")):
            if getattr(block, name) is not None:
                raise InputError(f"model.value_residual mixes one v, and model.{name} has {other}: leave one out")
        if isinstance(rule, OwnModule):
            raise InputError(f"model.value_residual mixes the v of rules, which module '{rule.name}' does not have")
        if RANK in spec.value_residual and rule.steps > 1:
            raise InputError(
                f"model.value_residual.rank gates one v of each token, and rule '{rule.name}' has {rule.steps}"
            )
        values = rule.steps, block.kv_heads or block.heads, block.head_dims[1]
        of_first = of_first or values
        if values != of_first:
            sizes = [f"{steps} of {heads} heads x {width}" for steps, heads, width in (of_first, values)]
            raise InputError(
                f"model.value_residual adds the values of layer 0 to those of layer {i}, which differ in number: "
                f"{sizes[0]} and {sizes[1]} for each token"
            )


def _check_canon(spec: "ModelSpec") -> None:
    places = places_in_order(spec.canon)
    if "B" in places and isinstance(spec.make_rule(), OwnModule):
        raise InputError("model.canon B stands on q, k and v of a rule, which a module does not have")
    if without := next((place for place in places if place in "CD" and (not spec.mlp or spec.block == "mamba")), None):
        raise InputError(f"model.canon {without} has no effect without an MLP")
    _put(spec, "canon", places)


def _check_layers(spec: "ModelSpec") -> None:
    if isinstance(spec.layers, list | tuple | Mapping):
        _put(spec, "layers", listed(spec.layers, spec.make_rule().name))
    else:
        whole("layers", spec.layers, least=1)
    _check_attention(spec)
    if spec.attention and (spec.bonus or spec.low_rank_activation or spec.low_rank_bias):
        spec.at(next(filter(spec.is_attention, range(spec.depth))))  # attention may have none of these
    name = spec.make_rule().name
    if spec.beside is not None:
        _put(spec, "beside", beside_layer(spec.beside, name))
        spec.second()
    if not isinstance(spec.layers, int):
        # The first layer has no value residual, so that its kind is checked again where another layer has it.
        kinds = {(repr(entry), layer > 0): layer for layer, entry in reversed([*enumerate(spec.layers)])}
        for layer in sorted(kinds.values()):
            spec.at(layer)


def _check_attention(spec: "ModelSpec") -> None:
    if not isinstance(spec.layers, int):
        if spec.attention or spec.window:
            key = "attention" if spec.attention else "window"
            raise InputError(
                f"model.{key} does not go with a list of layers: list {{name: {ATTENTION}, window: ...}} in layers"
            )
        _put(spec, "attention", ())
        return
    if isinstance(spec.attention, str):
        if spec.attention != SECOND_TO_LAST_OF_EIGHT:
            raise unknown("layout", spec.attention, [SECOND_TO_LAST_OF_EIGHT, "[layer, ...]"], where="model.attention")
        if spec.depth < 7:
            raise InputError(f"model.attention {spec.attention} needs at least 7 layers, not {spec.depth}")
    elif not isinstance(spec.attention, list | tuple):
        raise InputError(f"model.attention must be [layer, ...] or {SECOND_TO_LAST_OF_EIGHT}, not {spec.attention!r}")
    else:
        _put(spec, "attention", tuple(spec.attention))
        for layer in spec.attention:
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < spec.depth:
                wrong = InputError(f"model.attention names layer {layer!r}; there are 0 to {spec.depth - 1}")
                raise wrong.with_fields(key="model.attention", allowed=[*map(str, range(spec.depth))])
    if spec.window and not spec.attention:
        raise InputError("model.window has no effect without attention layers")
