"""What a rule's `operands` compute, as expressions: for a file, and for an equation.

`operands` runs on symbols in place of tensors, so that what it decides by its knobs is decided, and what is left is one
expression for each operand.
"""

import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from deltalab.gates import Gate

ATOM, POWER, MINUS, TIMES, PLUS = 5, 4, 3, 2, 1
"""How tightly an expression holds together: what is looser than its place asks needs brackets."""
SIGNS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "+": (operator.add, PLUS),
    "-": (operator.sub, PLUS),
    "*": (operator.mul, TIMES),
    "/": (operator.truediv, TIMES),
    "//": (operator.floordiv, TIMES),
    "**": (operator.pow, POWER),
}
UNSEEN = ("expand", "to", "unsqueeze", "flatten")
"""Methods that change a tensor's form and not its values: an equation leaves them out."""


class Untraceable(Exception):
    """Says what in a rule's `operands` is no expression of its inputs."""


class Symbol:
    """A tensor, or a size, as an expression of others.

    form: name, number, attribute, item, method, call, pick (one of several results of a call), minus, or a sign of
    `SIGNS`. parts: what it is made of. vector: whether it has a channel axis, by which an equation tells a * b from
    a b. axes: how many it has, where that is known.
    """

    def __init__(self, form: str, *parts: Any, vector: bool = False, axes: int | None = None) -> None:
        self.form, self.parts, self.vector, self.axes = form, parts, vector, axes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Symbol("attribute", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.form != "attribute":
            raise Untraceable("it calls a tensor")
        given, name = self.parts
        if name == "dim" and given.axes is not None:
            return given.axes
        if given.form == "number":  # a constant, whatever its shape
            return given if name in UNSEEN else _called(getattr(torch, name), args=(given, *args), kwargs=kwargs)
        return Symbol("method", given, name, args, kwargs, vector=given.vector and name not in ("sum", "mean", "norm"))

    def __getitem__(self, index: Any) -> Any:
        return self if self.form == "number" else Symbol("item", self, index, vector=self.vector)

    def __neg__(self) -> "Symbol":
        if self.form == "number":
            return number(-self.parts[0])
        return self.parts[0] if self.form == "minus" else Symbol("minus", self, vector=self.vector)

    def __bool__(self) -> bool:
        raise Untraceable("it decides by the values or the shapes of tensors")

    def __iter__(self) -> Iterator[Any]:
        raise Untraceable("it takes a tensor apart")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "Symbol":
        return _called(function, args, kwargs or {})


def _called(function: Any, args: Any, kwargs: Any) -> Symbol:
    if isinstance(function, FunctionType):
        defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()}
        kwargs = {
            name: value for name, value in kwargs.items() if value is not defaults[name] and value != defaults[name]
        }
    return Symbol("call", function, args, kwargs, vector=any(isinstance(one, Symbol) and one.vector for one in args))


def number(value: float, name: str = "") -> Symbol:
    """A constant. name: of the gate that it is the value of."""
    return Symbol("number", value, name, axes=1)


def _signed(sign: str, swapped: bool) -> Callable[[Symbol, Any], Symbol]:
    def of(one: Symbol, other: Any) -> Symbol:
        other = other if isinstance(other, Symbol) else number(other)
        left, right = (other, one) if swapped else (one, other)
        a, b = (part.parts[0] if part.form == "number" else None for part in (left, right))
        if a is not None and b is not None:
            return number(SIGNS[sign][0](a, b))
        if (sign == "*" and a == 1) or (sign == "+" and a == 0):
            return right
        if (sign in ("*", "/") and b == 1) or (sign in ("+", "-") and b == 0):
            return left
        if sign == "-" and a == 0:
            return -right
        return Symbol(sign, left, right, vector=left.vector or right.vector)

    return of


for _sign, (_function, _) in SIGNS.items():
    setattr(Symbol, f"__{_function.__name__}__", _signed(_sign, False))
    setattr(Symbol, f"__r{_function.__name__}__", _signed(_sign, True))


def of_gate(name: str, gate: Gate) -> Symbol:
    """The symbol of a gate: its number where it is a `const`."""
    if gate.kind == "const":
        return number(gate.low, name)
    shape = gate.shape(1, 7, 7)
    return Symbol("name", name, vector=shape[1:] == (7,), axes=len(shape) + 2 * gate.projected)


