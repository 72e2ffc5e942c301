"""The sections `tune` and `search`: how many candidates, what bounds them, what is weighed, and which go on."""

import math
import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
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
from deltalab.study.specs.sections.search_space import (
    LAYERS,
    Number,
    Space,
    Strict,
    Whole,
    example_with,
)
from deltalab.study.specs.setting_paths import of_training

Sampler = Literal["mixed", "tpe", "nsga2", "nsga3", "gp", "random"]
EVOLUTION = "evolution"
"""The proposer that comes with deltalab."""
UNNAMED_SAMPLER: Sampler = "tpe"
"""The sampler of a recorded search that names none: the default until 2026-11-25."""
Quantity = Literal["state", "cache", "parameters", "flops"]
"""What an arm may have as much of as the base."""
COSTS = ("flops_per_token", "state_size", "parameters", "decode_us")
"""The costs that a search can weigh besides the tasks' metrics. A smaller cost is better."""
DEFAULT_COSTS = COSTS[:2]
"""The costs that a search weighs if its file lists no objectives."""


class Match(Strict):
    """Scales dimensions of an arm until the arm has as much of one or more quantities as the base, within 2%.

    Each quantity has a dimension of its own: `true` takes the default, and a path names another. A list such as
    `[state, parameters]` says `true` of each.

    Attributes:
        state: The memory of the rules after a whole sequence, KV caches too, without the cache of the convolution. Its
            default is `model.key_dim`.
        cache: All that is held between tokens: the state and the cache of the convolution. Its default is
            `model.key_dim`.
        parameters: The parameters. Their default is `model.d_model`, or `model.mlp_width` if they are not alone.
        flops: The flops. Their default is `model.d_model`.
        scale: The dimension, if there is one quantity.
    """

    state: bool | str = False
    cache: bool | str = False
    parameters: bool | str = False
    flops: bool | str = False
    scale: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_a_list(cls, raw: Any) -> Any:
        if not isinstance(raw, list | tuple):
            return raw
        for entry in raw:
            if entry not in get_args(Quantity):
                raise unknown("quantity", entry, get_args(Quantity))
            if raw.count(entry) > 1:
                raise ValueError(f"'{entry}' is given twice")
        return dict.fromkeys(raw, True)

    @field_validator("state", "cache", "parameters", "flops", mode="before")
    @classmethod
    def _true_or_a_path(cls, raw: Any) -> Any:
        if not isinstance(raw, bool | str):
            raise ValueError(f"takes true or the path of a dimension, not {raw!r}")
        return raw

    @model_validator(mode="after")
    def _a_dimension_each(self) -> Self:
        names = self._quantities
        if not names:
            raise ValueError(f"takes at least one of {', '.join(f'{name}: true' for name in get_args(Quantity))}")
        if self.scale is not None and (len(names) > 1 or getattr(self, names[0]) is not True):
            raise ValueError(f"scale goes with one quantity that is true: write {names[0]}: {self.scale}")
        for path in (paths := [*self.dimensions.values()]):
            if paths.count(path) > 1:
                both = " and ".join(name for name in names if self.dimensions[name] == path)
                raise ValueError(f"{both} exclude each other: {path} scales both; give each a dimension of its own")
        return self

    @property
    def _quantities(self) -> list[Quantity]:
        return [name for name in get_args(Quantity) if getattr(self, name)]

    @property
    def dimensions(self) -> dict[Quantity, str]:
        """The path of the dimension to scale for each quantity."""
        alone = len(self._quantities) == 1
        defaults: dict[Quantity, str] = {
            "state": "model.key_dim",
            "cache": "model.key_dim",
            # The MLP's width changes no other layer, and is the finest step.
            "parameters": "model.d_model" if alone else "model.mlp_width",
            "flops": "model.d_model",
        }
        given = {name: self.scale or getattr(self, name) for name in self._quantities}
        return {name: path if isinstance(path, str) else defaults[name] for name, path in given.items()}

    @property
    def keyed(self) -> dict[str, Any]:
        """The match as the identity of a study hashes it.

        The first releases knew one quantity at a time, and called the cache `state`. Their studies keep their identity.

        Examples:
            >>> Match(cache=True).keyed
            {'state': True, 'parameters': False, 'flops': False, 'scale': None}
            >>> Match(state=True).keyed
            {'state': 'model.key_dim'}
        """
        first = dict(zip(("cache", "parameters", "flops"), ("state", "parameters", "flops"), strict=True))
        if (names := self._quantities)[1:] or names[0] not in first or getattr(self, names[0]) is not True:
            return {str(name): path for name, path in self.dimensions.items()}
        return {name: name == first[names[0]] for name in first.values()} | {"scale": self.scale}


