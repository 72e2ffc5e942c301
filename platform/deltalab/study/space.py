"""The settings that a study tunes or searches: their values, the conditions under which they exist, what bounds them.

A candidate is a mapping from the path of each setting to its value; a setting whose condition does not hold is absent.
Samplers draw knobs. A knob is a setting, or a part of one: of a pattern of layers, its length and each of its places.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import islice, pairwise
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from deltalab.errors import InputError, unknown

# Strict: neither true nor "3" counts as a number.
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]

LAYERS = "model.layers"
"""The setting that takes a pattern."""
MOST_TRIALS = 10_000
MOST_SETTINGS = 100
"""The most settings that a space may have, each place of a pattern counted."""
MOST_CHOICES = 100
"""The most values of a choice or a pattern."""
MOST_PLACES = 100
"""The most places of a pattern, and the most times that they follow one another."""
INTEGERS = 16
"""Values of a range of integers that stand for all of them."""

Sampler = Literal["tpe", "nsga2", "nsga3", "gp", "random"]
Quantity = Literal["state", "parameters", "flops"]
COSTS = ("flops_per_token", "state_size", "parameters", "decode_us")
"""What a search can weigh besides the tasks' metrics; smaller is better."""
DEFAULT_COSTS = COSTS[:2]


STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
"""A mapping whose keys are all known."""


class _Strict(BaseModel):
    model_config = STRICT


Condition = dict[str, tuple[Any, ...]]
"""Setting -> its values, one of which it must have."""


class Search(_Strict):
    """The values that a setting may take: exactly one of the first five.

    log_uniform: a range [low, high], spread over its logarithm. uniform: a range [low, high].
    integers: whole numbers from low to high. choice: at least two values.
    pattern: the layers that may stand at each place of `model.layers`, spelled as there. lengths: how many places.
    repeat: how often the places follow one another.
    when: setting -> the values of it, one of which it must have; without them, this setting does not exist. All must
    hold. Of a list of such mappings, one must hold. A rule is compared by its name, or as a whole where the
    condition is a mapping.
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
    def _one_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, int) else given

    @field_validator("when", mode="before")
    @classmethod
    def _one_value_or_several(cls, given: Any) -> Any:
        if given is None:
            return None
        ways = given if isinstance(given, list | tuple) else [given]
        if not ways or not all(
            isinstance(way, dict) and way and all(isinstance(key, str) for key in way) for way in ways
        ):
            raise ValueError(f"takes {{SETTING: [value, ...]}}, or a list of such mappings, not {given!r}")
        found = [
            {path: tuple(values) if isinstance(values, list | tuple) else (values,) for path, values in way.items()}
            for way in ways
        ]
        return found[0] if len(found) == 1 else tuple(found)

    @model_validator(mode="after")
    def _one_that_is_not_empty(self) -> Self:
        forms = ("log_uniform", "uniform", "integers", "choice", "pattern")
        given = {name: value for name in forms if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            raise ValueError("takes exactly one of log_uniform, uniform, integers, choice; model.layers also a pattern")
        ((name, value),) = given.items()
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
        """Without the keys of a later release that are not given: a study keeps its identity."""
        later = ("pattern", "lengths", "repeat", "when")
        return {key: value for key, value in dump(self).items() if key not in later or value is not None}

    @property
    def extremes(self) -> tuple[Any, ...]:
        """Its bounds, or all of its choices."""
        found = self.log_uniform or self.uniform or self.integers or self.choice
        assert found is not None
        return found

    @property
    def said(self) -> str:
        """
        >>> Search(integers=(1, 4)).said, Search(choice=("slow", 2)).said
        ('1 to 4', 'slow, 2')
        """
        if self.choice is not None or self.pattern is not None:
            return ", ".join(map(str, self.choice or self.pattern or ()))
        low, high = self.extremes
        return f"{low:g} to {high:g}"

    def points(self, integers: int) -> list[Any]:
        """All choices, the bounds of a range, or up to so many integers spread over theirs.

        >>> Search(integers=(16, 64)).points(4)
        [16, 32, 48, 64]
        """
        if self.integers is None:
            return [*self.extremes]
        low, high = self.integers
        gaps = min(integers - 1, high - low)
        return [low + round(i * (high - low) / gaps) for i in range(gaps + 1)]

    def holds(self, value: object) -> bool:
        """Whether the setting may take the value.

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
        """Whether its condition holds among the knobs drawn.

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
        """The conditions of which one must hold; one that asks nothing, where the setting always exists.

        >>> Search(choice=(1, 2), when={"a": 3}).ways, Search(choice=(1, 2)).ways
        (({'a': (3,)},), ({},))
        """
        return self.when if isinstance(self.when, tuple) else (self.when or {},)

    @property
    def parents(self) -> list[str]:
        """The settings in its condition."""
        return [*dict.fromkeys(path for way in self.ways for path in way)]


def _is_plain(value: object) -> bool:
    """Whether JSON can express it; YAML also has dates, for example."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, bool | int | float | str | None)


