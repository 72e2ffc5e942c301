"""The tuples that name the operands of the kernels: operators, launches, padding and gradients follow from them.

Each field has the name of a field of `rule.Operands`, and its type says how wide the operand is. docs/kernels.md says
what else a new operand needs.
"""

from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Annotated, Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

from torch import Tensor

from deltalab.rule import Operands, fields_of

T = TypeVar("T")
Tiled = Callable[[Tensor | None], Any]

Keys = Annotated[Tensor, "keys"]
"""A vector of keys for each step, [B, T, H, K]."""

Values = Annotated[Tensor, "values"]
"""A vector of values for each step, [B, T, H, V]."""

PerStep = Annotated[Tensor, "numbers"]
"""One number for each step, [B, T, H]."""

READING = ("r", "read")
"""The operands with one row for each token. All others have one row for each of a token's steps."""


class ScalarOperands(NamedTuple):
    """The operands of one pass of `kernels.scalar`, or their gradients."""

    r: Keys
    k: Keys
    u: Values
    g: PerStep | None
    e: PerStep | None
    beta: PerStep | None
    read: PerStep | None
    d: PerStep | None


class FitOperands(NamedTuple):
    """The operands that `rule.Fit` gives a second pass of `kernels.scalar`, or their gradients.

    Attributes:
        target: `Fit.v`; None if it is the first pass's u.
        r: None if it is the first pass's r.
        g: None if it is the first pass's g.
        e: The strength of the erasure.
        beta: `Fit.strength`, the strength of the write.
        read: The factor of r.
    """

    target: Values | None
    r: Keys | None
    g: PerStep | None
    e: PerStep | None
    beta: PerStep
    read: PerStep | None

    def after(self, first: ScalarOperands, u: Tensor) -> ScalarOperands:
        """Returns all operands of the second pass, which runs after the first pass and writes u."""
        r, g = first.r if self.r is None else self.r, first.g if self.g is None else self.g
        return ScalarOperands(r=r, k=first.k, u=u, g=g, e=self.e, beta=self.beta, read=self.read, d=None)


class DiagonalOperands(NamedTuple):
    """The operands of `kernels.diagonal`, or their gradients."""

    r: Keys
    k: Keys
    u: Values
    g: Keys
    e: PerStep | None
    a: Keys | None
    b: Keys | None
    beta: PerStep | None
    read: PerStep | None
    d: PerStep | None


class Layout(Generic[T]):
    """Names and widths of the fields of a tuple of operands, computed once, because every launch needs them.

    Attributes:
        kind: The tuple.
        names: The names of its fields.
        widths: The width of each field by its name: `keys`, `values` or `numbers`; None if the tensor is no operand.
        optional: The names of the fields that may be None.
        keys: The names of the fields that are as wide as keys.
        values: The names of the fields that are as wide as values.
        d_names: The names of the gradients of all fields.
        d_keys: The names of the gradients that are as wide as keys.
        d_values: The names of the gradients that are as wide as values.
    """

    def __init__(self, kind: Callable[..., T]) -> None:
        self.kind: Any = kind
        self.widths: dict[str, str | None] = {}
        self.optional: set[str] = set()
        for name, hint in get_type_hints(kind, include_extras=True).items():
            if NoneType in get_args(hint):
                self.optional.add(name)
                hint = get_args(hint)[0]
            self.widths[name] = getattr(hint, "__metadata__", (None,))[0]
        self.names = list(self.widths)
        self.keys = [name for name, width in self.widths.items() if width == "keys"]
        self.values = [name for name, width in self.widths.items() if width == "values"]
        self.d_names, self.d_keys, self.d_values = (
            [f"d_{name}" for name in names] for names in (self.names, self.keys, self.values)
        )

    def schema(self, prefix: str = "") -> str:
        """Returns the fields as arguments of an operator's schema, with names that begin with `prefix`."""
        return ", ".join(f"Tensor{'?' if name in self.optional else ''} {prefix}{name}" for name in self.names)

    def prefixed(self, prefix: str) -> list[str]:
        """The names of the fields, each after the prefix."""
        return [prefix + name for name in self.names]

    def split(self, arguments: Sequence[Any]) -> tuple[T, Sequence[Any]]:
        """Returns the first arguments of an operator as the tuple, and the arguments that are left."""
        count = len(self.names)
        return self.kind._make(arguments[:count]), arguments[count:]

    def arguments(self, operands: Any, keys: Tiled, values: Tiled | None = None) -> dict[str, Any]:
        """Returns operands as arguments of a launch, by name.

        Args:
            operands: The operands, or their gradients.
            keys: Views a tensor that is as wide as keys in tiles.
            values: Views a tensor that is as wide as values in tiles. If None, operands that are as wide as values are
                left out.
        """
        arguments: dict[str, Any] = operands._asdict()
        for name in self.keys:
            arguments[name] = keys(arguments[name])
        for name in self.values:
            if values is None:
                del arguments[name]
            else:
                arguments[name] = values(arguments[name])
        return arguments

    def gradients(self, grads: Any, keys: Tiled, values: Tiled) -> dict[str, Any]:
        """Returns gradients of operands as arguments d_<name> of a launch, viewed in tiles as in `arguments`."""
        arguments = dict(zip(self.d_names, grads, strict=True))
        for name in self.d_keys:
            arguments[name] = keys(arguments[name])
        for name in self.d_values:
            arguments[name] = values(arguments[name])
        return arguments

    def narrowed(self, operands: Any) -> Any:
        """Returns the operands with vectors of keys in u's dtype. They come in fp32 if their gradients shall be."""
        dtype = operands.u.dtype
        if operands.k.dtype == dtype:
            return operands
        wide = {name: getattr(operands, name) for name in self.keys if name != "g"}
        return operands._replace(**{name: x.to(dtype) for name, x in wide.items() if x is not None})

    def contiguous(self, operands: Operands) -> list[Tensor | None]:
        """The operands that the tuple names, contiguous and in its order."""
        tensors = fields_of(operands)
        return [None if (x := tensors[name]) is None else x.contiguous() for name in self.names]


SCALAR, FIT, DIAGONAL = Layout(ScalarOperands), Layout(FitOperands), Layout(DiagonalOperands)

WIDTHS = {**SCALAR.widths, **DIAGONAL.widths}
"""The width of each operand of any structure by its name. A decay may also have no channels."""


def contiguous(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The tensors, contiguous."""
    return [None if x is None else x.contiguous() for x in tensors]