class Bound(Strict):
    """What a quantity of a candidate may be: at_most, at_least, or within a share of the base's.

    Attributes:
        at_most: The largest value.
        at_least: The smallest value.
        within: The share of the base's quantity by which the candidate's may differ from it.
        of: Whose quantity `within` refers to.
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
        """The least and the most that is allowed, if the base has the quantity `base`.

        Examples:
            >>> Bound(at_most=120, within=0.25).limits(100)
            (75.0, 120.0)
        """
        share = math.inf if self.within is None else self.within
        least = 0.0 if self.at_least is None else self.at_least
        most = math.inf if self.at_most is None else self.at_most
        return (max(least, base * (1 - share)), min(most, base * (1 + share))) if self.within else (least, most)

    def __str__(self) -> str:
        """The bound in words.

        Examples:
            >>> str(Bound(at_most=4096, at_least=100)), str(Bound(within=0.02, of="base"))
            ('at most 4,096 and at least 100', "within 2% of the base's")
        """
        parts = [f"at most {self.at_most:,.10g}"] if self.at_most is not None else []
        parts += [f"at least {self.at_least:,.10g}"] if self.at_least is not None else []
        parts += [f"within {100 * self.within:.3g}% of the base's"] if self.within is not None else []
        return " and ".join(parts)


class Constrain(Strict):
    """What the candidates of a search may hold and compute.

    Attributes:
        state: Elements of the rules' memory of one sequence at the task's length, KV caches too, without the cache of
            the convolution.
        parameters: Elements that are trained.
        flops: Operations of the matrix products of a forward pass per token, without embedding and logits.
    """

    state: Bound | None = None
    parameters: Bound | None = None
    flops: Bound | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_before_training(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and "decode_us" in raw:
            raise ValueError(
                "decode_us cannot be bounded: candidates are refused before they train, and it is timed after that; "
                "bound state, parameters or flops, and add decode_us to objectives"
            )
        return raw

    @property
    def bounds(self) -> dict[str, Bound]:
        """The bounds that are given, by quantity."""
        return {name: bound for name, bound in self if bound is not None}


class Fidelity(BaseModel):
    """Successive halving: each candidate trains at the first values, and the best `keep` of them at the next.

    Every other key is `train.steps`, `train.seeds` (seeds of one candidate) or `model.d_model`, with values that
    increase. Several keys go up together.

    Attributes:
        keep: The share that goes on.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, tuple[Annotated[Whole, Field(ge=1)], ...]] = Field(init=False)

    paths: ClassVar[tuple[str, ...]] = ("train.steps", "train.seeds", "model.d_model")
    """The settings that may rise from rung to rung."""

    keep: Annotated[Number, Field(gt=0, lt=1)] = 1 / 3

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, raw: Any) -> Any:
        for path in raw if isinstance(raw, dict) else ():
            if path not in ("keep", *cls.paths):
                raise unknown("key", str(path), ["keep", *cls.paths])
        return raw

    @model_validator(mode="after")
    def _goes_up(self) -> Self:
        for path, values in self.values.items():
            if len(values) < 2 or any(a >= b for a, b in pairwise(values)):
                raise ValueError(f".{path}: takes at least two values that increase, not {list(values)}")
        if not self.values:
            raise ValueError("needs a key such as 'train.steps: [200, 600, 1800]'")
        if len({*map(len, self.values.values())}) > 1:
            lengths = ", ".join(f"{path} has {len(values)}" for path, values in self.values.items())
            raise ValueError(f"all keys need as many values: {lengths}")
        return self

    @property
    def values(self) -> dict[str, tuple[int, ...]]:
        """The values of each setting at the rungs, by its path."""
        return self.__pydantic_extra__

    @property
    def rungs(self) -> list[dict[str, int]]:
        """The settings of each rung, the cheapest first.

        Examples:
            >>> Fidelity.model_validate({"train.steps": [2, 6], "train.seeds": [1, 3]}).rungs
            [{'train.steps': 2, 'train.seeds': 1}, {'train.steps': 6, 'train.seeds': 3}]
        """
        columns = zip(*self.values.values(), strict=True)
        return [dict(zip(self.values, column, strict=True)) for column in columns]


class Tune(Space):
    """The same candidates for every arm, spread over the ranges, the base's own values among them.

    Every seed of the study trains every candidate. A seed's result is the test score of its run with the best
    validation score, so that the choice is part of what the error bars cover.

    Attributes:
        trials: How many candidates are tried.
        extend: Moves the ranges, for all arms alike, while the best value of an arm is the lowest or the highest tried.
    """

    extend: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _holds_several_candidates(self) -> Self:
        if self.trials < 2:
            raise ValueError("trials 1 leaves one candidate and nothing to choose: give at least 2, or leave out tune")
        for path, search in self.searched.items():
            if search.when is not None or search.pattern is not None:
                key = "when" if search.when is not None else "pattern"
                raise ValueError(f".{path}: {key} goes with search: every arm tries the same candidates of tune")
        if self.extend and not any(search.choice is None for search in self.searched.values()):
            raise ValueError("extend moves a range, and every setting is searched by choice")
        return self


