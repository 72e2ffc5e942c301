"""Layers of flash-linear-attention (FLA 0.6) that compute what a layer of ours computes: options and weights of each.

A `Form` is one model type of FLA. Its functions translate settings both ways and raise `InputError` where one side has
no equal of the other's setting.
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
from deltalab.ops.convolution import FEATURES
from deltalab.rule import UpdateRule


@dataclass(frozen=True)
class Part:
    """Parameters of our layer as parameters of FLA's.

    ours: names in `RuleLayer`, none where FLA's have a fixed value. theirs: names in FLA's layer, none where ours has
    no effect. split: values of ours to values of theirs; join: the way back. Either raises `InputError` where no value
    of the other side is equal.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    split: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor]], Sequence[Tensor]]

    def within(self, ours: str, theirs: str) -> "Part":
        """The part with these prefixes before its names."""
        return replace(self, ours=tuple(ours + x for x in self.ours), theirs=tuple(theirs + x for x in self.theirs))


@dataclass(frozen=True)
class Form:
    """A model type of FLA.

    rule: the rule of ours that it computes. options: its options that change logits, with their defaults.
    config: our model to options; settings: options to settings of `ModelSpec`. Options that neither names must have
    their values in `fixed`.
    parts: the parameters of a layer of our model. idle: options that FLA's model ignores. block: of `ModelSpec`.
    """

    model_type: str
    architecture: str
    rule: str
    options: Mapping[str, Any]
    fixed: Mapping[str, Any]
    config: Callable[[ModelSpec], dict[str, Any]]
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    parts: Callable[[ModelSpec], list[Part]]
    idle: tuple[str, ...] = ()
    block: str = "transformer"


def same(ours: str, theirs: str) -> Part:
    """A parameter that both have in one form."""
    return Part((ours,), (theirs,), list, list)


def shaped(ours: str, theirs: str, our_shape: tuple[int, ...], their_shape: tuple[int, ...]) -> Part:
    """A parameter whose values stand in another shape."""
    return Part((ours,), (theirs,), lambda x: [x[0].reshape(their_shape)], lambda x: [x[0].reshape(our_shape)])


def fixed(theirs: str, value: Tensor, why: str) -> Part:
    """A parameter of FLA that ours lacks. why: what ours lacks, for the error where a checkpoint has another value."""

    def join(given: Sequence[Tensor]) -> Sequence[Tensor]:
        if not torch.equal(given[0].float(), value.expand(given[0].shape)):
            raise InputError(f"{theirs} is not {value.flatten()[0].item():g} everywhere: {why}")
        return []

    return Part((), (theirs,), lambda _: [value], join)


def idle(theirs: str, value: Tensor) -> Part:
    """A parameter of FLA that has no effect. value: what an exported model gets."""
    return Part((), (theirs,), lambda _: [value], lambda _: [])


def projections(spec: ModelSpec, theirs: Sequence[str | None], taps: Sequence[str]) -> list[Part]:
    """q, k and v: FLA has a matrix and a convolution for each. theirs: None for one that FLA does not read."""
    widths, d_model = channels(spec), spec.d_model
    sizes = {name: size for name, size in zip(theirs, widths, strict=True) if name is not None}

    def split(given: Sequence[Tensor]) -> Sequence[Tensor]:
        return [part for name, part in zip(theirs, given[0].split(widths), strict=True) if name is not None]

    def join(given: Sequence[Tensor]) -> Sequence[Tensor]:
        found = dict(zip(sizes, given, strict=True))
        unread = given[0].new_zeros
        return [torch.cat([found[n] if n else unread(w, d_model) for n, w in zip(theirs, widths, strict=True)])]

    parts = [Part(("qkv.weight",), tuple(f"{name}.weight" for name in sizes), split, join)]
    if spec.conv:
        parts.append(
            Part(
                ("conv",),
                tuple(f"{name}.weight" for name in taps),
                lambda given: [part.t().unsqueeze(1).contiguous() for part in given[0].split(widths, dim=1)],
                lambda given: [torch.cat([part.squeeze(1) for part in given]).t().contiguous()],
            )
        )
    return parts


def channels(spec: ModelSpec) -> list[int]:
    """The widths of q, k and v."""
    rule, (key_dim, value_dim) = spec.make_rule(), spec.head_dims
    v_heads = spec.kv_heads or spec.heads
    k_heads = min(spec.own_qk_heads, v_heads)
    return [spec.own_qk_heads * key_dim, rule.steps * k_heads * key_dim, rule.steps * v_heads * value_dim]


QKV = ("q_proj", "k_proj", "v_proj")
CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")


