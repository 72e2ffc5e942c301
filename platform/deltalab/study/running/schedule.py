"""Decides what a study runs next, from its plan and from what the ledger already holds.

Every seed of each arm on each task trains every candidate of tuning; seeds are added in the looks that the study asks
for, as long as an arm is undecided and has a prospect. A search first finds its candidates by Optuna, on seeds of its
own. Trials that differ only in numbers go out in stacks, to be trained as one. Neither stacks nor timing change what a
study computes. The ledger is the only memory: a schedule made anew from the same plan goes on where the last one was
killed.

A candidate that makes no model is recorded as infeasible, and the next one is drawn in its place: the budget counts
candidates that train.
"""

import logging
import math
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import islice, pairwise
from threading import RLock
from typing import Any, Protocol, TypeVar, cast

from deltalab.store import Store, TrialRecord, TrialSummary
from deltalab.store.models import Stage
from deltalab.study.planning.plan import Infeasible, Plan, PlannedArm
from deltalab.study.planning.tuning_candidates import beyond, called, edge
from deltalab.study.running.activity import Count, Pace, work
from deltalab.study.searching.phase import SearchPhase, score
from deltalab.study.specs.method_settings import setting
from deltalab.study.statistics.seed_choice import Run, Scores, outcomes
from deltalab.study.workers.jobs import Job, Lost
from deltalab.study.workers.train_stack import failed, infeasible
from deltalab.training.train import stackable
from deltalab.training.trainer import most_stacked

_log = logging.getLogger("deltalab")

PAUSES = (1.0, 5.0, 25.0)
"""Seconds before a stack that was lost runs again, for the first loss, the second and the third."""

MOST_MOVES = 3
"""How often `extend` moves the ranges of a task."""


@dataclass
class _Track:
    """One arm on one task. tried: the values of the candidates that every seed trains, by number, None until known.

    trials: (candidate, look) -> the trial, None while it runs.
    """

    arm: PlannedArm
    tried: dict[int, dict[str, Any]] | None = None
    trials: dict[tuple[int, int], TrialSummary | None] = field(default_factory=dict)
    stopped: bool = False


class _Queue:
    """Trials that wait for a worker: those of a search before those of confirmation, each by their number.

    A stack takes the first few of many: those of one place alone are sorted, once they are reached.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self._order: list[tuple[bool, int]] = []
        self._at: dict[tuple[bool, int], dict[str, Job]] = {}

    def add(self, job: Job) -> None:
        place = _place(job)
        if place not in self._at:
            insort(self._order, place)
        self._at.setdefault(place, {})[job.key] = self.jobs[job.key] = job

    def remove(self, job: Job) -> None:
        place = _place(job)
        del self.jobs[job.key], self._at[place][job.key]
        if not self._at[place]:
            del self._at[place], self._order[bisect_left(self._order, place)]

    def ordered(self, work: Callable[[Job], float]) -> Iterator[Job]:
        """All trials. Those with one number follow one another by how long they take, the longest first."""
        for place in self._order:
            yield from sorted(self._at[place].values(), key=work, reverse=True)


def named(stack: Sequence[Job], plan: Plan) -> str:
    """The first trial of a stack and the number of the others, for a message; its task, where there are several.

    That of a candidate says at which fidelity it trains, where there are several.
    """
    job, seeds, others = stack[0], len(stack[0].seeds), len(stack) - 1
    search = plan.spec.search
    what = called(job.arm, job.stage, job.number, search.trials if search else None) if plan.budget else job.arm
    if search and search.fidelity and job.stage == "tune":
        at = [path for path in search.fidelity.values if path != "train.seeds"]  # which the message has anyway
        what += "".join(f", {path} {setting(job.config, path, what)}" for path in at)
    what = f"{job.task} / {what}" if len(plan.tasks) > 1 else what
    more = f" and {others} more trial{'s' * (others != 1)}" if others else ""
    return f"{what}, {seeds} seed{'s' * (seeds != 1)}{more}"


def _place(job: Job) -> tuple[bool, int]:
    return job.stage == "confirm", job.number


@dataclass
class _Family:
    """Tracks that are tested together. moves: how often each task's ranges were extended."""

    tracks: list[_Track]
    look: int = 0
    moves: dict[str, int] = field(default_factory=dict)


