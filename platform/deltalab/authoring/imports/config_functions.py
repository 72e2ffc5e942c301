"""The functions and operators that the reader of a configuration knows, each bounded in what it makes."""

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

from deltalab.reading import MOST_LETTERS

MOST_ITEMS = 100_000
"""The items that a list may have."""


class TooLarge(Exception):
    """A value that is larger than the limits."""


def listed(items: Iterable[Any]) -> list[Any]:
    """Returns the items as a list; raises `TooLarge` if there are over `MOST_ITEMS`."""
    if isinstance(items, Sized) and len(items) > MOST_ITEMS:
        raise TooLarge(f"makes a list of over {MOST_ITEMS:,} items")
    return list(items)


def _linspace(start: float, stop: float, num: int = 50) -> list[float]:
    return [start + (stop - start) * i / max(num - 1, 1) for i in listed(range(num))]


def _logspace(start: float, stop: float, num: int = 50) -> list[float]:
    return [10**exponent for exponent in _linspace(start, stop, num)]


def _times(a: Any, b: Any) -> Any:
    for many, count in ((a, b), (b, a)):
        if isinstance(many, str | list | tuple) and isinstance(count, int) and len(many) * count > MOST_ITEMS:
            raise TooLarge(f"makes a value of over {MOST_ITEMS:,} items")
    return a * b


def _modulo(a: Any, b: Any) -> Any:
    if isinstance(a, str):
        raise TypeError("the format of a text is not read")
    return a % b


def _power(a: Any, b: Any) -> Any:
    if abs(b) > 64:
        raise TooLarge("makes a power above 64")
    return a**b


def _rounded(x: float, digits: int | None = None) -> float:
    return round(x) if digits is None else round(x, max(-20, min(20, digits)))


def as_text(value: object = "") -> str:
    """Returns a text or a number as text; raises `TypeError` for another value."""
    if value is not None and not isinstance(value, str | int | float):
        raise TypeError("the text of a list or an object is not read")
    return str(value)


def _product(*lists: Any) -> list[tuple[Any, ...]]:
    if len(lists) > 16 or math.prod(map(len, lists)) > MOST_ITEMS:
        raise TooLarge(f"makes a list of over {MOST_ITEMS:,} items")
    found: list[tuple[Any, ...]] = [()]
    for items in lists:
        found = [(*before, item) for before in found for item in items]
    return found


def _replaced(text: str, old: str, new: str) -> str:
    if len(new) * (len(text) + 1) > MOST_LETTERS:
        raise TooLarge(f"makes a text of over {MOST_LETTERS:,} letters")
    return text.replace(old, new)


OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: _times, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: _modulo, ast.Pow: _power, ast.Eq: operator.eq, ast.NotEq: operator.ne,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_,
    ast.IsNot: operator.is_not, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b,
}  # fmt: skip
SIGNS: Mapping[type, Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}
OF_ITEMS: Mapping[str, Callable[..., Any]] = {
    "enumerate": lambda items, start=0: list(enumerate(items, start)), "len": len, "list": lambda items=(): list(items),
    "np.array": list, "range": lambda *given: listed(range(*given)), "reversed": lambda items: list(reversed(items)),
    "tuple": lambda items=(): tuple(items), "zip": lambda *lists: list(zip(*lists, strict=False)),
    "itertools.product": _product,
}  # fmt: skip
"""The functions that take items as they are."""
OF_VALUES: Mapping[str, Callable[..., Any]] = {
    "abs": abs, "all": all, "any": any, "bool": bool, "float": float, "int": int, "max": max, "min": min,
    "np.linspace": _linspace, "np.logspace": _logspace, "np.log2": math.log2, "np.sqrt": math.sqrt,
    "math.log2": math.log2, "math.sqrt": math.sqrt, "round": _rounded, "set": lambda x=(): list(dict.fromkeys(x)),
    "sorted": lambda items, reverse=False: sorted(items, reverse=reverse), "str": as_text,
    "sum": lambda items: sum(items),
}  # fmt: skip
"""The functions that read the values of items, too."""
OF_TEXT: Mapping[str, Callable[..., Any]] = {
    "endswith": str.endswith, "lower": str.lower, "replace": _replaced, "split": str.split,
    "startswith": str.startswith, "strip": str.strip, "upper": str.upper,
}  # fmt: skip
