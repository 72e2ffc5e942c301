"""A model as data: its rule, its sizes and the layout of its layers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

from deltalab.errors import InputError, unknown
from deltalab.registry import get_rule
from deltalab.rule import UpdateRule

SECOND_TO_LAST_OF_EIGHT = "second_to_last_of_every_eight"

ATTENTION = "attention"
"""The rule of the layers that `ModelSpec.attention` lists."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model, as data.

    rule: a rule's name, or {name: ..., knob: ...}.
    d_model, layers, heads: width, depth and heads of each layer. key_dim: width of a head's keys, d_model / heads where
        None. expand_v: width of its values over that of its keys.
    conv: width of the short convolution over q, k and v, 0 for none.
    output_norm: whether each head's output has an RMS norm. output_gate: whether it is multiplied by sigmoid(W x).
    block: `transformer` is [mixer, MLP]; `mamba` is [mixer] alone, q and k shared by all heads, twice the depth.
    mlp: whether `transformer` blocks have a SwiGLU of width 8/3 d_model; False in `mamba` blocks.
    attention: the layers, counted from 0, that are softmax attention instead, or `second_to_last_of_every_eight`.
        window: how many tokens these see, 0 for all.
    tie_embeddings: whether input and output embeddings are one matrix.
    readout: `position` reads a position's logits from its own hidden state, `last` by an MLP from the position and the
        last hidden state of the sequence.
    chunk_size: tokens in a chunk of the parallel form.

    Raises `InputError` for values that make no model.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    vocab_size: int
    rule: str | Mapping[str, Any]
    d_model: int = 64
    layers: int = 2
    heads: int = 2
    key_dim: int | None = None
    expand_v: float = 1.0
    conv: int = 4
    output_norm: bool = True
    output_gate: bool = True
    block: Literal["transformer", "mamba"] = "transformer"
    mlp: bool = True
    attention: tuple[int, ...] | Literal["second_to_last_of_every_eight"] = field(default=())
    window: int = 0
    tie_embeddings: bool = True
    readout: Literal["position", "last"] = "position"
    chunk_size: int = 64

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "layers", "heads", "chunk_size"):
            _whole(name, getattr(self, name), least=1)
        for name in ("conv", "window"):
            _whole(name, getattr(self, name), least=0)
        if self.key_dim is not None:
            _whole("key_dim", self.key_dim, least=1)
        elif self.d_model % self.heads:
            raise InputError(f"model.d_model {self.d_model} must be a multiple of heads {self.heads}, or set key_dim")
        for name in ("output_norm", "output_gate", "mlp", "tie_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"model.{name} must be true or false, not {getattr(self, name)!r}")
        if isinstance(self.expand_v, bool) or not isinstance(self.expand_v, int | float) or not 0 < self.expand_v < 1e6:
            raise InputError(f"model.expand_v must be a positive number, not {self.expand_v!r}")
        object.__setattr__(self, "expand_v", float(self.expand_v))  # 2 and 2.0 are one model with one identity
        if self.block not in ("transformer", "mamba"):
            raise unknown("block", self.block, ("transformer", "mamba"), where="model.block")
        if self.readout not in ("position", "last"):
            raise unknown("readout", self.readout, ("position", "last"), where="model.readout")
        if self.block == "mamba":
            object.__setattr__(self, "mlp", False)  # the block has no MLP, so that no study can ablate it
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
        self.make_rule()

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
        """The rules of the layers: `make_rule`, then that of the attention layers, if there are any."""
        return [self.make_rule(), *([get_rule(ATTENTION, window=self.window)] if self.attention else [])]

    @property
    def depth(self) -> int:
        """The number of blocks: twice `layers` for `mamba`, whose blocks hold a mixer and no MLP."""
        return self.layers * (2 if self.block == "mamba" else 1)

    @property
    def head_dims(self) -> tuple[int, int]:
        """The widths of a head's keys and values, K and V."""
        key_dim = self.key_dim or self.d_model // self.heads
        return key_dim, max(1, round(key_dim * self.expand_v))

    def is_attention(self, layer: int) -> bool:
        """Whether this layer, counted from 0, is softmax attention."""
        if isinstance(self.attention, str):
            return layer % 8 == 6
        return layer in self.attention


def _whole(name: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"model.{name} must be a whole number of at least {least}, not {value!r}")
