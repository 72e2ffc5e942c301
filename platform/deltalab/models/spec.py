"""A model as data: its rule, its sizes and the layout of its layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeAlias

from deltalab.errors import InputError, unknown
from deltalab.ops.convolution import FEATURES
from deltalab.ops.norm import EPS, HEAD_GATES, HEAD_NORMS
from deltalab.registry import get_rule
from deltalab.rule import UpdateRule

SECOND_TO_LAST_OF_EIGHT = "second_to_last_of_every_eight"

ATTENTION = "attention"
"""The rule of the layers that `ModelSpec.attention` lists."""

RULE = "rule"
"""An entry of `ModelSpec.layers` that stands for `ModelSpec.rule`."""

ROPE = 10000.0
"""The base of rotary positions where none is given."""

OF_A_LAYER = (
    "heads",
    "key_dim",
    "expand_v",
    "conv",
    "qk_heads",
    "kv_heads",
    "qk_norm",
    "rope",
    "token_shift",
    "output_norm",
    "output_gate",
    "gate_rank",
    "features",
    "scale",
    "low_rank_bias",
)
"""Settings that an entry of `ModelSpec.layers` may give its own layer."""

TIED_WIDTH = 64
"""The width up to which tied logits have the factor d_model ** -0.5; above it, the factor is 8 / d_model."""

LATER = {"since": "0.2"}
"""Marks settings that the first release lacks: at their default they leave the key of a trial as it was."""

Layer: TypeAlias = str | Mapping[str, Any]

MOST = {
    "vocab_size": 2**24,
    "d_model": 2**16,
    "layers": 1000,
    "heads": 2**12,
    "key_dim": 2**16,
    "conv": 2**10,
    "qk_heads": 2**12,
    "kv_heads": 2**12,
    "gate_rank": 2**16,
    "mlp_width": 2**20,
    "base_width": 2**16,
    "window": 2**31 - 1,
    "chunk_size": 2**16,
}
"""The most that a whole number of a model may be; of `layers`, also the most blocks. No published model comes near."""
MOST_EXPANDED = 256
"""The most that `expand_v` may be."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model, as data.

    rule: a rule's name, or {name: ..., knob: ...}.
    d_model, layers, heads: width, depth and heads of each layer. key_dim: width of a head's keys, d_model / heads where
        None. expand_v: width of its values over that of its keys.
    layers: a number, or a list of the layers from first to last. An entry is `rule`, which is the model's rule; another
        rule's name; {name: ..., knob: ..., layer: {setting: ...}}, where `layer` changes settings of `OF_A_LAYER` in
        this layer alone; or {repeat: n, pattern: [entry, ...]}. A list has an entry for each block, also of `mamba`.
    conv: width of the short convolution over q, k and v, 0 for none.
    qk_heads: how many heads have a q and a k of their own, which groups of value heads share (grouped value attention);
        `heads` where None, 1 in `mamba` blocks. kv_heads: how many have a k and a v of their own, which groups of
        query heads share (grouped-query attention). Each divides `heads`; a layer takes one of them.
    qk_norm: whether each head's q and k have an RMS norm with weights, before the unit norm of the rules that have one.
    rope: whether q and k have rotary positions; a number is their base, 10000 where true.
    token_shift: whether projections read a learned mean of x_t and x_{t-1}, one for each of q, k, v, gates and output
        gate (RWKV).
    output_norm: of each head's output, a kind of `ops.norm.HeadNorm`: none (or false), rms (or true), rms_unweighted,
        rms_all, layer, group. output_gate: none (or false), or what of W x multiplies the normed output: sigmoid (or
        true), silu (swish); sigmoid_before_norm and silu_before_norm multiply before the norm (Mamba2).
    gate_rank: the width r of the gate's projection W_1 W_2 x through r channels, None for one matrix.
    block: `transformer` is [mixer, MLP]; `mamba` is [mixer] alone, q and k shared by all heads, twice the depth.
    features: what q, k and v get after their convolution, a kind of `FEATURES` instead of the rule's own: unit (SiLU
        and unit norm on q and k, SiLU on v), silu (SiLU on all three), unit_qk and silu_qk (the same without SiLU on
        v), raw (nothing). scale: of each head's output, K ** -0.5 where None.
    low_rank_bias: whether the second matrix of a projection through few channels (a gate's rank, `gate_rank`) has a
        bias.
    mlp: whether `transformer` blocks have a SwiGLU; False in `mamba` blocks. mlp_width: its hidden width, 8/3 d_model
        rounded up to a multiple of 8 where None.
    norm_eps: the number that all norms add to a mean square.
    base_width: the d_model W that `train.lr` is meant for. So that a step moves activations of all widths alike,
        training scales the rate of every matrix that d_model channels enter by W / d_model, and logits shrink with
        W / d_model (muP). The model of width W is the model without a base_width. None scales nothing.
    attention: the layers, counted from 0, that are softmax attention instead, or `second_to_last_of_every_eight`.
        window: how many tokens these see, 0 for all. Both need a number of layers: a list says the same itself.
    tie_embeddings: whether input and output embeddings are one matrix. Logits have the factor d_model ** -0.5 then, and
        8 / d_model above width 64, so that the logit of the token that was just read starts below 8.
    readout: `position` reads a position's logits from its own hidden state, `last` by an MLP from the position and the
        last hidden state of the sequence.
    chunk_size: tokens in a chunk of the parallel form.

    Raises `InputError` for values that make no model.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    vocab_size: int
    rule: str | Mapping[str, Any]
    d_model: int = 64
    layers: int | tuple[Layer, ...] = 2
    heads: int = 2
    key_dim: int | None = None
    expand_v: float = 1.0
    conv: int = 4
    qk_heads: int | None = field(default=None, metadata=LATER)
    kv_heads: int | None = field(default=None, metadata=LATER)
    qk_norm: bool = field(default=False, metadata=LATER)
    rope: bool | float = field(default=False, metadata=LATER)
    token_shift: bool = field(default=False, metadata=LATER)
    output_norm: bool | str = True
    output_gate: bool | str = True
    gate_rank: int | None = field(default=None, metadata=LATER)
    features: Literal["unit", "unit_qk", "silu", "silu_qk", "raw"] | None = field(default=None, metadata=LATER)
    scale: float | None = field(default=None, metadata=LATER)
    low_rank_bias: bool = field(default=False, metadata=LATER)
    block: Literal["transformer", "mamba"] = "transformer"
    mlp: bool = True
    mlp_width: int | None = field(default=None, metadata=LATER)
    norm_eps: float = field(default=EPS, metadata=LATER)
    base_width: int | None = field(default=None, metadata=LATER)
    attention: tuple[int, ...] | Literal["second_to_last_of_every_eight"] = field(default=())
    window: int = 0
    tie_embeddings: bool = True
    readout: Literal["position", "last"] = "position"
    chunk_size: int = 64

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "heads", "chunk_size"):
            _whole(name, getattr(self, name), least=1)
        for name in ("conv", "window"):
            _whole(name, getattr(self, name), least=0)
        if self.key_dim is not None:
            _whole("key_dim", self.key_dim, least=1)
        elif self.d_model % self.heads:
            raise InputError(f"model.d_model {self.d_model} must be a multiple of heads {self.heads}, or set key_dim")
        for name in ("qk_norm", "token_shift", "low_rank_bias", "mlp", "tie_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"model.{name} must be true or false, not {getattr(self, name)!r}")
        if (
            isinstance(self.expand_v, bool)
            or not isinstance(self.expand_v, int | float)
            or not 0 < self.expand_v <= MOST_EXPANDED
        ):
            raise InputError(
                f"model.expand_v must be a number above 0, and at most {MOST_EXPANDED}, not {self.expand_v!r}"
            )
        object.__setattr__(self, "expand_v", float(self.expand_v))  # 2 and 2.0 are one model with one identity
        self._check_heads()
        self._check_rope()
        self._check_output()
        self._check_numbers()
        if self.block not in ("transformer", "mamba"):
            raise unknown("block", self.block, ("transformer", "mamba"), where="model.block")
        if self.readout not in ("position", "last"):
            raise unknown("readout", self.readout, ("position", "last"), where="model.readout")
        if self.block == "mamba":
            object.__setattr__(self, "mlp", False)  # the block has no MLP, so that no study can ablate it
        if isinstance(self.layers, list | tuple | Mapping):
            object.__setattr__(self, "layers", self._listed())
        else:
            _whole("layers", self.layers, least=1)
        self._check_attention()
        self.make_rule()
        if not isinstance(self.layers, int):
            for layer in range(self.depth):
                self.at(layer)

    @classmethod
    def of(cls, given: "ModelSpec | Mapping[str, Any]") -> "ModelSpec":
        """A specification from a mapping. Raises `InputError` for keys that do not exist or are missing."""
        if isinstance(given, ModelSpec):
            return given
        if not isinstance(given, Mapping):
            raise InputError(f"model must be a mapping with vocab_size and rule, not {given!r}")
        names = [f.name for f in fields(cls)]
        for key in given:
            if key not in names:
                raise unknown("model key", key, names)
        for key in ("vocab_size", "rule"):
            if key not in given:
                raise InputError(f"model: needs {key}")
        return cls(**given)

    def make_rule(self) -> UpdateRule:
        """The rule with its knobs set."""
        if isinstance(self.rule, str):
            return get_rule(self.rule)
        if not isinstance(self.rule, Mapping) or not isinstance(self.rule.get("name"), str):
            raise InputError(f"rule must be a name or {{name: ..., knob: ...}}, not {self.rule!r}")
        knobs = {key: value for key, value in self.rule.items() if key != "name"}
        return get_rule(self.rule["name"], **knobs)

    def rules(self) -> list[UpdateRule]:
        """The rules of the layers: `make_rule`, then the others."""
        rule = self.make_rule()
        if isinstance(self.layers, int):
            return [rule, *([get_rule(ATTENTION, window=self.window)] if self.attention else [])]
        found = [rule]
        for layer in range(self.depth):
            if (other := self.at(layer).make_rule()) not in found:
                found.append(other)
        return found

    def at(self, layer: int) -> "ModelSpec":
        """The model whose only blocks are like that of this layer, counted from 0."""
        plain = replace(self, layers=1, attention=(), window=0)
        if isinstance(self.layers, int):
            return (
                replace(plain, rule={"name": ATTENTION, "window": self.window}) if self.is_attention(layer) else plain
            )
        entry = self.layers[layer]
        if isinstance(entry, str):
            return plain
        knobs = {key: value for key, value in entry.items() if key != "layer"}
        try:
            return replace(plain, rule=self.rule if entry["name"] == RULE else knobs, **entry.get("layer", {}))
        except InputError as error:
            raise InputError(f"model.layers[{layer}]: {error}") from None

    @property
    def depth(self) -> int:
        """The number of blocks: twice a number of `layers` for `mamba`, whose blocks hold a mixer and no MLP."""
        if not isinstance(self.layers, int):
            return len(self.layers)
        return self.layers * (2 if self.block == "mamba" else 1)

    @property
    def head_dims(self) -> tuple[int, int]:
        """The widths of a head's keys and values, K and V."""
        key_dim = self.key_dim or self.d_model // self.heads
        return key_dim, max(1, round(key_dim * self.expand_v))

    @property
    def tied_factor(self) -> float:
        """The factor of logits from tied embeddings, on embeddings of unit scale."""
        width = self.base_width or self.d_model
        # Recall is learned fastest from embeddings of unit scale; the factor gives logits unit scale too. At the start,
        # the logit of the token that was just read is d times the factor. Wide models bound it, since e^sqrt(d) would
        # outweigh the whole vocabulary.
        factor = float(width**-0.5 if width <= TIED_WIDTH else TIED_WIDTH**0.5 / width)
        # Training aligns hidden states with embeddings, so that their products grow with the width itself.
        return factor * self.width_share

    @property
    def width_share(self) -> float:
        """W / d_model for a `base_width` W: what training multiplies the rate of matrices by; 1 without one."""
        return 1.0 if self.base_width is None else self.base_width / self.d_model

    def is_attention(self, layer: int) -> bool:
        """Whether this layer, counted from 0, is softmax attention."""
        if isinstance(self.attention, str):
            return layer % 8 == 6
        return layer in self.attention

    @property
    def own_qk_heads(self) -> int:
        """How many heads have a q of their own."""
        return self.qk_heads or (1 if self.block == "mamba" else self.heads)

    def _check_heads(self) -> None:
        for name in ("qk_heads", "kv_heads"):
            given = getattr(self, name)
            if given is None:
                continue
            _whole(name, given, least=1)
            if self.heads % given:
                raise InputError(f"model.{name} must divide heads {self.heads}, not be {given}")
        if self.kv_heads not in (None, self.heads) and self.own_qk_heads < self.heads:
            raise InputError(
                "model.kv_heads: a layer shares k and v, or q and k by qk_heads (1 in mamba blocks), and not both; "
                f"leave one of them at heads {self.heads}"
            )

    def _check_rope(self) -> None:
        if not isinstance(self.rope, bool):
            if not isinstance(self.rope, int | float) or not 1 < self.rope < 1e12:
                raise InputError(f"model.rope must be true, false or a base above 1, not {self.rope!r}")
            object.__setattr__(self, "rope", True if self.rope == ROPE else float(self.rope))
        if self.rope and self.head_dims[0] % 2:
            raise InputError(f"model.rope turns pairs of channels: key_dim must be even, not {self.head_dims[0]}")

    def _check_output(self) -> None:
        kinds = {"output_norm": HEAD_NORMS, "output_gate": HEAD_GATES}
        for name, allowed in kinds.items():
            given = getattr(self, name)
            if isinstance(given, bool):
                continue
            if given not in allowed:
                raise unknown(f"{name[7:]}", given, [*allowed, "true", "false"], where=f"model.{name}")
            # One form for one model: a plain true or false stands in the keys of earlier trials.
            plain = {"none": False, "rms": True, "sigmoid": True}
            object.__setattr__(self, name, plain.get(given, given))
        if self.gate_rank is not None:
            _whole("gate_rank", self.gate_rank, least=1)
            if self.output_gate is False:
                raise InputError("model.gate_rank has no effect without output_gate: say null, or a kind of gate")
        if str(self.output_gate).endswith("before_norm") and self.output_norm is False:
            raise InputError(
                f"model.output_gate {self.output_gate} has no effect without output_norm: say sigmoid or silu"
            )

    def _check_numbers(self) -> None:
        if self.features not in (None, *FEATURES):
            raise unknown("features", self.features, FEATURES, where="model.features")
        for name in ("scale", "norm_eps"):
            given = getattr(self, name)
            if given is None and name == "scale":
                continue
            if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < 1e6:
                raise InputError(f"model.{name} must be a positive number, not {given!r}")
            object.__setattr__(self, name, float(given))
        if self.base_width is not None:
            _whole("base_width", self.base_width, least=1)
        if self.mlp_width is not None:
            _whole("mlp_width", self.mlp_width, least=1)
            if not self.mlp or self.block == "mamba":
                raise InputError("model.mlp_width has no effect without an MLP")

    def _check_attention(self) -> None:
        if not isinstance(self.layers, int):
            if self.attention or self.window:
                what = "attention" if self.attention else "window"
                raise InputError(
                    f"model.{what} does not go with a list of layers: list {{name: {ATTENTION}, window: ...}} in layers"
                )
            object.__setattr__(self, "attention", ())
            return
        if isinstance(self.attention, str):
            if self.attention != SECOND_TO_LAST_OF_EIGHT:
                raise unknown(
                    "layout", self.attention, [SECOND_TO_LAST_OF_EIGHT, "[layer, ...]"], where="model.attention"
                )
            if self.depth < 7:
                raise InputError(f"model.attention {self.attention} needs at least 7 layers, not {self.depth}")
        elif not isinstance(self.attention, list | tuple):
            raise InputError(
                f"model.attention must be [layer, ...] or {SECOND_TO_LAST_OF_EIGHT}, not {self.attention!r}"
            )
        else:
            object.__setattr__(self, "attention", tuple(self.attention))
            for layer in self.attention:
                if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.depth:
                    raise InputError(f"model.attention names layer {layer!r}; there are 0 to {self.depth - 1}")
        if self.window and not self.attention:
            raise InputError("model.window has no effect without attention layers")

    def _listed(self) -> tuple[Layer, ...]:
        """The entries of `layers` one by one, each rule's knobs spelled out, so that equal means equal."""
        own = self.make_rule().name
        found = tuple(_entry(one, own) for one in _repeated(self.layers, "model.layers"))
        if RULE not in map(_name, found):
            raise InputError(
                f"model.layers: rule '{own}' stands in no layer; list `{RULE}`, which is the model's rule, or '{own}'"
            )
        return found


def _name(entry: Layer) -> str:
    return entry if isinstance(entry, str) else str(entry["name"])


def _repeated(given: object, where: str) -> list[object]:
    """The entries of a list with its patterns repeated."""
    if isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, list | tuple) or not given:
        raise InputError(f"{where} must list at least one layer, not {given!r}")
    found: list[object] = []
    for one in given:
        if not isinstance(one, Mapping) or "name" in one:
            found.append(one)
            continue
        for key in one:
            if key not in ("repeat", "pattern"):
                raise unknown("key", key, ("name", "repeat", "pattern"), where=where)
        if "pattern" not in one:
            raise InputError(f"{where}: {{repeat: n}} needs pattern: [layer, ...]")
        _whole("layers repeat", one.get("repeat", 1), least=1)
        pattern = _repeated(one["pattern"], f"{where} pattern")
        _few_blocks(len(found) + one.get("repeat", 1) * len(pattern))
        found += one.get("repeat", 1) * pattern
    _few_blocks(len(found))
    return found


