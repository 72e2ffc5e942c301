"""A study as the ledger has it: its file and its tasks, whatever release wrote them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from deltalab.statistics.joint_test import Look
from deltalab.statistics.looks import looks_of, seeds_of_base, trained_in_parts
from deltalab.store import Study
from deltalab.study.specs.sections.budget import UNNAMED_SAMPLER, Searching
from deltalab.study.specs.sections.ladder_sizes import Ladder, task_of
from deltalab.study.specs.sections.search_space import Search
from deltalab.study.specs.setting_paths import training_part

_NOT_SETTINGS = ("trials", "extend", "seeds")
"""Keys of `tune` that name no setting."""
HARDLY_LEARNED = 0.1
"""The share of the way from chance to the best possible score below which nothing can be said of a task."""


@dataclass(frozen=True)
class RecordedTask:
    """A task of a study at one size.

    Attributes:
        name: What the study calls the task, with its size on a ladder.
        metric: The metric that is compared.
        maximize: Whether more of the metric is better.
        chance: The metric of a model that has learned nothing.
        bounds: The lowest and the highest value that the metric can have; None if it has no bounds.
        version: The version of the task's batches and metrics.
        length: The length of a training sequence in tokens; None if the record does not say.
        parameters: The parameters that the task was made with.
        fingerprint: A hash of the task's data; None for a task without data, and in records of early releases.
        margin: The least difference of the metric that matters; 0 in records of early releases.
        chosen_by: The task whose trials are read and whose metric chooses among candidates; None for this task itself.
    """

    name: str
    metric: str
    maximize: bool
    chance: float
    bounds: tuple[float, float] | None = None
    version: int | None = None
    length: int | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None
    margin: float = 0.0
    chosen_by: "RecordedTask | None" = None

    @property
    def trained(self) -> str:
        """The name of the task that was trained."""
        return self.name if self.chosen_by is None else self.chosen_by.name

    @property
    def sign(self) -> int:
        """1 if more of the metric is better, else -1."""
        return 1 if self.maximize else -1

    @property
    def limit(self) -> float | None:
        """The best value that the metric can have; None if it has no bounds."""
        return None if self.bounds is None else self.bounds[self.maximize]

    def is_hardly_learned(self, score: float) -> bool:
        """Whether a score is near that of a model that has learned nothing; False for a metric without bounds."""
        return self.limit is not None and (score - self.chance) / (self.limit - self.chance) < HARDLY_LEARNED

    @property
    def perfect(self) -> float | None:
        """The best possible value: `limit` or, of a loss without bounds, 0; None if neither is better than chance."""
        best = self.limit if self.bounds or self.maximize else 0.0
        return best if best is not None and self.sign * (best - self.chance) > 0 else None

    def normalized(self, score: float) -> float:
        """A score on the scale where chance is 0 and `perfect`, which must be known, is 1."""
        assert self.perfect is not None
        return (score - self.chance) / (self.perfect - self.chance)


@dataclass(frozen=True)
class RecordedSpec:
    """A recorded study's file, with properties for the settings that answers depend on.

    Attributes:
        values: The file with every default spelled out, as the ledger keeps it.
    """

    values: Mapping[str, Any]

    @property
    def is_search(self) -> bool:
        """Whether the study searches candidates, besides comparing arms."""
        return bool(self.values.get("search"))

    @property
    def is_tuned(self) -> bool:
        """Whether the study tunes its arms."""
        return bool(self.values.get("tune"))

    @property
    def is_ladder(self) -> bool:
        """Whether the study trains its arms at several sizes."""
        return bool(self.values.get("scales"))

    @property
    def has_engine(self) -> bool:
        """Whether an engine of real training trained the runs, each seed as a trial of its own."""
        return bool(self.values.get("engine"))

    @property
    def is_extended(self) -> bool:
        """Whether tuning moves on beyond a range whose end is best."""
        return bool((self.values.get("tune") or {}).get("extend"))

    @property
    def is_one_family(self) -> bool:
        """Whether the arms of all tasks are tested together."""
        return self.values.get("family") == "study"

    @cached_property
    def search(self) -> Searching:
        """The section `search`. A study without one raises `pydantic.ValidationError`."""
        return Searching.model_validate({"sampler": UNNAMED_SAMPLER, **(self.values.get("search") or {})})

    @cached_property
    def scales(self) -> Ladder:
        """The section `scales`. A study without one raises `pydantic.ValidationError`."""
        return Ladder.model_validate(self.values.get("scales"))

    @property
    def candidates(self) -> int | None:
        """How many candidates the sampler of a search draws; None for a study that is no search."""
        return self.values["search"]["trials"] if self.is_search else None

    @property
    def fidelity(self) -> Mapping[str, Any]:
        """The settings that rise with the rungs of successive halving, and `keep`; empty without rungs."""
        return (self.values.get("search") or {}).get("fidelity") or {}

    @cached_property
    def tuned(self) -> dict[str, Search]:
        """The settings that every arm tunes, by path: those of the training alone in a search.

        A task may have ranges of its own: `tuned_on`.
        """
        sections = self.values.get("tune") or training_part(self.values.get("search") or {})
        return {path: Search.model_validate(given) for path, given in sections.items() if path not in _NOT_SETTINGS}

    def tuned_on(self, label: str) -> dict[str, Search]:
        """The settings that every arm tunes on a recorded task, by path, in the task's own ranges if it has any.

        >>> lr = {"train.lr": {"choice": [1, 2]}, "trials": 2}
        >>> own = {"text": {"tune": {"train.lr": {"choice": [3, 4]}}}}
        >>> RecordedSpec({"tune": lr, "for_task": own}).tuned_on("text")["train.lr"].choice
        (3, 4)
        """
        change = (self.values.get("for_task") or {}).get(self.task_of(label)) or {}
        own = {path: Search.model_validate(given) for path, given in (change.get("tune") or {}).items()}
        return {**self.tuned, **own}

    @property
    def tasks(self) -> list[str]:
        """The tasks as the file names them, without the sizes of a ladder."""
        return list(self.values.get("task", ()))

    @property
    def looks(self) -> tuple[Look, ...]:
        """The numbers of seeds at which the study looks at its data."""
        return looks_of(self.values["seeds"])

    @property
    def seeds_of_base(self) -> int | None:
        """How many seeds the base has if they are more than those of an arm, else None."""
        return seeds_of_base(self.values["seeds"])

    def trained_in_parts(self, *, is_base: bool) -> tuple[int, ...]:
        """How many seeds an arm has trained after each trial of a candidate, if it does not stop before the last."""
        return trained_in_parts(self.values["seeds"], is_base=is_base, one_by_one=self.has_engine)

    @property
    def first_seed(self) -> int:
        """The first seed of the arms; recorded studies of old releases begin at 1."""
        return int(self.values.get("first_seed", 1))

    @property
    def is_further_look(self) -> bool:
        """Whether the study was tested with fewer seeds before."""
        return isinstance(self.values["seeds"], Mapping) and "after" in self.values["seeds"]

    def task_of(self, label: str) -> str:
        """The name that the file gives a recorded task.

        >>> RecordedSpec({"scales": {"model.d_model": [32, 64]}, "task": {"text": {}}}).task_of("text.d_model=64")
        'text'
        """
        return task_of(label.partition(": ")[0], self.values.get("scales"), self.tasks)

    def families(self, labels: list[str]) -> list[list[str]]:
        """The recorded tasks whose arms are tested together: all sizes of a task, or the whole study.

        >>> RecordedSpec({"family": "task", "task": {"a": {}, "b": {}}}).families(["a", "b"])
        [['a'], ['b']]
        """
        if self.is_one_family:
            return [labels]
        families: dict[str, list[str]] = {}
        for label in labels:
            families.setdefault(self.task_of(label), []).append(label)
        return list(families.values())


def recorded_tasks(study: Study) -> dict[str, RecordedTask]:
    """The tasks of a study by their recorded names, in the study's order."""
    return {name: _task(name, facts) for name, facts in study.provenance["tasks"].items()}


