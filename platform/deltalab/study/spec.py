"""A study as its YAML file states it: refused where it is not understood, in one line that says how to mend it."""

import difflib
import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deltalab.errors import InputError, unknown


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Search(_Strict):
    """Where a tuned number may lie; exactly one of the four."""

    log_uniform: tuple[float, float] | None = None
    uniform: tuple[float, float] | None = None
    integers: tuple[int, int] | None = None
    choice: tuple[float | int | str | bool, ...] | None = None

    @model_validator(mode="after")
    def _one_that_is_not_empty(self) -> Self:
        given = {name: value for name, value in self if value is not None}
        if len(given) != 1:
            raise ValueError("takes exactly one of log_uniform, uniform, integers, choice")
        ((name, value),) = given.items()
        if name == "choice" and len(set(value)) < 2:
            raise ValueError("choice needs at least two different values")
        if name != "choice" and not value[0] < value[1]:
            raise ValueError(f"{name} needs [low, high] with low < high, not {list(value)}")
        if name == "log_uniform" and value[0] <= 0:
            raise ValueError(f"log_uniform needs positive bounds, not {list(value)}")
        return self


class Tune(BaseModel):
    """The same budget for every arm: `trials` configurations, each judged by the mean of `seeds` validation runs.

    Every other key is a setting to search, by its path: `train.lr: {log_uniform: [1e-3, 1e-1]}`.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Search] = Field(init=False)

    trials: Annotated[int, Field(ge=1, le=10_000)]
    seeds: Annotated[int, Field(ge=1, le=100)] = 1

    @property
    def searched(self) -> dict[str, Search]:
        return self.__pydantic_extra__

    def grid(self) -> list[dict[str, Any]] | None:
        """Every candidate, where all settings are searched by choice; None where there is no end of them."""
        choices = [search.choice for search in self.searched.values()]
        if None in choices:
            return None
        return [dict(zip(self.searched, values, strict=True)) for values in itertools.product(*filter(None, choices))]

    @model_validator(mode="after")
    def _searches_something(self) -> Self:
        if not self.searched:
            raise ValueError("searches nothing: add a key such as 'train.lr: {log_uniform: [1e-3, 1e-1]}'")
        return self


class Change(_Strict):
    """What an arm, or a task, changes in the base."""

    rule: str | dict[str, Any] | None = None
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}


class Base(_Strict):
    """The full method."""

    rule: str | dict[str, Any]
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}


class Resources(_Strict):
    """What one trial takes. A fraction of a GPU is a share of its memory."""

    cpu: Annotated[float, Field(gt=0)] = 1
    gpu: Annotated[float, Field(ge=0)] = 0


class StudySpec(_Strict):
    """A study: a base, arms that each change it, tuning with one budget for all, and confirmation on fresh seeds.

    task: one or several, each with its parameters; `task: KIND` among them where one task is there under several
    names. for_task: what a task changes in the base, for every arm.
    ablate: parts taken away one at a time, each an arm `without_PART`: knobs of the rule, or parts of the model.
    factorial: pairs of them, each an arm without both, whose interaction is reported.
    arms: further arms by name. seeds: for confirmation. deadline: seconds a trial may take.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    description: str = ""
    task: Annotated[dict[str, dict[str, Any]], Field(min_length=1)]
    base: Base
    for_task: dict[str, Change] = {}
    ablate: tuple[str, ...] = ()
    factorial: tuple[tuple[str, str], ...] = ()
    arms: dict[str, Change] = {}
    tune: Tune | None = None
    seeds: Annotated[int, Field(ge=1, le=1000)]
    resources: Resources = Resources()
    deadline: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _task_by_name(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("task"), str):
            return {**given, "task": {given["task"]: {}}}
        if isinstance(given, dict) and isinstance(given.get("task"), dict):
            return {**given, "task": {name: params or {} for name, params in given["task"].items()}}
        return given


def load_study(file: str | Path, *, profile: str | None = None) -> StudySpec:
    """Reads a study, with one of its profiles merged over it.

    Raises `InputError` for a file that is missing, is not YAML, or says what a study cannot say.
    """
    path = Path(file)
    try:
        given = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.stem, [p.stem for p in path.parent.glob("*.yaml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}.yaml?" if near else ""
        raise InputError(f"{path}: no such study{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise InputError(f"{path}: a study is a mapping with name, task, base and seeds")
    profiles = given.pop("profiles", None) or {}
    if not isinstance(profiles, dict) or not all(isinstance(change, dict) for change in profiles.values()):
        raise InputError(f"{path}: profiles: must be a mapping of names to what they change")
    if profile is not None and profile not in profiles:
        raise unknown("profile", profile, profiles, where=str(path))
    for name, change in profiles.items():
        # Every profile is held to the same standard, also the one that is not asked for.
        merged = _validated(_merge(given, change), where=f"{path}: profiles.{name}")
        if name == profile:
            return merged
    return _validated(given, where=str(path))


def schema() -> dict[str, Any]:
    """The JSON schema of a study file."""
    found = StudySpec.model_json_schema()
    profiles = {"type": "object", "additionalProperties": {"type": "object"}, "title": "Changes by name"}
    found["properties"]["profiles"] = profiles
    return found


def _validated(given: Mapping[str, Any], *, where: str) -> StudySpec:
    try:
        return StudySpec.model_validate(given)
    except ValidationError as error:
        raise InputError(f"{where}: {_first_line(error)}") from None


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        kind: Any = StudySpec
        for part in first["loc"][:-1]:
            inner = kind.model_fields.get(str(part)) if hasattr(kind, "model_fields") else None
            kind = (
                inner.annotation if inner is not None else {"arms": Change, "for_task": Change}.get(str(part), Change)
            )
        names = [*getattr(kind, "model_fields", {}), *(["profiles"] if kind is StudySpec else [])]
        return str(unknown("key", key, names))
    message = first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] == "missing" else f", not {str(first['input'])[:80]!r}"
    return f"{key}: {message[0].lower()}{message[1:]}{given}"


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings merge key by key, null takes one away, and everything else, gates among it, is replaced."""
    merged = dict(below)
    for key, value in above.items():
        if value is None:
            merged.pop(key, None)
        elif key in ("arms", "for_task", "base", "task", "resources", "tune") and isinstance(value, dict):
            merged[key] = _merge(merged.get(key) or {}, value)
        elif key in merged and isinstance(merged[key], dict) and isinstance(value, dict):
            merged[key] = {**merged[key], **value}
        else:
            merged[key] = value
    return merged


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a key given twice, and reads 1e-3 as the number that it is."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_UniqueKeys.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)