Method = TypeVar("Method", bound=Callable[..., Any])


def _alone(method: Method) -> Method:
    """A method that one thread of the driver calls at a time."""

    @wraps(method)
    def alone(self: "Schedule", *args: Any, **given: Any) -> Any:
        with self.lock:
            return method(self, *args, **given)

    return cast(Method, alone)


class Stacks(Protocol):
    """What an executor asks for stacks and tells of results: a `Schedule`, or the queue of another driver's."""

    plan: Plan
    missing: dict[str, str]

    @property
    def completed(self) -> int: ...
    @property
    def total(self) -> int: ...
    def stages(self) -> dict[Stage, Count]: ...
    def pace(self) -> Pace: ...
    @property
    def done(self) -> bool: ...
    @property
    def ended(self) -> bool: ...
    def look(self) -> None: ...
    def next(self, places: int) -> list[Job]: ...
    def finished(self, record: TrialRecord) -> None: ...
    def unfinished(self, stack: Sequence[Job], lost: Lost) -> None: ...
    def leader(self, task: str) -> tuple[str, float] | None: ...


class Schedule:
    """Call `next` for the next stack of trials (empty: wait) until `ended`; report each trial of it by `finished`, or
    the stack by `unfinished`.

    cut_off: stacks that a killed driver left behind with a checkpoint, by the keys of their trials.
    missing: why each trial, by its key, could not run although it was tried several times. Nothing is recorded of it.
    given_up: the same for people, a line for each stack.
    """

    def __init__(self, plan: Plan, store: Store, study_id: int, cut_off: Iterable[tuple[str, ...]] = ()) -> None:
        self.plan, self.store, self.study_id = plan, store, study_id
        self.lock = RLock()
        self.tracks = [_Track(arm) for arm in plan.arms]
        of_tasks = [[track for track in self.tracks if track.arm.task == task] for task in plan.tasks]
        one = plan.spec.family == "study"
        self._families = [_Family(self.tracks)] if one else [_Family(tracks) for tracks in of_tasks]
        self._search = SearchPhase(plan, store, study_id) if plan.spec.search else None
        self._infeasible = 0
        self.known = 0
        self.failures = 0
        self.completed = 0
        self._ended: Counter[Stage] = Counter()
        # Two arms, or two candidates of one, may come to the same trial: it runs once, for all who wait for it.
        self._awaited: dict[str, list[tuple[_Track | SearchPhase, Job, int]]] = {}
        self._waiting = _Queue()
        self._alone: set[str] = set()
        self._out: set[str] = set()
        self._run: set[str] = set()
        self._again: list[tuple[float, list[Job]]] = []
        self._losses: Counter[tuple[str, ...]] = Counter()
        self._pace = {"here": Pace(), "before": Pace()}
        self.missing: dict[str, str] = {}
        self.given_up: list[str] = []
        self.fault: Exception | None = None
        self._flops: dict[tuple[str, str], float] = {}
        most = plan.spec.resources.stack
        self._cut_off = [keys for keys in cut_off if most == "auto" or len(keys) <= most]

    @property
    def done(self) -> bool:
        return all(track.stopped for track in self.tracks)

    @property
    def ended(self) -> bool:
        """Whether the study is done, or only missing trials keep it from it. Ask where `next` has given nothing."""
        return self.done or not (self._waiting.jobs or self._out or self._again)

    @property
    def total(self) -> int:
        """Trials of the whole study, if no arm that still runs stops before the last look."""
        asked = sum(len(track.trials) for track in self.tracks)
        asked += self._search.total if self._search else 0
        for family in self._families:
            for track in family.tracks:
                if not track.stopped:
                    number = self.plan.tried(track.arm) if track.tried is None else len(track.tried)
                    asked += number * len(self.plan.spec.looks) - len(track.trials)
        return asked

    @_alone
    def stages(self) -> dict[Stage, Count]:
        """How many trials each stage has, with the assumption of `total`."""
        ends = [0, *(look.seeds for look in self.plan.spec.looks)]
        seeds = [after - before for before, after in pairwise(ends)]
        left = 0
        for track in self.tracks:
            if not track.stopped:
                numbers = range(self.plan.tried(track.arm)) if track.tried is None else track.tried
                awaited = ((n, look) for n in numbers for look in range(len(seeds)))
                own = sum(seeds[look] for n, look in awaited if track.trials.get((n, look)) is None)
                left += own * track.arm.config["train"]["steps"]
        searched = self._search.total if self._search else 0
        found: dict[Stage, Count] = {}
        if self._search:
            found["tune"] = Count(self._ended["tune"], searched, self._search.left)
        return {**found, "confirm": Count(self._ended["confirm"], self.total - searched, left)}

    def pace(self) -> Pace:
        """What trials have taken. Those that the ledger had count for the less, the more have ended since."""
        here, before = self._pace["here"], self._pace["before"]
        share = max(0.0, 1 - here.work / before.work) if before.work else 0.0
        return here.plus(share * before.seconds, share * before.work)

    @property
    def infeasible(self) -> int:
        """Candidates drawn so far that make no model."""
        return self._infeasible + (self._search.infeasible if self._search else 0)

    def look(self) -> None:
        """Collects every trial whose configuration is determined by the results so far; takes known results from the
        ledger.
        """
        while asked := self._ask():
            known = self.store.known_trials(job.key for _, job, _ in asked)
            for track, job, look in asked:
                if job.key in known:
                    self.store.attach(self.study_id, job.arm, job.key, job.number, job.values)
                    self.known += job.key not in self._run
                    self._learn(track, job, look, known[job.key])
                    continue
                if job.key not in self._awaited:
                    self._waiting.add(job)
                self._awaited.setdefault(job.key, []).append((track, job, look))

    @_alone
    def next(self, places: int) -> list[Job]:
        """Trials to train as one; `places` is how many such stacks run at a time.

        A search goes first, since confirmation waits for it; then what takes long, so that all workers end at about
        one time. Raises `InputError` where no candidate of a search makes a model, and `fault`, what another thread of
        the driver failed with.
        """
        if self.fault is not None:
            raise self.fault
        self.look()
        if self._again and self._again[0][0] <= time.monotonic():
            _, stack = self._again.pop(0)
        elif self._waiting.jobs:
            stack = self._left_behind() or self._stack(places)
            for job in stack:
                self._waiting.remove(job)
        else:
            return []
        self._out.update(job.key for job in stack)
        return stack

    @_alone
    def finished(self, record: TrialRecord) -> None:
        """Records a trial, whole, and learns from it."""
        for track, job, look in self._awaited[record.key]:
            known = self.store.record_trial(self.study_id, job.arm, record, job.number, job.values)
            self._learn(track, job, look, known)
        del self._awaited[record.key]
        self._out.discard(record.key)
        self._run.add(record.key)

    @_alone
    def returned(self, stack: Sequence[Job]) -> None:
        """Takes back a stack that nobody has begun."""
        for job in stack:
            self._out.discard(job.key)
            self._waiting.add(job)

    def unfinished(self, stack: Sequence[Job], lost: Lost) -> None:
        """Takes back a stack that ended without results: to fail, to run in parts, or to run again."""
        if lost.of == "infrastructure":
            self.lost(stack, str(lost))
        elif len(stack) > 1:
            self.part(stack)
        else:
            self.finished(failed(stack[0], str(lost)))

    @_alone
    def part(self, stack: Sequence[Job]) -> None:
        """Queues each trial of a stack again, alone: they ended their process, and one of them is to blame."""
        self._alone.update(job.key for job in stack)
        for job in stack:
            self._out.discard(job.key)
            self._waiting.add(job)

    @_alone
    def lost(self, stack: Sequence[Job], reason: str) -> None:
        """Queues the same stack again, which no trial of it is to blame for, after a pause that grows.

        After the last of `PAUSES` its trials are missing, and the rest of the study goes on.
        """
        keys = tuple(job.key for job in stack)
        why = reason.strip().splitlines()[-1]
        self._out.difference_update(keys)
        tries = self._losses[keys]
        self._losses[keys] += 1
        if tries == len(PAUSES):
            self.missing |= dict.fromkeys(keys, why)
            self.given_up.append(f"{named(stack, self.plan)}: given up after {tries + 1} tries: {why}")
            _log.warning("%s; the next `study run` tries again", self.given_up[-1])
            return
        _log.warning("%s: runs again in %g s: %s", named(stack, self.plan), PAUSES[tries], why)
        insort(self._again, (time.monotonic() + PAUSES[tries], list(stack)), key=lambda again: again[0])

    def _ask(self) -> list[tuple[_Track | SearchPhase, Job, int]]:
        """The trials that nobody has asked for yet and that depend on no result still awaited."""
        asked: list[tuple[_Track | SearchPhase, Job, int]] = []
        if self._search:
            asked += ((self._search, job, rung) for job, rung in self._search.ask())
        for family in self._families:
            asked += self._confirmations(family)
        return asked

    def _confirmations(self, family: _Family) -> list[tuple[_Track | SearchPhase, Job, int]]:
        while not all(track.stopped for track in family.tracks):
            running = [track for track in family.tracks if not track.stopped]
            for track in running:
                if track.tried is None:
                    track.tried = self._to_try(track)
            asked: list[tuple[_Track | SearchPhase, Job, int]] = []
            for track in running:
                for number, values in (track.tried or {}).items():
                    for look in range(family.look + 1):
                        if (number, look) not in track.trials:
                            track.trials[number, look] = None
                            asked.append((track, self.plan.job(track.arm, "confirm", number, values, look), look))
            waits = any(track.tried is None or None in track.trials.values() for track in running)
            if asked or waits:
                return asked
            if not self._extended(family):
                self._judge(family)
        return []

    def _to_try(self, track: _Track) -> dict[int, dict[str, Any]] | None:
        """The candidates that every seed of an arm trains, by number; None until a search has ended."""
        if self._search and not self._search.done:
            return None
        own = self._search.values(track.arm) if self._search else {}
        found: dict[int, dict[str, Any]] = {}
        for number, values in enumerate(self.plan.candidates(track.arm, own)):
            if len(found) == self.plan.tried(track.arm):
                break
            if self._feasible(track.arm, number, values):
                found[number] = values
        return found or {0: own}

    def _feasible(self, arm: PlannedArm, number: int, values: Mapping[str, Any]) -> bool:
        """Whether a candidate makes a model; the ledger records the reason where it does not."""
        try:
            self.plan.job(arm, "confirm", number, values)
        except Infeasible as error:
            self._infeasible += 1
            record = infeasible(error.job, str(error))
            self.store.record_trial(self.study_id, arm.name, record, number, dict(values))
            return False
        return True

    def _extended(self, family: _Family) -> bool:
        """Gives every arm of a task a candidate beyond the values tried, where the best value of one is at an end."""
        tune = self.plan.spec.tune
        if tune is None or not tune.extend or family.look:
            return False
        moved = False
        for task in dict.fromkeys(track.arm.task for track in family.tracks):
            if family.moves.get(task, 0) == MOST_MOVES:
                continue
            scores = self._scores(family, task)
            tracks = [track for track in family.tracks if track.arm.task == task]
            ranges = {path: search for path, search in tune.searched.items() if search.choice is None}
            ends = set()
            for track in tracks:
                best = scores.best(track.arm.name)
                tried = track.tried or {}
                if best is not None:
                    ends |= set(edge(ranges, list(tried.values()), tried[best]).items())
            number = max(number for track in tracks for number in track.tried or {}) + 1
            number = max(number, sum(1 for _ in self.plan.candidates(tracks[0].arm)))
            for at, (path, end) in enumerate(sorted(ends)):
                longest = max((list((track.tried or {}).values()) for track in tracks), key=len)
                values = beyond(tune.searched, longest, path, above=end == "highest")
                for track in tracks:
                    if track.tried is not None and self._feasible(track.arm, number + at, values):
                        track.tried[number + at] = values
                        moved = True
            family.moves[task] = family.moves.get(task, 0) + 1
        return moved

    def _judge(self, family: _Family) -> None:
        """Tests the arms after a look and stops those that are decided, or have no prospect."""
        tasks = list(dict.fromkeys(track.arm.task for track in family.tracks))
        tables = [self._scores(family, task) for task in tasks]
        found = dict(zip(tasks, outcomes(tables, self.plan.spec.looks), strict=True))
        last = family.look == len(self.plan.spec.looks) - 1
        for track in family.tracks:
            outcome = found[track.arm.task].get(track.arm.name)
            if not track.arm.is_base:
                track.stopped = last or outcome is None or outcome.stopped is not None
        for track in family.tracks:
            if track.arm.is_base:
                others = [other for other in family.tracks if other.arm.task == track.arm.task and other != track]
                track.stopped = last or all(other.stopped for other in others)
        family.look += 1

    def _scores(self, family: _Family, task: str) -> Scores:
        tracks = [track for track in family.tracks if track.arm.task == task]
        kind, looks = self.plan.tasks[task], self.plan.spec.looks
        runs: dict[str, dict[int, dict[int, Run]]] = {}
        seeds: dict[str, list[int]] = {}
        for track in tracks:
            own = runs.setdefault(track.arm.name, {})
            for (number, _), summary in track.trials.items():
                if summary is not None and summary.state == "done":
                    own.setdefault(number, {}).update(_runs(summary, kind.metric))
            reached = max((look for _, look in track.trials), default=-1)
            trained = any(own.values())
            seeds[track.arm.name] = list(range(1, looks[reached].seeds + 1)) if trained else []
        base = next(track.arm.name for track in tracks if track.arm.is_base)
        return Scores(base, kind.maximize, kind.chance, runs, seeds)

    def _left_behind(self) -> list[Job]:
        for keys in self._cut_off:
            if all(key in self._waiting.jobs for key in keys):
                self._cut_off.remove(keys)
                return [self._waiting.jobs[key] for key in keys]
        return []

    def _stack(self, places: int) -> list[Job]:
        others = self._waiting.ordered(self._work)
        first = next(others)
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

    def _learn(self, who: _Track | SearchPhase, job: Job, look: int, summary: TrialSummary) -> None:
        self.completed += 1
        self._ended[job.stage] += 1
        self.failures += summary.state == "failed"
        if summary.state == "done" and job.key not in self._run:
            where = "here" if job.key in self._out else "before"
            self._pace[where] = self._pace[where].plus(summary.seconds, work([job]))
        flops = [value for value in summary.finals.get(("cost", "flops_per_token"), {}).values() if value > 0]
        if flops:
            self._flops[job.task, job.arm] = flops[0]
        if isinstance(who, _Track):
            who.trials[job.number, look] = summary
        else:
            who.learn(job, look, summary)

    def leader(self, task: str) -> tuple[str, float] | None:
        """The arm whose best candidate so far has the best mean validation score on a task."""
        metric, best = self.plan.tasks[task].metric, max if self.plan.tasks[task].maximize else min
        tops: dict[str, float] = {}
        for track in self.tracks:
            found = [score(trial, metric, "validation") for trial in track.trials.values() if trial is not None]
            found = [value for value in found if not math.isnan(value)]
            if track.arm.task == task and found:
                tops[track.arm.name] = best(found)
        if not tops:
            return None
        name = best(tops, key=lambda name: tops[name])
        return name, tops[name]


def _runs(summary: TrialSummary, metric: str) -> dict[int, Run]:
    """The runs of a trial by seed; NaN for those that diverged."""
    validation, test = summary.finals.get(("validation", metric), {}), summary.finals.get(("test", metric), {})
    found = {seed: Run(value, test.get(seed, math.nan)) for seed, value in validation.items()}
    return found | {seed: Run(math.nan, math.nan) for seed in summary.diverged}