@dataclass(frozen=True)
class Objective:
    """An objective of a search: a metric or a cost that the search weighs.

    Attributes:
        name: A task's metric, or one of `COSTS`.
        task: The task; None for a cost that names no task, which is the largest of all tasks.
        maximize: Whether more is better.
    """

    name: str
    task: str | None
    maximize: bool

    def __str__(self) -> str:
        """The objective as a study's file writes it: NAME, or NAME@TASK."""
        return self.name if self.task is None else f"{self.name}@{self.task}"


class Searching(Space):
    """A search for architectures, from the base.

    Each candidate is judged by the mean of `seeds` validation runs. Where the study has several tasks, a candidate is
    trained on each.
    A key may also be `rule` as a whole: `rule: {choice: [comba, {name: gla}]}`.

    Attributes:
        trials: How many candidates are tried.
        seeds: Seeds of one candidate.
        finalists: How many candidates are confirmed, each as an arm.
        sampler: What draws candidates. `mixed` draws by TPE and near the best candidates, and at random while that
            gains nothing.
        random: The share of the trials that random search draws instead, as a control.
        objectives: What is weighed, as METRIC, METRIC@TASK or one of `COSTS`, which may name their task as well. By
            default the metric of every task, flops_per_token and state_size.
        constrain: What a candidate may hold and compute.
        match: Makes every candidate as large as the base.
        warm: Candidates to begin with: rules, by name or with knobs, and {study: NAME} for those of a study in the
            ledger.
        fidelity: Successive halving.
        proposals: What proposes candidates beside the sampler: `evolution`, a command, or `module:function`.
        trainings: Values of the searched `train` settings that every seed of the base and of each finalist tries on a
            task. Two would leave out one end of a range or an arm's own value.
    """

    sections: ClassVar[tuple[str, ...]] = ("rule",)

    seeds: Annotated[Whole, Field(ge=1, le=100)] = 1
    finalists: Annotated[Whole, Field(ge=1, le=100)] = 4
    sampler: Sampler = "mixed"
    random: Annotated[Number, Field(ge=0, lt=1)] = 0.2
    objectives: tuple[str, ...] = ()
    constrain: Constrain = Constrain()
    match: Match | None = None
    warm: tuple[str | dict[str, Any], ...] = ()
    fidelity: Fidelity | None = None
    proposals: Annotated[str, Field(max_length=1000)] | None = None
    trainings: Annotated[Whole, Field(ge=3, le=1000)] = 5

    @field_validator("sampler", mode="before")
    @classmethod
    def _is_known(cls, raw: Any) -> Any:
        if raw not in get_args(Sampler):
            raise unknown("sampler", raw, get_args(Sampler))
        return raw

    @field_validator("objectives")
    @classmethod
    def _names_one(cls, raw: tuple[str, ...]) -> tuple[str, ...]:
        if not raw:
            raise ValueError("takes at least one; without the key it is every task's metric and its costs")
        return raw

    @field_validator("warm", mode="before")
    @classmethod
    def _rules_and_studies(cls, raw: Any) -> Any:
        for entry in raw if isinstance(raw, list | tuple) else ():
            named = isinstance(entry, dict) and isinstance(entry.get("name"), str) and "study" not in entry
            study = isinstance(entry, dict) and [*entry] == ["study"] and isinstance(entry["study"], str)
            if not (isinstance(entry, str) or named or study):
                raise ValueError(f"takes rules (NAME, or {{name: NAME, knob: ...}}) and {{study: NAME}}, not {entry!r}")
        return raw

    @field_validator("proposals")
    @classmethod
    def _is_a_command(cls, raw: str | None) -> str | None:
        if raw is None:
            return None
        try:
            words = shlex.split(raw)
        except ValueError as error:
            raise ValueError(f"is no command: {error}") from None
        if not words:
            raise ValueError(f"is empty: give {EVOLUTION}, a command or module:function")
        if raw != EVOLUTION and not re.fullmatch(r"[\w.]+:\w+", raw) and shutil.which(words[0]) is None:
            raise ValueError(str(unknown("command", words[0], [EVOLUTION, "module:function", "a program on the PATH"])))
        return raw

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.proposals is not None and self.sampler == "random":
            raise ValueError(".proposals: compete with a sampler, and random is the control: give another sampler")
        if self.proposals is not None and self.enumerated:
            raise ValueError(f".proposals: all {self.whole} candidates are tried: leave it out, or give fewer trials")
        if self.finalists > self.trials:
            raise ValueError(f"finalists {self.finalists} exceed trials {self.trials}")
        for path, search in self.searched.items():
            if search.pattern is not None and path != LAYERS:
                raise ValueError(f".{path}: only {LAYERS} takes a pattern")
        for name, knob in self.knobs.items():
            for number, way in enumerate(knob.ways):
                if example_with({**self.knobs, name: knob.model_copy(update={"when": way})}, name) is None:
                    where = f".{name}.when[{number}]" if len(knob.ways) > 1 else f".{name}.when"
                    raise ValueError(f"{where}: never holds, since the settings in it need others that exclude them")
        if not self.random and self.sampler != "random" and self.whole != self.trials:
            raise ValueError(
                ".random: must be above 0 and below 1: random search is the control of what the sampler finds"
            )
        if self.sampler == "gp" and (bound := [name for name, knob in self.knobs.items() if knob.when]):
            raise ValueError(f".sampler: gp draws what every candidate has, and {bound[0]} exists in some: take tpe")
        for path in self.match.dimensions.values() if self.match else ():
            if path in self.searched:
                raise ValueError(f".match scales {path}, which is searched: scale another, or leave it out")
        for path in self.fidelity.values if self.fidelity else ():
            if path in self.searched:
                raise ValueError(f".fidelity.{path}: is searched already")
        if "trainings" in self.model_fields_set and not any(map(of_training, self.searched)):
            raise ValueError(f".trainings {self.trainings}: nothing of train is searched that they could vary")
        if self.finalists > self.halved[-1]:
            raise ValueError(
                f".fidelity: {self.halved[-1]} candidates reach its last values, fewer than finalists {self.finalists}"
            )
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out the keys of a later release that are at their default, so that a study keeps its identity."""
        later = ("random", "objectives", "constrain", "match", "warm", "fidelity", "proposals", "trainings")
        plain = {key for key in later if getattr(self, key) == type(self).model_fields[key].default}
        plain |= {"sampler"} if self.sampler == UNNAMED_SAMPLER else set()
        return {key: value for key, value in dump(self).items() if key not in plain}

    @property
    def enumerated(self) -> bool:
        """Whether every candidate of the space is tried, so that nothing samples."""
        return self.whole == self.trials

    @property
    def rungs(self) -> list[dict[str, int]]:
        """The settings that each rung of successive halving changes; one rung without settings if there is none."""
        return self.fidelity.rungs if self.fidelity else [{}]

    @property
    def halved(self) -> list[int]:
        """How many candidates train at each rung."""
        keep = self.fidelity.keep if self.fidelity else 1
        counts = [self.trials]
        for _ in self.rungs[1:]:
            counts.append(math.ceil(keep * counts[-1] - 1e-9))
        return counts

    @property
    def controls(self) -> int:
        """How many of the trials are drawn by random search, as a control."""
        if self.sampler == "random" or self.enumerated:
            return 0
        return min(self.trials - 1, max(1, round(self.random * self.trials)))

    def weighed(self, tasks: Mapping[str, tuple[str, bool]]) -> tuple[Objective, ...]:
        """Lists the objectives of a study with these tasks.

        Args:
            tasks: The metric of each task by the task's name, and whether more of the metric is better.

        Raises:
            InputError: An objective is unknown, does not say whose metric it is, or is given twice, or no task's metric
                is an objective.
        """
        metrics = {f"{metric}@{task}": Objective(metric, task, more) for task, (metric, more) in tasks.items()}
        known = {**metrics, **{cost: Objective(cost, None, False) for cost in COSTS}}
        known |= {f"{cost}@{task}": Objective(cost, task, False) for cost in COSTS for task in tasks}
        for metric in dict.fromkeys(metric for metric, _ in tasks.values()):
            whose = [name for name, objective in metrics.items() if objective.name == metric]
            if len(whose) == 1:
                known[metric] = metrics[whose[0]]
        objectives: list[Objective] = []
        for name in self.objectives or (*metrics, *DEFAULT_COSTS):
            if name not in known:
                whose = [other for other in metrics if other.startswith(f"{name}@")]
                if whose:
                    raise InputError(f"objectives: '{name}' is the metric of several tasks: say {' or '.join(whose)}")
                short = [other for other in known if "@" not in other and other not in COSTS]
                raise unknown("objective", name, [*short, *metrics, *COSTS], where="objectives")
            if known[name] in objectives:
                raise InputError(f"objectives: '{name}' is given twice")
            objectives.append(known[name])
        if not any(objective in metrics.values() for objective in objectives):
            raise InputError(f"objectives: weighs costs alone: add {' or '.join(metrics)}")
        return tuple(objectives)