@contextmanager
def helpers_kept(module: ModuleType) -> Iterator[None]:
    """Makes calls of a module's own functions expressions, which a file may hold beside the function itself."""
    own = {
        name: found
        for name, found in vars(module).items()
        if isinstance(found, FunctionType) and found.__module__ == module.__name__ and not hasattr(found, "__wrapped__")
    }

    def keeping(function: FunctionType) -> Callable[..., Any]:
        several = str(inspect.signature(function).return_annotation).startswith("tuple[")

        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(one, Symbol) for one in (*args, *kwargs.values())):
                return function(*args, **kwargs)
            found = _called(function, args, kwargs)
            if not several:
                return found
            picks: list[Symbol] = []
            for _ in inspect.signature(function).return_annotation.__args__:
                picks.append(Symbol("pick", found, picks, vector=found.vector))
            return tuple(picks)

        return call

    vars(module).update({name: keeping(function) for name, function in own.items()})
    try:
        yield
    finally:
        vars(module).update(own)


@contextmanager
def locals_of(function: Any) -> Iterator[dict[int, str]]:
    """The names that a function gives to symbols, by their ids: what it has when it returns."""
    names: dict[int, str] = {}
    code = function.__code__

    def returned(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is code:
            own = {name: value for name, value in frame.f_locals.items() if isinstance(value, Symbol)}
            for name in sorted(own, key=len, reverse=True):  # of several names the shortest
                names[id(own[name])] = name

    before = sys.getprofile()
    sys.setprofile(returned)
    try:
        yield names
    finally:
        sys.setprofile(before)


class Writer:
    """Writes symbols as code. What is used twice, and has no name, becomes a line of its own in `lines`.

    names: those that the rule gave, by id. taken: names that mean something else. written: the names of lines, by id.
    """

    def __init__(self, results: list[Symbol], names: Mapping[int, str], taken: set[str]) -> None:
        self.names, self.taken = names, set(taken)
        self.lines: list[str] = []
        self.functions: dict[str, Any] = {}
        self.written: dict[int, str] = {}
        self._uses: dict[int, int] = {}
        for one in results:
            self._count(one)

    def _count(self, one: Any) -> None:
        for part in _symbols(one):
            self._uses[id(part)] = self._uses.get(id(part), 0) + 1
            if self._uses[id(part)] == 1:
                self._count(part.parts)

    def code(self, one: Any, place: int = 0) -> str:
        """An expression, in brackets where it is looser than its place."""
        if not isinstance(one, Symbol):
            return _plain(one, self.code)
        if id(one) in self.written:
            return self.written[id(one)]
        if one.form == "pick":
            return self._picked(one)
        text, level = self._expression(one)
        shared = self._uses.get(id(one), 0) > 1 and one.form not in ("name", "attribute", "number")
        if shared or (id(one) in self.names and len(text) > 40):
            return self._line(one, text)
        return f"({text})" if level < place else text

    def _line(self, one: Symbol, text: str) -> str:
        self.lines.append(f"{self._name(one)} = {text}")
        return self.written[id(one)]

    def _name(self, one: Symbol) -> str:
        name = self.names.get(id(one)) or (one.form == "number" and one.parts[1]) or "x"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        self.written[id(one)] = name
        return str(name)

    def _picked(self, one: Symbol) -> str:
        """A name for one of several results of a call, which stand on one line."""
        call, picks = one.parts
        text = self._expression(call)[0]
        self.lines.append(
            f"{', '.join(self._name(pick) if id(pick) in self._uses else '_' for pick in picks)} = {text}"
        )
        return self.written[id(one)]

    def _expression(self, one: Symbol) -> tuple[str, int]:
        form, parts = one.form, one.parts
        if form == "name":
            return parts[0], ATOM
        if form == "number":
            return repr(parts[0]), ATOM if parts[0] >= 0 else MINUS
        if form == "attribute":
            return f"{self.code(parts[0], ATOM)}.{parts[1]}", ATOM
        if form == "item":
            return f"{self.code(parts[0], ATOM)}[{_index(parts[1])}]", ATOM
        if form == "method":
            given, name, args, kwargs = parts
            return f"{self.code(given, ATOM)}.{name}({self._arguments(args, kwargs)})", ATOM
        if form == "call":
            function, args, kwargs = parts
            return f"{self._named(function)}({self._arguments(args, kwargs)})", ATOM
        if form == "minus":
            return f"-{self.code(parts[0], TIMES)}", MINUS
        level = SIGNS[form][1]
        left, right = self.code(parts[0], level), self.code(parts[1], level + (form not in ("+", "*")))
        tight = form == "**" and all(part.form in ("name", "attribute", "number") for part in parts)
        return (f"{left}**{right}" if tight else f"{left} {form} {right}"), level

    def _arguments(self, args: Any, kwargs: Mapping[str, Any]) -> str:
        return ", ".join(
            [*map(self._argument, args), *(f"{name}={self._argument(one)}" for name, one in kwargs.items())]
        )

    def _argument(self, one: Any) -> str:
        """A constant that a function takes must be a tensor."""
        if isinstance(one, Symbol) and one.form == "number" and one.parts[1]:
            return self.full(one)
        return self.code(one)

    def full(self, one: Symbol) -> str:
        """A constant as a tensor [H]."""
        if id(one) not in self.written:
            self._line(one, f"q.new_full(q.shape[2:3], {one.parts[0]!r})")
        return self.written[id(one)]

    def _named(self, function: Any) -> str:
        name = function.__name__
        for prefix, module in (("torch", torch), ("F", F)):
            if getattr(module, name, None) is function:
                return f"{prefix}.{name}"
        self.functions[name] = function
        return str(name)


def _symbols(one: Any) -> Iterator[Symbol]:
    if isinstance(one, Symbol):
        yield one
    elif isinstance(one, tuple | list):
        for part in one:
            yield from _symbols(part)
    elif isinstance(one, dict):
        yield from _symbols(list(one.values()))


def _plain(one: Any, code: Callable[[Any], str]) -> str:
    if isinstance(one, tuple):
        return f"({', '.join(map(code, one))}{',' * (len(one) == 1)})"
    if isinstance(one, list):
        return f"[{', '.join(map(code, one))}]"
    if isinstance(one, str):
        return f'"{one}"'
    if one is None or isinstance(one, bool | int | float) or str(one).startswith("torch."):
        return repr(one)
    raise Untraceable(f"it holds {one!r}")


def _index(index: Any) -> str:
    if isinstance(index, tuple):
        return ", ".join(map(_index, index))
    if isinstance(index, slice):
        ends = ["" if end is None else str(end) for end in (index.start, index.stop)]
        return ":".join(ends)
    return "..." if index is ... else str(index)


class Equation:
    """Writes symbols as a paper does: k_t, alpha_t = exp(g_t), a b for products with a number, a * b by channel.

    of: the name of each leaf. lines: the names of other symbols, by id, each with the index t. where: what these names
    and functions mean.
    """

    def __init__(self, of: Mapping[str, str], lines: Mapping[int, str], t: str) -> None:
        self.of, self.lines, self.t = of, lines, t
        self.where: dict[str, None] = {}

    def __call__(self, one: Any, place: int = 0) -> str:
        if not isinstance(one, Symbol):
            return str(one)
        if id(one) in self.lines and one.form not in ("number", "pick"):
            name = f"{self.lines[id(one)]}_{self.t}"
            self.where[f"{name} = {self._expression(one)[0]}"] = None
            return name
        text, level = self._expression(one)
        return f"({text})" if level < place else text

    def _expression(self, one: Symbol) -> tuple[str, int]:
        form, parts = one.form, one.parts
        if form == "name":
            return self.of.get(parts[0], parts[0]), ATOM
        if form == "number":
            return f"{parts[0]:g}", ATOM
        if form in ("item", "attribute"):
            return self._expression(parts[0])
        if form == "minus":
            return self._negative(parts[0])
        if form == "method":
            given, name, args, _ = parts
            return self._expression(given) if name in UNSEEN else self._function(name, (given, *args))
        if form == "pick":
            return f"{self(parts[0])}", ATOM
        if form == "call":
            return self._called(parts[0], parts[1])
        level = SIGNS[form][1]
        left, right = self(parts[0], level), self(parts[1], level + (form not in ("+", "*")))
        if form == "*" and not (parts[0].vector and parts[1].vector):
            if parts[0].vector:
                left, right = right, left
            return f"{left} {right}", TIMES
        return f"{left} {form} {right}", level

    def _negative(self, one: Symbol) -> tuple[str, int]:
        if one.form == "call" and one.parts[0] is torch.expm1:
            return f"1 - {self._function('exp', one.parts[1])[0]}", PLUS
        return f"-{self(one, TIMES)}", MINUS

    def _called(self, function: Any, args: Any) -> tuple[str, int]:
        name = function.__name__.removeprefix("_")
        if name != function.__name__ and function.__doc__:  # a function of the rule's own file, which says what it is
            given = ", ".join(inspect.signature(function).parameters)
            meaning = " ".join(function.__doc__.split("\n\n")[0].split()).removesuffix(".").split(": ")[0]
            self.where[f"{name}({given}): {meaning}"] = None
        return self._function(name, args)

    def _function(self, name: str, args: Any) -> tuple[str, int]:
        said = [self(one) for one in args if isinstance(one, Symbol)]
        if name == "exp" and said == [self.of.get("g")]:
            return said[0].replace("g", "alpha", 1), ATOM
        return f"{name}({', '.join(said)})", ATOM
