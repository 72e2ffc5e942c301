"""What a configuration that is read as text holds beside plain values: calls of classes, and values left unread."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


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


KINDS = (bool, int, float, str, list, tuple, dict, slice, Made, Unread, type(None))
"""The types of all values that a file may hold."""


def parts_of(value: object) -> Iterable[object]:
    """Returns the values that a value holds."""
    if isinstance(value, Made):
        return value.given.values()
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
