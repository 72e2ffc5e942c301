"""Reads a Python file that makes configurations, by its syntax tree. None of its code runs."""

import ast
from collections.abc import Sized
from pathlib import Path
from typing import Any

from deltalab.authoring.imports.config_functions import (
    MOST_ITEMS,
    OF_ITEMS,
    OF_TEXT,
    OF_VALUES,
    OPERATORS,
    SIGNS,
    TooLarge,
    as_text,
    listed,
)
from deltalab.authoring.imports.config_values import KINDS, Made, Unread, parts_of
from deltalab.errors import InputError
from deltalab.reading import LARGEST, MOST_DEPTH, MOST_LETTERS, read_text

MOST_STEPS = 1_000_000
"""The statements, expressions and copied items that a file may take. A stranger's file may loop forever."""
MOST_CALLS = 40
"""How deep functions may call each other."""


class _Return(Exception):
    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


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
        notes: The statements that were left out, each with its line.

    Raises:
        InputError: The file is no Python, or takes too many steps or too large values to read.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.values: dict[str, Any] = {"__name__": file.stem}
        self.notes: list[str] = []
        self._steps, self._calls = 0, 0
        self._functions: dict[str, tuple[ast.FunctionDef, dict[str, Any], Path]] = {}
        self._modules: dict[str, str] = {}
        self._renamed: dict[str, str] = {}
        try:
            self._run(_parsed(file), self.values)
            self._weigh(self.values.get("configs"), ast.Pass())
        except RecursionError:
            raise InputError(f"{file}: nests too deep to be read") from None
        except TooLarge as error:
            raise InputError(f"{file}: {error}") from None
        except (_Return, _Next):
            raise InputError(f"{file}: no Python: a return or a break that stands outside") from None

    def _place(self, node: ast.AST) -> str:
        line = getattr(node, "lineno", None)
        return f"{self.file}, line {line}" if line else f"{self.file}"

    def _unread(self, node: ast.AST, text: str) -> Unread:
        return Unread(f"{self._place(node)}: {text}")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _count(self, node: ast.AST, steps: int = 1) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise InputError(f"{self._place(node)}: takes over {MOST_STEPS:,} steps to read")

    def _weigh(self, value: object, node: ast.AST) -> None:
        """Counts all that a value holds as steps, since comparing or printing it takes as many."""
        waiting = [(value, 0)]
        while waiting:
            part, depth = waiting.pop()
            self._count(node)
            if depth > MOST_DEPTH:
                raise TooLarge(f"nests values over {MOST_DEPTH} deep")
            waiting += [(inner, depth + 1) for inner in parts_of(part)]

    # --- statements -----------------------------------------------------------------------------------------

    def _run(self, body: list[ast.stmt], names: dict[str, Any]) -> None:
        for node in body:
            self._count(node)
            try:
                self._statement(node, names)
            except (_Return, _Next, TooLarge, InputError, RecursionError):
                raise
            except Exception as error:
                self._note(f"{self._place(node)}: a statement that is not read: {type(error).__name__}: {error}")

    def _statement(self, node: ast.stmt, names: dict[str, Any]) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            if node.value is not None:
                value = self._value(node.value, names)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, value, names)
        elif isinstance(node, ast.AugAssign):
            before, more = self._value(node.target, names), self._value(node.value, names)
            if isinstance(before, list) and isinstance(more, list | tuple) and isinstance(node.op, ast.Add):
                self._extend(before, more, node)
            else:
                self._assign(node.target, self._applied(node, node.op, before, more), names)
        elif isinstance(node, ast.For):
            self._loop(node, names)
        elif isinstance(node, ast.If):
            test = self._value(node.test, names)
            if isinstance(test, Unread):
                self._note(f"{self._place(node)}: a condition that is not read ({test.reason})")
            else:
                self._run(node.body if test else node.orelse, names)
        elif isinstance(node, ast.FunctionDef) and not node.decorator_list:
            self._functions[node.name] = (node, names, self.file)
        elif isinstance(node, ast.Return):
            raise _Return(None if node.value is None else self._value(node.value, names))
        elif isinstance(node, ast.Expr):
            value = self._value(node.value, names)
            if isinstance(value, Unread):
                self._note(value.reason)
        elif isinstance(node, ast.Continue | ast.Break):
            raise _Next(isinstance(node, ast.Break))
        elif isinstance(node, ast.Import):
            self._modules |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            self._import(node)
        elif not isinstance(node, ast.Pass | ast.Assert):
            self._note(f"{self._place(node)}: a statement `{type(node).__name__.lower()}` that is not read")

    def _loop(self, node: ast.For, names: dict[str, Any]) -> None:
        items = self._value(node.iter, names)
        if isinstance(items, Unread):
            self._note(f"{self._place(node)}: a loop over what is not read ({items.reason})")
            return
        for item in self._copied(items, node):
            self._assign(node.target, item, names)
            try:
                self._run(node.body, names)
            except _Next as jump:
                if jump.ends:
                    return
        self._run(node.orelse, names)

    def _import(self, node: ast.ImportFrom) -> None:
        """Finds the functions of a module of the same repository."""
        module = "." * node.level + (node.module or "")
        wanted = {alias.name: alias.asname or alias.name for alias in node.names}
        self._modules |= dict.fromkeys(wanted.values(), module)
        self._renamed |= {new: old for old, new in wanted.items()}
        parts = module.split(".")
        if node.level or len(parts) < 2:
            return
        for folder in self.file.resolve().parents:
            path = folder.joinpath(*parts).with_suffix(".py")
            if path.is_file() and path != self.file.resolve():
                try:
                    body = _parsed(path)
                except InputError as error:
                    self._note(str(error))
                    return
                for other in body:
                    if isinstance(other, ast.FunctionDef) and (other.name in wanted or "*" in wanted):
                        self._functions[wanted.get(other.name, other.name)] = (other, {}, path)
                return

    def _assign(self, target: ast.expr, value: Any, names: dict[str, Any]) -> None:
        if isinstance(target, ast.Name):
            names[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = [value] * len(target.elts) if isinstance(value, Unread) else self._copied(value, target)
            if len(parts) != len(target.elts):
                raise InputError(f"{self._place(target)}: {len(parts)} values for {len(target.elts)} names")
            for part, item in zip(target.elts, parts, strict=True):
                self._assign(part, item, names)
        elif isinstance(target, ast.Subscript | ast.Attribute):
            holder = self._value(target.value, names)
            if isinstance(target, ast.Attribute) and isinstance(holder, Made):
                holder.given[target.attr] = value
            elif isinstance(target, ast.Subscript) and isinstance(holder, dict | list):
                key = self._value(target.slice, names)
                if isinstance(key, slice | Unread):
                    raise TypeError("the key is not read")
                holder[key] = value
            else:
                raise TypeError("what it changes is not read")

    # --- values ---------------------------------------------------------------------------------------------

    def _value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        self._count(node)
        try:
            value = self._read(node, names)
        except (_Return, _Next, InputError, RecursionError):
            raise
        except TooLarge as error:
            raise InputError(f"{self._place(node)}: {error}") from None
        except Exception as error:
            return self._unread(node, f"`{ast.unparse(node)[:60]}`: {type(error).__name__}: {str(error)[:100]}")
        return value if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) else self._bounded(value, node)

    def _bounded(self, value: Any, node: ast.AST) -> Any:
        """Returns a value that was made, if it is not too large."""
        if not isinstance(value, KINDS):
            return self._unread(node, f"a value of the type {type(value).__name__}")
        if isinstance(value, list | tuple | dict):
            if len(value) > MOST_ITEMS:
                raise InputError(f"{self._place(node)}: makes a list of over {MOST_ITEMS:,} items")
            self._count(node, len(value))
        elif isinstance(value, str) and len(value) > MOST_LETTERS:
            raise InputError(f"{self._place(node)}: makes a text of over {MOST_LETTERS:,} letters")
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise InputError(f"{self._place(node)}: makes a number of over 64 bits")
        return value

    def _copied(self, items: Any, node: ast.AST) -> list[Any]:
        found = listed(items)
        self._count(node, len(found))
        return found

    def _extend(self, holder: list[Any], more: Any, node: ast.AST) -> None:
        found = self._copied(more, node)
        if len(holder) + len(found) > MOST_ITEMS:
            raise InputError(f"{self._place(node)}: makes a list of over {MOST_ITEMS:,} items")
        holder.extend(found)

    def _read(self, node: ast.expr, names: dict[str, Any]) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in names or node.id in self.values:
                return names.get(node.id, self.values.get(node.id))
            return self._unread(node, f"`{node.id}` is not known")
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            items = self._items(node.elts, names)
            return tuple(items) if isinstance(node, ast.Tuple) and isinstance(items, list) else items
        if isinstance(node, ast.Dict):
            found: dict[Any, Any] = {}
            for key, item in zip(node.keys, node.values, strict=True):
                value = self._value(item, names)
                if key is None and isinstance(value, Unread):
                    return value
                self._count(node, len(value) if key is None else 1)
                found |= value if key is None else {self._value(key, names): value}
            return found
        if isinstance(node, ast.BinOp):
            return self._applied(node, node.op, self._value(node.left, names), self._value(node.right, names))
        if isinstance(node, ast.UnaryOp):
            value = self._value(node.operand, names)
            return value if isinstance(value, Unread) else SIGNS[type(node.op)](value)
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                value = self._value(part, names)
                if isinstance(value, Unread) or bool(value) == isinstance(node.op, ast.Or):
                    break
            return value
        if isinstance(node, ast.Compare):
            values = [self._value(part, names) for part in (node.left, *node.comparators)]
            for value in values:
                self._weigh(value, node)
            steps = [self._applied(node, op, a, b) for op, a, b in zip(node.ops, values[:-1], values[1:], strict=True)]
            return next((step for step in steps if isinstance(step, Unread)), all(steps))
        if isinstance(node, ast.IfExp):
            test = self._value(node.test, names)
            return test if isinstance(test, Unread) else self._value(node.body if test else node.orelse, names)
        if isinstance(node, ast.JoinedStr):
            return self._text(node, names)
        if isinstance(node, ast.Subscript):
            holder, key = self._value(node.value, names), self._value(node.slice, names)
            unread = next((value for value in (holder, key) if isinstance(value, Unread)), None)
            return unread or (self._bounded(holder[key], node) if isinstance(key, slice) else holder[key])
        if isinstance(node, ast.Slice):
            ends = [None if end is None else self._value(end, names) for end in (node.lower, node.upper, node.step)]
            return next((end for end in ends if isinstance(end, Unread)), slice(*ends))
        if isinstance(node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp):
            return self._comprehended(node, dict(names))
        if isinstance(node, ast.Attribute):
            holder = self._value(node.value, names)
            if isinstance(holder, Made) and node.attr in holder.given:
                return holder.given[node.attr]
            return (
                holder if isinstance(holder, Unread) else self._unread(node, f"`{ast.unparse(node)[:60]}` is not known")
            )
        if isinstance(node, ast.Call):
            return self._called(node, names)
        return self._unread(node, f"`{ast.unparse(node)[:60]}` is not read")

    def _items(self, nodes: list[ast.expr], names: dict[str, Any]) -> list[Any] | Unread:
        """Returns the items of a list, or what a star stands before if that is not known."""
        items: list[Any] = []
        for node in nodes:
            if not isinstance(node, ast.Starred):
                items.append(self._value(node, names))
                continue
            value = self._value(node.value, names)
            if isinstance(value, Unread):
                return value
            self._extend(items, value, node)
        return items

    def _text(self, node: ast.JoinedStr, names: dict[str, Any]) -> str | Unread:
        parts: list[str] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue) and (part.format_spec is not None or part.conversion != -1):
                return self._unread(node, "the format of a number in a text")
            value = self._value(part.value if isinstance(part, ast.FormattedValue) else part, names)
            if isinstance(value, Unread):
                return value
            parts.append(as_text(value))
        return "".join(parts)

    def _applied(self, node: ast.AST, op: ast.AST, a: Any, b: Any) -> Any:
        if isinstance(a, Unread) or isinstance(b, Unread):
            return a if isinstance(a, Unread) else b
        return self._bounded(OPERATORS[type(op)](a, b), node)

    def _comprehended(
        self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp, names: dict[str, Any]
    ) -> Any:
        found: list[Any] = []
        self._count(node, len(names))

        def go(number: int) -> Unread | None:
            if number == len(node.generators):
                if isinstance(node, ast.DictComp):
                    found.append((self._value(node.key, names), self._value(node.value, names)))
                else:
                    found.append(self._value(node.elt, names))
                return None
            part = node.generators[number]
            items = self._value(part.iter, names)
            if isinstance(items, Unread):
                return items
            for item in self._copied(items, node):
                self._assign(part.target, item, names)
                tests = [self._value(test, names) for test in part.ifs]
                unread = next((test for test in tests if isinstance(test, Unread)), None)
                if unread is None and all(tests):
                    unread = go(number + 1)
                if unread is not None:
                    return unread
            return None

        unread = go(0)
        if unread is not None:
            return unread
        return dict(found) if isinstance(node, ast.DictComp) else found

    # --- calls ----------------------------------------------------------------------------------------------

    def _called(self, node: ast.Call, names: dict[str, Any]) -> Any:
        name = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else "a function"
        given = self._items(node.args, names)
        if isinstance(given, Unread):
            return given
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self._value(keyword.value, names)
            if keyword.arg is None and isinstance(value, Unread):
                return value
            self._count(node, len(value) if keyword.arg is None else 1)
            keywords |= value if keyword.arg is None else {keyword.arg: value}
        if name in self._functions:
            return self._entered(*self._functions[name], given, keywords)
        if isinstance(node.func, ast.Attribute) and name.partition(".")[0] not in self._modules:
            holder = self._value(node.func.value, names)
            if isinstance(holder, Unread):
                return holder
            if isinstance(holder, list | dict | str):
                return self._method(holder, node, given, keywords)
        if name == "dict":
            return {**dict(*given), **keywords}
        if name in OF_ITEMS or name in OF_VALUES:
            values = [*given, *keywords.values()]
            self._count(node, sum(len(value) for value in given if isinstance(value, Sized)))
            if name in OF_VALUES:
                values += [item for value in given if isinstance(value, list | tuple) for item in value]
                self._weigh(given, node)
            unread = next((value for value in values if isinstance(value, Unread)), None)
            return unread or {**OF_ITEMS, **OF_VALUES}[name](*given, **keywords)
        made = self._renamed.get(name, name).rpartition(".")[2]
        if made[:1].isupper() and not given:
            return Made(made, keywords)
        if name == "print":
            return None
        module = self._modules.get(name)
        return self._unread(node, f"calls {name[:60]}{f' from {module}' if module else ''}, which is not read")

    def _method(
        self, holder: list[Any] | dict[Any, Any] | str, node: ast.Call, given: list[Any], keywords: dict[str, Any]
    ) -> Any:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if isinstance(holder, list) and method in ("append", "extend"):
            (more,) = given
            if method == "extend" and isinstance(more, Unread):
                return more
            return self._extend(holder, [more] if method == "append" else more, node)
        if isinstance(holder, list) and method == "copy":
            return holder[:]
        if isinstance(holder, dict) and method in ("items", "keys", "values"):
            return list(getattr(holder, method)())
        if isinstance(holder, dict) and method in ("get", "update", "copy"):
            self._count(node, sum(len(part) for part in (holder, *given) if isinstance(part, Sized)))
            return getattr(holder, method)(*given, **keywords)
        if isinstance(holder, str) and method in OF_TEXT:
            unread = next((value for value in given if isinstance(value, Unread)), None)
            return unread or OF_TEXT[method](holder, *given)
        return self._unread(node, f"calls {ast.unparse(node.func)[:60]}, which is not read")

    def _entered(
        self,
        function: ast.FunctionDef,
        outer: dict[str, Any],
        file: Path,
        given: list[Any],
        keywords: dict[str, Any],
    ) -> Any:
        """Reads the body of a function with its arguments."""
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise InputError(f"{self._place(function)}: functions call each other over {MOST_CALLS} deep")
        caller, self.file = self.file, file
        try:
            inside = {} if outer is self.values else dict(outer)
            self._count(function, len(inside))
            self._run(function.body, inside | self._arguments(function.args, outer, given, keywords))
        except _Return as done:
            return done.value
        finally:
            self._calls -= 1
            self.file = caller
        return None

    def _arguments(
        self, takes: ast.arguments, outer: dict[str, Any], given: list[Any], keywords: dict[str, Any]
    ) -> dict[str, Any]:
        positional = [argument.arg for argument in (*takes.posonlyargs, *takes.args)]
        named = {*positional, *(argument.arg for argument in takes.kwonlyargs)}
        rest = {key: value for key, value in keywords.items() if key not in named}
        if (rest and takes.kwarg is None) or (len(given) > len(positional) and takes.vararg is None):
            raise TypeError("it takes other arguments")
        found: dict[str, Any] = {}
        last = positional[len(positional) - len(takes.defaults) :]
        starts = [*zip(last, takes.defaults, strict=True)]
        starts += [(a.arg, d) for a, d in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if d is not None]
        for name, default in starts:
            found[name] = self._value(default, outer)
        found |= dict(zip(positional, given, strict=False)) | {k: v for k, v in keywords.items() if k in named}
        if missing := sorted(named - found.keys()):
            raise TypeError(f"it needs {missing[0]}")
        if takes.vararg is not None:
            found[takes.vararg.arg] = tuple(given[len(positional) :])
        if takes.kwarg is not None:
            found[takes.kwarg.arg] = rest
        return found


def _parsed(file: Path) -> list[ast.stmt]:
    """Returns the statements of a file."""
    try:
        return ast.parse(read_text(file)).body
    except OSError as error:
        raise InputError(f"{file}: {error.strerror or error}") from None
    except (RecursionError, MemoryError):
        raise InputError(f"{file}: nests too deep to be read") from None
    except (SyntaxError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise InputError(f"{file}{line}: no Python: {getattr(error, 'msg', error)}") from None
