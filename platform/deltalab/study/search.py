"""A search for architectures on one task: its candidates, the base's training, and who is confirmed.

Optuna draws candidates from the whole space. Beside them the base tries as many values of the `train` settings that are
searched, so that it is tuned with the budget of its rivals. All run on seeds that confirmation never uses.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from deltalab.errors import InputError
from deltalab.store import Store, TrialSummary
from deltalab.study.candidates import MOST_DRAWN
from deltalab.study.pareto import front
from deltalab.study.plan import Infeasible, Job, Plan, PlannedArm
from deltalab.study.suggest import COSTS, Candidate, batch_start, suggest
from deltalab.study.trial import infeasible


class SearchPhase:
    """arm: the base. drawn: the candidates of the search, by number. own: those of the base's training, by number."""

    def __init__(self, plan: Plan, arm: PlannedArm, store: Store, study_id: int) -> None:
        assert plan.spec.search is not None
        self.plan, self.arm, self.space = plan, arm, plan.spec.search
        self.drawn: list[Candidate] = []
        self.own: dict[int, Candidate] = {}
        self._store, self._study_id = store, study_id
        self._again = {
            row.number: row.values
            for row in store.trials(study_id)
            if (row.stage, row.arm, row.task) == ("tune", arm.name, arm.task)
        }
        # Numbers of the base's candidates follow those of every draw.
        self._own = enumerate(plan.candidates(arm.task), MOST_DRAWN * self.space.trials)

    @property
    def done(self) -> bool:
        """Whether every candidate has ended."""
        return not (self._draws or any(candidate.score is None for candidate in (*self.drawn, *self.own.values())))

    @property
    def total(self) -> int:
        """Trials of the search, if the space gives enough candidates that make a model."""
        return (self.space.trials if self._draws else self._spent) + self.plan.base_trials

    @property
    def infeasible(self) -> int:
        """Candidates drawn so far that make no model."""
        return len(self.drawn) - self._spent

    def ask(self) -> Iterator[Job]:
        """The trials that depend on no result still awaited and were not asked for before."""
        while len(self.own) < self.plan.base_trials:
            number, values = next(self._own)
            if (job := self._job(number, values)) is not None:
                self.own[number] = Candidate(values)
                yield job
        while self._draws and not any(
            candidate.score is None for candidate in self.drawn[: batch_start(len(self.drawn))]
        ):
            number = len(self.drawn)
            candidate = Candidate(self._again.get(number) or suggest(self.plan, self.arm.task, self.drawn))
            self.drawn.append(candidate)
            if (job := self._job(number, candidate.values)) is not None:
                yield job
            else:
                candidate.infeasible, candidate.score, candidate.costs = True, math.nan, (math.nan,) * len(COSTS)

    def learn(self, job: Job, summary: TrialSummary) -> None:
        candidate = self.own[job.number] if job.number in self.own else self.drawn[job.number]
        candidate.costs = tuple(score(summary, cost, "cost") for cost in COSTS)
        candidate.score = score(summary, self.plan.tasks[job.task].metric, "validation")

    def base(self) -> dict[str, Any]:
        """The values of the base's best candidate; {}, as it is written, where none has a score."""
        scored = [candidate for candidate in self.own.values() if not math.isnan(candidate.score or 0.0)]
        best = max if self.plan.tasks[self.arm.task].maximize else min
        return best(scored, key=lambda candidate: candidate.score or 0.0).values if scored else {}

    def finalist(self, place: int) -> dict[str, Any]:
        """The values of a finalist.

        Candidates on the Pareto front of score, arithmetic and state come first, then the rest, each by score.
        Raises `InputError` where no candidate made a model.
        """
        sign = -1 if self.plan.tasks[self.arm.task].maximize else 1
        trained = {n: candidate for n, candidate in enumerate(self.drawn) if not candidate.infeasible}
        if not trained:
            raise InputError(f"{self.plan.where}: search: none of {len(self.drawn)} candidates makes a model")
        different = {json.dumps(trained[n].values, sort_keys=True): n for n in sorted(trained, reverse=True)}
        numbers = sorted(different.values())
        scores = [math.nan if (own := trained[n].score) is None else own for n in numbers]
        first = set(front([(sign * own, *trained[n].costs) for own, n in zip(scores, numbers, strict=True)]))
        order = sorted(range(len(numbers)), key=lambda i: (i not in first, math.isnan(scores[i]), sign * scores[i]))
        return trained[numbers[order[place % len(order)]]].values

    @property
    def _spent(self) -> int:
        """Draws that count against the budget."""
        return sum(not candidate.infeasible for candidate in self.drawn)

    @property
    def _draws(self) -> bool:
        """Whether there is budget left and candidates to spend it on."""
        most = self.space.trials if self.space.enumerated else MOST_DRAWN * self.space.trials
        return self._spent < self.space.trials and len(self.drawn) < most

    def _job(self, number: int, values: Mapping[str, Any]) -> Job | None:
        """The trial of a candidate; None, and a record of the reason, where it makes no model."""
        try:
            return self.plan.job(self.arm, "tune", number, values)
        except Infeasible as error:
            record = infeasible(error.job, str(error))
            self._store.record_trial(self._study_id, self.arm.name, record, number, dict(values))
            return None


def score(summary: TrialSummary, metric: str, split: str) -> float:
    """The mean of a metric over all seeds; NaN where the trial failed or one of them diverged."""
    finals = summary.finals.get((split, metric), {})
    if summary.diverged or not finals:
        return math.nan
    return math.fsum(finals.values()) / len(finals)
