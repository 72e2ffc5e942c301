"""Layers of flash-linear-attention (FLA 0.6) that compute what a layer of ours computes: options and weights of each.

A `Form` is one model type of FLA. Its functions translate settings both ways and raise `InputError` where one side has
no equal of the other's setting.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.models.spec import ROPE, ModelSpec
from deltalab.ops.convolution import FEATURES
from deltalab.ops.norm import EPS
from deltalab.rule import UpdateRule
from deltalab.structure import SPLR


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
        """The part with names inside of modules."""
        return replace(self, ours=tuple(ours + x for x in self.ours), theirs=tuple(theirs + x for x in self.theirs))


@dataclass(frozen=True)
class Form:
    """A model type of FLA.

    rule: the rule of ours that it computes. options: its options that change logits, with their defaults.
    config: our model to options; settings: options to settings of `ModelSpec`. Options that neither names must have
    their values in `fixed`.
    parts: the parameters of a layer of our model.
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


def same(ours: str, theirs: str) -> Part:
    return Part((ours,), (theirs,), list, list)


def shaped(ours: str, theirs: str, our_shape: tuple[int, ...], their_shape: tuple[int, ...]) -> Part:
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
            wants = " or ".join("null" if value is None else str(value).lower() for value in values)
            raise InputError(
                f"export to fla: FLA's {model_type} has no equal of model.{name} {given!r}; it needs {wants}"
            )


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
        kind = given.kind if isinstance(given, Gate) else given
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


def own(spec: ModelSpec, kind: str) -> str | None:
    """`ModelSpec.features` for a kind: None where it is the rule's own."""
    return None if features(spec) == kind else kind


def expanded(width: int, by: float) -> int:
    return round(width * by)


def ratio(part: int, whole: int) -> float:
    """part / whole as FLA's expand_k or expand_v, which FLA multiplies by `whole` and rounds down."""
    found = part / whole
    return found if int(whole * found) == part else math.nextafter(found, math.inf)


# Gated delta rule, delta rule, Comba, KDA: heads of `head_dim`, SiLU and unit norm.


def _heads_of(spec: ModelSpec) -> dict[str, Any]:
    key_dim, value_dim = spec.head_dims
    grouped = spec.own_qk_heads != spec.heads
    return {
        "head_dim": key_dim,
        "num_heads": spec.own_qk_heads,
        "num_v_heads": spec.heads if grouped else None,
        "expand_v": ratio(value_dim, key_dim),
        **_conv_of(spec),
    }


def _conv_of(spec: ModelSpec) -> dict[str, Any]:
    return {"use_short_conv": spec.conv > 0, "conv_size": spec.conv or 4}


def _conv_from(options: Mapping[str, Any]) -> int:
    return int(options["conv_size"]) if options["use_short_conv"] else 0


def _heads_from(options: Mapping[str, Any]) -> dict[str, Any]:
    heads = options.get("num_v_heads") or options["num_heads"]
    return {
        "heads": heads,
        "qk_heads": None if heads == options["num_heads"] else options["num_heads"],
        "key_dim": options["head_dim"],
        "expand_v": int(options["head_dim"] * options["expand_v"]) / options["head_dim"],
        "conv": _conv_from(options),
    }


def _gate_of(spec: ModelSpec, model_type: str, *kinds: object) -> bool:
    needs(spec, model_type, output_gate=(*kinds, False))
    return spec.output_gate is not False


def _norm_and_gate(spec: ModelSpec, norm: str = "o_norm") -> list[Part]:
    gate = [same("gate.weight", "g_proj.weight")] if spec.output_gate is not False else []
    return [same("norm.weight", f"{norm}.weight"), *gate, same("out.weight", "o_proj.weight")]


def _decay(options: str = "g") -> list[Part]:
    learned = f"gates.learned.{options}"
    return [
        same(f"gates.project.{options}.weight", "a_proj.weight"),
        same(f"{learned}.log_a", "A_log"),
        same(f"{learned}.dt_bias", "dt_bias"),
    ]


def _beta() -> Part:
    return same("gates.project.beta.weight", "b_proj.weight")


