"""Decides what a study runs next, from its plan and from what the ledger already holds.

A search first draws candidates by Optuna, on separate seeds. Then every seed of each arm on each task trains
every candidate of tuning (`confirmation`). Trials that differ only in numbers go out in stacks, to be trained as one.
Neither stacks nor timing change what a study computes. The ledger is the only memory: a schedule made anew from the
same plan goes on where the last one was killed.

A candidate that makes no model is recorded as infeasible, and the next one is drawn in its place: the budget counts
candidates that train.
"""

import logging
import math
import time
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from itertools import islice
from threading import RLock
from typing import Any, Protocol, TypeVar, cast

from deltalab.store import Store, TrialRecord, TrialSummary
from deltalab.store.models import Stage
from deltalab.study.planning.plan import Plan
from deltalab.study.planning.tuning_candidates import trial_name
from deltalab.study.running.activity import Count, Pace, work
from deltalab.study.running.confirmation import ArmTrials, ConfirmPhase
from deltalab.study.searching.phase import SearchPhase
from deltalab.study.specs.setting_paths import setting
from deltalab.study.workers.jobs import Job, Lost
from deltalab.study.workers.train_stack import failed
from deltalab.training.train import stackable
from deltalab.training.trainer import most_stacked

_log = logging.getLogger("deltalab")

PAUSES = (1.0, 5.0, 25.0, 60.0)
"""Seconds before a lost stack runs again, after its first, second, third and each further loss."""

SAME_PLACE = 4
"""After as many losses in a row at one place of a training, the rule or the task is at fault, and not the machine."""

Asked = tuple[ArmTrials | SearchPhase, Job, int]
"""A trial: who asked for it and learns from it, its job, and its look or rung."""