def _same(one: object, other: object) -> bool:
    """Whether two values are equal: 1 and 1.0 are, 1 and true are not."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _meets(path: str, value: object, wanted: object) -> bool:
    if path == "rule" and isinstance(wanted, str):
        return wanted == (value.get("name") if isinstance(value, Mapping) else value)
    return _same(value, wanted)


class Match(_Strict):
    """Scales one dimension of an arm until the arm has as much state, parameters or flops as the base, within 2%.

    state, parameters, flops: the quantity; exactly one is true. scale: the dimension, by its path. Its default is
    `model.key_dim` for the state, and `model.d_model` for parameters and flops.
    """

    state: Annotated[bool, Field(strict=True)] = False
    parameters: Annotated[bool, Field(strict=True)] = False
    flops: Annotated[bool, Field(strict=True)] = False
    scale: str | None = None

    @model_validator(mode="after")
    def _one_quantity(self) -> Self:
        if self.state + self.parameters + self.flops != 1:
            raise ValueError("takes exactly one of state: true, parameters: true, flops: true")
        return self

    @property
    def quantity(self) -> Quantity:
        return "state" if self.state else "parameters" if self.parameters else "flops"

    @property
    def dimension(self) -> str:
        return self.scale or ("model.key_dim" if self.state else "model.d_model")


class Bound(_Strict):
    """What a quantity of a candidate may be: at_most, at_least, or within a share of the base's.

    at_most: the largest value. at_least: the smallest value. within: the share by which it may differ from the base's.
    of: whose quantity `within` refers to.
    """

    at_most: Annotated[Number, Field(gt=0)] | None = None
    at_least: Annotated[Number, Field(gt=0)] | None = None
    within: Annotated[Number, Field(gt=0, lt=1)] | None = None
    of: Literal["base"] | None = None

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if self.at_most is None and self.at_least is None and self.within is None:
            raise ValueError("takes at_most: NUMBER, at_least: NUMBER, or within: SHARE, of: base")
        if self.of and self.within is None:
            raise ValueError("of: base goes with within: SHARE")
        if self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least:g} is more than at_most {self.at_most:g}")
        return self

    def limits(self, base: float) -> tuple[float, float]:
        """The least and the most that is allowed. base: the quantity of the base.

        >>> Bound(at_most=120, within=0.25).limits(100)
        (75.0, 120.0)
        """
        share = math.inf if self.within is None else self.within
        least = 0.0 if self.at_least is None else self.at_least
        most = math.inf if self.at_most is None else self.at_most
        return (max(least, base * (1 - share)), min(most, base * (1 + share))) if self.within else (least, most)

    def __str__(self) -> str:
        """
        >>> str(Bound(at_most=4096, at_least=100)), str(Bound(within=0.02, of="base"))
        ('at most 4,096 and at least 100', "within 2% of the base's")
        """
        said = [f"at most {self.at_most:,.10g}"] if self.at_most is not None else []
        said += [f"at least {self.at_least:,.10g}"] if self.at_least is not None else []
        said += [f"within {100 * self.within:.3g}% of the base's"] if self.within is not None else []
        return " and ".join(said)


class Constrain(_Strict):
    """What the candidates of a search may hold and compute.

    state: elements held for one sequence at the task's length. parameters: elements that are trained. flops: of the
    matrix products of a forward pass per token, without embedding and logits.
    """

    state: Bound | None = None
    parameters: Bound | None = None
    flops: Bound | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_before_training(cls, given: Any) -> Any:
        if isinstance(given, dict) and "decode_us" in given:
            raise ValueError(
                "decode_us cannot be bounded: candidates are refused before they train, and it is timed after that; "
                "bound state, parameters or flops, and add decode_us to objectives"
            )
        return given

    @property
    def bounds(self) -> dict[str, Bound]:
        return {name: bound for name, bound in self if bound is not None}


class Fidelity(BaseModel):
    """Successive halving: each candidate trains at the first values, and the best `keep` of them at the next.

    Every other key is `train.steps`, `train.seeds` (seeds of one candidate) or `model.d_model`, with values that
    increase. Several keys go up together.
    keep: the share that goes on.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, tuple[Annotated[Whole, Field(ge=1)], ...]] = Field(init=False)

    paths: ClassVar[tuple[str, ...]] = ("train.steps", "train.seeds", "model.d_model")

    keep: Annotated[Number, Field(gt=0, lt=1)] = 1 / 3

    @model_validator(mode="after")
    def _goes_up(self) -> Self:
        for path, values in self.values.items():
            if path not in self.paths:
                raise ValueError(str(unknown("key", path, ["keep", *self.paths])))
            if len(values) < 2 or any(a >= b for a, b in pairwise(values)):
                raise ValueError(f".{path}: takes at least two values that increase, not {list(values)}")
        if not self.values:
            raise ValueError("needs a key such as 'train.steps: [200, 600, 1800]'")
        if len({*map(len, self.values.values())}) > 1:
            said = ", ".join(f"{path} has {len(values)}" for path, values in self.values.items())
            raise ValueError(f"all keys need as many values: {said}")
        return self

    @property
    def values(self) -> dict[str, tuple[int, ...]]:
        return self.__pydantic_extra__

    @property
    def rungs(self) -> list[dict[str, int]]:
        """The settings of each rung, the cheapest first.

        >>> Fidelity.model_validate({"train.steps": [2, 6], "train.seeds": [1, 3]}).rungs
        [{'train.steps': 2, 'train.seeds': 1}, {'train.steps': 6, 'train.seeds': 3}]
        """
        columns = zip(*self.values.values(), strict=True)
        return [dict(zip(self.values, column, strict=True)) for column in columns]


