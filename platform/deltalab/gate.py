"""A gate of an update rule as data, and the decorator that makes a gate of a function."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from pickle import PicklingError
from typing import Any, Literal, ParamSpec, TypeAlias

import torch
from torch import Tensor

from deltalab.errors import InputError, unknown

P = ParamSpec("P")
MOST_WIDTH = 2**16
"""The largest rank that a gate may have, and the largest number of slots."""

Start: TypeAlias = Callable[[tuple[int, ...], torch.Generator | None], Tensor]
Value: TypeAlias = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
Per: TypeAlias = Literal[
    "token",
    "step",
    "channel",
    "value_channel",
    "value_pair",
    "slot",
    "head",
    "head_channel",
    "head_value_channel",
    "head_value_pair",
    "head_value_slot",
    "head_value_square",
    "head_matrix",
    "head_slot",
    "none",
]
PROJECTED: tuple[Per, ...] = ("token", "step", "channel", "value_channel", "value_pair", "slot")
"""The values of `Gate.per` for which a gate depends on the input."""


@dataclass(frozen=True)
class Gate:
    """One parameterization of a gate.

    `per` names the source and the shape of the gate's value:

    - `token`: W x, for each head, [B, T, H];
    - `step`: W x, for each head and each of a token's n steps, [B, n T, H];
    - `channel`: W x, for each head and channel of the key, [B, T, H, K];
    - `value_channel`: W x, for each head and channel of the value, [B, T, H, V];
    - `value_pair`: W x, for each head and complex channel of `elementwise.paired`, [B, T, H, (V + 1) // 2];
    - `slot`: W x, for each head and each of `slots` slots of a memory or of its levels, [B, T, H, slots];
    - `head`: learned, for each head, [H];
    - `head_channel`, `head_value_channel`, `head_value_pair`, `head_slot`: learned, [H, K], [H, V], [H, (V + 1) // 2]
      and [H, slots];
    - `head_value_slot`: learned, for each head and each of `slots` slots of each channel of the value, [H, V slots];
    - `head_value_square`: learned, `slots` matrices for each head, [H, slots V V];
    - `head_matrix`: learned, a matrix for each head, [H, K V];
    - `none`: fixed, [H].

    Attributes:
        per: The source and the shape of the value, as in the list above.
        low: The least value. A strength is the number itself, but the gate g of a rule is a log-decay, in [-inf, 0].
        high: The greatest value.
        value: The function (z, parameters) -> value. z is the projection in the gate's shape, or zeros if the gate has
            no projection.
        parameters: The learned parameters: each name, with the function start(shape, generator) that makes the first
            values. `shape` is the shape of the gate's value without batch and time. A generator of None stands for
            torch's global generator. Weight decay does not apply to these parameters.
        by_head: The parameters that have one number for each head, [H], even if the value has channels.
        one_projection: Whether all heads share one projection, as the angles of Mamba3 do.
        rank: The width r of a projection W_1 W_2 x through r channels; None for one matrix, 0 for the width V of a
            head's values.
        of: The gate whose projection and parameters this gate shares; None if it has its own.
        slots: The number of slots, if `per` names them.
        features: None for a gate. Otherwise this object declares a projected vector besides q, k and v, per `channel`
            or `value_channel`, and `features` names the activation after the layer's short convolution, as for q and
            k: `unit` is SiLU and unit norm, `silu` is SiLU, `raw` is no activation.
        kind: The name of the function that made the gate; set by `parameterization`.
        options: The arguments with which the function `kind` was called; set by `parameterization`.
        again: The function `kind` itself, which can make the gate again with other arguments; set by
            `parameterization`.
    """

    per: Per
    low: float
    high: float
    value: Value = field(compare=False, repr=False)
    parameters: Mapping[str, Start] = field(default_factory=dict, compare=False, repr=False)
    by_head: frozenset[str] = frozenset()
    one_projection: bool = False
    rank: int | None = None
    of: str | None = None
    slots: int = 0
    features: Literal["unit", "silu", "raw"] | None = None
    kind: str = ""
    options: tuple[tuple[str, float], ...] = ()
    again: "Callable[..., Gate] | None" = field(default=None, compare=False, repr=False)

    def shape(self, heads: int, key_dim: int, value_dim: int) -> tuple[int, ...]:
        """Returns the shape of the value without batch and time."""
        widths = {
            "channel": key_dim,
            "value_channel": value_dim,
            "value_pair": (value_dim + 1) // 2,
            "value_slot": value_dim * self.slots,
            "value_square": value_dim**2 * self.slots,
            "matrix": key_dim * value_dim,
            "slot": self.slots,
        }
        width = widths.get(self.per.removeprefix("head_"))
        return (heads,) if width is None else (heads, width)

    def parameter_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a parameter, for a value of `shape` without batch and time."""
        return shape[:1] if name in self.by_head else shape

    @property
    def projected(self) -> bool:
        """Whether the gate depends on the input."""
        return self.per in PROJECTED

    @property
    def constant(self) -> bool:
        """Whether the gate depends on neither the input nor a parameter."""
        return self.per == "none"

    def __deepcopy__(self, memo: object) -> "Gate":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the parameterization and the plain fields. A function defined inside a function cannot be pickled."""
        if self.again is None:
            raise PicklingError(f"a gate pickles if @parameterization made it, unlike {self!r}")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        return _unpickled, (self.again, plain)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value:g}' for name, value in self.options)})"

    def spec(self) -> dict[str, dict[str, float]]:
        """Returns the gate as YAML writes it."""
        return {self.kind: dict(self.options)}

    def remade(self, given: Mapping[str, object], *, where: str) -> "Gate":
        """Returns a gate of the same parameterization with other numbers.

        Args:
            given: Each option to change, with its new number.
            where: The place where the user wrote the numbers. The message of an error begins with it.

        Raises:
            InputError: The parameterization does not have an option, or does not take a number.
        """
        assert self.again is not None
        names = [name for name, _ in self.options]
        for name, number in given.items():
            if name not in names:
                raise unknown("option", name, names, where=f"{where}: gate '{self.kind}'")
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                problem = f"{self.kind}.{name} takes a finite number, not {number!r}"
                raise InputError(problem, where=where, key=f"{self.kind}.{name}")
        try:
            gate = self.again(**{**dict(self.options), **given})
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if (width := max(gate.rank or 0, gate.slots)) > MOST_WIDTH:
            raise InputError(f"{where}: gate '{self.kind}' is {width:,} wide; a gate is at most {MOST_WIDTH:,} wide")
        return gate


def _unpickled(again: Callable[..., Gate], settings: Mapping[str, Any]) -> Gate:
    return replace(again(**dict(settings["options"])), **settings)


def parameterization(make: Callable[P, Gate]) -> Callable[P, Gate]:
    """Names a gate after the function that makes it, so that YAML can say `d: {head: {init: 1.0}}`."""
    signature = inspect.signature(make)

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Gate:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = tuple((name, float(number)) for name, number in bound.arguments.items() if number is not None)
        return replace(make(*args, **kwargs), kind=make.__name__.rstrip("_"), options=options, again=made)

    return made