class _WaitingJobs:
    """The jobs that wait for a worker: first the jobs of a search, then those of confirmation, both in order of number.

    A stack takes the first few of many jobs. So the jobs of one stage and number are sorted only when their turn comes.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self._order: list[tuple[bool, int]] = []
        self._at: dict[tuple[bool, int], dict[str, Job]] = {}

    def add(self, job: Job) -> None:
        rank = _rank(job)
        if rank not in self._at:
            insort(self._order, rank)
        self._at.setdefault(rank, {})[job.key] = self.jobs[job.key] = job

    def remove(self, job: Job) -> None:
        rank = _rank(job)
        del self.jobs[job.key], self._at[rank][job.key]
        if not self._at[rank]:
            del self._at[rank], self._order[bisect_left(self._order, rank)]

    def ordered(self, work: Callable[[Job], float]) -> Iterator[Job]:
        """Yields all jobs; among jobs of one stage and number, the longest first."""
        for rank in self._order:
            yield from sorted(self._at[rank].values(), key=work, reverse=True)


def _rank(job: Job) -> tuple[bool, int]:
    """Returns a key that sorts jobs in the order in which they go out."""
    return job.stage == "confirm", job.number


def stack_label(stack: Sequence[Job], plan: Plan) -> str:
    """Names a stack in a message: its first trial, the seeds, and how many more trials it has.

    The label says the task if the study has several, and at which fidelity a candidate trains if there are several.
    """
    job, seeds, others = stack[0], len(stack[0].seeds), len(stack) - 1
    search = plan.spec.search
    name = trial_name(job.arm, job.stage, job.number, search.trials if search else None) if plan.budget else job.arm
    if search and search.fidelity and job.stage == "tune":
        rising = [path for path in search.fidelity.values if path != "train.seeds"]  # The label has the seeds anyway.
        name += "".join(f", {path} {setting(job.config, path, name)}" for path in rising)
    name = f"{job.task} / {name}" if len(plan.tasks) > 1 else name
    more = f" and {others} more trial{'s' * (others != 1)}" if others else ""
    return f"{name}, {seeds} seed{'s' * (seeds != 1)}{more}"


F = TypeVar("F", bound=Callable[..., Any])


def _locked(method: F) -> F:
    """Lets one thread of the driver at a time call a method."""

    @wraps(method)
    def locked(self: "Schedule", *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast(F, locked)


class StackSource(Protocol):
    """What an executor asks for stacks and tells of results: a `Schedule`, or the queue of another driver."""

    plan: Plan
    missing: dict[str, str]

    @property
    def completed(self) -> int:
        """Trials that have ended."""

    @property
    def total(self) -> int:
        """Trials of the whole study."""

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""

    @property
    def ended(self) -> bool:
        """Whether there will be no further stack. Ask only after `next` has given nothing."""

    def stages(self) -> dict[Stage, Count]:
        """The trials of each stage."""

    def pace(self) -> Pace:
        """The seconds and the work of the trials that have ended."""

    def refresh(self) -> None:
        """Finds out which trials can run."""

    def next(self, places: int) -> list[Job]:
        """The next stack, where `places` stacks run at a time; empty if no trial can run now."""

    def finished(self, record: TrialRecord) -> None:
        """Takes the record of a trial that has ended."""

    def unfinished(self, stack: Sequence[Job], lost: Lost) -> None:
        """Takes back a stack that ended without results."""

    def leader(self, task: str) -> tuple[str, float] | None:
        """The best arm so far on a task, and its score."""


class Schedule:
    """The stacks of a study, in the order in which they run.

    Call `next` for the next stack until `ended`; an empty stack says to wait. Report each trial of a stack by
    `finished`, or the stack by `unfinished`.

    Attributes:
        plan: The study.
        store: The ledger.
        study_id: The study's id in the ledger.
        lock: Held by the thread that uses the schedule.
        known: How many trials the ledger already had.
        failures: How many trials raised.
        completed: How many trials have ended.
        missing: Why each trial, by its key, could not run although it was tried several times. The ledger has no record
            of a missing trial.
        given_up: A line for people on each stack whose trials are missing.
        fault: The error of another thread of the driver; None if there is none.
    """

    def __init__(self, plan: Plan, store: Store, study_id: int, interrupted: Iterable[tuple[str, ...]] = ()) -> None:
        """Begins with what the ledger holds.

        Args:
            plan: The study.
            store: The ledger.
            study_id: The study's id in the ledger.
            interrupted: Stacks whose checkpoint a killed driver left. Each is a tuple of its trials' keys.
        """
        self.plan, self.store, self.study_id = plan, store, study_id
        self.lock = RLock()
        self._search = SearchPhase(plan, store, study_id) if plan.spec.search else None
        self._confirm = ConfirmPhase(plan, store, study_id, self._search)
        self.known = 0
        self.failures = 0
        self.completed = 0
        self._ended: Counter[Stage] = Counter()
        # Two arms, or two candidates of one arm, may come to the same trial, which runs once for all who wait for it.
        self._awaited: dict[str, list[Asked]] = {}
        self._waiting = _WaitingJobs()
        self._alone: set[str] = set()
        self._out: set[str] = set()
        self._run: set[str] = set()
        self._again: list[tuple[float, list[Job]]] = []
        self._losses: defaultdict[tuple[str, ...], list[str | None]] = defaultdict(list)
        self._pace = {"here": Pace(), "before": Pace()}
        self.missing: dict[str, str] = {}
        self.given_up: list[str] = []
        self.fault: Exception | None = None
        self._flops: dict[tuple[str, str], float] = {}
        most = plan.spec.resources.stack
        self._interrupted = [keys for keys in interrupted if most == "auto" or len(keys) <= most]

    @property
    def done(self) -> bool:
        """Whether the study needs no further trial."""
        return self._confirm.done

    @property
    def ended(self) -> bool:
        """Whether the study is done but for missing trials. Ask only after `next` has given nothing."""
        return self.done or not (self._waiting.jobs or self._out or self._again)

    @property
    def total(self) -> int:
        """Trials of the whole study, if no arm that still runs stops before the last look."""
        return self._confirm.total + (self._search.total if self._search else 0)

    @_locked
    def stages(self) -> dict[Stage, Count]:
        """How many trials each stage has, if no arm that still runs stops before the last look."""
        counts: dict[Stage, Count] = {}
        if self._search:
            counts["tune"] = Count(self._ended["tune"], self._search.total, self._search.left)
        return {**counts, "confirm": Count(self._ended["confirm"], self._confirm.total, self._confirm.left)}

    def pace(self) -> Pace:
        """The pace of ended trials. Trials that the ledger already had count less, the more work was done here."""
        here, before = self._pace["here"], self._pace["before"]
        share = max(0.0, 1 - here.work / before.work) if before.work else 0.0
        return here.plus(share * before.seconds, share * before.work)

    @property
    def infeasible(self) -> int:
        """Candidates drawn so far that make no model."""
        return self._confirm.infeasible + (self._search.infeasible if self._search else 0)

    def refresh(self) -> None:
        """Collects every trial that the results so far determine, and takes known results from the ledger."""
        while asked := self._ask():
            known = self.store.known_trials(job.key for _, job, _ in asked)
            for who, job, look in asked:
                if job.key in known:
                    self.store.attach(self.study_id, job.arm, job.key, job.number, job.values)
                    self.known += job.key not in self._run
                    self._learn(who, job, look, known[job.key])
                    continue
                if job.key not in self._awaited:
                    self._waiting.add(job)
                self._awaited.setdefault(job.key, []).append((who, job, look))

    @_locked
    def next(self, places: int) -> list[Job]:
        """Gives out the next stack: trials that are to train as one.

        A search goes first, since confirmation waits for it. Then the longest trials go first, so that all workers end
        at about one time.

        Args:
            places: How many stacks run at a time.

        Returns:
            The stack; empty if no trial can run now.

        Raises:
            InputError: No candidate of a search makes a model.
            LedgerGone: The ledger's file was deleted, moved or replaced.
            Exception: `fault`.
        """
        if self.fault is not None:
            raise self.fault
        self.store.require_in_place()
        self.refresh()
        if self._again and self._again[0][0] <= time.monotonic():
            _, stack = self._again.pop(0)
        elif self._waiting.jobs:
            stack = self._interrupted_stack() or self._stack(places)
            for job in stack:
                self._waiting.remove(job)
        else:
            return []
        self._out.update(job.key for job in stack)
        return stack

    @_locked
    def finished(self, record: TrialRecord) -> None:
        """Records a whole trial, and learns from it."""
        for who, job, look in self._awaited[record.key]:
            known = self.store.record_trial(self.study_id, job.arm, record, job.number, job.values)
            self._learn(who, job, look, known)
        del self._awaited[record.key]
        self._out.discard(record.key)
        self._run.add(record.key)

    @_locked
    def returned(self, stack: Sequence[Job]) -> None:
        """Takes back a stack that nobody has begun."""
        for job in stack:
            self._out.discard(job.key)
            self._waiting.add(job)

    def unfinished(self, stack: Sequence[Job], lost: Lost) -> None:
        """Takes back a stack that ended without results. Its trials fail, run again alone, or run again as a stack."""
        if lost.of == "infrastructure":
            self.lost(stack, lost)
        elif len(stack) > 1:
            self.part(stack)
        else:
            self.finished(failed(stack[0], str(lost)))

    @_locked
    def part(self, stack: Sequence[Job]) -> None:
        """Queues each trial of a stack again, alone, since an unknown one of them ended the stack's process."""
        self._alone.update(job.key for job in stack)
        for job in stack:
            self._out.discard(job.key)
            self._waiting.add(job)

    @_locked
    def lost(self, stack: Sequence[Job], lost: Lost) -> None:
        """Queues a stack again whose trials are not to blame, after a pause that grows.

        After as many further tries as the study's `retries`, the trials of the stack are missing, and the rest of the
        study goes on. A stack that is lost at the same place again and again is to blame.
        """
        keys = tuple(job.key for job in stack)
        why = str(lost).strip().splitlines()[-1]
        places = self._losses[keys]
        places.append(lost.at)
        if lost.at is not None and places[-SAME_PLACE:] == [lost.at] * SAME_PLACE:
            places.clear()
            again = f"{SAME_PLACE} times in a row, so that the rule or the task is at fault"
            self.unfinished(stack, Lost(f"{str(lost).rstrip()}, {again}", "trial"))
            return
        self._out.difference_update(keys)
        if len(places) > self.plan.spec.retries:
            self.missing |= dict.fromkeys(keys, why)
            tries = f"{len(places)} tr{'y' if len(places) == 1 else 'ies'}"
            self.given_up.append(f"{stack_label(stack, self.plan)}: given up after {tries}: {why}")
            _log.warning("%s; the next `study run` tries again", self.given_up[-1])
            return
        pause = PAUSES[min(len(places), len(PAUSES)) - 1]
        _log.warning("%s: runs again in %g s: %s", stack_label(stack, self.plan), pause, why)
        insort(self._again, (time.monotonic() + pause, list(stack)), key=lambda again: again[0])

    def leader(self, task: str) -> tuple[str, float] | None:
        """The arm whose best candidate so far has the best mean validation score on a task, and that score."""
        return self._confirm.leader(task)

    def _ask(self) -> list[Asked]:
        """The trials that nobody has asked for yet and that depend on no result still awaited."""
        asked: list[Asked] = []
        if self._search:
            asked += ((self._search, job, rung) for job, rung in self._search.ask())
        asked += self._confirm.ask()
        return asked

    def _interrupted_stack(self) -> list[Job]:
        """A stack that a killed driver left behind, if all of its trials wait; else empty."""
        for keys in self._interrupted:
            if all(key in self._waiting.jobs for key in keys):
                self._interrupted.remove(keys)
                return [self._waiting.jobs[key] for key in keys]
        return []

    def _stack(self, places: int) -> list[Job]:
        """The next stack of trials that wait."""
        others = self._waiting.ordered(self._work)
        first = next(others)
        wanted = self.plan.spec.resources
        if wanted.stack == "auto":
            # Size the stack so that all waiting and running work is split evenly over the places: others will be free
            # before a longer stack ends.
            out = sum(self._work(asked[0][1]) for asked in self._awaited.values())
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
        """Predicts the operations of a trial's matrix products from those of its arm's earlier trials, per token.

        An arm without a trial yet counts as the heaviest arm, and so comes first.
        """
        train = job.config["train"]
        per_token = self._flops.get((job.task, job.arm)) or max(self._flops.values(), default=1.0)
        tokens = train["steps"] * train["batch_size"] * self.plan.tasks[job.task].length * len(job.seeds)
        return float(per_token * tokens)

    def _may_stack(self, job: Job, other: Job) -> bool:
        """Whether two trials may train as one."""
        if job.engine is not None or {job.key, other.key} & self._alone:
            return False
        return (job.task, job.seeds) == (other.task, other.seeds) and stackable(job.specs, other.specs)

    def _learn(self, who: ArmTrials | SearchPhase, job: Job, look: int, summary: TrialSummary) -> None:
        """Counts a trial that has ended, and gives the result to the search or the arm that asked for the trial."""
        self.completed += 1
        self._ended[job.stage] += 1
        self.failures += summary.state == "failed"
        if summary.state == "done" and job.key not in self._run:
            where = "here" if job.key in self._out else "before"
            self._pace[where] = self._pace[where].plus(summary.seconds, work([job]))
        flops = [value for value in summary.finals.get(("cost", "flops_per_token"), {}).values() if value > 0]
        if flops:
            self._flops[job.task, job.arm] = flops[0]
        who.learn(job, look, summary)
