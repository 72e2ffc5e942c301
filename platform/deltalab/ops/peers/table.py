"""The published op for each structure, and its arguments from the operands of a rule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deltalab.rule import Operands, UpdateRule
from deltalab.structure import Transition

PRECISE = ("g", "gk", "beta")
"""The arguments that keep their precision: decays and strengths. All others have the dtype of v."""


@dataclass(frozen=True)
class Op:
    """A function of flash-linear-attention: `chunk_NAME` over sequences and `fused_recurrent_NAME` for tokens.

    Attributes:
        name: The text that stands for NAME in these function names.
        takes: Returns the arguments of the op besides q and k, from the operands of a rule.
        module: The module of the op; empty if the module has the name of the op.
        one_strength: Whether the op writes with the same strength with which it erases.
        options: Further arguments of the op.
        for_tokens: Maps names of arguments to their names in `fused_recurrent_NAME`, where the two differ.
    """

    name: str
    takes: Callable[[Operands], dict[str, Tensor | None]]
    module: str = ""
    one_strength: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    for_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The module of flash-linear-attention that holds the op."""
        return f"fla.ops.{self.module or self.name}"

    def arguments(self, x: Operands, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the tensors that the op takes, contiguous, by its names for them.

        Args:
            x: The operands.
            dtype: The dtype of the op's products.
        """
        named = {"q": x.resolved().r, "k": x.k, **self.takes(x)}
        return {
            name: (value if name in PRECISE else value.to(dtype)).contiguous()
            for name, value in named.items()
            if value is not None
        }


def _beta(x: Operands) -> Tensor:
    """Returns the strength of writes."""
    assert x.e is not None
    return torch.ones_like(x.e) if x.beta is None else x.beta


def _write(x: Operands) -> dict[str, Tensor | None]:
    """Returns the values that are written."""
    return {"v": x.resolved().u}


def _decay(x: Operands) -> dict[str, Tensor | None]:
    """Returns the arguments of an op with a decay."""
    return {**_write(x), "g": x.g}


def _delta(x: Operands) -> dict[str, Tensor | None]:
    """Returns the arguments of an op of the delta rule."""
    return {"v": x.u, "beta": _beta(x)}


def _gated_delta(x: Operands) -> dict[str, Tensor | None]:
    """Returns the arguments of an op of the gated delta rule."""
    return {**_delta(x), "g": x.g}


def _feedback(x: Operands) -> dict[str, Tensor | None]:
    """Returns the arguments of an op that erases with a strength of its own."""
    assert x.e is not None
    return {**_gated_delta(x), "p": (x.e / _beta(x))[..., None] * x.k}


def _free(x: Operands) -> dict[str, Tensor | None]:
    """Returns the arguments of an op with a free low rank."""
    # In the op, a reads the state and b is written. In deltalab, b reads the state and a is written.
    return {**_write(x), "gk": x.g, "a": x.b, "b": x.a}


OPS: dict[tuple[str, str, str], Op] = {
    ("none", "none", "state"): Op("linear_attn", _write, options={"normalize": False}),
    ("scalar", "none", "state"): Op("simple_gla", _decay),
    ("diagonal", "none", "state"): Op("gla", _decay, for_tokens={"g": "gk"}),
    ("none", "tied", "state"): Op("delta_rule", _delta, one_strength=True),
    ("scalar", "tied", "decayed_state"): Op("gated_delta_rule", _gated_delta, one_strength=True),
    ("diagonal", "tied", "decayed_state"): Op("kda", _gated_delta, one_strength=True),
    ("scalar", "tied", "state"): Op("comba", _feedback),
    ("diagonal", "free", "state"): Op("dplr_delta_rule", _free, module="generalized_delta_rule"),
}
"""Maps each structure to the op that computes it: the decay, the low rank, and the state that the low rank reads."""


def hindrance(rule: UpdateRule) -> str | None:
    """Returns why no published op computes a rule, as far as its structure tells, as a clause; None if one may."""
    transition = rule.transition
    if transition is None:
        return f"rule '{rule.name}' is no single recurrence of the algebra"
    if rule.second_state:
        return "no published op has a second state"
    if transition.steps > 1:
        return f"no published op takes {transition.steps} steps per token"
    decay, low_rank, reads = _key(transition)
    if (decay, low_rank, reads) not in OPS:
        seen = reads.replace("_", " ")
        return f"no published op has decay '{decay}' and low rank '{low_rank}' that reads the {seen}"
    return None


def _key(transition: Transition) -> tuple[str, str, str]:
    """The key of `OPS`.

    A state that does not decay, or that no low rank reads, is read in one way. `ops.lowering.by_channel` gives a free
    low rank a decay for each channel.
    """
    reads = "state" if "none" in (transition.decay, transition.low_rank) else transition.reads
    return "diagonal" if transition.low_rank == "free" else transition.decay, transition.low_rank, reads


def op_of(transition: Transition, operands: Operands) -> Op | str:
    """Returns the op that computes a recurrence, or why there is none, as a clause.

    Args:
        transition: The transition, of a rule that has no `hindrance`, as `ops.lowering` leaves it.
        operands: The operands, as `ops.lowering` leaves them.
    """
    if operands.sign is not None or transition.output == "before":
        return "no published op has signs, or reads before it writes"
    op = OPS.get(_key(transition))
    if op is None:
        return "no published op has the structure that its signs leave"
    if op.one_strength and operands.e is not None and not _same(operands.e, _beta(operands)):
        return f"the published op {op.name} erases and writes with one strength"
    return op


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers. Values are read, which waits for the device, only if need be."""
    if a is b or (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype):
        return True
    return torch.equal(a, b)
