"""Reads a Python file that makes configurations, by its syntax tree. None of its code runs."""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltalab.errors import InputError

MOST_STEPS = 200_000
"""The statements and expressions that a file may take. A stranger's file may loop forever."""
MOST_ITEMS = 100_000
"""The items that a list or a text may have."""
MOST_CALLS = 40
"""How deep functions may call each other."""


@dataclass(frozen=True)
class Made:
    """A call of a class, such as `ModelConfig(d_model=64)`.

    Attributes:
        name: The name of the class.
        given: The keyword arguments.
    """

    name: str
    given: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Unread:
    """A value that is not known, because the reader does not run what makes it.

    Attributes:
        reason: The place, and what stands there.
    """

    reason: str


class _Return(Exception):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


def _logspace(start: float, stop: float, num: int = 50) -> list[float]:
    return [10**exponent for exponent in _linspace(start, stop, num)]


def _linspace(start: float, stop: float, num: int = 50) -> list[float]:
    return [start + (stop - start) * i / max(num - 1, 1) for i in range(min(num, MOST_ITEMS))]


def _zipped(*lists: Any) -> list[Any]:
    return list(zip(*lists, strict=False))


def _times(a: Any, b: Any) -> Any:
    """Multiplies, but makes no long list or text."""
    for many, count in ((a, b), (b, a)):
        if isinstance(many, str | list | tuple) and isinstance(count, int) and len(many) * count > MOST_ITEMS:
            raise InputError(f"makes a value of over {MOST_ITEMS:,} items")
    return a * b


def _product(lists: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = [()]
    for items in lists:
        found = [(*before, item) for before in found for item in items][:MOST_ITEMS]
    return found


_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: _times, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_,
    ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
    ast.Pow: lambda a, b: a**b if abs(a) <= 1e4 and abs(b) <= 64 else math.nan,
}  # fmt: skip


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs, "any": any, "all": all, "bool": bool, "enumerate": lambda x, start=0: list(enumerate(x, start)),
    "float": float, "int": int, "len": len, "list": list, "max": max, "min": min, "np.array": list,
    "np.linspace": _linspace, "np.logspace": _logspace, "np.log2": math.log2, "np.sqrt": math.sqrt,
    "math.log2": math.log2, "math.sqrt": math.sqrt,
    "range": lambda *given: list(range(*given)[:MOST_ITEMS]), "reversed": lambda x: list(reversed(x)), "round": round,
    "set": set, "sorted": sorted, "str": str, "sum": sum, "tuple": tuple, "zip": _zipped,
    "itertools.product": lambda *given: _product(given),
}  # fmt: skip


