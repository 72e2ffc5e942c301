"""Traces a rule's `operands` as expressions, and writes the expressions as code or as an equation.

`operands` runs on symbols in place of tensors. The run takes one branch wherever the rule's knobs decide, so that each
operand becomes one expression.
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
"""How tightly an expression binds. An expression that binds less than its place requires needs brackets."""
SIGNS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "+": (operator.add, PLUS),
    "-": (operator.sub, PLUS),
    "*": (operator.mul, TIMES),
    "/": (operator.truediv, TIMES),
    "//": (operator.floordiv, TIMES),
    "**": (operator.pow, POWER),
}
UNSEEN = ("expand", "to", "unsqueeze", "flatten")
"""Methods that change the shape or the dtype of a tensor and not its values. An equation leaves them out."""


class Untraceable(Exception):
    """The error if a rule's `operands` cannot be written as expressions of its inputs. The message says why."""


class Symbol:
    """A tensor, or a size, as an expression of other symbols.

    Attributes:
        form: "name", "number", "attribute", "item", "method", "call", "pick" (one of several results of a call),
            "minus", or a sign of `SIGNS`.
        parts: What the expression is made of.
        vector: Whether it has a channel axis. An equation writes the product of two vectors as a * b, others as a b.
        axes: The number of its axes, if it is known.
    """

    def __init__(self, form: str, *parts: Any, vector: bool = False, axes: int | None = None) -> None:
        self.form, self.parts, self.vector, self.axes = form, parts, vector, axes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Symbol("attribute", self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the symbol of a method's call."""
        if self.form != "attribute":
            raise Untraceable("it calls a tensor")
        tensor, name = self.parts
        if name == "dim" and tensor.axes is not None:
            return tensor.axes
        if tensor.form == "number":  # a method of a constant gives a constant
            return tensor if name in UNSEEN else _called(getattr(torch, name), args=(tensor, *args), kwargs=kwargs)
        return Symbol(
            "method", tensor, name, args, kwargs, vector=tensor.vector and name not in ("sum", "mean", "norm")
        )

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
    """Returns the symbol of a call, without keyword arguments that equal their defaults."""
    if isinstance(function, FunctionType):
        defaults = {name: argument.default for name, argument in inspect.signature(function).parameters.items()}
        kwargs = {
            name: value for name, value in kwargs.items() if value is not defaults[name] and value != defaults[name]
        }
    return Symbol(
        "call",
        function,
        args,
        kwargs,
        vector=any(isinstance(argument, Symbol) and argument.vector for argument in args),
    )


def number(value: float, name: str = "") -> Symbol:
    """Returns the symbol of a constant. If the constant is the value of a gate, `name` is the gate's name."""
    return Symbol("number", value, name, axes=1)


def _signed(sign: str, swapped: bool) -> Callable[[Symbol, Any], Symbol]:
    """Returns the method of `Symbol` for a sign. The method leaves out neutral elements, such as 1 in a product."""

    def operation(symbol: Symbol, other: Any) -> Symbol:
        other = other if isinstance(other, Symbol) else number(other)
        left, right = (other, symbol) if swapped else (symbol, other)
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

    return operation


for _sign, (_function, _) in SIGNS.items():
    setattr(Symbol, f"__{_function.__name__}__", _signed(_sign, False))
    setattr(Symbol, f"__r{_function.__name__}__", _signed(_sign, True))


def of_gate(name: str, gate: Gate) -> Symbol:
    """Returns the symbol of a gate, which is a number if the gate is a `const`."""
    if gate.kind == "const":
        return number(gate.low, name)
    shape = gate.shape(1, 7, 7)
    return Symbol("name", name, vector=shape[1:] == (7,), axes=len(shape) + 2 * gate.projected)


@contextmanager
def helpers_kept(module: ModuleType) -> Iterator[None]:
    """Makes calls of a module's own functions return expressions, as long as the context lasts.

    The file of a written rule can hold the functions beside the expressions that call them.
    """
    functions = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not hasattr(value, "__wrapped__")
    }

    def as_expression(function: FunctionType) -> Callable[..., Any]:
        returns_tuple = str(inspect.signature(function).return_annotation).startswith("tuple[")

        def call(*args: Any, **kwargs: Any) -> Any:
            if not any(isinstance(argument, Symbol) for argument in (*args, *kwargs.values())):
                return function(*args, **kwargs)
            result = _called(function, args, kwargs)
            if not returns_tuple:
                return result
            picks: list[Symbol] = []
            for _ in inspect.signature(function).return_annotation.__args__:
                picks.append(Symbol("pick", result, picks, vector=result.vector))
            return tuple(picks)

        return call

    vars(module).update({name: as_expression(function) for name, function in functions.items()})
    try:
        yield
    finally:
        vars(module).update(functions)