def recorded_measures(study: Study) -> dict[str, RecordedTask]:
    """The further metrics that a study compares, each as a task that was trained as the task it is measured on."""
    tasks = recorded_tasks(study)
    measures = {}
    for facts in study.provenance.get("compare", ()):
        of = tasks[facts["task"]]
        name = measure_label(of.name, facts["metric"])
        bounds = facts["bounds"]
        measures[name] = replace(
            of,
            name=name,
            metric=facts["metric"],
            maximize=facts["maximize"],
            chance=facts["chance"],
            bounds=(bounds[0], bounds[1]) if bounds else None,
            margin=facts["margin"],
            chosen_by=of,
        )
    return measures


def measure_label(task: str, metric: str) -> str:
    """Names a further metric of a task.

    >>> measure_label("text", "needle exact_match@512")
    'text: needle exact_match@512'
    """
    return f"{task}: {metric}"


def _task(name: str, facts: Mapping[str, Any]) -> RecordedTask:
    parameters = facts.get("parameters") or {}
    bounds, length = facts.get("bounds"), facts.get("length", parameters.get("length"))
    if length is None and "length_range" in parameters:  # The last token is the answer, which is no input.
        length = parameters["length_range"][1] - 1
    return RecordedTask(
        name,
        facts["metric"],
        facts["maximize"],
        facts["chance"],
        (bounds[0], bounds[1]) if bounds else None,
        facts.get("version"),
        None if length is None else int(length),
        parameters,
        facts.get("fingerprint"),
        facts.get("margin", 0.0),
    )
