"""Reads a study's YAML file, and refuses what is wrong in it in one line that says how to mend it."""

import copy
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails

from deltalab.authoring.files import study_folder
from deltalab.errors import InputError, missing_file, unknown
from deltalab.export.recipe import no_graphs
from deltalab.models.hybrids import PRESET, find_hybrid
from deltalab.models.spec import MIXER
from deltalab.own_module import as_rule
from deltalab.reading import read_text, read_yaml
from deltalab.statistics.joint_test import Look
from deltalab.statistics.looks import looks_of, seeds_of_base, trained_in_parts
from deltalab.study.specs.overrides import Overrides, error_prefix, read_overrides, with_overrides
from deltalab.study.specs.sections.budget import Bound, Constrain, Match, Searching, Tune
from deltalab.study.specs.sections.engine import Engine
from deltalab.study.specs.sections.ladder_sizes import Ladder, refuse_both
from deltalab.study.specs.sections.resources import Resources
from deltalab.study.specs.sections.search_space import STRICT, Number, Search, Whole
from deltalab.study.specs.sections.seeds import Seeds, SeedsKey


class _Strict(BaseModel):
    """As `search_space.Strict`; ruff knows only here that a subclass is pydantic's, whose defaults may be mutable."""

    model_config = STRICT


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+=-]*$", max_length=100)]
"""The name of an arm or a task, which appears in tables, file names and URLs."""

LAST_FIRST_SEED = 999_000
"""The last seed with which a study may begin: it has at most 1,000, and those of a search begin at 1,000,001."""
RETRIES = 3
"""How often a training that the machine lost runs again if the study does not say."""
MOST_RETRIES = 1000
"""The most that a study may say."""
MOST_ARMS = 500
"""The most arms of a study, counted on each task and at each size."""


class _WithRule(_Strict):
    """A section with a rule and a model, whose `model.mixer` or `model.preset` stands for a rule."""

    @model_validator(mode="before")
    @classmethod
    def _mixer_as_rule(cls, raw: Any) -> Any:
        model = raw.get("model") if isinstance(raw, dict) else None
        named = [key for key in (MIXER, PRESET) if isinstance(model, dict) and key in model]
        if not isinstance(model, dict) or not named:
            return raw
        if raw.get("rule") is not None or len(named) > 1:
            raise ValueError(f".model.{named[0]} stands in place of a rule: give one of them")
        try:
            rule = as_rule(model[MIXER], f".model.{MIXER}") if MIXER in model else find_hybrid(model[PRESET]).rule
        except InputError as error:
            raise ValueError(f".{error}" if PRESET in model else str(error)) from None
        return {**raw, "rule": rule, "model": {key: value for key, value in model.items() if key != MIXER}}


class Change(_WithRule):
    """What an arm, or an entry of `for_task`, changes in the base.

    Attributes:
        rule: Another rule, or knobs of the base's rule.
        model: The settings of the model that differ.
        train: The settings of the training that differ.
        match: Makes an arm as large as the base; in arms only.
        tune: The task's own ranges, of settings that the study tunes; in for_task only.
    """

    rule: str | dict[str, Any] | None = None
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}
    match: Match | None = None
    tune: dict[str, Search] = {}

    @field_validator("tune", mode="before")
    @classmethod
    def _ranges_alone(cls, raw: Any) -> Any:
        for key in Tune.model_fields:
            if isinstance(raw, dict) and key in raw:
                raise ValueError(f".{key} is the same for all tasks and stands in tune: a task has ranges of its own")
        return raw


class Method(_WithRule):
    """A rule, a model and a training, as `base` states them.

    Attributes:
        rule: A rule's name, or a mapping with `name` and knobs.
        model: Settings of the model.
        train: Settings of the training; steps, batch_size and lr are required.
    """

    rule: str | dict[str, Any]
    model: dict[str, Any] = {}
    train: dict[str, Any] = {}


