"""Expands a study into its arms, and each arm into trials, which are identified by a hash of what they compute."""

import hashlib
import json
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import product
from typing import Any, Literal

from deltalab.errors import InputError, unknown
from deltalab.models.spec import LATER, TIED_WIDTH, ModelSpec
from deltalab.registry import get_task, rule_plugin, task_plugin
from deltalab.study.candidates import grid_size, spread
from deltalab.study.match import Matcher
from deltalab.study.scales import sized
from deltalab.study.settings import (
    applied,
    difference,
    resolve,
    resolve_method,
    rule_of,
    setting,
    with_values,
)
from deltalab.study.spec import Change, Search, Searching, StudySpec, Tune
from deltalab.tasks import BUILTIN, Task
from deltalab.training.train import NUMERICS, TrainSpec

CONFIRM_SEEDS_FROM = 1
TUNE_SEEDS_FROM = 1_000_001
"""Far from those of confirmation, so that no seed is used by both."""
MOST_COMBINATIONS = 500
"""Candidates that a plan tries to make, over all its arms."""
INTEGERS = 16
"""Values of a range of integers among them."""


@dataclass(frozen=True)
class PlannedArm:
    """One arm on one task.

    config: rule, model and train before tuning, with every default spelled out.
    change: dotted key -> [base value, arm value].
    """

    name: str
    task: str
    is_base: bool
    config: dict[str, Any]
    change: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs to run one trial, as JSON.

    key: SHA-256 of what the trial computes. task: its name in the study; task_kind: its name in the registry.
    plugins: (kind, name, file, hash) of the code it runs.
    rule_source: the source at planning time; a worker's file may have changed since.
    """

    key: str
    arm: str
    task: str
    task_kind: str
    task_version: int
    stage: Literal["tune", "confirm"]
    number: int
    values: dict[str, Any]
    config: dict[str, Any]
    task_params: dict[str, Any]
    seeds: tuple[int, ...]
    plugins: tuple[tuple[str, str, str, str], ...]
    rule_source: str
    gpu: float = 0.0
    deadline: float | None = None

    @cached_property
    def specs(self) -> tuple[ModelSpec, TrainSpec]:
        """The model and the training. Its plugins must have been loaded."""
        train = TrainSpec(**self.config["train"])
        if train.device == "auto" and not self.gpu:
            # A worker that asked Ray for no GPU still sees all of them, and every worker would take the first.
            train = replace(train, device="cpu")
        return ModelSpec.of({**self.config["model"], "rule": self.config["rule"]}), train


@dataclass(frozen=True)
class Plan:
    """A study, expanded.

    arms: those of each task, the base first. where: the study's file, which errors name.
    notes: what to know about the search space before the study runs.
    """

    spec: StudySpec
    profile: str | None
    arms: list[PlannedArm]
    tasks: dict[str, Task]
    where: str
    notes: tuple[str, ...] = ()

    @property
    def identity(self) -> str:
        """SHA-256 of all that the study computes, with rule sources and data. Another identity is another study."""
        keys = [self.job(arm, "confirm", 0, {}).key for arm in self.arms]
        tune = self.budget.model_dump(mode="json") if self.budget else None
        found: dict[str, Any] = {
            "name": self.spec.name,
            "profile": self.profile,
            "tune": tune,
            "arms": self.names,
            "trials": keys,
        }
        if len(self.spec.looks) > 1:
            found["looks"] = [look.seeds for look in self.spec.looks]
        if self.spec.family != "task":
            found["family"] = self.spec.family
        return _hash(found)

    @cached_property
    def rules(self) -> list[str]:
        """The rules that the study may train, in the order of its arms."""
        found: dict[str, None] = {}
        for arm in self.arms:
            try:
                job = self.job(arm, "confirm", 0, {})
            except Infeasible as infeasible:
                job = infeasible.job
            found |= dict.fromkeys(name for kind, name, _, _ in job.plugins if kind == "rule")
        searched = self.budget.searched.get("rule") if self.budget else None
        choices: Iterable[Any] = (searched.choice if searched else None) or ()
        return [*(found | dict.fromkeys(each["name"] if isinstance(each, dict) else str(each) for each in choices))]

    @property
    def names(self) -> list[str]:
        """The arms, the base first."""
        return list(dict.fromkeys(arm.name for arm in self.arms))

    @property
    def budget(self) -> Tune | Searching | None:
        """The settings that are searched, and how many candidates are tried."""
        return self.spec.search or self.spec.tune

    def candidates(self, task: str) -> list[dict[str, Any]]:
        """The candidates of tuning on a task, more than the budget: an arm tries the first that make it a model.

        Those of the base's `train` settings, where a search is for architectures. [{}], the values as written, where
        there is nothing to tune.
        """
        searched = self.budget.searched if self.budget else {}
        if self.spec.search:
            searched = {path: search for path, search in searched.items() if path.startswith("train.")}
        if self.budget is None or not searched:
            return [{}]
        base = next(arm for arm in self.arms if arm.is_base and arm.task == task)
        trials = self.budget.trials
        if (whole := grid_size(searched)) is not None and self.spec.search:
            trials = min(trials, whole)
        return spread(searched, trials, {path: setting(base.config, path, "tune") for path in searched})

    @cached_property
    def tried(self) -> int:
        """Candidates of each arm that every seed trains."""
        return self.budget.trials if self.spec.tune and self.budget else 1

    @cached_property
    def base_trials(self) -> int:
        """Candidates for the base's training, on each task, where the study is a search."""
        if not self.spec.search:
            return 0
        drawn = self.candidates(next(iter(self.tasks)))
        return 0 if drawn == [{}] else min(self.spec.search.trials, len(drawn))

    @property
    def _searched(self) -> int:
        """Trials of the search on all tasks."""
        return len(self.tasks) * (self.base_trials + (self.spec.search.trials if self.spec.search else 0))

    @property
    def trials(self) -> int:
        """Trials, if no arm stops before the last look."""
        return len(self.arms) * self.tried * len(self.spec.looks) + self._searched

    @property
    def runs(self) -> int:
        """Runs, if no arm stops before the last look."""
        confirmed = len(self.arms) * self.tried * self.spec.looks[-1].seeds
        seeds = self.spec.search.seeds if self.spec.search else 0
        return confirmed + self._searched * seeds

    def job(
        self,
        arm: PlannedArm,
        stage: Literal["tune", "confirm"],
        number: int,
        values: Mapping[str, Any],
        look: int = 0,
    ) -> Job:
        """A trial of an arm with tuned values in place. look: which one its seeds are added for.

        Raises `Infeasible` for values that make no model, `InputError` for settings that do not exist.
        """
        if stage == "tune":
            assert self.spec.search is not None
            seeds = tuple(range(TUNE_SEEDS_FROM, TUNE_SEEDS_FROM + self.spec.search.seeds))
        else:
            ends = [0, *(each.seeds for each in self.spec.looks)]
            seeds = tuple(range(CONFIRM_SEEDS_FROM + ends[look], CONFIRM_SEEDS_FROM + ends[look + 1]))
        task = self.tasks[arm.task]
        config = with_values(arm.config, values, where=f"arm '{arm.name}'")
        rules, wide, reason = [config["rule"]["name"]], False, None
        try:
            config = resolve(config, task)
            model = ModelSpec.of({**config["model"], "rule": config["rule"]})
            rules, wide = [rule.name for rule in model.rules()], model.tie_embeddings and model.d_model > TIED_WIDTH
        except InputError as error:
            reason = str(error)
        params = json.loads(json.dumps(asdict(task)))  # a job is JSON: lists where a task has tuples
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
        )
        if reason is not None:
            raise Infeasible(reason, job)
        return job


