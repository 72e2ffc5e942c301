"""Reads YAML and JSON that a user wrote, and refuses what exceeds a limit before it costs time or memory.

docs/reference/limits.md lists the limits.
"""

import json
import math
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from deltalab.errors import InputError

MOST_BYTES = 2**18
"""The most bytes that a YAML file may have. PyYAML reads slowly, letter by letter."""
MOST_JSON = 2**24
"""The most bytes that a JSON file may have."""
MOST_VALUES = 10_000
"""The most keys and values that a YAML text may have. PyYAML reads 20,000 of them in a second.

The keys and values that an alias stands for count each time the alias is used.
"""
MOST_DEPTH = 32
"""The most mappings and lists that may lie inside each other."""
MOST_LETTERS = 10_000
"""The most letters that one text may have, or one number as it is written."""
LARGEST = 2**63 - 1
"""The largest whole number, without its sign: it fits into 64 bits."""

_TAGS = ("str", "int", "float", "bool", "null", "seq", "map", "merge")
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters, halves of surrogate pairs, and marks that change the order in which a terminal shows a line."""


def read_text(file: Path, *, most: int = MOST_BYTES) -> str:
    """Returns the text of a file in UTF-8.

    Args:
        file: The file.
        most: The largest size in bytes.

    Raises:
        FileNotFoundError: There is no such file.
        NotADirectoryError: A parent of the file is no folder.
        InputError: The file is a folder, a pipe or a device, has over `most` bytes, or is not text.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise InputError(f"{file}: cannot be read: it is {'a folder' if file.is_dir() else 'a pipe or a device'}")
        with file.open("rb") as opened:
            data = opened.read(most + 1)
        if len(data) > most:
            size = file.stat().st_size
            raise InputError(f"{file}: cannot be read: it has {size:,} bytes, and at most {most:,} are read")
        return data.decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{file}: cannot be read: {reason}") from None


def read_yaml(text: str, *, where: str) -> Any:
    """Reads YAML of texts, numbers, true, false, null, lists, and mappings whose keys are texts.

    Args:
        text: The YAML.
        where: The place of the text, such as its file. The message of an error begins with it.

    Raises:
        InputError: The text is not YAML, has a key twice, or exceeds a limit of this module.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(str(error.problem), where=f"{where}{line}", key=getattr(error, "key", None)) from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    except (ValueError, OverflowError, IndexError, KeyError) as error:  # %YAML 9.9, for example
        raise InputError(f"{where}: not YAML: {_one_line(error)}") from None


def read_pairs(words: Iterable[str]) -> dict[str, Any]:
    """Reads words KEY=VALUE, and returns each key with its value. Each value is read as YAML.

    Raises:
        InputError: A word has no `=`, two words have the same key, or `read_yaml` refuses a value.

    Examples:
        >>> read_pairs(["train.steps=100", "seeds={at_least: 6, at_most: 15}", "deadline="])
        {'train.steps': 100, 'seeds': {'at_least': 6, 'at_most': 15}, 'deadline': None}
    """
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise InputError(f"'{_cut(word)}': give settings as KEY=VALUE", key=_cut(word))
        if key in values:
            raise InputError(f"'{_cut(key)}' is given twice", key=_cut(key))
        values[key] = read_yaml(value, where=f"'{_cut(word)}'")
    return values


def pairs(values: Mapping[str, Any]) -> str:
    """Writes keys and values as words KEY=VALUE with spaces between them, which `read_pairs` reads back.

    Examples:
        >>> pairs({"train.steps": 100, "rule": "gla", "base.model": {"mlp": False}, "deadline": None})
        'train.steps=100 rule=gla base.model={"mlp": false} deadline='
    """
    return " ".join(f"{key}={_written(value)}" for key, value in values.items())


def _written(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z0-9_./+-]+", value) and read_yaml(value, where="") == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def read_json(file: Path, *, most: int = MOST_JSON) -> dict[str, Any]:
    """Returns the mapping in a JSON file.

    Args:
        file: The file.
        most: The largest size in bytes.

    Raises:
        FileNotFoundError: There is no such file.
        NotADirectoryError: A parent of the file is no folder.
        InputError: `read_text` refuses the file, or the file holds no mapping.
    """
    try:
        content = json.loads(read_text(file, most=most))
    except RecursionError:
        raise InputError(f"{file}: not JSON: it nests too deep") from None
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{file}: not JSON: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}: holds no mapping")
    return content


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with limits. It reads 1e-3 as a number, and a date as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._values = 0
        self._sizes: dict[int, int] = {}  # the id of a node -> the number of values in it, to count at each alias
        self._held: list[yaml.Node] = []  # nodes, kept alive so that the ids of `_sizes` are unique

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        alias = isinstance(event, yaml.AliasEvent)
        self._depth += 1
        if self._depth > MOST_DEPTH:
            self._refuse(f"nests more than {MOST_DEPTH} mappings and lists", event)
        before = self._values
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias and id(node) not in self._sizes:
            self._refuse("an alias stands inside of what it names", event)
        self._values += self._sizes[id(node)] if alias else 1
        if self._values > MOST_VALUES:
            self._refuse(f"has more than {MOST_VALUES:,} values", event)
        if node is not None and not alias:
            self._sizes[id(node)] = self._values - before
            self._held.append(node)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):  # !!map [1]
            self._refuse("is no mapping", node)
        keys = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse("a key must be a word", key)
            if key.value in keys:
                self._refuse(f"key '{_cut(key.value)}' is given twice", key, key=_cut(key.value))
            keys.add(key.value)
        mapping = super().construct_mapping(node, deep)
        for key in mapping:
            if not isinstance(key, str):
                self._refuse(f"key {key!r} must be text: write it in quotes", node)
        return mapping

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag.removeprefix("tag:yaml.org,2002:") not in _TAGS:
            self._refuse(f"takes no tag {_cut(node.tag.replace('tag:yaml.org,2002:', '!!'))}", node)
        if not isinstance(node, yaml.ScalarNode):
            return super().construct_object(node, deep)
        if len(node.value) > MOST_LETTERS:
            self._refuse(f"has {len(node.value):,} letters in one text; at most {MOST_LETTERS:,} are read", node)
        if hidden := _HIDDEN.search(node.value):
            self._refuse(f"has the character U+{ord(hidden[0]):04X} in a text", node)
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError, KeyError, AttributeError):
            self._refuse(f"'{_cut(node.value)}' is no {node.tag.rpartition(':')[2]}", node)
        if isinstance(value, int) and abs(value) > LARGEST:
            self._refuse(f"{_cut(node.value)} is not between -2^63 and 2^63", node)
        if isinstance(value, float) and not math.isfinite(value):
            self._refuse(f"{_cut(node.value)} is not a finite number", node)
        return value

    def _refuse(self, problem: str, at: Any, *, key: str | None = None) -> Any:
        error = yaml.constructor.ConstructorError(None, None, problem, at.start_mark)
        error.key = key  # type: ignore[attr-defined]
        raise error


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)