class Space(BaseModel):
    """Settings to search, and `trials`, how many candidates are tried.

    A candidate that makes no model is recorded as infeasible; it uses up no trial, and another is drawn in its place.
    Every key that is not listed is a setting to search, by its path: `train.lr: {log_uniform: [1e-3, 1e-1]}`.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, Search] = Field(init=False)

    sections: ClassVar[tuple[str, ...]] = ()

    trials: Annotated[Whole, Field(ge=1, le=MOST_TRIALS)]

    @property
    def searched(self) -> dict[str, Search]:
        return self.__pydantic_extra__

    @cached_property
    def knobs(self) -> dict[str, Search]:
        """What is drawn, by name: settings by their path, each after those in its condition.

        A pattern is drawn as `model.layers.length`, where it has several lengths, and `model.layers[0]`, and so on.
        """
        return {name: knob for path in _in_order(self.searched) for name, knob in _knobs(path, self.searched[path])}

    @cached_property
    def whole(self) -> int | None:
        """How many candidates there are, where all knobs are choices; None where one is a range, or for over 10,000."""
        return count(self.knobs)

    def draw(self, ask: Callable[[str, Search], Any]) -> dict[str, Any]:
        """A candidate. ask: gives the value of a knob, by its name; it is asked for those that exist."""
        drawn: dict[str, Any] = {}
        for name, knob in self.knobs.items():
            if knob.exists(drawn):
                drawn[name] = ask(name, knob)
        return self.settings(drawn)

    def combinations(self) -> Iterator[dict[str, Any]]:
        """All candidates in order, where all knobs are choices."""
        return map(self.settings, combinations(self.knobs))

    def settings(self, drawn: Mapping[str, Any]) -> dict[str, Any]:
        """The candidate that drawn knobs make, its settings in the order in which the study lists them."""
        found: dict[str, Any] = {}
        for path, search in self.searched.items():
            if search.pattern is not None:
                places = [drawn[name] for i in range(max(search.lengths or ())) if (name := f"{path}[{i}]") in drawn]
                if places:
                    found[path] = places * (search.repeat or 1)
            elif path in drawn:
                found[path] = drawn[path]
        return found

    def drawn(self, candidate: Mapping[str, Any]) -> dict[str, Any] | None:
        """The knobs of a candidate; None where it is not one of the space: a value that no knob takes, or a setting too
        many or too few.
        """
        flat = {path: value for path, value in candidate.items() if path in self.knobs}
        for path, search in self.searched.items():
            layers = candidate.get(path)
            if search.pattern is None or not isinstance(layers, list | tuple):
                continue
            length = len(layers) // (search.repeat or 1)
            flat |= {f"{path}[{i}]": layer for i, layer in enumerate(layers[:length])}
            flat |= {f"{path}.length": length} if len(search.lengths or ()) > 1 else {}
        found: dict[str, Any] = {}
        for name, knob in self.knobs.items():
            if not knob.exists(found):
                continue
            if name not in flat or not knob.holds(flat[name]):
                return None
            found[name] = flat[name]
        # Equal only if no setting is left over, and a pattern repeats what its places say.
        return found if self.settings(found) == dict(candidate) else None

    @model_validator(mode="before")
    @classmethod
    def _a_path_has_a_dot(cls, given: Any) -> Any:
        for key in given if isinstance(given, dict) else ():
            if key not in cls.model_fields and "." not in str(key) and key not in cls.sections:
                if key == "seeds":
                    raise ValueError("leave out seeds: every seed of the study trains every candidate")
                raise ValueError(str(unknown("key", key, [*cls.model_fields, "paths such as train.lr"])))
        return given

    @model_validator(mode="after")
    def _searches_something(self) -> Self:
        if not self.searched:
            raise ValueError("searches nothing: add a key such as 'train.lr: {log_uniform: [1e-3, 1e-1]}'")
        if (knobs := sum(max(one.lengths or (1,)) for one in self.searched.values())) > MOST_SETTINGS:
            raise ValueError(f"has {knobs} settings; at most {MOST_SETTINGS} can be searched")
        return self


def _in_order(searched: Mapping[str, Search]) -> list[str]:
    """The paths, each after those in its condition, otherwise as they are listed.

    Raises `ValueError` for a condition that cannot hold, and for a cycle.
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
        said = ", ".join(f"{one} needs {other}" for one, other in pairwise(circle))
        raise ValueError(f".{circle[0]}.when: the conditions go in a circle: {said}") from None
    found: list[str] = []
    while len(found) < len(searched):
        found.append(next(p for p in searched if p not in found and all(q in found for q in searched[p].parents)))
    return found


