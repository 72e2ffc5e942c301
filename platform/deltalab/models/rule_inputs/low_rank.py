"""The projections W_1 f(W_2 x) of a layer through a rank: their names, the function f between them, and biases."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deltalab.errors import InputError, unknown
from deltalab.gates import Gate

INSIDE: Mapping[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "sigmoid": torch.sigmoid}
"""The functions that may stand between the two matrices."""

OUTPUT_GATE = "output_gate"
"""The name of the output gate's projection. Those of the rule's gates have their symbols."""


def projections(gates: Mapping[str, Gate], gate_rank: int | None) -> dict[str, bool]:
    """Returns the names of a layer's projections through a rank, and whether each may have a bias.

    Args:
        gates: The gates of the rule, by symbol.
        gate_rank: The rank of the output gate; None if it has one matrix.
    """
    own = {
        name: not gate.by_head
        for name, gate in gates.items()
        if gate.projected and gate.rank is not None and gate.of is None and gate.features is None
    }
    return own if gate_rank is None else {**own, OUTPUT_GATE: True}


def biases_in_full(setting: object, projected: Mapping[str, bool]) -> bool | tuple[str, ...]:
    """Returns `ModelSpec.low_rank_bias` in its only form.

    Raises:
        InputError: It is neither true nor false, nor a list of projections that may have a bias.
    """
    if isinstance(setting, bool):
        return setting
    if not isinstance(setting, list | tuple):
        problem = f"model.low_rank_bias must be true, false or a list of projections, not {setting!r}"
        raise InputError(problem, key="model.low_rank_bias")
    biased = [name for name, may in projected.items() if may]
    _check(setting, biased, "model.low_rank_bias")
    return tuple(name for name in biased if name in setting) or False


def activations_in_full(setting: object, projected: Mapping[str, bool]) -> dict[str, Any] | None:
    """Returns `ModelSpec.low_rank_activation` in its only form.

    Raises:
        InputError: It does not map projections to functions of `INSIDE`.
    """
    if setting is None:
        return None
    if not isinstance(setting, Mapping):
        problem = f"model.low_rank_activation must be {{projection: function}}, not {setting!r}"
        raise InputError(problem, key="model.low_rank_activation")
    _check([*setting], [*projected], "model.low_rank_activation")
    for name, function in setting.items():
        if function not in INSIDE:
            raise unknown("function", function, INSIDE, where=f"model.low_rank_activation.{name}")
    return {name: setting[name] for name in projected if name in setting} or None


def _check(names: Sequence[object], projected: list[str], where: str) -> None:
    for name in names:
        if name not in projected:
            raise unknown("projection of a rank", name, projected, where=where)
