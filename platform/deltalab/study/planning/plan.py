"""A study expanded into its arms, and each arm into jobs, which are identified by a hash of what they compute."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, Literal

from deltalab.errors import InputError
from deltalab.models.costs import CostCounter
from deltalab.models.settings.layer_list import OF_NO_PRESET, RULE
from deltalab.models.spec import LATER, TIED_WIDTH, ModelSpec
from deltalab.registry import rule_plugin, task_plugin
from deltalab.study.planning.matching import Bounded, Matcher
from deltalab.study.planning.tuning_candidates import spread_candidates
from deltalab.study.specs.method_settings import resolve, with_values, within_flops
from deltalab.study.specs.sections.budget import Objective, Searching, Tune
from deltalab.study.specs.sections.ladder_sizes import task_of
from deltalab.study.specs.sections.search_space import LAYERS, Search, count_combinations
from deltalab.study.specs.setting_paths import changes_a_step, model_part, of_training, setting, training_part
from deltalab.study.specs.study_file import StudySpec
from deltalab.study.workers.jobs import Job
from deltalab.tasks import BUILTIN, Task
from deltalab.training.spec import TrainSpec
from deltalab.training.train import NUMERICS

TUNE_SEEDS_FROM = 1_000_001
"""The first seed of a search, beyond those of confirmation, so that no seed is used by both."""


@dataclass(frozen=True)
class PlannedArm:
    """One arm on one task.

    Attributes:
        name: The arm's name.
        task: The name that the plan gives the task.
        is_base: Whether the arm is the base.
        config: Rule, model and train before tuning, with every default spelled out.
        change: Dotted key -> [base value, arm value].
        flops: The operations of a training, from which its steps follow; None where the study's file gives steps.
    """

    name: str
    task: str
    is_base: bool
    config: dict[str, Any]
    change: dict[str, Any]
    flops: float | None = None


@dataclass(frozen=True)
class Plan:
    """A study, expanded into its arms on each task.

    Attributes:
        spec: The study, with its profile and the overrides in place.
        profile: The name of the profile; None without one.
        arms: The arms of each task, the base first.
        tasks: The tasks by the names that the plan gives them, which name a ladder's size as well.
        study_file: What errors call the study.
        notes: What to know about the recipe and the search space before the study runs.
        overrides: Settings that override the study's file, by their keys.
        further: The further metrics that the study compares, as `further_metrics` describes them.
    """

    spec: StudySpec
    profile: str | None
    arms: list[PlannedArm]
    tasks: dict[str, Task]
    study_file: str
    notes: tuple[str, ...] = ()
    overrides: dict[str, Any] = field(default_factory=dict)
    further: tuple[dict[str, Any], ...] = ()

    @property
    def identity(self) -> str:
        """SHA-256 of all that the study computes, with rule sources and data. Another identity is another study."""
        keys = [self.job(arm, "confirm", 0, {}).key for arm in self.arms]
        tune = self.budget.model_dump(mode="json") if self.budget else None
        if tune and self.spec.search and self.spec.search.match:
            tune["match"] = self.spec.search.match.keyed
        computed: dict[str, Any] = {
            "name": self.spec.name,
            "profile": self.profile,
            "tune": tune,
            "arms": self.names,
            "trials": keys,
        }
        if self.spec.engine:
            computed["seeds"] = self.spec.trained_in_parts(is_base=False)[-1]
        if len(self.spec.looks) > 1:
            computed["looks"] = [look.seeds for look in self.spec.looks]
        if sum(look.is_last for look in self.spec.looks) > 1:  # A further look, by the rule of its day.
            computed["spent"] = [look.spent for look in self.spec.looks]
        if self.spec.seeds_of_base is not None:
            computed["seeds of base"] = self.spec.seeds_of_base
        if self.spec.family != "task":
            computed["family"] = self.spec.family
        if self.further:
            computed["compare"] = [[of["task"], of["metric"]] for of in self.further]
        if own := {task: change.tune for task, change in self.spec.for_task.items() if change.tune}:
            computed["ranges"] = {
                task: {path: search.model_dump(mode="json") for path, search in sorted(ranges.items())}
                for task, ranges in sorted(own.items())
            }
        if self.spec.margin:
            computed["margin"] = dict(sorted(self.spec.margin.items()))
        return _hash(computed)

    def margin(self, task: Task) -> float:
        """Returns the least difference of a task's metric that matters: the study's, or the task's own."""
        return self.spec.margin.get(task.metric, task.margin)

    @cached_property
    def rules(self) -> list[str]:
        """The rules that the study may train, in the order of its arms."""
        names: dict[str, None] = {}
        for arm in self.arms:
            try:
                job = self.job(arm, "confirm", 0, {})
            except Infeasible as infeasible:
                job = infeasible.job
            names |= dict.fromkeys(name for kind, name, _, _ in job.plugins if kind == "rule")
        for path, knob in self.budget.knobs.items() if self.budget else ():
            if path == "rule" or path.startswith(f"{LAYERS}["):
                choices: Iterable[Any] = knob.choice or ()
                names |= dict.fromkeys(rule["name"] if isinstance(rule, dict) else str(rule) for rule in choices)
        return [name for name in names if name != RULE]

    @property
    def names(self) -> list[str]:
        """The names of the arms, the base first."""
        return list(dict.fromkeys(arm.name for arm in self.arms))

    @property
    def budget(self) -> Tune | Searching | None:
        """The section `search` or `tune`: the settings that vary, and how many candidates are tried."""
        return self.spec.search or self.spec.tune

    def space(self, task: str) -> Tune | Searching | None:
        """The section `search`, or the section `tune` with the ranges that `for_task` gives a task."""
        scales = self.spec.scales.model_dump() if self.spec.scales else None
        return self.spec.search or self.spec.tune_on(task_of(task, scales, [*self.spec.task]))

    def candidates(self, arm: PlannedArm, values: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        """The candidates that every seed of an arm may train, in order.

        Every seed trains the first `tried` of them that make a model. A study that tunes has the same candidates for
        all arms of a task. In a search the candidates vary the training alone, and the arm's own values come first. If
        there is nothing to vary, the values as they are written are the only candidate.

        Args:
            arm: The arm.
            values: The values of the search's finalist that the arm is; nothing for the base.
        """
        if isinstance(tune := self.space(arm.task), Tune):
            base = next(other for other in self.arms if other.is_base and other.task == arm.task)
            written = {path: setting(base.config, path, "tune") for path in tune.searched}
            return spread_candidates(tune.searched, tune.trials, written)
        values = dict(values or {})
        of_model = model_part(values)
        config = self.config_for(arm, values) if values else arm.config
        searched = self._trained(config)
        if not searched or (values and not of_model):  # The model is the base's, and the base varies its training.
            return iter([values])
        whole = count_combinations(searched)
        trials = self.tried(arm) if whole is None else min(self.tried(arm), whole)
        written = {path: setting(config, path, "search") for path in searched}
        drawn = spread_candidates(searched, trials, written)
        first = sorted(islice(drawn, trials), key=lambda train: any(train[path] != written[path] for path in train))
        return ({**of_model, **train} for train in chain(first, drawn))

    def tried(self, arm: PlannedArm) -> int:
        """The most candidates of an arm that every seed trains."""
        if self.spec.tune:
            return self.spec.tune.trials
        search, training = self.spec.search, self._training
        if not search or not training or (not arm.is_base and search.knobs.keys() == training.keys()):
            return 1
        whole = count_combinations(training)
        return search.trainings if whole is None else min(search.trainings, whole)

    def _trained(self, config: Mapping[str, Any]) -> dict[str, Search]:
        """The settings of the training that a search varies, if their conditions on rule and model hold in `config`."""
        knobs = {}
        for path, knob in self._training.items():
            ways = []
            for way in knob.ways:
                above = model_part(way)
                drawn = {name: config["rule"] if name == "rule" else setting(config, name, "search") for name in above}
                if knob.model_copy(update={"when": above}).exists(drawn):
                    ways.append(training_part(way))
            if ways:
                knobs[path] = knob.model_copy(update={"when": tuple(ways) if all(ways) else None})
        return knobs

    @property
    def _training(self) -> dict[str, Search]:
        """The settings of the training that a search varies, whatever their conditions."""
        return training_part(self.spec.search.knobs if self.spec.search else {})

    @cached_property
    def objectives(self) -> tuple[Objective, ...]:
        """What a search weighs; empty if the study is no search."""
        metrics = {name: (task.metric, task.maximize) for name, task in self.tasks.items()}
        return self.spec.search.weighed(metrics) if self.spec.search else ()

    @property
    def _searched(self) -> list[int]:
        """Trials of the search on all tasks, for each rung of successive halving."""
        return [len(self.tasks) * trials for trials in self.spec.search.halved] if self.spec.search else []

    @property
    def trials(self) -> int:
        """How many trials the study has, if no arm stops before the last look."""
        parts = (self.tried(arm) * len(self.spec.trained_in_parts(is_base=arm.is_base)) for arm in self.arms)
        return sum(parts) + sum(self._searched)

    @property
    def runs(self) -> int:
        """How many runs the study has, if no arm stops before the last look."""
        return sum(map(self.confirmed, self.arms)) + sum(n * self._seeds(rung) for rung, n in enumerate(self._searched))

    def confirmed(self, arm: PlannedArm) -> int:
        """How many runs an arm has besides those of a search, if it does not stop before the last look."""
        return self.tried(arm) * self.spec.trained_in_parts(is_base=arm.is_base)[-1]

    @property
    def whole_runs(self) -> float:
        """How many runs the study has, where a run at a lower rung counts as its share of the last rung's steps."""
        rungs = self.spec.search.rungs if self.spec.search else []
        steps = [rung.get("train.steps", 1) for rung in rungs]
        saved = [1 - at_rung / steps[-1] for at_rung in steps]
        return self.runs - sum(n * self._seeds(rung) * saved[rung] for rung, n in enumerate(self._searched))

    def _seeds(self, rung: int | None) -> int:
        """How many seeds a candidate of a search has at a rung; None stands for the last rung."""
        assert self.spec.search is not None
        return self.spec.search.rungs[-1 if rung is None else rung].get("train.seeds", self.spec.search.seeds)

    def job(
        self,
        arm: PlannedArm,
        stage: Literal["tune", "confirm"],
        number: int,
        values: Mapping[str, Any],
        part: int = 0,
        rung: int | None = None,
    ) -> Job:
        """Makes the job of a trial of an arm.

        Args:
            arm: The arm.
            stage: Whether the trial tunes or confirms.
            number: The number of the candidate.
            values: The candidate's values by path.
            part: Which of the arm's trials of the candidate it is: the look for which its seeds are added, or 1 for
                the further seeds of the base. With an engine, each seed is a part.
            rung: The rung of successive halving; None for the whole training.

        Raises:
            Infeasible: The values make no model, or none that a search's `match` and `constrain` allow.
            InputError: A setting does not exist.
        """
        if stage == "tune":
            seeds = tuple(range(TUNE_SEEDS_FROM, TUNE_SEEDS_FROM + self._seeds(rung)))
        else:
            ends = [0, *self.spec.trained_in_parts(is_base=arm.is_base)]
            first = self.spec.first_seed
            seeds = tuple(range(first + ends[part], first + ends[part + 1]))
        task = self.tasks[arm.task]
        config = self.with_values(arm, values)
        rules, wide, reason = [config["rule"]["name"]], False, None
        try:
            config = self.config_for(arm, values)
            if self._is_candidate(values):
                for quantity, bounded in self.bounded(arm, config).items():
                    if not bounded.holds:
                        raise InputError(f"constrain.{quantity}: {bounded}")
            if rung is not None:
                config = self.config_for(arm, values, rung)
            model = ModelSpec.of({**config["model"], "rule": config["rule"]})
            rules, wide = [rule.name for rule in model.rules()], model.tie_embeddings and model.d_model > TIED_WIDTH
        except InputError as error:
            reason = str(error)
        params = json.loads(json.dumps(asdict(task)))  # A job is JSON, which has lists in place of a task's tuples.
        plugins = tuple(_plugins(rules, task))
        key = _hash(
            {
                "numerics": NUMERICS,
                # The name as well, since a recorded trial belongs to one task name.
                "task": [arm.task, task.name, task.version, params, task.fingerprint()],
                "config": _keyed(config),
                "code": sorted(digest for _, _, _, digest in plugins),
                "stage": stage,
                "seeds": seeds,
                # The factor changed after the first release. The trials of narrow models keep their keys.
                **({"tied logits": f"{TIED_WIDTH**0.5:g} / d_model"} if wide else {}),
                **({} if reason is None else {"infeasible": reason}),
                **({"decode": True} if self._decodes else {}),
                **({"engine": self.spec.engine.learns_by} if self.spec.engine else {}),
            }
        )
        job = Job(
            key=key,
            arm=arm.name,
            task=arm.task,
            task_kind=task.name,
            task_version=task.version,
            stage=stage,
            number=number,
            values=dict(values),
            config=config,
            task_params=params,
            seeds=seeds,
            plugins=plugins,
            rule_source=rule_plugin(config["rule"]["name"]).source,
            gpu=self.spec.resources.gpu,
            deadline=self.spec.deadline,
            decode=self._decodes,
            engine=self.spec.engine.model_dump(mode="json") if self.spec.engine else None,
        )
        if reason is not None:
            raise Infeasible(reason, job)
        return job

    def models(self) -> list[ModelSpec]:
        """Returns the model of each arm, and of the base with each rule that a search may choose for it."""
        configs = [arm.config for arm in self.arms]
        knob = self.budget.knobs.get("rule") if self.budget else None
        configs += [{**self.arms[0].config, "rule": rule} for rule in (knob.choice if knob else None) or ()]
        return [ModelSpec.of({**config["model"], "rule": config["rule"]}) for config in configs]

    @cached_property
    def _counter(self) -> CostCounter:
        return CostCounter()

    @cached_property
    def _matcher(self) -> Matcher:
        return Matcher({})

    @property
    def _decodes(self) -> bool:
        """Whether the trials time a decoding step."""
        return any(objective.name == "decode_us" for objective in self.objectives)

    def with_values(self, arm: PlannedArm, values: Mapping[str, Any]) -> dict[str, Any]:
        """Puts a candidate's values into the configuration of an arm, which is not yet resolved.

        Raises:
            InputError: A setting does not exist.
        """
        searched = self.spec.search.searched if self.spec.search else {}
        absent = [path for path in searched if path not in values] if self._is_candidate(values) else []
        tune = "tune" if arm.is_base else f"tune: arm '{arm.name}'"
        return with_values(arm.config, values, where="search" if self.spec.search else tune, absent=absent)

    def _is_candidate(self, values: Mapping[str, Any]) -> bool:
        """Whether values are a candidate of a search, and not of its base, which tunes its training alone."""
        return self.spec.search is not None and any(not of_training(path) for path in values)

    def config_for(self, arm: PlannedArm, values: Mapping[str, Any], rung: int | None = None) -> dict[str, Any]:
        """The configuration with which an arm trains a candidate, every setting spelled out.

        If a search matches its candidates, the model is as large as the base, at a rung as the base at that rung.

        Raises:
            InputError: The values make no model, or no model is as large as the base.
        """
        task, base, search = self.tasks[arm.task], arm.config, self.spec.search
        changes: dict[str, Any] = {}
        if search and rung is not None:
            changes = {path: value for path, value in search.rungs[rung].items() if path != "train.seeds"}
            base = resolve(with_values(base, changes, where="search.fidelity"), task)
        config = resolve(self.with_values(replace(arm, config=base), values), task)
        if search and search.match and self._is_candidate(values):
            try:
                config = self._matcher.matched(search.match, base, config, task.length)
            except InputError as error:
                raise InputError(f"match: {error}") from None
        if arm.flops is not None and any(map(changes_a_step, {**changes, **values})):
            config = resolve(within_flops(config, arm.flops), task, self._counter)
        return config

    def bounded(self, arm: PlannedArm, config: dict[str, Any]) -> dict[str, Bounded]:
        """The quantities that a search constrains, in the configuration of a candidate.

        Raises:
            InputError: The model does not run.
        """
        bounds = self.spec.search.constrain.bounds if self.spec.search else {}
        return self._matcher.bounded(bounds, arm.config, config, self.tasks[arm.task].length)


def _keyed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as keys hash it: without the settings of a later release that are at their defaults."""
    keyed = dict(config)
    for section, kind in (("model", ModelSpec), ("train", TrainSpec)):
        later = {f.name: json.loads(json.dumps(f.default)) for f in fields(kind) if f.metadata == LATER}
        keyed[section] = {k: v for k, v in config[section].items() if k not in later or v != later[k]}
    model = keyed["model"]
    plain = {f.name: f.default for f in fields(ModelSpec) if f.name in OF_NO_PRESET and f.name not in model}
    if not isinstance(model["layers"], int):
        model["layers"] = [_keyed_entry(entry, plain) for entry in model["layers"]]
    return keyed


def _keyed_entry(entry: Any, plain: Mapping[str, Any]) -> Any:
    """An entry of `layers` without the settings of `OF_NO_PRESET` that leave the model's own, `plain`, as they are."""
    if isinstance(entry, str) or "layer" not in entry:
        return entry
    return {**entry, "layer": {k: v for k, v in entry["layer"].items() if k not in plain or v != plain[k]}}


class Infeasible(InputError):
    """A candidate makes no model or no training, or breaks a constraint. The message is the reason.

    Attributes:
        job: The job that the candidate would have been; `job.config` has the candidate's values in place.
    """

    def __init__(self, reason: str, job: Job) -> None:
        """Keeps the job beside the reason."""
        super().__init__(reason)
        self.job = job


def _plugins(rules: list[str], task: Task) -> list[tuple[str, str, str, str]]:
    """Lists the plugins that a job runs, as (kind, name, file, hash)."""
    plugins = [("rule", name, rule_plugin(name)) for name in rules]
    plugins.append(("task", task.name, task_plugin(task.name)))
    # Tests hold a built-in task to its version. A user's file may change without a new version, so it is hashed.
    builtin = BUILTIN.values()
    return [
        (kind, name, str(plugin.file), "" if plugin.kind in builtin else plugin.hash) for kind, name, plugin in plugins
    ]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