def _check_condition(
    searched: Mapping[str, Search], path: str, parent: str, values: tuple[Any, ...], where: str
) -> None:
    if parent not in searched:
        raise ValueError(
            f"{where}: {unknown('searched setting', parent, [other for other in searched if other != path])}"
        )
    above = searched[parent]
    if above.choice is None and above.integers is None:
        raise ValueError(f"{where}: {parent} is no choice: a condition needs one, or integers")
    taken = above.choice if above.choice is not None else range(above.extremes[0], above.extremes[1] + 1)
    for value in values:
        if not any(_meets(parent, one, value) for one in taken):
            allowed = dict.fromkeys(_said(parent, one) for one in above.choice or [above.said])
            raise ValueError(f"{where}.{parent}: {unknown('value', _said(parent, value), allowed)}")


def _said(path: str, value: object) -> str:
    return str(value["name"]) if path == "rule" and isinstance(value, Mapping) and "name" in value else str(value)


def _knobs(path: str, search: Search) -> Iterator[tuple[str, Search]]:
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
    """The knobs that may be drawn together, in order. values: which of a knob's, all of its choices by default.

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


def count(knobs: Mapping[str, Search]) -> int | None:
    """How many combinations of knobs there are; None where one is a range, and for more than `MOST_TRIALS`."""
    if any(knob.choice is None for knob in knobs.values()):
        return None
    if math.prod(len(knob.extremes) for knob in knobs.values() if not knob.when) > MOST_TRIALS:
        return None  # There are at least as many as of the knobs that always exist.
    found = sum(1 for _ in islice(combinations(knobs), MOST_TRIALS + 1))
    return found if found <= MOST_TRIALS else None


def example(knobs: Mapping[str, Search], name: str) -> dict[str, Any] | None:
    """Knobs drawn under which a knob exists, only those that its condition names; None where it never exists."""
    needed = [name]
    for one in needed:
        needed += [parent for parent in knobs[one].parents if parent not in needed]
    named: dict[str, list[Any]] = {}
    for parent, values in (item for knob in knobs.values() for way in knob.ways for item in way.items()):
        named.setdefault(parent, []).extend(values)
    # Of a range of integers, its bounds and the values that conditions name.
    above = {
        one: knob if knob.choice else Search(choice=(*{*knob.extremes, *named[one]},), when=knob.when)
        for one, knob in knobs.items()
        if one in needed and one != name
    }
    return next((one for one in combinations(above) if knobs[name].exists(one)), None)


class Tune(Space):
    """The same candidates for every arm, spread over the ranges, the base's own values among them.

    Every seed of the study trains every candidate. A seed's result is the test score of its run with the best
    validation score, so that the choice is part of what the error bars cover.
    trials: how many candidates are tried.
    extend: moves the ranges, for all arms alike, while the best value of an arm is the lowest or the highest tried.
    """

    extend: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _holds_several_candidates(self) -> Self:
        if self.trials < 2:
            raise ValueError("trials 1 leaves one candidate and nothing to choose: give at least 2, or leave out tune")
        for path, search in self.searched.items():
            if search.when is not None or search.pattern is not None:
                what = "when" if search.when is not None else "pattern"
                raise ValueError(f".{path}: {what} goes with search: every arm tries the same candidates of tune")
        if self.extend and not any(search.choice is None for search in self.searched.values()):
            raise ValueError("extend moves a range, and every setting is searched by choice")
        return self


@dataclass(frozen=True)
class Objective:
    """What a search weighs.

    name: a task's metric, or one of `COSTS`. task: whose; None for a cost, which is then the largest of all tasks.
    """

    name: str
    task: str | None
    maximize: bool

    def __str__(self) -> str:
        return self.name if self.task is None else f"{self.name}@{self.task}"


class Searching(Space):
    """A search for architectures, from the base.

    Each candidate is judged by the mean of `seeds` validation runs. The base tunes its `train` settings among those
    searched, with as many candidates. Where the study has several tasks, a candidate is trained on each.
    A key may also be `rule` as a whole: `rule: {choice: [comba, {name: gla}]}`.
    trials: how many candidates are tried. seeds: of one candidate.
    finalists: how many candidates are confirmed, each as an arm.
    sampler: what draws candidates. random: the share of the trials that random search draws instead, as a control.
    objectives: what is weighed, as METRIC, METRIC@TASK or one of `COSTS`, which may name their task as well. By default
    the metric of every task, flops_per_token and state_size.
    constrain: what a candidate may hold and compute. match: makes every candidate as large as the base.
    warm: candidates to begin with: rules, by name or with knobs, and {study: NAME} for those of a study in the ledger.
    fidelity: successive halving.
    """

    sections: ClassVar[tuple[str, ...]] = ("rule",)

    seeds: Annotated[Whole, Field(ge=1, le=100)] = 1
    finalists: Annotated[Whole, Field(ge=1, le=100)] = 4
    sampler: Sampler = "tpe"
    random: Annotated[Number, Field(ge=0, lt=1)] = 0.2
    objectives: tuple[str, ...] = ()
    constrain: Constrain = Constrain()
    match: Match | None = None
    warm: tuple[str | dict[str, Any], ...] = ()
    fidelity: Fidelity | None = None

    @field_validator("sampler", mode="before")
    @classmethod
    def _is_known(cls, given: Any) -> Any:
        if given not in get_args(Sampler):
            raise ValueError(str(unknown("sampler", given, get_args(Sampler))))
        return given

    @field_validator("warm", mode="before")
    @classmethod
    def _rules_and_studies(cls, given: Any) -> Any:
        for entry in given if isinstance(given, list | tuple) else ():
            named = isinstance(entry, dict) and isinstance(entry.get("name"), str)
            study = isinstance(entry, dict) and [*entry] == ["study"] and isinstance(entry["study"], str)
            if not (isinstance(entry, str) or named or study):
                raise ValueError(f"takes rules (NAME, or {{name: NAME, knob: ...}}) and {{study: NAME}}, not {entry!r}")
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.finalists > self.trials:
            raise ValueError(f"finalists {self.finalists} exceed trials {self.trials}")
        for path, search in self.searched.items():
            if search.pattern is not None and path != LAYERS:
                raise ValueError(f".{path}: only {LAYERS} takes a pattern")
        for name, knob in self.knobs.items():
            for number, way in enumerate(knob.ways):
                if example({**self.knobs, name: knob.model_copy(update={"when": way})}, name) is None:
                    where = f".{name}.when[{number}]" if len(knob.ways) > 1 else f".{name}.when"
                    raise ValueError(f"{where}: never holds, since the settings in it need others that exclude them")
        if not self.random and self.sampler != "random" and self.whole != self.trials:
            raise ValueError(
                ".random: must be above 0 and below 1: random search is the control of what the sampler finds"
            )
        if self.sampler == "gp" and (bound := [name for name, knob in self.knobs.items() if knob.when]):
            raise ValueError(f".sampler: gp draws what every candidate has, and {bound[0]} exists in some: take tpe")
        if self.match is not None and self.match.dimension in self.searched:
            raise ValueError(f".match scales {self.match.dimension}, which is searched: scale another, or leave it out")
        for path in self.fidelity.values if self.fidelity else ():
            if path in self.searched:
                raise ValueError(f".fidelity.{path}: is searched already")
        if self.finalists > self.halved[-1]:
            raise ValueError(
                f".fidelity: {self.halved[-1]} candidates reach its last values, fewer than finalists {self.finalists}"
            )
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the keys of a later release that are at their default: a study keeps its identity."""
        later = ("sampler", "random", "objectives", "constrain", "match", "warm", "fidelity")
        plain = {key for key in later if getattr(self, key) == type(self).model_fields[key].default}
        return {key: value for key, value in dump(self).items() if key not in plain}

    @property
    def enumerated(self) -> bool:
        """Whether every candidate of the space is tried, so that nothing samples."""
        return self.whole == self.trials

    @property
    def rungs(self) -> list[dict[str, int]]:
        """The settings that each rung of successive halving changes; a single one without any, where there is none."""
        return self.fidelity.rungs if self.fidelity else [{}]

    @property
    def halved(self) -> list[int]:
        """How many candidates train at each rung, where only the best go on."""
        keep = self.fidelity.keep if self.fidelity else 1
        found = [self.trials]
        for _ in self.rungs[1:]:
            found.append(math.ceil(keep * found[-1] - 1e-9))
        return found

    @property
    def controls(self) -> int:
        """How many of the trials random search draws as a control."""
        if self.sampler == "random" or self.enumerated:
            return 0
        return min(self.trials - 1, max(1, round(self.random * self.trials)))

    def weighed(self, tasks: Mapping[str, tuple[str, bool]]) -> tuple[Objective, ...]:
        """The objectives. tasks: name -> its metric, and whether more of it is better.

        Raises `InputError` for an objective that is unknown, that does not say whose metric it is, or that stands
        twice, and where no task's metric is among them.
        """
        metrics = {f"{metric}@{task}": Objective(metric, task, more) for task, (metric, more) in tasks.items()}
        known = {**metrics, **{cost: Objective(cost, None, False) for cost in COSTS}}
        known |= {f"{cost}@{task}": Objective(cost, task, False) for cost in COSTS for task in tasks}
        for metric in dict.fromkeys(metric for metric, _ in tasks.values()):
            whose = [name for name, one in metrics.items() if one.name == metric]
            if len(whose) == 1:
                known[metric] = metrics[whose[0]]
        found: list[Objective] = []
        for name in self.objectives or (*metrics, *DEFAULT_COSTS):
            if name not in known:
                whose = [other for other in metrics if other.startswith(f"{name}@")]
                if whose:
                    raise InputError(f"objectives: '{name}' is the metric of several tasks: say {' or '.join(whose)}")
                short = [other for other in known if "@" not in other and other not in COSTS]
                raise unknown("objective", name, [*short, *metrics, *COSTS], where="objectives")
            if known[name] in found:
                raise InputError(f"objectives: '{name}' is given twice")
            found.append(known[name])
        if not any(one in metrics.values() for one in found):
            raise InputError(f"objectives: weighs costs alone: add {' or '.join(metrics)}")
        return tuple(found)
