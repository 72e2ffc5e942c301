"""Decides what a study runs next, from its plan and what the ledger already holds.

Each arm on each task first tunes, by Optuna, with the same budget and, before results tell them apart, the same
candidates; then its best configuration is confirmed on fresh seeds. Trials that differ in numbers alone go out in
stacks, to be trained as one. Neither stacks nor timing change what a study computes. The ledger is the only memory:
a schedule made anew from the same plan goes on where the last one was killed.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import optuna

from deltalab.errors import InputError
from deltalab.store import Store, TrialRecord, TrialSummary
from deltalab.study.pareto import front
from deltalab.study.plan import Arm, Job, Plan
from deltalab.study.spec import Search
from deltalab.training.train import stackable
from deltalab.training.trainer import most_stacked

BATCH = 10
"""How many candidates an arm asks Optuna for at a time. The first ten are drawn without looking at any result."""
COSTS = ("flops_per_token", "state_size")
"""What a search weighs a score against; every trial measures them."""

optuna.logging.set_verbosity(logging.ERROR)


@dataclass
class _Track:
    """One arm on one task. scores, costs: of tuning trials by number, NaN where one failed or diverged."""

    arm: Arm
    scores: dict[int, float] = field(default_factory=dict)
    costs: dict[int, tuple[float, ...]] = field(default_factory=dict)
    values: dict[int, dict[str, Any]] = field(default_factory=dict)
    issued: int = 0
    confirmed: Literal["no", "running", "yes"] = "no"


class Schedule:
    """`next` gives a stack of trials, empty while results are awaited, until `done`; `finished` records one trial.

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
        return self.plan.trials

    def look(self) -> None:
        """Finds all trials that can be told by now; those that the ledger has are taken from it."""
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
        """Trials to train as one; `places` is how many such stacks there are at a time.

        Tuning goes first, as others wait for it, then what takes long, so that all workers end at about one time.
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
        """Has trials wait again, each for a place of its own: together they came to nothing, and one is to blame."""
        self._alone.update(job.key for job in stack)
        self._waiting.update({job.key: job for job in stack})

    def _ask(self) -> list[tuple[_Track, Job]]:
        """The trials that no one has asked for and that need no result that is awaited."""
        asked = []
        for track in sorted(self.tracks, key=lambda track: track.issued):
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
            # By work and with what is in flight: other places will be free before a longer stack ends.
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
        """Of matrix products, by what trials of its arm took a token; an arm of which nothing is known comes first."""
        train = job.config["train"]
        per_token = self._flops.get((job.task, job.arm)) or max(self._flops.values(), default=1.0)
        tokens = train["steps"] * train["batch_size"] * self.plan.tasks[job.task].length * len(job.seeds)
        return float(per_token * tokens)

    def _may_stack(self, one: Job, other: Job) -> bool:
        if {one.key, other.key} & self._alone:
            return False
        return (one.task, one.seeds) == (other.task, other.seeds) and stackable(one.specs, other.specs)

    def _next_of(self, track: _Track) -> Job | None:
        tune = self.plan.budget if self.plan.tunes(track.arm) else None
        if tune is not None and track.issued < tune.trials and len(track.scores) >= _batch(track.issued).start:
            number = track.issued
            values = self._again.get((track.arm.name, track.arm.task, number)) or self._suggest(track, number)
            track.issued += 1
            track.values[number] = values
            return self.plan.job(track.arm, "tune", number, values)
        if track.confirmed == "no" and (tune is None or len(track.scores) == tune.trials):
            best = self._found(track) if self.plan.spec.search else self._best(track)
            if best is None:
                return None
            track.confirmed = "running"
            number = tune.trials if tune is not None else 0
            return self.plan.job(track.arm, "confirm", number, best)
        return None

    def _found(self, track: _Track) -> dict[str, Any] | None:
        """What a search gives an arm: nothing to the base, which stands as written; a candidate to the others.

        Candidates on the Pareto front of score, arithmetic and state come first, then the rest, each by score.
        None until the search has ended.
        """
        search = self.plan.spec.search
        assert search is not None
        if track.arm.is_base:
            return {}
        base = next(other for other in self.tracks if other.arm.is_base and other.arm.task == track.arm.task)
        if len(base.scores) < search.trials:
            return None
        sign = -1 if self.plan.tasks[track.arm.task].maximize else 1
        different = {json.dumps(base.values[n], sort_keys=True): n for n in sorted(base.scores, reverse=True)}
        numbers = sorted(different.values())
        first = set(front([(sign * base.scores[n], *base.costs[n]) for n in numbers]))

        def rank(i: int) -> tuple[bool, bool, float]:
            own = base.scores[numbers[i]]
            return i not in first, math.isnan(own), sign * own

        order = sorted(range(len(numbers)), key=rank)
        place = [arm.name for arm in self.plan.arms if arm.task == track.arm.task and not arm.is_base]
        return base.values[numbers[order[place.index(track.arm.name) % len(order)]]]

    def _suggest(self, track: _Track, number: int) -> dict[str, Any]:
        """Optuna's next candidate, a function of the number and of what the batches before its own gave.

        Those of its own batch are told as running, which the sampler keeps away from (its "constant liar"). It is
        seeded by the number alone, so all arms start from the same candidates. A budget that covers every choice
        there is takes them in order.
        """
        tune = self.plan.budget
        assert tune is not None
        grid = tune.grid()
        if grid is not None and tune.trials == len(grid):
            return grid[number]
        maximize, minimize = optuna.study.StudyDirection.MAXIMIZE, optuna.study.StudyDirection.MINIMIZE
        directions = [maximize if self.plan.tasks[track.arm.task].maximize else minimize]
        directions += [minimize] * (len(COSTS) if self.plan.spec.search else 0)
        spaces = {path: _distribution(search) for path, search in tune.searched.items()}
        seed = int.from_bytes(hashlib.sha256(f"{self.plan.spec.name}/{number}".encode()).digest()[:4], "little")
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=BATCH, constant_liar=True)
        study = optuna.create_study(sampler=sampler, directions=directions)
        for before in range(number):
            params = {path: _said(given, tune.searched[path]) for path, given in track.values[before].items()}
            if before in _batch(number):
                running = optuna.trial.TrialState.RUNNING
                study.add_trial(optuna.trial.create_trial(params=params, distributions=spaces, state=running))
                continue
            # A diverged trial says as much about its region as a trial that learned nothing.
            score = track.scores[before]
            value = self.plan.tasks[track.arm.task].chance if math.isnan(score) else score
            costs = track.costs[before] if self.plan.spec.search else ()
            if any(map(math.isnan, costs)):
                continue  # nothing is known of what it would have cost
            study.add_trial(optuna.trial.create_trial(params=params, distributions=spaces, values=[value, *costs]))
        params = study.ask(spaces).params
        return {path: json.loads(given) if tune.searched[path].choice else given for path, given in params.items()}

    def _best(self, track: _Track) -> dict[str, Any]:
        """The values of the best tuning trial; those of the plan where none finished, so that the arm is judged."""
        finished = {number: score for number, score in sorted(track.scores.items()) if not math.isnan(score)}
        if not finished:
            return {}
        best = max if self.plan.tasks[track.arm.task].maximize else min
        return track.values[best(finished, key=lambda number: finished[number])]

    def _learn(self, track: _Track, job: Job, summary: TrialSummary) -> None:
        self.completed += 1
        self.failures += summary.state == "failed"
        if job.stage == "confirm":
            track.confirmed = "yes"
            return
        track.costs[job.number] = tuple(score(summary, cost, "cost", job.seeds) for cost in COSTS)
        if track.costs[job.number][0] > 0:
            self._flops[job.task, job.arm] = track.costs[job.number][0]
        track.scores[job.number] = score(summary, self.plan.tasks[job.task].metric, "validation", job.seeds)

    def leader(self, task: str) -> tuple[str, float] | None:
        """The arm with the best score so far on a task, over its tuning trials."""
        scores = {
            track.arm.name: [score for score in track.scores.values() if not math.isnan(score)]
            for track in self.tracks
            if track.arm.task == task
        }
        best = max if self.plan.tasks[task].maximize else min
        tops = {name: best(values) for name, values in scores.items() if values}
        if not tops:
            return None
        name = best(tops, key=lambda name: tops[name])
        return name, tops[name]


def _batch(number: int) -> range:
    """The numbers of the batch that a candidate is of.

    >>> _batch(12)
    range(10, 20)
    """
    return range(number // BATCH * BATCH, (number // BATCH + 1) * BATCH)


def score(summary: TrialSummary, metric: str, split: str, seeds: tuple[int, ...]) -> float:
    """The mean of a metric over all seeds; NaN where one of them failed or diverged."""
    finals: Mapping[int, float] = summary.finals.get((split, metric), {})
    if any(seed not in finals or seed in summary.diverged for seed in seeds):
        return math.nan
    return sum(finals[seed] for seed in seeds) / len(seeds)


def _distribution(search: Search) -> optuna.distributions.BaseDistribution:
    if search.log_uniform is not None:
        return optuna.distributions.FloatDistribution(*search.log_uniform, log=True)
    if search.uniform is not None:
        return optuna.distributions.FloatDistribution(*search.uniform)
    if search.integers is not None:
        return optuna.distributions.IntDistribution(*search.integers)
    if search.choice is None:
        raise InputError("a search needs a range")
    return optuna.distributions.CategoricalDistribution([json.dumps(value) for value in search.choice])


def _said(value: Any, search: Search) -> Any:
    """A value as its distribution has it: choices may be whole rules, which Optuna takes as text alone."""
    return json.dumps(value) if search.choice else value