def _few_blocks(count: int) -> None:
    if count > MOST["layers"]:
        raise InputError(f"model.layers lists {count:,} blocks; a model has at most {MOST['layers']:,}")


def _entry(given: object, own: str) -> Layer:
    """An entry in its one form: `rule` where it is the model's rule as it stands. own: that rule's name."""
    if isinstance(given, str):
        given = {"name": given}
    if not isinstance(given, Mapping) or not isinstance(given["name"], str):
        raise InputError(f"model.layers: a layer is a rule's name or {{name: ..., knob: ...}}, not {given!r}")
    name, settings = given["name"], given.get("layer") or {}
    knobs = {key: value for key, value in given.items() if key not in ("name", "layer")}
    if not isinstance(settings, Mapping):
        raise InputError(f"model.layers: layer takes {{setting: ...}}, not {settings!r}")
    for key in settings:
        if key not in OF_A_LAYER:
            raise unknown("setting of a layer", key, OF_A_LAYER, where="model.layers")
    settings = {"layer": dict(settings)} if settings else {}
    if name == RULE and knobs:
        raise InputError(f"model.layers: `{RULE}` is the model's rule with its knobs, and takes no {next(iter(knobs))}")
    if name == RULE or (name == own and not knobs):
        return {"name": RULE, **settings} if settings else RULE
    try:
        for key in knobs:
            if key in OF_A_LAYER and key not in get_rule(name).options():
                raise InputError(f"{key} is a setting of the layer: say {{name: {name}, layer: {{{key}: ...}}}}")
        return {**get_rule(name, **knobs).spec(), **settings}
    except InputError as error:
        raise InputError(f"model.layers: {error}") from None


def _whole(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"model.{name} must be a whole number of at least {least}, not {value!r}")
    if value > (most := MOST.get(name, MOST["layers"])):
        raise InputError(f"model.{name} must be at most {most:,}, not {value:,}")
