"""The settings that a study tunes or searches: their values, and the conditions under which they exist.

A candidate maps the path of each setting to its value. A setting whose condition does not hold is absent. Samplers draw
knobs. A knob is a setting or a part of a setting: a pattern of layers has a knob for its length and one for each place.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from deltalab.errors import unknown

Whole = Annotated[int, Field(strict=True)]
"""A whole number; neither true nor "3" is one."""
Number = Annotated[float, Field(strict=True)]
"""A number; neither true nor "3" is one."""

LAYERS = "model.layers"
"""The setting that takes a pattern."""
MOST_TRIALS = 10_000
"""The most candidates that a study may try."""
MOST_SETTINGS = 100
"""The most settings that a space may have, each place of a pattern counted."""
MOST_CHOICES = 100
"""The most values of a choice or a pattern."""
MOST_PLACES = 100
"""The most places of a pattern, and the most times that a pattern is repeated."""
INTEGERS = 16
"""How many values of a range of integers are tried in checks, in place of the whole range."""

STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
"""How pydantic reads a mapping whose keys are all known."""


class Strict(BaseModel):
    """A section of a study's file, whose keys are all known."""

    model_config = STRICT


Condition = dict[str, tuple[Any, ...]]
"""Maps a setting to values. The condition holds if the setting has one of them."""


