"""Describes a model type of flash-linear-attention (FLA 0.6) as a `Form`, and has the helpers for writing forms.

The functions of a form translate options and weights both ways. They raise `InputError` if one side has no equal of a
setting of the other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.models.spec import ModelSpec
from deltalab.ops.fused.convolution import FEATURES
from deltalab.rule import UpdateRule


@dataclass(frozen=True)
class Part:
    """Parameters of our layer, and the parameters of FLA's layer that have the same effect.

    Attributes:
        ours: Names in `RuleLayer`, empty if FLA's parameters have a fixed value.
        theirs: Names in FLA's layer, empty if our parameters have no effect.
        split: Turns our values into FLA's. Raises `InputError` if no values of FLA's parameters are equivalent.
        join: Turns FLA's values into ours. Raises `InputError` if no values of our parameters are equivalent.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    split: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor]], Sequence[Tensor]]

    def within(self, ours: str, theirs: str) -> "Part":
        """Returns the part with the prefix `ours` before our names and the prefix `theirs` before FLA's."""
        return replace(self, ours=tuple(ours + x for x in self.ours), theirs=tuple(theirs + x for x in self.theirs))


@dataclass(frozen=True)
class Form:
    """A model type of FLA.

    Attributes:
        model_type: FLA's name of the type.
        architecture: FLA's class.
        rule: The rule of ours that the type computes.
        options: The options that change logits, with their defaults.
        fixed: The options for which our model can reproduce only one value, with this value.
        config: Turns our model into options.
        settings: Turns options into settings of `ModelSpec`.
        parts: Lists the parameters of a layer of our model.
        takes: Whether a layer is of this type, where a rule has several; the others' refusals would say nothing of it.
        idle: The options that FLA's model ignores.
        block: The block of `ModelSpec`.
        hybrid: Whether single layers may be softmax attention, by FLA's option `attn`.
        trunk: FLA's name of the model without its output matrix.
        last_norm: FLA's name of the norm before the output matrix.
        mixer: FLA's name of a block's mixer; the name of the norm before it begins with it, but for mamba blocks.
        own: The settings outside of mixers that `config` checks, in the place of the usual checks.
        block_parts: Lists the parameters of a block but those of its mixer; None for RMS norms and SwiGLU.
        end_parts: Lists those outside of the blocks but the embedding and the last norm's weights, with FLA's names in
            its trunk.
        mlp_width: The width of the MLP that FLA gives a width of the model and a `hidden_ratio`.
        newer: Turns the weights of a checkpoint of an older FLA into those of FLA 0.6, by name.
        needs_weights: Why an untrained model of ours has no equal; "" if it has one.
    """

    model_type: str
    architecture: str
    rule: str
    options: Mapping[str, Any]
    fixed: Mapping[str, Any]
    config: Callable[[ModelSpec], dict[str, Any]]
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    parts: Callable[[ModelSpec], list[Part]]
    takes: Callable[[ModelSpec], bool] = lambda spec: True
    idle: tuple[str, ...] = ()
    block: str = "transformer"
    hybrid: bool = True
    trunk: str = "model"
    last_norm: str = "norm"
    mixer: str = "attn"
    own: tuple[str, ...] = ()
    block_parts: Callable[[], list[Part]] | None = None
    end_parts: Callable[[ModelSpec], list[Part]] = lambda spec: []
    mlp_width: Callable[[int, float | None], int] = lambda d_model, ratio: swiglu_width(d_model, ratio)
    newer: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda weights: weights
    needs_weights: str = ""


def same(ours: str, theirs: str) -> Part:
    """Returns the part for a parameter that both sides have in the same shape."""
    return Part((ours,), (theirs,), list, list)