class _Next(Exception):
    """A `continue`, or a `break` if it ends the loop."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.ends = ends


class ConfigText:
    """The values of a Python file, as far as they can be read.

    Literals, names, arithmetic, loops, conditions, comprehensions, functions of the file, and calls of classes are
    read. Any other call makes an `Unread`. A function that is imported is read from its file, if that lies where the
    name of its module says, below a folder that holds the file.

    Attributes:
        values: The values by name.
        notes: What was left out, with its line.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.values: dict[str, Any] = {}
        self.notes: list[str] = []
        self._steps, self._calls = 0, 0
        self._functions: dict[str, tuple[ast.FunctionDef, dict[str, Any]]] = {}
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{file}: {error.strerror or error}") from None
        except (SyntaxError, ValueError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            raise InputError(f"{file}{line}: no Python: {getattr(error, 'msg', error)}") from None
        self._run(tree.body, self.values)

    def _note(self, node: ast.AST, text: str) -> Unread:
        unread = Unread(f"{self.file}, line {getattr(node, 'lineno', 0)}: {text}")
        if unread.reason not in self.notes:
            self.notes.append(unread.reason)
        return unread

    def _run(self, body: list[ast.stmt], names: dict[str, Any]) -> None:
        for node in body:
            self._count(node)
            self._statement(node, names)

    def _count(self, node: ast.AST) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise InputError(f"{self.file}, line {getattr(node, 'lineno', 0)}: takes over {MOST_STEPS:,} steps to read")

    def _statement(self, node: ast.stmt, names: dict[str, Any]) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            value = None if node.value is None else self._value(node.value, names)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, value, names)
        elif isinstance(node, ast.AugAssign):
            sum_of = ast.copy_location(ast.BinOp(_loaded(node.target), node.op, node.value), node)
            self._assign(node.target, self._value(sum_of, names), names)
        elif isinstance(node, ast.For):
            items = self._value(node.iter, names)
            if isinstance(items, Unread):
                return
            for item in list(items)[:MOST_ITEMS]:
                self._assign(node.target, item, names)
                try:
                    self._run(node.body, names)
                except _Next as jump:
                    if jump.ends:
                        break
        elif isinstance(node, ast.If):
            test = self._value(node.test, names)
            if isinstance(test, Unread):
                self._note(node, "a condition that is not read")
            else:
                self._run(node.body if test else node.orelse, names)
        elif isinstance(node, ast.FunctionDef):
            self._functions[node.name] = (node, names)
        elif isinstance(node, ast.Return):
            raise _Return(None if node.value is None else self._value(node.value, names))
        elif isinstance(node, ast.Expr):
            self._value(node.value, names)
        elif isinstance(node, ast.Continue | ast.Break):
            raise _Next(isinstance(node, ast.Break))
        elif isinstance(node, ast.ImportFrom):
            self._import(node)
        elif not isinstance(node, ast.Import | ast.Pass | ast.Assert):
            self._note(node, f"a statement `{type(node).__name__.lower()}` that is not read")

    def _import(self, node: ast.ImportFrom) -> None:
        """Reads the functions of a module of the same repository."""
        parts = (node.module or "").split(".")
        for folder in self.file.resolve().parents:
            path = folder.joinpath(*parts).with_suffix(".py")
            if node.level == 0 and len(parts) > 1 and path.is_file() and path != self.file:
                try:
                    body = ast.parse(path.read_text(encoding="utf-8")).body
                except (OSError, SyntaxError, ValueError):
                    return
                wanted = {alias.name for alias in node.names}
                for other in body:
                    if isinstance(other, ast.FunctionDef) and (other.name in wanted or "*" in wanted):
                        self._functions[other.name] = (other, {})
                return

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = [value] * len(target.elts) if isinstance(value, Unread) else list(value)
            if len(parts) != len(target.elts):
                raise InputError(f"{self.file}, line {target.lineno}: {len(parts)} values for {len(target.elts)} names")
            for part, item in zip(target.elts, parts, strict=True):
                self._assign(part, item, names)
        elif isinstance(target, ast.Subscript):
            holder, key = self._value(target.value, names), self._value(target.slice, names)
            if isinstance(holder, dict | list) and not isinstance(key, Unread):
                holder[key] = value
        elif isinstance(target, ast.Attribute):
            holder = self._value(target.value, names)
            if isinstance(holder, Made):
                holder.given[target.attr] = value

    def _value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        self._count(node)
        try:
            return self._read(node, names)
        except (_Return, _Next, InputError):
            raise
        except Exception as error:
            return self._note(node, f"`{ast.unparse(node)[:60]}`: {type(error).__name__}: {error}")

    def _read(self, node: ast.expr, names: dict[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in names:
                return names[node.id]
            return self.values.get(node.id, Unread(f"{self.file}, line {node.lineno}: `{node.id}` is not known"))
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            items: list[Any] = []
            for item in node.elts:
                value = self._value(item.value if isinstance(item, ast.Starred) else item, names)
                items += list(value) if isinstance(item, ast.Starred) else [value]
            return tuple(items) if isinstance(node, ast.Tuple) else items
        if isinstance(node, ast.Dict):
            found: dict[Any, Any] = {}
            for key, item in zip(node.keys, node.values, strict=True):
                value = self._value(item, names)
                found |= value if key is None else {self._value(key, names): value}
            return found
        if isinstance(node, ast.BinOp):
            return self._applied(
                _OPERATORS[type(node.op)], self._value(node.left, names), self._value(node.right, names)
            )
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, names)
            negative = operator.not_ if isinstance(node.op, ast.Not) else operator.neg
            return value if isinstance(value, Unread) else negative(value)
        if isinstance(node, ast.BoolOp):
            values = [self._value(part, names) for part in node.values]
            unread = next((value for value in values if isinstance(value, Unread)), None)
            return unread or (all(values) if isinstance(node.op, ast.And) else next(filter(None, values), values[-1]))
        if isinstance(node, ast.Compare):
            values = [self._value(part, names) for part in (node.left, *node.comparators)]
            steps = [
                self._applied(_OPERATORS[type(op)], a, b)
                for op, a, b in zip(node.ops, values, values[1:], strict=False)
            ]
            return next((step for step in steps if isinstance(step, Unread)), all(steps))
        if isinstance(node, ast.IfExp):
            test = self._value(node.test, names)
            return test if isinstance(test, Unread) else self._value(node.body if test else node.orelse, names)
        if isinstance(node, ast.JoinedStr):
            parts = [
                self._value(part.value if isinstance(part, ast.FormattedValue) else part, names) for part in node.values
            ]
            return "".join("?" if isinstance(part, Unread) else str(part) for part in parts)
        if isinstance(node, ast.Subscript):
            holder, key = self._value(node.value, names), self._value(node.slice, names)
            return self._applied(operator.getitem, holder, key)
        if isinstance(node, ast.Slice):
            ends = [None if end is None else self._value(end, names) for end in (node.lower, node.upper, node.step)]
            return slice(*ends)
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return self._comprehended(node, dict(names))
        if isinstance(node, ast.Attribute):
            holder = self._value(node.value, names)
            if isinstance(holder, Made) and node.attr in holder.given:
                return holder.given[node.attr]
            return Unread(f"{self.file}, line {node.lineno}: `{ast.unparse(node)}` is not known")
        if isinstance(node, ast.Call):
            return self._called(node, names)
        return self._note(node, f"`{ast.unparse(node)[:60]}` is not read")

    def _applied(self, function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        if isinstance(a, Unread) or isinstance(b, Unread):
            return a if isinstance(a, Unread) else b
        value = function(a, b)
        if isinstance(value, str | list | tuple) and len(value) > MOST_ITEMS:
            raise InputError(f"{self.file}: makes a value of over {MOST_ITEMS:,} items")
        return value

    def _comprehended(self, node: ast.ListComp | ast.GeneratorExp, names: dict[str, Any]) -> list[Any]:
        found: list[Any] = []

        def go(number: int) -> None:
            if number == len(node.generators):
                found.append(self._value(node.elt, names))
                return
            part = node.generators[number]
            items = self._value(part.iter, names)
            for item in [] if isinstance(items, Unread) else list(items):
                self._assign(part.target, item, names)
                if all(self._value(test, names) for test in part.ifs):
                    go(number + 1)

        go(0)
        return found

    def _called(self, node: ast.Call, names: dict[str, Any]) -> Any:
        name = ast.unparse(node.func)
        given: list[Any] = []
        for part in node.args:
            value = self._value(part.value if isinstance(part, ast.Starred) else part, names)
            given += list(value) if isinstance(part, ast.Starred) and not isinstance(value, Unread) else [value]
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self._value(keyword.value, names)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, dict):
                keywords |= value
        if name in self._functions:
            return self._entered(*self._functions[name], given, keywords)
        if isinstance(node.func, ast.Attribute):
            holder = self._value(node.func.value, names)
            if isinstance(holder, list) and node.func.attr in ("append", "extend"):
                getattr(holder, node.func.attr)(*given)
                return None
            if isinstance(holder, dict) and node.func.attr in ("items", "keys", "values", "get", "update", "copy"):
                value = getattr(holder, node.func.attr)(*given, **keywords)
                return list(value) if node.func.attr in ("items", "keys", "values") else value
            if isinstance(holder, str) and node.func.attr in (
                "lower",
                "upper",
                "replace",
                "strip",
                "split",
                "startswith",
                "endswith",
            ):
                return getattr(holder, node.func.attr)(*given)
        if name == "dict":
            return {**(given[0] if given else {}), **keywords}
        if name in _FUNCTIONS:
            unread = next((value for value in (*given, *keywords.values()) if isinstance(value, Unread)), None)
            return unread or _FUNCTIONS[name](*given, **keywords)
        if name.rpartition(".")[2][:1].isupper() and not given:
            return Made(name.rpartition(".")[2], keywords)
        if name == "print":
            return None
        return self._note(node, f"calls {name}, which is not read")

    def _entered(
        self, function: ast.FunctionDef, outer: dict[str, Any], given: list[Any], keywords: dict[str, Any]
    ) -> Any:
        """Reads the body of a function with its arguments."""
        names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
        inside = dict(outer)
        for argument, default in zip(reversed(function.args.args), reversed(function.args.defaults), strict=False):
            inside[argument.arg] = self._value(default, outer)
        for argument, start in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            if start is not None:
                inside[argument.arg] = self._value(start, outer)
        inside |= dict(zip(names, given, strict=False)) | keywords
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise InputError(f"{self.file}: functions call each other over {MOST_CALLS} deep")
        try:
            self._run(function.body, inside)
        except _Return as done:
            return done.value
        finally:
            self._calls -= 1
        return None


def _loaded(target: ast.expr) -> ast.expr:
    """Returns a target of an assignment as an expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body