def _keyed(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as keys hash it: without settings of a later release that are at their default."""
    later = {f.name: f.default for f in fields(ModelSpec) if f.metadata == LATER}
    model = {name: value for name, value in config["model"].items() if name not in later or value != later[name]}
    return {**config, "model": model}


class Infeasible(InputError):
    """A candidate that makes no model, or no training. The message is the reason.

    job: the trial it would have been; `job.config` has the candidate's values in place.
    """

    def __init__(self, reason: str, job: Job) -> None:
        super().__init__(reason)
        self.job = job


def make_plan(spec: StudySpec, *, profile: str | None = None, where: str = "study") -> Plan:
    """Expands a study.

    Raises `InputError` for rules, knobs, tasks and settings that do not exist, for values that make no model, for arms
    that equal the base or one another, and for parts to take away that the method does not have.
    """
    try:
        return _make_plan(spec, profile, where)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _make_plan(spec: StudySpec, profile: str | None, file: str) -> Plan:
    tasks = {}
    base_width = spec.base.model.get("base_width") or spec.base.model.get("d_model", ModelSpec.d_model)
    sizes = {one.label: one for one in sized(spec.scales, spec.task, base_width)}
    for label, one in sizes.items():
        kind = one.params.get("task", one.task)
        if not isinstance(kind, str):
            raise InputError(f"task.{one.task}.task must be a task's name, not {kind!r}")
        try:
            tasks[label] = get_task(kind, **{key: value for key, value in one.params.items() if key != "task"})
        except InputError as error:
            # Where one task has several names in the study, say which of them is meant.
            raise error if label == kind else InputError(f"task.{label}: {error}") from None
    for name in spec.for_task:
        if name not in spec.task:
            raise unknown("task", name, spec.task, where="for_task")
    changes = _changes(spec)
    matcher = Matcher(spec.tune.searched if spec.tune else {})
    arms = []
    for task_name, task in tasks.items():
        at = sizes[task_name]
        base = applied(spec.base, spec.for_task.get(at.task, Change()))
        base = applied(base, Change(model=at.model, train=at.train))
        resolved = {"base": resolve_method(base, task, where="base")}
        for name, change in changes.items():
            resolved[name] = resolve_method(applied(base, change), task, where=f"arms.{name}")
            if change.match is not None:
                try:
                    resolved[name] = matcher.matched(change.match, resolved["base"], resolved[name], task.length)
                except InputError as error:
                    raise InputError(f"arms.{name}.match on task '{task_name}': {error}") from None
        seen: dict[str, str] = {}
        for name, config in resolved.items():
            twin = seen.setdefault(json.dumps(config, sort_keys=True), name)
            if twin != name:
                raise InputError(
                    f"arm '{name}' is the same as {twin if twin == 'base' else repr(twin)} on task '{task_name}'"
                )
            change_of = difference(resolved["base"], config)
            arms.append(PlannedArm(name, task_name, name == "base", config, change_of))
        for i in range(spec.search.finalists if spec.search else 0):
            arms.append(PlannedArm(f"found_{i + 1}", task_name, False, resolved["base"], {}))
    plan = Plan(spec, profile, arms, tasks, file)
    if plan.budget is None:
        return plan
    key = "search" if spec.search else "tune"
    size = grid_size(plan.budget.searched)
    if size is not None and plan.budget.trials > size:
        raise InputError(f"{key}.trials {plan.budget.trials}: there are only {size} choices to try")
    note = _check_candidates(plan, key)
    try:
        for task_name in tasks:
            plan.candidates(task_name)
    except InputError as error:
        raise InputError(f"{key}.{error}") from None
    return replace(plan, notes=(note,) if note else ())


def _check_candidates(plan: Plan, key: str) -> str | None:
    """A note on the combinations that make no model, None where all that are tried make one.

    Raises `InputError` for settings that do not exist, for a choice or a bound that makes no model in any combination,
    and for arms that are one and the same once tuned.
    """
    assert plan.budget is not None
    tuned = [arm for arm in plan.arms if arm.is_base or not plan.spec.search]
    candidates = _combinations(plan.budget.searched, max(1, MOST_COMBINATIONS // len(tuned)))
    note = None
    seen: dict[tuple[str, str], str] = {}
    for arm in tuned:
        reasons: list[str | None] = []
        first = None
        for values in candidates:
            config = with_values(arm.config, values, where=key)
            try:
                config = resolve(config, plan.tasks[arm.task])
            except InputError as error:
                reasons.append(str(error))
            else:
                first = first or json.dumps(config, sort_keys=True)
                reasons.append(None)
        if None not in reasons:
            said = ", ".join(f"{path}={value}" for path, value in candidates[0].items())
            raise InputError(f"{key}: no combination makes a model on task '{arm.task}', such as {said}: {reasons[0]}")
        for path, search in plan.budget.searched.items():
            for value in search.extremes:
                found = [why for values, why in zip(candidates, reasons, strict=True) if values[path] == value]
                if None not in found:
                    raise InputError(f"{key}.{path}: {value!r} makes no model on task '{arm.task}': {found[0]}")
        bad = [i for i, why in enumerate(reasons) if why is not None]
        if bad and note is None:
            said = ", ".join(f"{path}={value}" for path, value in candidates[bad[0]].items())
            note = (
                f"{key}: {len(bad)} of {len(candidates)} combinations tried make no model, such as {said}: "
                f"{reasons[bad[0]]}. The run records such a candidate as infeasible and draws another in its place."
            )
        twin = seen.setdefault((arm.task, first or ""), arm.name)
        if twin != arm.name:
            paths = list(plan.budget.searched)
            raise InputError(
                f"arm '{arm.name}' is the same as {twin if twin == 'base' else repr(twin)} on task '{arm.task}' "
                f"once {', '.join(paths)} {'is' if len(paths) == 1 else 'are'} tuned"
            )
    return note


def _combinations(searched: Mapping[str, Search], most: int) -> list[dict[str, Any]]:
    """All combinations of choices, bounds and some integers between; a random sample where they are more than `most`.

    Every choice and bound is in at least one.
    """
    points = {path: search.points(INTEGERS) for path, search in searched.items()}
    if math.prod(map(len, points.values())) <= most:
        return [dict(zip(points, values, strict=True)) for values in product(*points.values())]
    draw = random.Random(0)
    sample = [{path: draw.choice(values) for path, values in points.items()} for _ in range(most)]
    first = {path: values[0] for path, values in points.items()}
    return [*({**first, path: value} for path, values in points.items() for value in values), *sample]


def _changes(spec: StudySpec) -> dict[str, Change]:
    """Every arm but the base: first those that `ablate` and `factorial` generate, then those of `arms`."""
    base = rule_of(spec.base.rule)
    changes: dict[str, Change] = {}
    for part in spec.ablate:
        if f"without_{part}" in changes:
            raise InputError(f"ablate: '{part}' is given twice")
        changes[f"without_{part}"] = _without(base, [part], "ablate")
    for pair in spec.factorial:
        changes["_".join(f"without_{part}" for part in pair)] = _without(base, list(pair), "factorial")
        for part in pair:
            changes.setdefault(f"without_{part}", _without(base, [part], "factorial"))
    for name, change in spec.arms.items():
        if name == "base" or name in changes:
            raise InputError(f"arms.{name}: there is such an arm already")
        changes[name] = change
    return changes


# Parts of the model that can be taken away -> the value that takes them away.
_MODEL_PARTS: dict[str, object] = {
    "output_gate": False,
    "output_norm": False,
    "conv": 0,
    "mlp": False,
    "rope": False,
    "qk_norm": False,
    "token_shift": False,
}


def _without(rule: Mapping[str, Any], parts: list[str], key: str) -> Change:
    kind: Any = rule_plugin(rule["name"]).kind
    knobs, model = {}, {}
    for part in parts:
        if part in _MODEL_PARTS:
            model[part] = _MODEL_PARTS[part]
        elif part in kind.options():
            knobs[part] = kind(**{part: kind.without(part)}).spec()[part]
        else:
            raise unknown("part", part, [*kind.options(), *_MODEL_PARTS], where=key)
    return Change(rule=knobs or None, model=model)


def _plugins(rules: list[str], task: Task) -> list[tuple[str, str, str, str]]:
    found = [("rule", name, rule_plugin(name)) for name in rules]
    found.append(("task", task.name, task_plugin(task.name)))
    # Tests hold a built-in task to its version; a user's file may change without a new version, so it is hashed.
    ours = BUILTIN.values()
    return [(kind, name, str(plugin.file), "" if plugin.kind in ours else plugin.hash) for kind, name, plugin in found]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