class Search(Strict):
    """The values that a setting may take: exactly one of the first five keys.

    Attributes:
        log_uniform: A range [low, high], spread over its logarithm.
        uniform: A range [low, high].
        integers: Whole numbers from low to high.
        choice: At least two values.
        pattern: The layers that may stand at each place of `model.layers`, spelled as there.
        lengths: How many places a pattern may have.
        repeat: How often the places follow one another.
        when: Settings, each with the values of which it must have one, or else this setting does not exist. All
            settings of a mapping must have such a value. Of a list of mappings, one must hold. A rule is compared by
            its name, or as a whole if the condition is a mapping.
    """

    log_uniform: tuple[Number, Number] | None = None
    uniform: tuple[Number, Number] | None = None
    integers: tuple[Whole, Whole] | None = None
    choice: Annotated[tuple[Any, ...], Field(max_length=MOST_CHOICES)] | None = None
    pattern: Annotated[tuple[Any, ...], Field(max_length=MOST_CHOICES)] | None = None
    lengths: tuple[Annotated[Whole, Field(ge=1, le=MOST_PLACES)], ...] | None = None
    repeat: Annotated[Whole, Field(ge=1, le=MOST_PLACES)] | None = None
    when: Condition | tuple[Condition, ...] | None = None

    @field_validator("lengths", mode="before")
    @classmethod
    def _one_or_several(cls, raw: Any) -> Any:
        return (raw,) if isinstance(raw, int) else raw

    @field_validator("when", mode="before")
    @classmethod
    def _one_value_or_several(cls, raw: Any) -> Any:
        if raw is None:
            return None
        ways = raw if isinstance(raw, list | tuple) else [raw]
        if not ways or not all(
            isinstance(way, dict) and way and all(isinstance(key, str) for key in way) for way in ways
        ):
            raise ValueError(f"takes {{SETTING: [value, ...]}}, or a list of such mappings, not {raw!r}")
        conditions = [
            {path: tuple(values) if isinstance(values, list | tuple) else (values,) for path, values in way.items()}
            for way in ways
        ]
        return conditions[0] if len(conditions) == 1 else tuple(conditions)

    @model_validator(mode="after")
    def _one_that_is_not_empty(self) -> Self:
        forms = ("log_uniform", "uniform", "integers", "choice", "pattern")
        stated = {name: value for name in forms if (value := getattr(self, name)) is not None}
        if len(stated) != 1:
            raise ValueError("takes exactly one of log_uniform, uniform, integers, choice; model.layers also a pattern")
        ((name, value),) = stated.items()
        if name in ("choice", "pattern"):
            if not all(map(_is_plain, value)):
                raise ValueError(f"{name} takes numbers, words, lists and mappings, not {list(value)}")
            if len(value) < 2 or len(set(map(json.dumps, value))) < len(value):
                raise ValueError(f"{name} needs at least two values, all different, not {list(value)}")
        elif not value[0] < value[1]:
            raise ValueError(f"{name} needs [low, high] with low < high, not {list(value)}")
        if name == "log_uniform" and value[0] <= 0:
            raise ValueError(f"log_uniform needs positive bounds, not {list(value)}")
        if name == "pattern" and (not self.lengths or len(set(self.lengths)) < len(self.lengths)):
            raise ValueError("pattern needs lengths: [number of places, ...], all different")
        if name != "pattern" and (self.lengths or self.repeat):
            raise ValueError(f"{'lengths' if self.lengths else 'repeat'} goes with a pattern")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out the keys of a later release that are not given, so that a study keeps its identity."""
        later = ("pattern", "lengths", "repeat", "when")
        return {key: value for key, value in dump(self).items() if key not in later or value is not None}

    @property
    def extremes(self) -> tuple[Any, ...]:
        """The bounds of a range, or all choices."""
        values = self.log_uniform or self.uniform or self.integers or self.choice
        assert values is not None
        return values

    @property
    def said(self) -> str:
        """The values in words.

        Examples:
            >>> Search(integers=(1, 4)).said, Search(choice=("slow", 2)).said
            ('1 to 4', 'slow, 2')
        """
        if self.choice is not None or self.pattern is not None:
            return ", ".join(map(str, self.choice or self.pattern or ()))
        low, high = self.extremes
        return f"{low:g} to {high:g}"

    def points(self, integers: int) -> list[Any]:
        """Lists values that stand for all: every choice, the bounds of a range, or integers spread over their range.

        Args:
            integers: The most integers to list.

        Examples:
            >>> Search(integers=(16, 64)).points(4)
            [16, 32, 48, 64]
        """
        if self.integers is None:
            return [*self.extremes]
        low, high = self.integers
        gaps = min(integers - 1, high - low)
        return [low + round(i * (high - low) / gaps) for i in range(gaps + 1)]

    def holds(self, value: object) -> bool:
        """Whether the setting may take a value.

        Examples:
            >>> Search(integers=(1, 4)).holds(2), Search(integers=(1, 4)).holds(2.5), Search(choice=(1, 2)).holds(True)
            (True, False, False)
        """
        if self.choice is not None:
            return any(_same(value, choice) for choice in self.choice)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        low, high = self.extremes
        return bool(low <= value <= high) and (self.integers is None or isinstance(value, int))

    def exists(self, drawn: Mapping[str, Any]) -> bool:
        """Whether the setting's condition holds among the knobs drawn so far.

        Examples:
            >>> Search(choice=(1, 2), when={"rule": ["gla"]}).exists({"rule": {"name": "gla"}})
            True
        """
        return any(
            all(
                path in drawn and any(_meets(path, drawn[path], value) for value in values)
                for path, values in way.items()
            )
            for way in self.ways
        )

    @property
    def ways(self) -> tuple[Condition, ...]:
        """The conditions of which one must hold; a single empty condition if the setting always exists.

        Examples:
            >>> Search(choice=(1, 2), when={"a": 3}).ways, Search(choice=(1, 2)).ways
            (({'a': (3,)},), ({},))
        """
        return self.when if isinstance(self.when, tuple) else (self.when or {},)

    @property
    def parents(self) -> list[str]:
        """The settings that the condition names."""
        return [*dict.fromkeys(path for way in self.ways for path in way)]


def _is_plain(value: object) -> bool:
    """Whether JSON can express a value; YAML also has dates, for example."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, bool | int | float | str | None)


def _same(value: object, other: object) -> bool:
    """Whether two values are equal: 1 and 1.0 are, 1 and true are not."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _meets(path: str, value: object, wanted: object) -> bool:
    """Whether a setting's value is the one that a condition wants."""
    if path == "rule" and isinstance(wanted, str):
        return wanted == (value.get("name") if isinstance(value, Mapping) else value)
    return _same(value, wanted)