@contextmanager
def locals_of(function: Any) -> Iterator[dict[int, str]]:
    """Yields a dictionary that is filled when `function` returns.

    It maps the ids of symbols to the names of the local variables of `function` that hold them.
    """
    names: dict[int, str] = {}
    code = function.__code__

    def returned(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is code:
            symbols = {name: value for name, value in frame.f_locals.items() if isinstance(value, Symbol)}
            for name in sorted(symbols, key=len, reverse=True):  # the shortest of several names wins
                names[id(symbols[name])] = name

    before = sys.getprofile()
    sys.setprofile(returned)
    try:
        yield names
    finally:
        sys.setprofile(before)


class Writer:
    """Writes symbols as code. An expression that is used more than once becomes a line of its own in `lines`.

    Attributes:
        names: Maps the ids of symbols to the names that the rule gives them.
        taken: The names that are in use already.
        lines: The lines of code that stand before the expression.
        functions: The functions that the code calls, by name.
        written: Maps the ids of symbols that have a line to the names of these symbols.
    """

    def __init__(self, results: list[Symbol], names: Mapping[int, str], taken: set[str]) -> None:
        self.names, self.taken = names, set(taken)
        self.lines: list[str] = []
        self.functions: dict[str, Any] = {}
        self.written: dict[int, str] = {}
        self._uses: dict[int, int] = {}
        for result in results:
            self._count(result)

    def _count(self, value: Any) -> None:
        """Counts the uses of all symbols in a value."""
        for part in _symbols(value):
            self._uses[id(part)] = self._uses.get(id(part), 0) + 1
            if self._uses[id(part)] == 1:
                self._count(part.parts)

    def code(self, value: Any, place: int = 0) -> str:
        """Returns an expression as code, in brackets if it binds less than its place requires."""
        if not isinstance(value, Symbol):
            return _plain(value, self.code)
        if id(value) in self.written:
            return self.written[id(value)]
        if value.form == "pick":
            return self._picked(value)
        text, level = self._expression(value)
        shared = self._uses.get(id(value), 0) > 1 and value.form not in ("name", "attribute", "number")
        if shared or (id(value) in self.names and len(text) > 40):
            return self._line(value, text)
        return f"({text})" if level < place else text

    def _line(self, symbol: Symbol, text: str) -> str:
        """Writes an expression as a line of its own, and returns its name."""
        self.lines.append(f"{self._name(symbol)} = {text}")
        return self.written[id(symbol)]

    def _name(self, symbol: Symbol) -> str:
        """Gives a name to a symbol."""
        name = self.names.get(id(symbol)) or (symbol.form == "number" and symbol.parts[1]) or "x"
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        self.written[id(symbol)] = name
        return str(name)

    def _picked(self, symbol: Symbol) -> str:
        """Writes a call with several results as a line of its own, and returns the name of one of them."""
        call, picks = symbol.parts
        text = self._expression(call)[0]
        self.lines.append(
            f"{', '.join(self._name(pick) if id(pick) in self._uses else '_' for pick in picks)} = {text}"
        )
        return self.written[id(symbol)]

    def _expression(self, symbol: Symbol) -> tuple[str, int]:
        """Returns an expression as code, and how tightly it binds."""
        form, parts = symbol.form, symbol.parts
        if form == "name":
            return parts[0], ATOM
        if form == "number":
            return repr(parts[0]), ATOM if parts[0] >= 0 else MINUS
        if form == "attribute":
            return f"{self.code(parts[0], ATOM)}.{parts[1]}", ATOM
        if form == "item":
            return f"{self.code(parts[0], ATOM)}[{_index(parts[1])}]", ATOM
        if form == "method":
            tensor, name, args, kwargs = parts
            return f"{self.code(tensor, ATOM)}.{name}({self._arguments(args, kwargs)})", ATOM
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
        """Returns the arguments of a call as code."""
        return ", ".join(
            [*map(self._argument, args), *(f"{name}={self._argument(argument)}" for name, argument in kwargs.items())]
        )

    def _argument(self, argument: Any) -> str:
        """Returns an argument as code. A constant that a function takes must be a tensor."""
        if isinstance(argument, Symbol) and argument.form == "number" and argument.parts[1]:
            return self.full(argument)
        return self.code(argument)

    def full(self, constant: Symbol) -> str:
        """Writes a constant as a tensor [H] on a line of its own, and returns the name of the tensor."""
        if id(constant) not in self.written:
            self._line(constant, f"q.new_full(q.shape[2:3], {constant.parts[0]!r})")
        return self.written[id(constant)]

    def _named(self, function: Any) -> str:
        """Returns the name by which the code calls a function."""
        name = function.__name__
        for prefix, module in (("torch", torch), ("F", F)):
            if getattr(module, name, None) is function:
                return f"{prefix}.{name}"
        self.functions[name] = function
        return str(name)


def _symbols(value: Any) -> Iterator[Symbol]:
    """Yields a value that is a symbol, or the symbols in a tuple, list or dictionary."""
    if isinstance(value, Symbol):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _symbols(part)
    elif isinstance(value, dict):
        yield from _symbols(list(value.values()))


def _plain(value: Any, code: Callable[[Any], str]) -> str:
    """Returns a value that is no symbol as code."""
    if isinstance(value, tuple):
        return f"({', '.join(map(code, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(code, value))}]"
    if isinstance(value, str):
        return f'"{value}"'
    if value is None or isinstance(value, bool | int | float) or str(value).startswith("torch."):
        return repr(value)
    raise Untraceable(f"it holds {value!r}")


def _index(index: Any) -> str:
    """Returns an index as code."""
    if isinstance(index, tuple):
        return ", ".join(map(_index, index))
    if isinstance(index, slice):
        ends = ["" if end is None else str(end) for end in (index.start, index.stop)]
        return ":".join(ends)
    return "..." if index is ... else str(index)


class Equation:
    """Writes symbols as a paper does.

    The value k of token t is written k_t, and exp(g_t) is written alpha_t. A product of two vectors is written a * b,
    and any other product a b.

    Attributes:
        of: Maps the name of each input and gate to its name in the equation.
        lines: Maps the ids of other symbols to their names. Each name gets the index t.
        t: The index of time.
        where: The meanings of the names in `lines` and of functions, in the order of their use.
    """

    def __init__(self, of: Mapping[str, str], lines: Mapping[int, str], t: str) -> None:
        self.of, self.lines, self.t = of, lines, t
        self.where: dict[str, None] = {}

    def __call__(self, value: Any, place: int = 0) -> str:
        """Returns an expression as text, in brackets if it binds less than its place requires."""
        if not isinstance(value, Symbol):
            return str(value)
        if id(value) in self.lines and value.form not in ("number", "pick"):
            name = f"{self.lines[id(value)]}_{self.t}"
            self.where[f"{name} = {self._expression(value)[0]}"] = None
            return name
        text, level = self._expression(value)
        return f"({text})" if level < place else text

    def _expression(self, symbol: Symbol) -> tuple[str, int]:
        """Returns an expression as text, and how tightly it binds."""
        form, parts = symbol.form, symbol.parts
        if form == "name":
            return self.of.get(parts[0], parts[0]), ATOM
        if form == "number":
            return f"{parts[0]:g}", ATOM
        if form in ("item", "attribute"):
            return self._expression(parts[0])
        if form == "minus":
            return self._negative(parts[0])
        if form == "method":
            tensor, name, args, _ = parts
            return self._expression(tensor) if name in UNSEEN else self._function(name, (tensor, *args))
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

    def _negative(self, symbol: Symbol) -> tuple[str, int]:
        """Returns minus an expression. Minus expm1(x) is 1 - exp(x)."""
        if symbol.form == "call" and symbol.parts[0] is torch.expm1:
            return f"1 - {self._function('exp', symbol.parts[1])[0]}", PLUS
        return f"-{self(symbol, TIMES)}", MINUS

    def _called(self, function: Any, args: Any) -> tuple[str, int]:
        """Returns a call as text, and keeps the meaning of a function of the rule's own file."""
        name = function.__name__.removeprefix("_")
        if name != function.__name__ and function.__doc__:  # only functions of the rule's own file have a leading _
            parameters = ", ".join(inspect.signature(function).parameters)
            meaning = " ".join(function.__doc__.split("\n\n")[0].split()).removesuffix(".").split(": ")[0]
            self.where[f"{name}({parameters}): {meaning}"] = None
        return self._function(name, args)

    def _function(self, name: str, args: Any) -> tuple[str, int]:
        """Returns the call of a function as text, such as tanh(x_t). For exp(g_t) it is alpha_t."""
        arguments = [self(argument) for argument in args if isinstance(argument, Symbol)]
        if name == "exp" and arguments == [self.of.get("g")]:
            return arguments[0].replace("g", "alpha", 1), ATOM
        return f"{name}({', '.join(arguments)})", ATOM