def swiglu_width(d_model: int, ratio: float | None) -> int:
    """Returns the width of FLA's SwiGLU: 2/3 of the ratio, rounded up to a multiple of 256."""
    return -(-int(d_model * (ratio or 4) * 2 / 3) // 256) * 256


def shaped(ours: str, theirs: str, our_shape: tuple[int, ...], their_shape: tuple[int, ...]) -> Part:
    """Returns the part for a parameter that the two sides have in different shapes."""
    return Part((ours,), (theirs,), lambda x: [x[0].reshape(their_shape)], lambda x: [x[0].reshape(our_shape)])


def fixed(theirs: str, value: Tensor, why: str) -> Part:
    """Returns the part for a parameter of FLA that our layer lacks.

    Args:
        theirs: The name of the parameter in FLA's layer.
        value: The value with which FLA's layer equals ours.
        why: What our layer lacks, for the error if a checkpoint has another value.
    """

    def join(values: Sequence[Tensor]) -> Sequence[Tensor]:
        if not torch.equal(values[0].float(), value.expand(values[0].shape)):
            raise InputError(f"{theirs} is not {value.flatten()[0].item():g} everywhere: {why}")
        return []

    return Part((), (theirs,), lambda _: [value], join)


def idle(theirs: str, value: Tensor) -> Part:
    """Returns the part for a parameter of FLA without effect, with the value that an exported model gets."""
    return Part((), (theirs,), lambda _: [value], lambda _: [])


def projections(spec: ModelSpec, theirs: Sequence[str | None], taps: Sequence[str]) -> list[Part]:
    """Returns the parts for q, k and v, for each of which FLA has a matrix and a convolution.

    Args:
        spec: Our layer.
        theirs: FLA's names of the matrices of q, k and v; None for a matrix that FLA does not have.
        taps: FLA's names of the three convolutions.
    """
    widths, d_model = channels(spec), spec.d_model
    sizes = {name: size for name, size in zip(theirs, widths, strict=True) if name is not None}

    def split(ours: Sequence[Tensor]) -> Sequence[Tensor]:
        return [matrix for name, matrix in zip(theirs, ours[0].split(widths), strict=True) if name is not None]

    def join(values: Sequence[Tensor]) -> Sequence[Tensor]:
        matrices = dict(zip(sizes, values, strict=True))
        unread = values[0].new_zeros
        return [torch.cat([matrices[n] if n else unread(w, d_model) for n, w in zip(theirs, widths, strict=True)])]

    parts = [Part(("qkv.weight",), tuple(f"{name}.weight" for name in sizes), split, join)]
    if spec.conv:
        parts.append(
            Part(
                ("conv",),
                tuple(f"{name}.weight" for name in taps),
                lambda ours: [conv.t().unsqueeze(1).contiguous() for conv in ours[0].split(widths, dim=1)],
                lambda values: [torch.cat([conv.squeeze(1) for conv in values]).t().contiguous()],
            )
        )
    return parts


def channels(spec: ModelSpec) -> list[int]:
    """Returns the widths of q, k and v, each over all heads and steps together."""
    rule, (key_dim, value_dim) = spec.make_rule(), spec.head_dims
    v_heads = spec.kv_heads or spec.heads
    k_heads = min(spec.own_qk_heads, v_heads)
    return [spec.own_qk_heads * key_dim, rule.steps * k_heads * key_dim, rule.steps * v_heads * value_dim]


QKV = ("q_proj", "k_proj", "v_proj")
CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")


def needs(spec: ModelSpec, model_type: str, **allowed: tuple[object, ...]) -> None:
    """Checks settings of our model that FLA's model type restricts.

    Raises:
        InputError: If a setting has none of its allowed values.
    """
    for name, values in allowed.items():
        value = getattr(spec, name)
        if value not in values:
            add = " or ".join(f"`--set model.{name}={_yaml(other)}`" for other in values)
            raise InputError(
                f"export to fla: FLA's {model_type} has no equal of model.{name} {_yaml(value)}; add {add}, and the "
                "model starts untrained"
            )


def _yaml(value: object) -> str:
    """The text of a value in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def plain(spec: ModelSpec, model_type: str, **others: tuple[object, ...]) -> None:
    """Checks, as `needs` does, the settings that FLA restricts in layers that normalize each head's output.

    Args:
        spec: Our layer.
        model_type: FLA's model type.
        **others: Allowed values by setting, which add to or replace the usual allowed values.
    """
    allowed: dict[str, tuple[object, ...]] = {
        "qk_norm": (False,),
        "rope": (False,),
        "rope_dim": (None,),
        "q_rank": (None,),
        "kv_rank": (None,),
        "token_shift": (False,),
        "output_norm": (True,),
        "gate_rank": (None,),
        "kv_heads": (None, spec.heads),
        "scale": (None,),
        "conv_bias": (False,),
        "skip": (False,),
        **others,
    }
    needs(spec, model_type, **allowed)


def of_rule(spec: ModelSpec, model_type: str, **allowed: tuple[object, ...]) -> UpdateRule:
    """Returns the rule of a layer, and checks the knobs that FLA's model type restricts.

    Args:
        spec: Our layer.
        model_type: FLA's model type.
        **allowed: The allowed values of knobs. For a gate, the name of a kind allows all gates of the kind.

    Raises:
        InputError: If a knob has none of its allowed values.
    """
    rule = spec.make_rule()
    for name, values in allowed.items():
        value = getattr(rule, name)
        kind = value.kind if isinstance(value, Gate) else str(value)
        if value not in values and kind not in values:
            add = " or ".join(f"`--set rule.{name}={setting(other)}`" for other in values)
            raise InputError(
                f"export to fla: FLA's {model_type} has no equal of {rule.name}.{name} {value}; add {add}, and the "
                "model starts untrained"
            )
    return rule


def setting(value: object) -> str:
    """Returns the text of a knob's value in YAML.

    Examples:
        >>> from deltalab import gates
        >>> setting(gates.const(1)), setting(gates.sigmoid()), setting("mamba2_decay"), setting(True)
        ('1', 'sigmoid', 'mamba2_decay', 'true')
    """
    if not isinstance(value, Gate):
        return _yaml(value)
    return f"{value.low:g}" if value.kind == "const" else value.kind


def twice(beta: Gate, model_type: str) -> bool:
    """Returns FLA's option `allow_neg_eigval`: whether beta is 2 sigmoid(W x) instead of sigmoid(W x).

    Raises:
        InputError: If beta is neither of the two.
    """
    most = dict(beta.options).get("max", 1.0)
    if beta.kind != "sigmoid" or most not in (1.0, 2.0):
        raise InputError(f"export to fla: FLA's {model_type} has no equal of beta {beta}; it needs sigmoid(max=1) or 2")
    return most == 2.0


def beta_of(twice: bool) -> dict[str, dict[str, float]]:
    """Returns our beta for FLA's option `allow_neg_eigval`."""
    return {"sigmoid": {"max": 2.0 if twice else 1.0}}


def features(spec: ModelSpec) -> str:
    """Returns the name in `FEATURES` of the maps that the model applies to q, k and v."""
    if spec.features is not None:
        return spec.features
    rule = spec.make_rule()
    silu_of_v = rule.silu_of_v and rule.features != "raw"
    return next(kind for kind, value in FEATURES.items() if value == (rule.features, silu_of_v))


def needs_features(spec: ModelSpec, model_type: str, *kinds: str) -> None:
    """Checks that the model's features are of one of the kinds.

    Raises:
        InputError: If the features are of another kind.
    """
    if (kind := features(spec)) not in kinds:
        conv = f" where conv is {spec.conv}" if model_type in ("gla", "retnet") else ""
        raise InputError(
            f"export to fla: FLA's {model_type} has no equal of features {kind!r}{conv}; "
            f"set model.features={' or '.join(kinds)}"
        )


def expanded(width: int, by: float) -> int:
    """Returns a multiple of a width, as a whole number."""
    return round(width * by)


def ratio(part: int, whole: int) -> float:
    """Returns part / whole as FLA's expand_k or expand_v, which FLA multiplies by `whole` and rounds down to `part`."""
    quotient = part / whole
    return quotient if int(whole * quotient) == part else math.nextafter(quotient, math.inf)


def conv_of(spec: ModelSpec) -> dict[str, Any]:
    """Returns FLA's options of the short convolution."""
    return {"use_short_conv": spec.conv > 0, "conv_size": spec.conv or 4}


def conv_from(options: Mapping[str, Any]) -> int:
    """Returns our `conv` for FLA's options of the short convolution."""
    return int(options["conv_size"]) if options["use_short_conv"] else 0


def gate_of(spec: ModelSpec, model_type: str, *kinds: object) -> bool:
    """Returns whether the layer has an output gate, which must be of one of the kinds.

    Raises:
        InputError: If the output gate is of another kind.
    """
    needs(spec, model_type, output_gate=(*kinds, False))
    return spec.output_gate is not False


def norm_and_gate(spec: ModelSpec, norm: str = "o_norm") -> list[Part]:
    """Returns the parts for the norm of the output, its gate if there is one, and the output matrix."""
    gate = [same("gate.weight", "g_proj.weight")] if spec.output_gate is not False else []
    return [same("norm.weight", f"{norm}.weight"), *gate, same("out.weight", "o_proj.weight")]


def widths_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our settings of heads for FLA's options, which give total widths as shares of the model's width."""
    d_model, heads = options["hidden_size"], options["num_heads"]
    key_dim, value_dim = (expanded(d_model, options[name]) // heads for name in ("expand_k", "expand_v"))
    return {"heads": heads, "key_dim": key_dim, "expand_v": value_dim / key_dim, "conv": conv_from(options)}


def shares_of(spec: ModelSpec) -> dict[str, Any]:
    """Returns FLA's options for the total widths of all heads, as shares of the model's width."""
    key_dim, value_dim = spec.head_dims
    return {
        "num_heads": spec.heads,
        "expand_k": ratio(spec.heads * key_dim, spec.d_model),
        "expand_v": ratio(spec.heads * value_dim, spec.d_model),
    }