class Space(BaseModel):
    """Settings to search, and `trials`, how many candidates are tried.

    A candidate that makes no model is recorded as infeasible. It uses up no trial, and another is drawn in its place.
    Every key that is not listed is a setting to search, by its path: `train.lr: {log_uniform: [1e-3, 1e-1]}`.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, Search] = Field(init=False)

    sections: ClassVar[tuple[str, ...]] = ()
    """Settings whose path has no dot."""

    trials: Annotated[Whole, Field(ge=1, le=MOST_TRIALS)]

    @property
    def searched(self) -> dict[str, Search]:
        """The settings to search, by their paths."""
        return self.__pydantic_extra__

    @cached_property
    def knobs(self) -> dict[str, Search]:
        """The knobs that are drawn, by name. A setting's name is its path, and it comes after those in its condition.

        A pattern is drawn as `model.layers.length`, if it has several lengths, `model.layers[0]`, and so on.
        """
        return {name: knob for path in _in_order(self.searched) for name, knob in _knobs(path, self.searched[path])}

    @cached_property
    def whole(self) -> int | None:
        """How many candidates there are; None if a knob is a range, or if there are over 10,000 candidates."""
        return count_combinations(self.knobs)

    def draw(self, ask: Callable[[str, Search], Any]) -> dict[str, Any]:
        """Draws a candidate.

        Args:
            ask: Gives the value of a knob; called with the name and the knob, for each knob that exists.
        """
        drawn: dict[str, Any] = {}
        for name, knob in self.knobs.items():
            if knob.exists(drawn):
                drawn[name] = ask(name, knob)
        return self.settings(drawn)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Lists all candidates in order. All knobs must be choices."""
        return map(self.settings, combinations(self.knobs))

    def settings(self, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """Makes a candidate of drawn knobs, with its settings in the order in which the study lists them."""
        candidate: dict[str, Any] = {}
        for path, search in self.searched.items():
            if search.pattern is not None:
                places = [drawn[name] for i in range(max(search.lengths or ())) if (name := f"{path}[{i}]") in drawn]
                if places:
                    candidate[path] = places * (search.repeat or 1)
            elif path in drawn:
                candidate[path] = drawn[path]
        return candidate

    def drawn(self, candidate: Mapping[str, Any]) -> dict[str, Any] | None:
        """Finds the knobs that make a candidate.

        Returns:
            The value of each knob by name; None if the candidate is not in the space, since it has a value that no
            knob takes, or a setting too many or too few.
        """
        flat = {path: value for path, value in candidate.items() if path in self.knobs}
        for path, search in self.searched.items():
            layers = candidate.get(path)
            if search.pattern is None or not isinstance(layers, list | tuple):
                continue
            length = len(layers) // (search.repeat or 1)
            flat |= {f"{path}[{i}]": layer for i, layer in enumerate(layers[:length])}
            flat |= {f"{path}.length": length} if len(search.lengths or ()) > 1 else {}
        knobs: dict[str, Any] = {}
        for name, knob in self.knobs.items():
            if not knob.exists(knobs):
                continue
            if name not in flat or not knob.holds(flat[name]):
                return None
            knobs[name] = flat[name]
        # The two are equal only if no setting is left over and a pattern repeats what its places say.
        return knobs if self.settings(knobs) == dict(candidate) else None

    @model_validator(mode="before")
    @classmethod
    def _a_path_has_a_dot(cls, raw: Any) -> Any:
        for key in raw if isinstance(raw, dict) else ():
            if key not in cls.model_fields and "." not in str(key) and key not in cls.sections:
                if key == "seeds":
                    raise ValueError("leave out seeds: every seed of the study trains every candidate")
                raise unknown("key", key, [*cls.model_fields, "paths such as train.lr"])
        return raw

    @model_validator(mode="after")
    def _searches_something(self) -> Self:
        if not self.searched:
            raise ValueError("searches nothing: add a key such as 'train.lr: {log_uniform: [1e-3, 1e-1]}'")
        if (places := sum(max(search.lengths or (1,)) for search in self.searched.values())) > MOST_SETTINGS:
            raise ValueError(f"has {places} settings; at most {MOST_SETTINGS} can be searched")
        return self


def _in_order(searched: Mapping[str, Search]) -> list[str]:
    """Orders the paths as they are listed, but each after those in its condition.

    Raises `ValueError` for a condition that cannot hold, and for a cycle of conditions.
    """
    for path, search in searched.items():
        for number, way in enumerate(search.ways):
            where = f".{path}.when[{number}]" if len(search.ways) > 1 else f".{path}.when"
            for parent, values in way.items():
                _check_condition(searched, path, parent, values, where)
    try:
        [*TopologicalSorter({path: search.parents for path, search in searched.items()}).static_order()]
    except CycleError as error:
        circle = [*reversed(error.args[1])]
        needs = ", ".join(f"{path} needs {other}" for path, other in pairwise(circle))
        raise ValueError(f".{circle[0]}.when: the conditions go in a circle: {needs}") from None
    ordered: list[str] = []
    while len(ordered) < len(searched):
        ordered.append(
            next(path for path in searched if path not in ordered and all(q in ordered for q in searched[path].parents))
        )
    return ordered


def _check_condition(
    searched: Mapping[str, Search], path: str, parent: str, values: tuple[Any, ...], where: str
) -> None:
    """Raises `ValueError` if a condition names a setting or a value that is not searched."""
    if parent not in searched:
        raise unknown("searched setting", parent, [other for other in searched if other != path], where=where)
    above = searched[parent]
    if above.choice is None and above.integers is None:
        raise ValueError(f"{where}: {parent} is no choice: a condition needs one, or integers")
    taken = above.choice if above.choice is not None else range(above.extremes[0], above.extremes[1] + 1)
    for value in values:
        if not any(_meets(parent, other, value) for other in taken):
            allowed = dict.fromkeys(_text(parent, other) for other in above.choice or [above.said])
            raise unknown("value", _text(parent, value), allowed, where=f"{where}.{parent}")


def _text(path: str, value: object) -> str:
    """A value in an error; a rule by its name."""
    return str(value["name"]) if path == "rule" and isinstance(value, Mapping) and "name" in value else str(value)


def _knobs(path: str, search: Search) -> Iterator[tuple[str, Search]]:
    """The knobs of a setting by name: the setting itself, or the length and the places of a pattern."""
    if search.pattern is None:
        yield path, search
        return
    lengths = search.lengths or ()
    if len(lengths) > 1:
        yield f"{path}.length", Search(choice=lengths, when=search.when)
    for place in range(max(lengths)):
        longer = {f"{path}.length": tuple(n for n in lengths if n > place)} if len(lengths) > 1 else {}
        ways = tuple({**way, **longer} for way in search.ways)
        yield f"{path}[{place}]", Search(choice=search.pattern, when=ways if any(ways) else None)


def combinations(
    knobs: Mapping[str, Search], values: Callable[[Search], Iterable[Any]] = lambda knob: knob.extremes
) -> Iterator[dict[str, Any]]:
    """Lists the values of knobs that may be drawn together, in order.

    Args:
        knobs: The knobs by name, each after those in its condition.
        values: Gives the values of a knob; by default its choices or its bounds.

    Examples:
        >>> knobs = {"a": Search(choice=(1, 2)), "b": Search(choice=(3, 4), when={"a": [2]})}
        >>> [*combinations(knobs)]
        [{'a': 1}, {'a': 2, 'b': 3}, {'a': 2, 'b': 4}]
    """

    def onwards(left: list[tuple[str, Search]], drawn: dict[str, Any]) -> Iterator[dict[str, Any]]:
        while left and not left[0][1].exists(drawn):
            left = left[1:]
        if not left:
            yield drawn
            return
        for value in values(left[0][1]):
            yield from onwards(left[1:], {**drawn, left[0][0]: value})

    return onwards([*knobs.items()], {})


def count_combinations(knobs: Mapping[str, Search]) -> int | None:
    """Counts the combinations of knobs; None if a knob is a range, or if there are more than `MOST_TRIALS`."""
    if any(knob.choice is None for knob in knobs.values()):
        return None
    if math.prod(len(knob.extremes) for knob in knobs.values() if not knob.when) > MOST_TRIALS:
        return None  # The knobs that always exist have too many combinations already.
    # No condition names the other knobs, so that these are counted by a product, and not listed.
    parents = {parent for knob in knobs.values() for parent in knob.parents}
    others = [knob for name, knob in knobs.items() if name not in parents]
    total = 0
    for drawn in combinations({name: knob for name, knob in knobs.items() if name in parents}):
        total += math.prod(len(knob.extremes) for knob in others if knob.exists(drawn))
        if total > MOST_TRIALS:
            return None
    return total


def example_with(knobs: Mapping[str, Search], name: str) -> dict[str, Any] | None:
    """Draws the knobs that the condition of a knob names, directly or not, so that the knob exists.

    Returns:
        The values of those knobs; None if the knob never exists.
    """
    needed = [name]
    for needed_name in needed:
        needed += [parent for parent in knobs[needed_name].parents if parent not in needed]
    conditions: dict[str, list[Any]] = {}
    for parent, values in (item for knob in knobs.values() for way in knob.ways for item in way.items()):
        conditions.setdefault(parent, []).extend(values)
    # The bounds of a range of integers, and the values that conditions name, stand for the range.
    above = {
        parent: knob if knob.choice else Search(choice=(*{*knob.extremes, *conditions[parent]},), when=knob.when)
        for parent, knob in knobs.items()
        if parent in needed and parent != name
    }
    return next((drawn for drawn in combinations(above) if knobs[name].exists(drawn)), None)