def needs(spec: ModelSpec, model_type: str, **allowed: tuple[object, ...]) -> None:
    """Raises `InputError` for a setting whose value is none of the allowed."""
    for name, values in allowed.items():
        given = getattr(spec, name)
        if given not in values:
            add = " or ".join(f"`--set model.{name}={_yaml(value)}`" for value in values)
            raise InputError(
                f"export to fla: FLA's {model_type} has no equal of model.{name} {_yaml(given)}; add {add}, and the "
                "model starts untrained"
            )


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def plain(spec: ModelSpec, model_type: str, **others: tuple[object, ...]) -> None:
    """`needs` of what no layer of FLA with SiLU features and a norm of each head's output has."""
    allowed: dict[str, tuple[object, ...]] = {
        "qk_norm": (False,),
        "rope": (False,),
        "token_shift": (False,),
        "output_norm": (True,),
        "gate_rank": (None,),
        "kv_heads": (None, spec.heads),
        "scale": (None,),
        **others,
    }
    needs(spec, model_type, **allowed)


def of_rule(spec: ModelSpec, model_type: str, **allowed: tuple[object, ...]) -> UpdateRule:
    """The rule. Raises `InputError` for a knob whose value is none of the allowed: a gate's kind, or what it equals."""
    rule = spec.make_rule()
    for name, values in allowed.items():
        given = getattr(rule, name)
        kind = given.kind if isinstance(given, Gate) else str(given)
        if given not in values and kind not in values:
            wants = " or ".join(map(str, values))
            raise InputError(
                f"export to fla: FLA's {model_type} has no equal of {rule.name}.{name} {given}; it needs {wants}"
            )
    return rule


def twice(beta: Gate, model_type: str) -> bool:
    """FLA's allow_neg_eigval: whether beta is 2 sigmoid(W x)."""
    most = dict(beta.options).get("max", 1.0)
    if beta.kind != "sigmoid" or most not in (1.0, 2.0):
        raise InputError(f"export to fla: FLA's {model_type} has no equal of beta {beta}; it needs sigmoid(max=1) or 2")
    return most == 2.0


def beta_of(twice: bool) -> dict[str, dict[str, float]]:
    return {"sigmoid": {"max": 2.0 if twice else 1.0}}


def features(spec: ModelSpec) -> str:
    """The kind of `FEATURES` that the model's q, k and v get."""
    if spec.features is not None:
        return spec.features
    rule = spec.make_rule()
    silu_of_v = rule.silu_of_v and rule.features != "raw"
    return next(kind for kind, value in FEATURES.items() if value == (rule.features, silu_of_v))


def needs_features(spec: ModelSpec, model_type: str, *kinds: str) -> None:
    if (given := features(spec)) not in kinds:
        conv = f" where conv is {spec.conv}" if model_type in ("gla", "retnet") else ""
        raise InputError(
            f"export to fla: FLA's {model_type} has no equal of features {given!r}{conv}; "
            f"set model.features={' or '.join(kinds)}"
        )


def expanded(width: int, by: float) -> int:
    return round(width * by)


def ratio(part: int, whole: int) -> float:
    """part / whole as FLA's expand_k or expand_v, which FLA multiplies by `whole` and rounds down."""
    found = part / whole
    return found if int(whole * found) == part else math.nextafter(found, math.inf)


def conv_of(spec: ModelSpec) -> dict[str, Any]:
    return {"use_short_conv": spec.conv > 0, "conv_size": spec.conv or 4}


def conv_from(options: Mapping[str, Any]) -> int:
    return int(options["conv_size"]) if options["use_short_conv"] else 0


def gate_of(spec: ModelSpec, model_type: str, *kinds: object) -> bool:
    needs(spec, model_type, output_gate=(*kinds, False))
    return spec.output_gate is not False


def norm_and_gate(spec: ModelSpec, norm: str = "o_norm") -> list[Part]:
    gate = [same("gate.weight", "g_proj.weight")] if spec.output_gate is not False else []
    return [same("norm.weight", f"{norm}.weight"), *gate, same("out.weight", "o_proj.weight")]


def widths_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of a layer whose options say the widths of all heads together, as shares of the model's."""
    d_model, heads = options["hidden_size"], options["num_heads"]
    key_dim, value_dim = (expanded(d_model, options[name]) // heads for name in ("expand_k", "expand_v"))
    return {"heads": heads, "key_dim": key_dim, "expand_v": value_dim / key_dim, "conv": conv_from(options)}


def shares_of(spec: ModelSpec) -> dict[str, Any]:
    key_dim, value_dim = spec.head_dims
    return {
        "num_heads": spec.heads,
        "expand_k": ratio(spec.heads * key_dim, spec.d_model),
        "expand_v": ratio(spec.heads * value_dim, spec.d_model),
    }