def _gated_deltanet(spec: ModelSpec, *, decays: bool = True) -> dict[str, Any]:
    name = "gated_deltanet"
    plain(spec, name)
    needs_features(spec, name, "unit")
    rule = of_rule(spec, name, **{"g": ("mamba2_decay",)} if decays else {})
    gated = _gate_of(spec, name, True, "silu")
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
    parts=lambda spec: [*projections(spec, QKV, CONVS), *_decay(), _beta(), *_norm_and_gate(spec)],
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
        **_conv_of(spec),
        "use_gate": _gate_of(spec, name, "silu"),
        "allow_neg_eigval": twice(rule.beta, name),  # type: ignore[attr-defined]
    }


def _widths_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """Heads of a layer whose options say the widths of all heads together, as shares of the model's."""
    d_model, heads = options["hidden_size"], options["num_heads"]
    key_dim, value_dim = (expanded(d_model, options[name]) // heads for name in ("expand_k", "expand_v"))
    return {"heads": heads, "key_dim": key_dim, "expand_v": value_dim / key_dim, "conv": _conv_from(options)}


def _from_deltanet(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_widths_from(options),
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
    parts=lambda spec: [*projections(spec, QKV, CONVS), _beta(), *_norm_and_gate(spec)],
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
    parts=lambda spec: [*projections(spec, QKV, CONVS), *_no_decay(spec), _beta(), *_norm_and_gate(spec)],
)
"""DeltaNet as FLA's Gated DeltaNet with a decay of exp(0), for what FLA's DeltaNet lacks: sigmoid gates, shared q, k.

A_log is -inf, so that g = -exp(A_log) softplus(..) = 0; its gradient is 0 too, so training leaves it there.
"""


# Softmax attention, as a model of its own or as layers of another.


def attention(spec: ModelSpec, model_type: str = "transformer") -> dict[str, Any]:
    """The options of FLA's attention layer, whose heads share the model's width."""
    key_dim, value_dim = spec.head_dims
    plain(
        spec,
        model_type,
        qk_norm=(True, False),
        rope=tuple({spec.rope} - {False}) or (True,),
        output_norm=(False,),
        output_gate=(False,),
        kv_heads=(spec.kv_heads,),
        qk_heads=(None, spec.heads),
        conv=(0,),
    )
    needs_features(spec, model_type, "raw")
    if (spec.heads * key_dim, value_dim) != (spec.d_model, key_dim):
        raise InputError(
            f"export to fla: the heads of FLA's attention share the model's width: {spec.heads} of {key_dim} and "
            f"{value_dim} are not {spec.d_model}"
        )
    if spec.qk_norm and (model_type != "transformer" or spec.norm_eps != EPS):
        raise InputError(
            "export to fla: FLA's attention has no equal of model.qk_norm true; it needs false, or attention alone "
            f"with norm_eps {EPS:g}"
        )
    window = getattr(spec.make_rule(), "window")  # noqa: B009
    return {
        "num_heads": spec.heads,
        "num_kv_heads": spec.kv_heads or spec.heads,
        "qkv_bias": False,
        "window_size": window or None,
        "rope_theta": ROPE if spec.rope is True else float(spec.rope),
        **({"qk_norm": spec.qk_norm} if model_type == "transformer" else {}),
    }


def from_attention(options: Mapping[str, Any], d_model: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rule and the settings of a layer of attention."""
    heads = options["num_heads"]
    shared = options.get("num_kv_heads") or heads
    base = float(options.get("rope_theta", ROPE))
    rule = {"name": "attention", "window": options.get("window_size") or 0}
    return rule, {
        "heads": heads,
        "kv_heads": None if shared == heads else shared,
        "qk_heads": None,
        "key_dim": d_model // heads,
        "expand_v": 1.0,
        "conv": 0,
        "rope": True if base == ROPE else base,
        "qk_norm": bool(options.get("qk_norm", False)),
        "output_norm": False,
        "output_gate": False,
    }


def _from_transformer(options: Mapping[str, Any]) -> dict[str, Any]:
    rule, settings = from_attention(options, options["hidden_size"])
    return {"rule": rule, **settings}


def attention_parts(spec: ModelSpec) -> list[Part]:
    norms = [same(f"{x}_norm.weight", f"{x}_norm.weight") for x in "qk"] if spec.qk_norm else []
    return [*projections(spec, QKV, CONVS), *norms, same("out.weight", "o_proj.weight")]


TRANSFORMER = Form(
    "transformer",
    "TransformerForCausalLM",
    "attention",
    options={
        "num_heads": 32,
        "num_kv_heads": None,
        "qkv_bias": False,
        "qk_norm": False,
        "window_size": None,
        "rope_theta": ROPE,
    },
    fixed={"qkv_bias": False},
    config=attention,
    settings=_from_transformer,
    parts=attention_parts,
)

# Comba, without what FLA computes in another way.


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
    return {**_heads_of(spec), "use_output_gate": _gate_of(spec, name, "silu")}


def _from_comba(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_heads_from(options),
        "rule": {"name": "comba", "b": {"const": {"value": 1.0}}, "d": {"const": {"value": 0.0}}},
        "output_gate": "silu" if options["use_output_gate"] else False,
    }


COMBA = Form(
    "comba",
    "CombaForCausalLM",
    "comba",
    options={
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
        *_norm_and_gate(spec),
    ],
    # FLA's layer has these, but its model does not pass them on.
    idle=("use_output_correction", "use_inner_decay", "correction_factor"),
)


# KDA: FLA's decay has one a for each head and a projection through head_v_dim channels.


def _kda(spec: ModelSpec) -> dict[str, Any]:
    name, (_, value_dim) = "kda", spec.head_dims
    plain(spec, name, gate_rank=(value_dim,), output_gate=(True,))
    needs_features(spec, name, "unit")
    rule = of_rule(spec, name, g=("mamba2_decay",))
    return {**_heads_of(spec), "allow_neg_eigval": twice(rule.beta, name)}  # type: ignore[attr-defined]


def _from_kda(options: Mapping[str, Any]) -> dict[str, Any]:
    heads = _heads_from(options)
    return {
        **heads,
        "rule": {"name": "kda", "beta": beta_of(options["allow_neg_eigval"])},
        "gate_rank": int(options["head_dim"] * options["expand_v"]),
        "low_rank_bias": True,
    }


def _kda_decay(spec: ModelSpec) -> list[Part]:
    key_dim, value_dim = spec.head_dims

    def factors(given: Sequence[Tensor]) -> Sequence[Tensor]:
        """W = W_2 W_1 with the rank of FLA's projection."""
        u, s, v = torch.linalg.svd(given[0].double(), full_matrices=False)
        if (s[value_dim:] > 1e-5 * s[0]).any():
            raise InputError(
                f"export to fla: FLA's kda projects its decay through {value_dim} channels (the width of a head's "
                f"values), and the projection of g has a higher rank"
            )
        root = F.pad(s[:value_dim], (0, max(0, value_dim - len(s)))).sqrt()
        first, second = (F.pad(x[:value_dim], (0, 0, 0, max(0, value_dim - len(s)))) for x in (v, u.t()))
        return [(first * root[:, None]).to(given[0].dtype), (second.t() * root).to(given[0].dtype)]

    def one_a(given: Sequence[Tensor]) -> Sequence[Tensor]:
        if not torch.equal(given[0], given[0][:, :1].expand_as(given[0])):
            raise InputError(
                "export to fla: FLA's kda has one a for each head, and these differ from channel to channel"
            )
        return [given[0][:, 0]]

    bias = torch.zeros(spec.heads * value_dim)
    return [
        Part(
            ("gates.project.g.weight",),
            ("f_proj.0.weight", "f_proj.1.weight"),
            factors,
            lambda given: [(given[1].double() @ given[0].double()).float()],
        ),
        Part(("gates.learned.g.log_a",), ("A_log",), one_a, lambda given: [given[0][:, None].repeat(1, key_dim)]),
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
    fixed={"safe_gate": False, "lower_bound": None},
    config=_kda,
    settings=_from_kda,
    parts=lambda spec: [*projections(spec, QKV, CONVS), _beta(), *_kda_decay(spec)],
)


# Linear attention without and with decay: q and k as they are, or through SiLU.


def _maps_of(spec: ModelSpec, model_type: str) -> dict[str, Any]:
    """FLA's convolution has SiLU; without one, its feature map is that of q and k alone."""
    kinds = ("silu",) if spec.conv else ("raw", "silu_qk")
    needs_features(spec, model_type, *kinds)
    return {**_conv_of(spec), "feature_map": "swish" if features(spec) == "silu_qk" else None}


def _maps_from(options: Mapping[str, Any]) -> dict[str, Any]:
    given = options["feature_map"]
    if given not in (None, "swish", "silu") or (given and options["use_short_conv"]):
        raise InputError(
            f"option 'feature_map' {given!r} has no equal here; it needs null, or swish without convolution"
        )
    return {"features": "silu" if options["use_short_conv"] else "silu_qk" if given else "raw"}


def _shares_of(spec: ModelSpec) -> dict[str, Any]:
    key_dim, value_dim = spec.head_dims
    return {
        "num_heads": spec.heads,
        "expand_k": ratio(spec.heads * key_dim, spec.d_model),
        "expand_v": ratio(spec.heads * value_dim, spec.d_model),
    }


def _swish_parts(spec: ModelSpec) -> list[Part]:
    return _norm_and_gate(spec, "g_norm_swish_gate" if spec.output_gate else "g_norm")


def _gla(spec: ModelSpec) -> dict[str, Any]:
    name = "gla"
    plain(spec, name, qk_heads=(None, spec.heads))
    rule = of_rule(spec, name, g=("gla_decay",))
    numbers = dict(rule.g.options)  # type: ignore[attr-defined]
    if numbers["tau"] != 16.0 or numbers["rank"] != 16.0:
        raise InputError(f"export to fla: FLA's gla has no equal of {rule.name}.g {rule.g}; it needs tau and rank 16")  # type: ignore[attr-defined]
    return {**_shares_of(spec), **_maps_of(spec, name), "use_output_gate": _gate_of(spec, name, "silu")}


def _from_gla(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_widths_from(options),
        **_maps_from(options),
        "rule": "gla",
        "low_rank_bias": True,
        "output_gate": "silu" if options["use_output_gate"] else False,
    }


def _gla_decay(spec: ModelSpec) -> list[Part]:
    key_dim, _ = spec.head_dims
    bias = torch.zeros(spec.heads * key_dim)
    return [
        same("gates.project.g.0.weight", "gk_proj.0.weight"),
        same("gates.project.g.1.weight", "gk_proj.1.weight"),
        same("gates.project.g.1.bias", "gk_proj.1.bias")
        if spec.low_rank_bias
        else fixed("gk_proj.1.bias", bias, "the decay has no bias without low_rank_bias"),
    ]


GLA = Form(
    "gla",
    "GLAForCausalLM",
    "gla",
    options={
        "num_heads": 4,
        "num_kv_heads": None,
        "expand_k": 0.5,
        "expand_v": 1.0,
        "use_short_conv": False,
        "conv_size": 4,
        "feature_map": None,
        "use_output_gate": True,
        "clamp_min": None,
        "use_gk": True,
        "use_gv": False,
        "fuse_norm": True,
    },
    fixed={"num_kv_heads": None, "clamp_min": None, "use_gk": True, "use_gv": False, "fuse_norm": True},
    config=_gla,
    settings=_from_gla,
    parts=lambda spec: [*projections(spec, QKV, CONVS), *_gla_decay(spec), *_swish_parts(spec)],
)


def _retnet(spec: ModelSpec) -> dict[str, Any]:
    name = "retnet"
    plain(spec, name, qk_heads=(None, spec.heads), kv_heads=(spec.kv_heads,), rope=(True,), conv=(0,))
    of_rule(spec, name, g=("retnet_decay",))
    return {
        **_shares_of(spec),
        **_maps_of(spec, name),
        "num_kv_heads": spec.kv_heads,
        "use_output_gate": _gate_of(spec, name, "silu"),
    }


def _from_retnet(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_widths_from(options),
        **_maps_from(options),
        "rule": "retnet",
        "rope": True,
        "kv_heads": options["num_kv_heads"],
        "output_gate": "silu" if options["use_output_gate"] else False,
    }


RETNET = Form(
    "retnet",
    "RetNetForCausalLM",
    "retnet",
    options={
        "hidden_ratio": 2,
        "num_heads": 8,
        "num_kv_heads": None,
        "expand_k": 1.0,
        "expand_v": 2.0,
        "use_short_conv": False,
        "feature_map": None,
        "use_output_gate": True,
        "fuse_norm": True,
    },
    # FLA's layer has a short convolution, but its model does not pass the option on.
    fixed={"use_short_conv": False, "fuse_norm": True},
    config=_retnet,
    settings=_from_retnet,
    parts=lambda spec: [*projections(spec, QKV, CONVS), *_swish_parts(spec)],
    idle=("conv_size",),
)


def _linear_attention(spec: ModelSpec) -> dict[str, Any]:
    name = "linear_attn"
    plain(spec, name, qk_heads=(None, spec.heads), kv_heads=(spec.kv_heads,), conv=(0,), output_gate=(False,))
    needs_features(spec, name, "raw")
    return {**_shares_of(spec), "num_kv_heads": spec.kv_heads, "feature_map": "identity"}


LINEAR_ATTENTION = Form(
    "linear_attn",
    "LinearAttentionForCausalLM",
    "linear_attention",
    options={
        "num_heads": 4,
        "num_kv_heads": None,
        "expand_k": 1.0,
        "expand_v": 1.0,
        "feature_map": "elementwise_product",
        "tie_feature_map_qk": False,
        "norm_q": False,
        "norm_k": False,
        "norm_feature_map": False,
    },
    fixed={"feature_map": "identity", "norm_q": False, "norm_k": False, "norm_feature_map": False},
    config=_linear_attention,
    settings=lambda options: {
        **_widths_from({**options, "use_short_conv": False}),
        "rule": "linear_attention",
        "features": "raw",
        "kv_heads": options["num_kv_heads"],
        "output_gate": False,
    },
    parts=lambda spec: [*projections(spec, QKV, CONVS), *_norm_and_gate(spec, "norm")],
    idle=("tie_feature_map_qk",),
)


def _hgrn2(spec: ModelSpec) -> dict[str, Any]:
    name, (key_dim, value_dim) = "hgrn2", spec.head_dims
    plain(
        spec, name, qk_heads=(None, spec.heads), conv=(0,), output_norm=("rms_all",), output_gate=(False,),
        norm_eps=(EPS,),
    )  # fmt: skip
    needs_features(spec, name, "silu_qk")
    of_rule(spec, name, g=("metala_decay",))
    if (spec.heads * key_dim, value_dim) != (spec.d_model, key_dim):
        raise InputError(
            f"export to fla: the heads of FLA's hgrn2 share the model's width: {spec.heads} of {key_dim} and "
            f"{value_dim} are not {spec.d_model}"
        )
    return {"num_heads": spec.heads, "expand_ratio": key_dim, "use_lower_bound": False}


def _from_hgrn2(options: Mapping[str, Any]) -> dict[str, Any]:
    width = options["expand_ratio"] or options["hidden_size"] // options["num_heads"]
    if options["hidden_size"] % width:
        raise InputError(f"option 'expand_ratio' {width} has no equal here where it does not divide hidden_size")
    return {
        "heads": options["hidden_size"] // width,
        "key_dim": width,
        "conv": 0,
        "rule": "hgrn2",
        "features": "silu_qk",
        "output_norm": "rms_all",
        "output_gate": False,
    }


HGRN2 = Form(
    "hgrn2",
    "HGRN2ForCausalLM",
    "hgrn2",
    options={
        "num_heads": None,
        "expand_ratio": 128,
        "use_short_conv": False,
        "conv_size": 4,
        "use_lower_bound": True,
    },
    # The norm of its heads has this eps whatever the option says.
    fixed={"use_short_conv": False, "use_lower_bound": False, "norm_eps": EPS},
    config=_hgrn2,
    settings=_from_hgrn2,
    parts=lambda spec: [
        *projections(spec, ("q_proj", None, "i_proj"), CONVS),
        same("gates.project.g.weight", "f_proj.weight"),
        *_norm_and_gate(spec, "g_norm"),
    ],
    idle=("conv_size",),
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
        "use_output_gate": _gate_of(spec, name, "silu"),
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
    return [*projections(spec, QKV, CONVS), *(_decay() if decays else []), _beta(), *_norm_and_gate(spec)]


DELTA_PRODUCT = Form(
    "gated_deltaproduct",
    "GatedDeltaProductForCausalLM",
    "delta_product",
    options={
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

FORMS = (
    GATED_DELTANET, DELTANET, UNDECAYED, COMBA, KDA, GLA, RETNET, HGRN2, LINEAR_ATTENTION, DELTA_PRODUCT, TRANSFORMER,
)  # fmt: skip
WHY_NOT: dict[str, str] = {}
