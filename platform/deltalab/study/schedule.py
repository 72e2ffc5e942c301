"""Decides what a study runs next, from its plan and from what the ledger already holds.

Each arm on each task first tunes, by Optuna, with the same budget and, until results differ, the same candidates; then
its best configuration is confirmed on fresh seeds. Trials that differ only in numbers go out in stacks, to be trained
as one. Neither stacks nor timing change what a study computes. The ledger is the only memory: a schedule made anew from
the same plan goes on where the last one was killed.

A candidate that makes no model is recorded as infeasible, and the next one is drawn in its place: the budget counts
candidates that train.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

from deltalab.errors import InputError
from deltalab.store import Store, TrialRecord, TrialSummary
from deltalab.study.pareto import front
from deltalab.study.plan import Infeasible, Job, Plan, PlannedArm
from deltalab.study.suggest import COSTS, Candidate, batch_start, suggest
from deltalab.study.trial import infeasible
from deltalab.training.train import stackable
from deltalab.training.trainer import most_stacked

DRAWS_PER_TRIAL = 20
"""An arm stops drawing after so many candidates per trial of its budget, however few of them made a model."""


@dataclass
class _Track:
    """One arm on one task. candidates: those drawn so far, by number."""

    arm: PlannedArm
    candidates: list[Candidate] = field(default_factory=list)
    confirmed: Literal["no", "running", "yes"] = "no"

    @property
    def spent(self) -> int:
        """Candidates that count against the budget."""
        return sum(not candidate.infeasible for candidate in self.candidates)

    @property
    def scored(self) -> dict[int, float]:
        """The scores of the candidates that have one, by number."""
        return {
            number: candidate.score
            for number, candidate in enumerate(self.candidates)
            if candidate.score is not None and not math.isnan(candidate.score)
        }

    @property
    def waits(self) -> bool:
        """Whether a candidate has yet to end."""
        return any(candidate.score is None for candidate in self.candidates)


class Schedule:
    """Call `next` for the next stack of trials (empty: wait for results) until `done`; report each finished trial by
    `finished`.

    cut_off: stacks that a killed driver left behind with a checkpoint, by the keys of their trials.
    """

    def __init__(self, plan: Plan, store: Store, study_id: int, cut_off: Iterable[tuple[str, ...]] = ()) -> None:
        self.plan, self.store, self.study_id = plan, store, study_id
        self.tracks = [_Track(arm) for arm in plan.arms]
        self.known = 0
        self.failures = 0
        self.completed = 0
        # Two arms, or two candidates of one, may come to the same trial: it runs once, for all who wait for it.
        self._awaited: dict[str, list[tuple[_Track, Job]]] = {}
        self._waiting: dict[str, Job] = {}
        self._alone: set[str] = set()
        self._flops: dict[tuple[str, str], float] = {}
        most = plan.spec.resources.stack
        self._cut_off = [keys for keys in cut_off if most == "auto" or len(keys) <= most]
        self._again = {
            (row.arm, row.task, row.number): row.values for row in store.trials(study_id) if row.stage == "tune"
        }

    @property
    def done(self) -> bool:
        return all(track.confirmed == "yes" for track in self.tracks)

    @property
    def total(self) -> int:
        """Trials of the whole study: those planned, minus those for which the space gave no feasible candidate."""
        budget = self.plan.budget
        drawn = [track for track in self.tracks if self.plan.tunes(track.arm) and not self._draws(track)]
        return self.plan.trials - sum(budget.trials - track.spent for track in drawn if budget)

    @property
    def infeasible(self) -> int:
        """Candidates drawn so far that make no model."""
        return sum(len(track.candidates) - track.spent for track in self.tracks)

    def look(self) -> None:
        """Collects every trial whose configuration is determined by the results so far; takes known results from the
        ledger.
        """
        while asked := self._ask():
            known = self.store.known_trials(job.key for _, job in asked)
            for track, job in asked:
                if job.key in known:
                    self.store.attach(self.study_id, job.arm, job.key, job.number, job.values)
                    self.known += 1
                    self._learn(track, job, known[job.key])
                    continue
                if job.key not in self._awaited:
                    self._waiting[job.key] = job
                self._awaited.setdefault(job.key, []).append((track, job))

    def next(self, places: int) -> list[Job]:
        """Trials to train as one; `places` is how many such stacks run at a time.

        Tuning goes first, since confirmation waits for it; then what takes long, so that all workers end at about one
        time. Raises `InputError` where no candidate of a search makes a model.
        """
        self.look()
        if not self._waiting:
            return []
        stack = self._left_behind() or self._stack(places)
        for job in stack:
            del self._waiting[job.key]
        return stack

    def finished(self, record: TrialRecord) -> None:
        """Records a trial, whole, and learns from it."""
        for track, job in self._awaited[record.key]:
            self.store.record_trial(self.study_id, job.arm, record, job.number, job.values)
            self._learn(track, job, self.store.known_trials([job.key])[job.key])
        del self._awaited[record.key]

    def part(self, stack: Sequence[Job]) -> None:
        """Queues each trial of a stack again, alone: their worker died, and one of them is to blame."""
        self._alone.update(job.key for job in stack)
        self._waiting.update({job.key: job for job in stack})

    def _ask(self) -> list[tuple[_Track, Job]]:
        """The trials that nobody has asked for yet and that depend on no result still awaited."""
        asked = []
        for track in sorted(self.tracks, key=lambda track: len(track.candidates)):
            while (job := self._next_of(track)) is not None:
                asked.append((track, job))
        return asked

    def _left_behind(self) -> list[Job]:
        for keys in self._cut_off:
            if all(key in self._waiting for key in keys):
                self._cut_off.remove(keys)
                return [self._waiting[key] for key in keys]
        return []

    def _stack(self, places: int) -> list[Job]:
        waiting = sorted(self._waiting.values(), key=lambda job: (job.stage == "confirm", job.number, -self._work(job)))
        first, *others = waiting
        wanted = self.plan.spec.resources
        if wanted.stack == "auto":
            # Size the stack so that all waiting and running work is split evenly over the places: others will be free
            # before a longer stack ends.
            out = sum(self._work(jobs[0][1]) for jobs in self._awaited.values())
            most = math.ceil(out / (places * self._work(first)))
            if not wanted.gpu:
                model, train = first.specs
                pays = most_stacked(self.plan.tasks[first.task], model, replace(train, device="cpu"))
                most = min(most, max(1, pays // len(first.seeds)))
        else:
            most = wanted.stack
        fit = (job for job in others if self._may_stack(first, job))
        return [first, *islice(fit, most - 1)]

    def _work(self, job: Job) -> float:
        """Operations of matrix products that a trial takes, from those per token of its arm's earlier trials.

        An arm without a trial yet counts as the heaviest arm, and so comes first.
        """
        train = job.config["train"]
        per_token = self._flops.get((job.task, job.arm)) or max(self._flops.values(), default=1.0)
        tokens = train["steps"] * train["batch_size"] * self.plan.tasks[job.task].length * len(job.seeds)
        return float(per_token * tokens)

    def _may_stack(self, one: Job, other: Job) -> bool:
        if {one.key, other.key} & self._alone:
            return False
        return (one.task, one.seeds) == (other.task, other.seeds) and stackable(one.specs, other.specs)

    def _next_of(self, track: _Track) -> Job | None:
        while self._draws(track) and not any(
            candidate.score is None for candidate in track.candidates[: batch_start(len(track.candidates))]
        ):
            if (job := self._draw(track)) is not None:
                return job
        if track.confirmed == "no" and not self._draws(track) and not track.waits:
            best = self._found(track) if self.plan.spec.search else self._best(track)
            if best is None:
                return None
            track.confirmed = "running"
            number = self.plan.budget.trials if self.plan.budget and self.plan.tunes(track.arm) else 0
            return self.plan.job(track.arm, "confirm", number, best)
        return None

    def _draws(self, track: _Track) -> bool:
        """Whether an arm has budget left and candidates to spend it on."""
        budget = self.plan.budget
        if budget is None or not self.plan.tunes(track.arm):
            return False
        grid = budget.grid()
        most = len(grid) if grid is not None and budget.trials == len(grid) else DRAWS_PER_TRIAL * budget.trials
        return track.spent < budget.trials and len(track.candidates) < most

    def _draw(self, track: _Track) -> Job | None:
        """The trial of an arm's next candidate; None, and a record of the reason, where it makes no model."""
        number = len(track.candidates)
        values = self._again.get((track.arm.name, track.arm.task, number))
        candidate = Candidate(values or suggest(self.plan, track.arm.task, track.candidates))
        track.candidates.append(candidate)
        try:
            return self.plan.job(track.arm, "tune", number, candidate.values)
        except Infeasible as error:
            candidate.infeasible, candidate.score, candidate.costs = True, math.nan, (math.nan,) * len(COSTS)
            record = infeasible(error.job, str(error))
            self.store.record_trial(self.study_id, track.arm.name, record, number, candidate.values)
            return None

    def _found(self, track: _Track) -> dict[str, Any] | None:
        """The values that a search gives an arm: {} for the base, which is confirmed as written; else a candidate's.

        Candidates on the Pareto front of score, arithmetic and state come first, then the rest, each by score.
        None until the search has ended. Raises `InputError` where no candidate made a model.
        """
        if track.arm.is_base:
            return {}
        base = next(other for other in self.tracks if other.arm.is_base and other.arm.task == track.arm.task)
        if self._draws(base) or base.waits:
            return None
        sign = -1 if self.plan.tasks[track.arm.task].maximize else 1
        trained = {n: candidate for n, candidate in enumerate(base.candidates) if not candidate.infeasible}
        if not trained:
            raise InputError(f"{self.plan.where}: search: none of {len(base.candidates)} candidates makes a model")
        different = {json.dumps(trained[n].values, sort_keys=True): n for n in sorted(trained, reverse=True)}
        numbers = sorted(different.values())
        scores = [base.scored.get(n, math.nan) for n in numbers]
        first = set(front([(sign * own, *trained[n].costs) for own, n in zip(scores, numbers, strict=True)]))
        order = sorted(range(len(numbers)), key=lambda i: (i not in first, math.isnan(scores[i]), sign * scores[i]))
        place = [arm.name for arm in self.plan.arms if arm.task == track.arm.task and not arm.is_base]
        return trained[numbers[order[place.index(track.arm.name) % len(order)]]].values

    def _best(self, track: _Track) -> dict[str, Any]:
        """The values of the best tuning trial; {} (the plan's values) if no tuning trial has a score, so that the arm
        still gets a result.
        """
        scores = track.scored
        if not scores:
            return {}
        best = max if self.plan.tasks[track.arm.task].maximize else min
        return track.candidates[best(scores, key=lambda number: scores[number])].values

    def _learn(self, track: _Track, job: Job, summary: TrialSummary) -> None:
        self.completed += 1
        self.failures += summary.state == "failed"
        if job.stage == "confirm":
            track.confirmed = "yes"
            return
        candidate = track.candidates[job.number]
        candidate.costs = tuple(score(summary, cost, "cost", job.seeds) for cost in COSTS)
        if candidate.costs[0] > 0:
            self._flops[job.task, job.arm] = candidate.costs[0]
        candidate.score = score(summary, self.plan.tasks[job.task].metric, "validation", job.seeds)

    def leader(self, task: str) -> tuple[str, float] | None:
        """The arm with the best score so far on a task, over its tuning trials."""
        best = max if self.plan.tasks[task].maximize else min
        tracks = [track for track in self.tracks if track.arm.task == task]
        tops = {track.arm.name: best(track.scored.values()) for track in tracks if track.scored}
        if not tops:
            return None
        name = best(tops, key=lambda name: tops[name])
        return name, tops[name]


def score(summary: TrialSummary, metric: str, split: str, seeds: tuple[int, ...]) -> float:
    """The mean of a metric over all seeds; NaN where one of them failed or diverged."""
    finals: Mapping[int, float] = summary.finals.get((split, metric), {})
    if any(seed not in finals or seed in summary.diverged for seed in seeds):
        return math.nan
    return sum(finals[seed] for seed in seeds) / len(seeds)
