"""Decides which trials confirm the arms: every seed of an arm trains every candidate, and seeds are added in looks.

An arm gets further seeds as long as it is undecided and has a prospect of a decision. A base that has more seeds than
the arms trains them at once, in a trial of their own.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from deltalab.statistics.seed_choice import Run, Scores, outcomes
from deltalab.store import Store, TrialSummary
from deltalab.study.planning.plan import Infeasible, Plan, PlannedArm
from deltalab.study.planning.tuning_candidates import beyond, edge
from deltalab.study.searching.phase import SearchPhase
from deltalab.study.searching.results import mean_score
from deltalab.study.specs.sections.budget import Tune
from deltalab.study.workers.jobs import Job
from deltalab.study.workers.train_stack import infeasible

MOST_MOVES = 3
"""How often `tune.extend` moves the ranges of a task at most."""


@dataclass
class ArmTrials:
    """The trials of one arm on one task.

    Attributes:
        arm: The arm.
        tried: The values of each candidate that every seed trains, by the candidate's number; None until the candidates
            are known.
        trials: (candidate, part) -> the trial; None while the trial runs. A part is a look, or the further seeds of the
            base; with an engine, a seed.
        stopped: Whether the arm gets no further seeds.
    """

    arm: PlannedArm
    tried: dict[int, dict[str, Any]] | None = None
    trials: dict[tuple[int, int], TrialSummary | None] = field(default_factory=dict)
    stopped: bool = False

    def learn(self, job: Job, part: int, summary: TrialSummary) -> None:
        """Keeps the result of a trial."""
        self.trials[job.number, part] = summary


@dataclass
class _ArmFamily:
    """Arms that are tested together, and the index of the look at which they are tested next."""

    arms: list[ArmTrials]
    look: int = 0
    moves: dict[str, int] = field(default_factory=dict)
    """How often the ranges of each task were extended."""


class ConfirmPhase:
    """The confirmation of a study: asks for trials, and tests the arms after each look.

    Attributes:
        arms: The trials of each arm on each task.
        infeasible: How many candidates so far make no model.
    """

    def __init__(self, plan: Plan, store: Store, study_id: int, search: SearchPhase | None) -> None:
        """Begins without a trial.

        Args:
            plan: The study.
            store: The ledger, which records infeasible candidates.
            study_id: The study's id in the ledger.
            search: The search whose finalists are the arms; None if the study is no search.
        """
        self.arms = [ArmTrials(arm) for arm in plan.arms]
        self.infeasible = 0
        self._plan, self._store, self._study_id, self._search = plan, store, study_id, search
        by_task = [[trials for trials in self.arms if trials.arm.task == task] for task in plan.tasks]
        whole_study = plan.spec.family == "study"
        self._families = [_ArmFamily(self.arms)] if whole_study else [_ArmFamily(arms) for arms in by_task]

    @property
    def done(self) -> bool:
        """Whether no arm gets further seeds."""
        return all(trials.stopped for trials in self.arms)

    @property
    def total(self) -> int:
        """How many trials the confirmation has, if no arm that still runs stops before the last look."""
        total = sum(len(trials.trials) for trials in self.arms)
        for trials in self.arms:
            if not trials.stopped:
                candidates = self._plan.tried(trials.arm) if trials.tried is None else len(trials.tried)
                total += candidates * len(self._parts(trials)) - len(trials.trials)
        return total

    @property
    def left(self) -> int:
        """The work left, in seeds times steps of trials, if no arm that still runs stops before the last look."""
        left = 0
        for trials in self.arms:
            if not trials.stopped:
                seeds = [after - before for before, after in pairwise((0, *self._parts(trials)))]
                numbers = range(self._plan.tried(trials.arm)) if trials.tried is None else trials.tried
                pairs = ((number, part) for number in numbers for part in range(len(seeds)))
                of_arm = sum(seeds[part] for number, part in pairs if trials.trials.get((number, part)) is None)
                left += of_arm * trials.arm.config["train"]["steps"]
        return left

    def ask(self) -> Iterator[tuple[ArmTrials, Job, int]]:
        """Yields each trial, with its part, that was not yielded before and that depends on no result still awaited."""
        for family in self._families:
            yield from self._ask(family)

    def _parts(self, trials: ArmTrials) -> tuple[int, ...]:
        """How many seeds an arm has after each of its parts."""
        return self._plan.spec.trained_in_parts(is_base=trials.arm.is_base)

    def leader(self, task: str) -> tuple[str, float] | None:
        """The arm whose best candidate so far has the best mean validation score on a task, and that score."""
        metric, best = self._plan.tasks[task].metric, max if self._plan.tasks[task].maximize else min
        scores: dict[str, float] = {}
        for trials in self.arms:
            means = [mean_score(trial, metric, "validation") for trial in trials.trials.values() if trial is not None]
            means = [mean for mean in means if not math.isnan(mean)]
            if trials.arm.task == task and means:
                scores[trials.arm.name] = best(means)
        if not scores:
            return None
        name = best(scores, key=lambda name: scores[name])
        return name, scores[name]

    def _ask(self, family: _ArmFamily) -> list[tuple[ArmTrials, Job, int]]:
        """Returns the next trials of a family. Tests the family's arms once all trials of a look have ended."""
        while not all(trials.stopped for trials in family.arms):
            running = [trials for trials in family.arms if not trials.stopped]
            for trials in running:
                if trials.tried is None:
                    trials.tried = self._to_try(trials)
            asked: list[tuple[ArmTrials, Job, int]] = []
            for trials in running:
                looks = self._plan.spec.looks
                due = [
                    part
                    for part, seeds in enumerate(self._parts(trials))
                    if seeds <= looks[family.look].seeds or seeds > looks[-1].seeds  # the base's further seeds
                ]
                for number, values in (trials.tried or {}).items():
                    for part in due:
                        if (number, part) not in trials.trials:
                            trials.trials[number, part] = None
                            asked.append((trials, self._plan.job(trials.arm, "confirm", number, values, part), part))
            waits = any(trials.tried is None or None in trials.trials.values() for trials in running)
            if asked or waits:
                return asked
            if not self._extended(family):
                self._judge(family)
        return []

    def _to_try(self, trials: ArmTrials) -> dict[int, dict[str, Any]] | None:
        """Returns the candidates that every seed of an arm trains, as number -> values; None while a search runs."""
        if self._search and not self._search.done:
            return None
        finalist = self._search.values(trials.arm) if self._search else {}
        candidates: dict[int, dict[str, Any]] = {}
        for number, values in enumerate(self._plan.candidates(trials.arm, finalist)):
            if len(candidates) == self._plan.tried(trials.arm):
                break
            if self._feasible(trials.arm, number, values):
                candidates[number] = values
        return candidates or {0: finalist}

    def _feasible(self, arm: PlannedArm, number: int, values: Mapping[str, Any]) -> bool:
        """Whether a candidate makes a model. If it does not, the ledger records the reason."""
        try:
            self._plan.job(arm, "confirm", number, values)
        except Infeasible as error:
            self.infeasible += 1
            record = infeasible(error.job, str(error))
            self._store.record_trial(self._study_id, arm.name, record, number, dict(values))
            return False
        return True

    def _extended(self, family: _ArmFamily) -> bool:
        """Gives all arms of a task a candidate beyond the values tried, if an arm's best is the lowest or highest."""
        if family.look:
            return False
        moved = False
        for task in dict.fromkeys(trials.arm.task for trials in family.arms):
            tune = self._plan.space(task)
            if not isinstance(tune, Tune) or not tune.extend or family.moves.get(task, 0) == MOST_MOVES:
                continue
            scores = self._scores(family, task)
            arms = [trials for trials in family.arms if trials.arm.task == task]
            ranges = {path: search for path, search in tune.searched.items() if search.choice is None}
            ends = set()
            for trials in arms:
                best = scores.best(trials.arm.name)
                tried = trials.tried or {}
                if best is not None:
                    ends |= set(edge(ranges, list(tried.values()), tried[best]).items())
            number = max(number for trials in arms for number in trials.tried or {}) + 1
            number = max(number, sum(1 for _ in self._plan.candidates(arms[0].arm)))
            for at, (path, end) in enumerate(sorted(ends)):
                longest = max((list((trials.tried or {}).values()) for trials in arms), key=len)
                values = beyond(tune.searched, longest, path, above=end == "highest")
                for trials in arms:
                    if trials.tried is not None and self._feasible(trials.arm, number + at, values):
                        trials.tried[number + at] = values
                        moved = True
            family.moves[task] = family.moves.get(task, 0) + 1
        return moved

    def _judge(self, family: _ArmFamily) -> None:
        """Tests the arms after a look, and stops those that are decided or have no prospect."""
        tasks = list(dict.fromkeys(trials.arm.task for trials in family.arms))
        tables = [self._scores(family, task) for task in tasks]
        by_task = dict(zip(tasks, outcomes(tables, self._plan.spec.looks), strict=True))
        last = family.look == len(self._plan.spec.looks) - 1
        for trials in family.arms:
            outcome = by_task[trials.arm.task].get(trials.arm.name)
            if not trials.arm.is_base:
                trials.stopped = last or outcome is None or outcome.stopped is not None
        for trials in family.arms:
            if trials.arm.is_base:
                others = [other for other in family.arms if other.arm.task == trials.arm.task and other != trials]
                trials.stopped = last or all(other.stopped for other in others)
        family.look += 1

    def _scores(self, family: _ArmFamily, task: str) -> Scores:
        """The scores so far of a family's arms on a task."""
        arms = [trials for trials in family.arms if trials.arm.task == task]
        kind, spec = self._plan.tasks[task], self._plan.spec
        runs: dict[str, dict[int, dict[int, Run]]] = {}
        seeds: dict[str, list[int]] = {}
        failed: dict[str, set[int]] = {}
        for trials in arms:
            of_arm = runs.setdefault(trials.arm.name, {})
            for (number, _), summary in trials.trials.items():
                if summary is not None and summary.state == "done":
                    of_arm.setdefault(number, {}).update(_runs(summary, kind.metric))
                elif summary is not None and summary.state == "failed":
                    failed.setdefault(trials.arm.name, set()).add(number)
            reached = max((part for _, part in trials.trials), default=-1)
            trained = any(of_arm.values())
            planned = range(spec.first_seed, spec.first_seed + self._parts(trials)[reached])
            seeds[trials.arm.name] = list(planned) if trained else []
        base = next(trials.arm.name for trials in arms if trials.arm.is_base)
        block = spec.looks[0].seeds if spec.seeds_of_base is not None else None
        return Scores(base, kind.maximize, kind.chance, runs, seeds, failed, self._plan.margin(kind), block)


def _runs(summary: TrialSummary, metric: str) -> dict[int, Run]:
    """Returns the runs of a trial by seed. A run that diverged has NaN scores."""
    validation, test = summary.finals.get(("validation", metric), {}), summary.finals.get(("test", metric), {})
    runs = {seed: Run(value, test.get(seed, math.nan)) for seed, value in validation.items()}
    return runs | {seed: Run(math.nan, math.nan) for seed in summary.diverged}