class StudySpec(_Strict):
    """A study: a base, arms that each change it, the same candidates for all, and seeds that each choose their own.

    Attributes:
        name: The study's name in the ledger.
        description: What the study asks, in one line.
        task: One task or several, each with its parameters. A parameter `task: KIND` lets one task appear under several
            names.
        base: The full method, which every arm changes.
        for_task: What every arm changes in the base on one task, and the task's own ranges of tune.
        ablate: Parts to take away one at a time, each an arm `without_PART`: knobs of the rule, or parts of the model.
        factorial: Pairs of parts, each an arm without both; the report gives their interaction.
        arms: Further arms by name.
        tune: Settings to tune, the same candidates for every arm.
        search: A search for architectures, in place of arms.
        scales: A ladder: sizes at which every arm runs, each against the base of its size.
        seeds: How many seeds, or {at_least, at_most}, or {after, at_most} for more seeds than a test had before, or
            {arms, base} for more seeds of the base than of an arm.
        first_seed: The first of these seeds. Another one repeats a study on fresh seeds.
        family: The arms that are tested together: those of the whole study, or those of a task.
        compare: Further metrics of a task that arms are compared in, by the same test, such as `recall_bits_per_byte`
            of text, or what an engine evaluates.
        margin: The least difference that matters, by metric: arms that differ by less are equal. 0 makes any difference
            matter. A metric that is left out has its task's margin.
        resources: What one stack of trials takes.
        engine: The engine of real training that trains each run, one at a time; None for deltalab's own training.
        deadline: Seconds that a trial may take.
        retries: How often a training runs again that the machine lost, before its trials are missing.
    """

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$", max_length=100)]
    description: str = ""
    task: Annotated[dict[Name, dict[str, Any]], Field(min_length=1)]
    base: Method
    for_task: dict[str, Change] = {}
    ablate: tuple[str, ...] = ()
    factorial: tuple[tuple[str, str], ...] = ()
    arms: dict[Name, Change] = {}
    tune: Tune | None = None
    search: Searching | None = None
    scales: Ladder | None = None
    seeds: SeedsKey
    first_seed: Annotated[Whole, Field(ge=1, le=LAST_FIRST_SEED)] = 1
    family: Literal["task", "study"] = "study"
    compare: dict[Name, tuple[str, ...]] = {}
    margin: dict[str, Annotated[Number, Field(ge=0, lt=math.inf)]] = {}
    resources: Resources = Resources()
    engine: Engine | None = None
    deadline: Annotated[Number, Field(gt=0, le=1e9)] | None = None
    retries: Annotated[Whole, Field(ge=0, le=MOST_RETRIES)] = RETRIES

    @field_validator("for_task")
    @classmethod
    def _arms_match(cls, raw: dict[str, Change]) -> dict[str, Change]:
        for name, change in raw.items():
            if change.match is not None:
                raise ValueError(f"{name}.match stands in an arm: the base has nothing to match")
        return raw

    @field_validator("arms")
    @classmethod
    def _tasks_tune(cls, raw: dict[str, Change]) -> dict[str, Change]:
        for name, change in raw.items():
            if change.tune:
                raise ValueError(f"{name}.tune stands in for_task: all arms of a task try the same candidates")
        return raw

    @model_validator(mode="after")
    def _a_search_makes_its_own_arms(self) -> Self:
        if self.search is not None:
            for key in ("ablate", "factorial", "arms", "tune"):
                if getattr(self, key):
                    raise InputError(f"search makes its own arms and tunes them: leave out {key}", key=key)
        return self

    @model_validator(mode="after")
    def _ranges_of_tasks_are_of_tuned_settings(self) -> Self:
        for name, change in self.for_task.items():
            where = f"for_task.{name}.tune"
            if change.tune and self.tune is None:
                raise ValueError(f"{where} has ranges of settings that the study tunes: add tune, with trials")
            for path in change.tune:
                if self.tune is not None and path not in self.tune.searched:
                    raise unknown("setting", path, self.tune.searched, where=where)
            try:
                self.tune_on(name)
            except ValidationError as error:
                raise ValueError(f"{where}{_below(error.errors()[0]['msg'])}") from None
        return self

    @model_validator(mode="after")
    def _gpus_are_those_of_an_engine(self) -> Self:
        gpus = self.resources.gpu
        if self.engine is None and gpus > 1:
            raise ValueError(f"resources.gpu must be at most 1 without an engine, not {gpus:g}")
        if self.engine is not None and gpus != int(gpus):
            raise ValueError(f"resources.gpu must be a whole number with an engine, not {gpus:g}")
        if self.engine is not None and gpus and self.engine.processes != 1:
            raise ValueError(f"engine.processes is for CPUs: each of the {gpus:g} GPUs of resources has one process")
        return self

    @model_validator(mode="after")
    def _steps_or_flops(self) -> Self:
        of_all = {
            "base": self.base.train,
            **{f"for_task.{name}": change.train for name, change in self.for_task.items()},
        }
        of_arms = {f"arms.{name}": change.train for name, change in self.arms.items()}
        for key in ("flops", "seconds"):
            if arm := next((where for where, train in of_arms.items() if key in train), None):
                raise ValueError(f"{arm} sets train.{key}, and all arms train for as many: give it in base")
        budget = next((where for where, train in of_all.items() if "flops" in train), None)
        if budget is None:
            return self
        searched: dict[str, Collection[str]] = {
            "tune": self.tune.searched if self.tune else (),
            "scales": self.scales.lists if self.scales else (),
        }
        if self.search:
            searched |= {"search": self.search.searched, "search.fidelity": self.search.rungs[0]}
        places = {where: "steps" in train for where, train in (of_all | of_arms).items()}
        places |= {where: "train.steps" in paths for where, paths in searched.items()}
        if where := next((where for where, sets_steps in places.items() if sets_steps), None):
            raise ValueError(
                f"{where} sets train.steps, and {budget} train.flops, which gives the steps: leave one out "
                "(train.steps: null in a profile, train.steps= on the command line)"
            )
        return self

    @model_validator(mode="after")
    def _seconds_are_the_budget(self) -> Self:
        sections = {"base": self.base.train, **{f"for_task.{name}": part.train for name, part in self.for_task.items()}}
        where = next((name for name, train in sections.items() if train.get("seconds") is not None), None)
        paths = [*(self.tune.searched if self.tune else ()), *(self.search.searched if self.search else ())]
        if "train.seconds" in paths:
            raise ValueError("train.seconds is the same for all candidates: give it in base")
        if where is None:
            return self
        if any("flops" in train for train in sections.values()):
            raise ValueError(f"{where} sets train.seconds beside train.flops: leave one out")
        if self.scales is not None:
            raise ValueError(f"{where} sets train.seconds, and a ladder fits its sizes by their steps: leave one out")
        if self.search and self.search.fidelity:
            raise ValueError(f"{where} sets train.seconds, and the rungs of search.fidelity give steps: leave one out")
        return self

    @model_validator(mode="after")
    def _graphs_are_replayed(self) -> Self:
        if self.engine is None or not self.engine.settings.get("graphs"):
            return self
        settings = self.engine.settings | {"precision": self.base.train.get("precision")}
        if why := no_graphs(settings, self.engine.name, self.resources.gpu):
            raise ValueError(f"engine.settings.graphs: {why}: leave it out")
        return self

    @model_validator(mode="after")
    def _a_ladder_sets_its_sizes(self) -> Self:
        if self.scales is None:
            return self
        if self.search is not None:
            raise ValueError("scales: a search runs at one size: leave out scales or search")
        if not isinstance(self.seeds, int):
            raise ValueError("scales: all sizes of an arm share their seeds: give seeds a number")
        for kind, changes in (("arms", self.arms), ("for_task", self.for_task)):
            for name, change in changes.items():
                refuse_both(self.scales, {"model": change.model, "train": change.train}, f"{kind}.{name}")
        tuned: dict[str, dict[str, Any]] = {}
        for path in self.tune.searched if self.tune else ():
            section, _, key = path.partition(".")
            tuned.setdefault(section, {})[key] = None
        refuse_both(self.scales, tuned, "tune")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out newer keys at their defaults, so that a study differs in nothing from one of an old release."""
        newer = {"first_seed": 1, "retries": RETRIES}
        return {key: value for key, value in dump(self).items() if key not in newer or value != newer[key]}

    def tune_on(self, task: str) -> Tune | None:
        """The section `tune` with the ranges of one of the file's tasks in place; None if the study tunes nothing."""
        own = self.for_task[task].tune if task in self.for_task else {}
        return Tune.model_validate({**self.tune.model_dump(), **own}) if self.tune and own else self.tune

    @property
    def looks(self) -> tuple[Look, ...]:
        """When the arms are tested: once, with all seeds, or several times."""
        return looks_of(self._seeds)

    @property
    def seeds_of_base(self) -> int | None:
        """How many seeds the base has if they are more than those of an arm, else None."""
        return seeds_of_base(self._seeds)

    def trained_in_parts(self, *, is_base: bool) -> tuple[int, ...]:
        """How many seeds an arm has trained after each trial of a candidate, if it does not stop before the last."""
        return trained_in_parts(self._seeds, is_base=is_base, one_by_one=self.engine is not None)

    @property
    def _seeds(self) -> int | dict[str, Any]:
        return self.seeds if isinstance(self.seeds, int) else self.seeds.model_dump()

    @model_validator(mode="before")
    @classmethod
    def _task_by_name(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and isinstance(raw.get("task"), str):
            return {**raw, "task": {raw["task"]: {}}}
        if isinstance(raw, dict) and isinstance(raw.get("task"), dict):
            return {**raw, "task": {name: params or {} for name, params in raw["task"].items()}}
        return raw


def load_study(
    study_file: str | Path | Mapping[str, Any], *, profile: str | None = None, overrides: Overrides = None
) -> StudySpec:
    """Reads a study, merges one of its profiles over it, and puts overrides in after that.

    Args:
        study_file: The path of a study's file, the name of a shipped study, or the mapping that a file would hold.
        profile: One of the study's profiles.
        overrides: A mapping of dotted keys, or words KEY=VALUE, as `deltalab.study.specs.overrides` explains them.

    Raises:
        InputError: The file is missing, is not YAML or is not a valid study, or the overrides make it no valid study.
    """
    if isinstance(study_file, Mapping):
        shown, raw = "study", copy.deepcopy(dict(study_file))
    elif isinstance(study_file, str | Path):
        shown, raw = _read(study_file)
    else:
        raise InputError(f"a study is a file, the name of a shipped study or a mapping, not {study_file!r}")
    profiles = raw.pop("profiles", None) or {}
    if not isinstance(profiles, dict) or not all(
        isinstance(name, str) and isinstance(change, dict) for name, change in profiles.items()
    ):
        raise InputError(f"{shown}: profiles: must be a mapping of names to what they change")
    if profile is not None and profile not in profiles:
        raise unknown("profile", profile, profiles, where=shown)
    asked, where = raw if profile is None else _merge(raw, profiles[profile]), error_prefix(shown, overrides)
    try:
        changed = with_overrides(asked, read_overrides(overrides), [*StudySpec.model_fields]) if overrides else None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    spec = _validated(raw, where=shown)
    for name, change in profiles.items():
        # Check every profile, not only the profile asked for.
        merged = _merge(raw, change)
        checked = _validated(merged, where=f"{shown}: profiles.{name}")
        if name == profile:
            spec = checked
    return spec if changed is None else _validated(changed, where=where)


def _read(study_file: str | Path) -> tuple[str, dict[str, Any]]:
    """Reads a study's file: its path, and the mapping in it."""
    path = study_folder.study_file(study_file)
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise missing_file(path, "study") from None
    raw = read_yaml(text, where=str(path))
    if not isinstance(raw, dict):
        raise InputError(f"{path}: a study is a mapping with name, task, base and seeds")
    return str(path), raw


def _validated(raw: Mapping[str, Any], *, where: str) -> StudySpec:
    """Validates a study's mapping; raises `InputError`."""
    try:
        return StudySpec.model_validate(raw)
    except ValidationError as error:
        raise _first_error(error, where) from _quoted(error)


_SAYS = {
    "missing": "is missing",
    "too_short": "must not be empty",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "tuple_type": "must be a list",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
}
_NO_KEY = ("str", "dict[str,any]", "[key]", "[number]", "[looks]", "[further]", "[unbalanced]")
"""Entries of pydantic's error paths that are no keys of the file."""
_KINDS: dict[str, type[BaseModel]] = {
    "base": Method,
    "for_task": Change,
    "arms": Change,
    "tune": Search,
    "search": Search,
    "seeds": Seeds,
    "resources": Resources,
    "engine": Engine,
}


def _first(error: ValidationError) -> ErrorDetails:
    """Returns the error to report: a misspelled key, which is also a missing key, if there is one, else the first."""
    errors = error.errors()
    return next((entry for entry in errors if entry["type"] == "extra_forbidden"), errors[0])


def _quoted(error: ValidationError) -> InputError | None:
    """Returns the error that a validator raised; None if pydantic itself found the input wrong."""
    raised = _first(error).get("ctx", {}).get("error")
    return raised if isinstance(raised, InputError) else None


def _first_error(error: ValidationError, where: str = "") -> InputError:
    """Returns what is wrong in a mapping at the place `where`."""
    first = _first(error)
    parts = [str(part) for part in first["loc"] if part not in _NO_KEY]
    key = " ".join(".".join(parts).split())
    if first["type"] == "extra_forbidden":
        kind = _kind(parts)
        names = [*kind.model_fields, *{StudySpec: ["profiles"], Seeds: ["after", "arms", "base"]}.get(kind, [])]
        return unknown("key", parts[-1], names, where=": ".join(filter(None, [where, ".".join(parts[:-1])])))
    if first["type"] == "value_error":
        return InputError(f"{key}{_below(first['msg'])}".removeprefix(": "), where=where, key=key or None)
    says = _SAYS.get(first["type"], first["msg"].replace("Input should", "must").replace("String should", "must"))
    if key.endswith(".rule") and first["type"] == "string_type":
        says = "must be a rule's name or a mapping"
    raw = "" if first["type"] == "missing" else f", not {first['input']!r:.80}"
    return InputError(f"{key} {says}{raw}", where=where, key=key)


def _below(message: str) -> str:
    """A validator's message as it follows a key: one that begins with .KEY is about a key below."""
    message = message.removeprefix("Value error, ")
    return message if message.startswith(".") else f": {message}"


def _kind(parts: list[str]) -> type[BaseModel]:
    """The class that holds the key at a path."""
    if len(parts) == 1:
        return StudySpec
    if "tune" in parts[2:-1]:
        return Search
    if "match" in parts[2:-1] or parts[:-1] == ["search", "match"]:
        return Match
    if parts[:2] == ["search", "constrain"]:
        return Constrain if len(parts) == 3 else Bound
    return _KINDS[parts[0]]


_LEVELS = {
    "task": 2,
    "base": 2,
    "for_task": 3,
    "arms": 3,
    "tune": 1,
    "search": 1,
    "scales": 1,
    "resources": 1,
    "engine": 1,
    "compare": 1,
    "margin": 1,
}
"""How many levels of mappings merge key by key. Deeper mappings, such as gates and ranges, are replaced whole."""


def _merge(below: Mapping[str, Any], above: Mapping[str, Any], levels: Mapping[str, int] | int = _LEVELS) -> Any:
    """Merges `above` over `below` key by key; null takes a key away."""
    merged = dict(below)
    for key, value in above.items():
        deeper = levels - 1 if isinstance(levels, int) else levels.get(key, 0)
        if value is None:
            merged.pop(key, None)
        elif deeper and isinstance(value, dict):
            under = merged.get(key)
            merged[key] = _merge(under if isinstance(under, dict) else {}, value, deeper)
        else:
            merged[key] = value
    return merged
