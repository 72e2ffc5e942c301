"""Runs a search for architectures: draws candidates, and chooses the finalists that are confirmed.

A candidate trains on every task of the study. Rules that the file names and candidates of other studies come first,
then candidates of the random control and of the sampler, in an order that is fixed beforehand. All train on seeds that
confirmation never uses. Then the finalists are known. In confirmation every seed of the base and of each finalist
trains equally many values of the `train` settings that are searched, and chooses one, as in a study that tunes.

At most `WINDOW` candidates run at a time. A candidate is drawn once all candidates at least `WINDOW` places before it
have ended. The sampler knows only their results, even if later candidates have ended, too. So it does not
matter how long a trial takes and how many run at a time: any executor draws the same candidates.
"""

import json
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltalab.errors import InputError
from deltalab.models.spec import ModelSpec
from deltalab.registry import rule_plugin
from deltalab.statistics.pareto import beyond_worst, greedy_choice, ranked
from deltalab.store import Store, TrialSummary
from deltalab.study.planning import warm_starts
from deltalab.study.planning.plan import Infeasible, Plan, PlannedArm
from deltalab.study.planning.tuning_candidates import MOST_DRAWN, PROPOSED_FROM, RANDOM_FROM, WARM_FROM
from deltalab.study.searching.halving import going_on
from deltalab.study.searching.mixed_draws import MixedDraws
from deltalab.study.searching.proposers import Proposer
from deltalab.study.searching.results import (
    at_chance,
    drawn_by,
    is_own,
    lot_name,
    objective_point,
    objective_points,
    objective_scores,
)
from deltalab.study.searching.rivals import Rivals
from deltalab.study.searching.sampler import START, OptunaStudy
from deltalab.study.specs.sections.budget import COSTS, Objective, Searching
from deltalab.study.workers.jobs import Job
from deltalab.study.workers.train_stack import infeasible

WINDOW = 8
"""How many candidates of a search run at a time. With more, the sampler knows less at each draw: decision 205."""


@dataclass
class Candidate:
    """A candidate while the search runs.

    Attributes:
        number: The candidate's number.
        values: The values of the searched settings by path.
        rungs: The trials by task, for each rung at which the candidate trains. A trial that still runs is None.
        infeasible: Whether the values make no model, so that no trial runs.
        outside: Whether the space lacks the candidate, whose rule was proposed. Samplers know nothing of it.
    """

    number: int
    values: dict[str, Any]
    rungs: list[dict[str, TrialSummary | None]] = field(default_factory=list)
    infeasible: bool = False
    outside: bool = False

    @property
    def waits(self) -> bool:
        """Whether a trial of the candidate runs."""
        return any(trial is None for trials in self.rungs for trial in trials.values())

    def scores(self, objectives: Sequence[Objective], rung: int = -1) -> dict[str, float]:
        """The score of each objective at a rung; NaN if a trial failed or diverged."""
        known = {task: trial for task, trial in self.rungs[rung].items() if trial is not None}
        return objective_scores(objectives, known)


class SearchPhase:
    """The search of a study: draws candidates, asks for their trials, and chooses the finalists.

    Attributes:
        plan: The study.
        space: The section `search`.
        arms: The base on each task.
        drawn: The candidates, in the order in which they were drawn.
    """

    def __init__(self, plan: Plan, store: Store, study_id: int) -> None:
        """Begins anew; candidates that the ledger has are drawn again as they were.

        Args:
            plan: The study.
            store: The ledger.
            study_id: The study's id in the ledger.
        """
        assert plan.spec.search is not None
        self.plan, self.space = plan, plan.spec.search
        self.arms = [arm for arm in plan.arms if arm.is_base]
        self.drawn: list[Candidate] = []
        self._store, self._study_id = store, study_id
        self._by_number: dict[tuple[str, int, str], Candidate] = {}
        self._waiting = 0
        self._ended: Counter[int] = Counter()  # Trials by rung.
        self._spent = {"warm": 0, "random": 0, "proposed": 0, "sampler": 0}
        self._drawn = dict(self._spent)
        # Feasible candidates whose results the sampler has not been told, in the order in which they were drawn.
        self._untold: deque[Candidate] = deque()
        self._study = begin_draws(plan.spec.name, self.space, [objective.maximize for objective in plan.objectives])
        self._rivals, self._proposer = Rivals(plan.spec.name), self._program()
        self._every = self.space.combinations() if self.space.enumerated else None
        self._again = {
            row.number: row.values
            for row in store.trials(study_id)
            if row.stage == "tune" and not is_own(row.number, self.space)
        }
        self._warm = [*warm_starts.named_candidates(plan), *warm_starts.recorded_candidates(plan, store)]
        self._finalists: dict[str, Candidate] = {}

    @property
    def done(self) -> bool:
        """Whether every candidate has ended, at every rung."""
        return bool(self._finalists) and not self._waiting

    @property
    def total(self) -> int:
        """Trials of the search, if the space gives enough candidates that make a model."""
        trained = self.space.trials if self._draws else self._trained
        return len(self.arms) * sum(min(places, trained) for places in self.space.halved)

    @property
    def left(self) -> float:
        """Seeds times steps of the trials that have not ended."""
        left = 0.0
        trained = self.space.trials if self._draws else self._trained
        for rung, (places, settings) in enumerate(zip(self.space.halved, self.space.rungs, strict=True)):
            seeds = settings.get("train.seeds", self.space.seeds)
            steps = [settings.get("train.steps", arm.config["train"]["steps"]) for arm in self.arms]
            left += seeds * (min(places, trained) - self._ended[rung] / len(steps)) * sum(steps)
        return max(0.0, left)

    @property
    def infeasible(self) -> int:
        """Candidates drawn so far that make no model."""
        return len(self.drawn) - self._trained

    def ask(self) -> Iterator[tuple[Job, int]]:
        """Yields each trial, with its rung, that was not yielded before and that depends on no result still awaited."""
        while self._draws and self._ready():
            yield from self._train(self._next(), 0)
        if not self._draws:
            for rung, _ in enumerate(self.space.rungs[1:]):
                if self._waiting:
                    break
                yield from self._go_on(rung)
            if not self._waiting and not self._finalists:
                self._finalists = self._chosen()

    def learn(self, job: Job, rung: int, summary: TrialSummary) -> None:
        """Keeps the result of a trial."""
        self._by_number[job.arm, job.number, job.task].rungs[rung][job.task] = summary
        self._waiting -= 1
        self._ended[rung] += 1

    def values(self, arm: PlannedArm) -> dict[str, Any]:
        """Returns the values of the finalist that became an arm; empty for the base. The search must be done."""
        return {} if arm.is_base else self._finalists[arm.name].values

    def _chosen(self) -> dict[str, Candidate]:
        """The finalists by arm, of the candidates that trained at the last rung.

        They come in the order of `finalists`. Candidates that are better than chance on no task come last. A model is
        taken once, however it was trained, and the base's model only if there is no other. Raises `InputError` if no
        candidate made a model.
        """
        objectives = self.plan.objectives
        last = [candidate for candidate in self.drawn if len(candidate.rungs) == len(self.space.rungs)]
        if not last:
            raise InputError(f"{self.plan.study_file}: search: none of {len(self.drawn)} candidates makes a model")
        by_values = {json.dumps(candidate.values, sort_keys=True): candidate for candidate in reversed(last)}
        different = list(by_values.values())[::-1]
        chance = {str(objective): self.plan.tasks[objective.task].chance for objective in objectives if objective.task}
        points = []
        for candidate in different:
            scores = candidate.scores(objectives)
            # The cheapest model is on the front even if it has learned nothing, and would be wasted as a finalist.
            learned = not at_chance(objectives, scores, chance)
            points.append(objective_point(objectives, scores if learned else dict.fromkeys(scores, math.nan)))
        metrics = [at for at, objective in enumerate(objectives) if objective.name not in COSTS]
        base_model, most = self._model({}), self.space.finalists
        while True:
            order = [different[i] for i in finalists(points, most, metrics)]
            models: dict[str, Candidate] = {}
            for candidate in order:
                models.setdefault(self._model(candidate.values), candidate)
            base = models.pop(base_model, None)
            if len(models) >= self.space.finalists or most >= len(different):
                break
            most *= 2
        chosen = [*models.values(), *filter(None, [base])] if models else order
        return {name: chosen[place % len(chosen)] for place, name in enumerate(self.plan.names[1:])}

    def _model(self, values: Mapping[str, Any]) -> str:
        """A text that tells the models of two candidates apart, on the first task."""
        config = self.plan.config_for(self.arms[0], values)
        return repr(ModelSpec.of({**config["model"], "rule": config["rule"]}))

    @property
    def _trained(self) -> int:
        """Candidates drawn that count against the budget."""
        return sum(self._spent.values())

    @property
    def _draws(self) -> bool:
        """Whether the budget is not used up and further candidates can be drawn."""
        most = self.space.trials if self.space.enumerated else MOST_DRAWN * self.space.trials
        return self._trained < self.space.trials and len(self.drawn) < most

    def _ready(self) -> bool:
        """Whether the next candidate may be drawn. Tells the sampler the results that the sampler may know."""
        while len(self._untold) >= WINDOW:
            first = self._untold[0]
            if None in first.rungs[0].values():
                return False
            candidate = self._untold.popleft()
            told = self._told(candidate)
            if not candidate.outside:
                self._study.tell(told)
            if self._proposer is not None:
                signs = [-1.0 if objective.maximize else 1.0 for objective in self.plan.objectives]
                point = None if told is None else [sign * value for sign, value in zip(signs, told, strict=True)]
                self._rivals.learn(self._kind(candidate.number), point, candidate)
        return True

    def _program(self) -> Proposer | None:
        """The program that proposes candidates; None if the search has none."""
        if self.space.proposals is None:
            return None
        about = {
            "study": self.plan.spec.name,
            "objectives": [{"name": str(each), "maximize": each.maximize} for each in self.plan.objectives],
            "base": {arm.task: arm.config for arm in self.arms},
        }
        return Proposer(self.space, about, self._store.folder / "proposals" / str(self._study_id))

    def _proposed(self, number: int) -> dict[str, Any]:
        """The values of a proposal, or of a random candidate if there is none that could train."""
        assert self._proposer is not None
        front = []
        for _, candidate in self._rivals.front:
            scores = {
                name: None if math.isnan(score) else score
                for name, score in candidate.scores(self.plan.objectives, 0).items()
            }
            source = {"source": rule_plugin(candidate.values["rule"]).source} if candidate.outside else {}
            front.append({"values": candidate.values, "scores": scores, **source})
        values = self._proposer.next(number, front, [candidate.values for candidate in self.drawn])
        return self._study.draw(number, "random") if values is None else values

    def _kind(self, number: int) -> str:
        """What the number of a candidate says of where it comes from: a key of `_spent`."""
        return drawn_by(number, self.space) if number >= RANDOM_FROM else "sampler"

    def _told(self, candidate: Candidate) -> list[float] | None:
        """The result that the sampler is told; None if a cost is not known."""
        scores = candidate.scores(self.plan.objectives, 0)
        for objective in self.plan.objectives:
            if math.isnan(scores[str(objective)]) and objective.task is not None and objective.name not in COSTS:
                # A diverged trial says as much about its region as a trial that learned nothing.
                scores[str(objective)] = self.plan.tasks[objective.task].chance
        return None if any(map(math.isnan, scores.values())) else list(scores.values())

    def _next(self) -> Candidate:
        """Returns the next candidate: from the ledger if it has that number, or else newly drawn."""
        if self._every is not None:
            return Candidate(len(self.drawn), next(self._every))
        if self._drawn["warm"] < len(self._warm):
            kind, first = "warm", WARM_FROM
        elif self._spent["random"] < controls_by(
            self._trained - self._spent["warm"], self.space.trials - self._spent["warm"], self.space.controls
        ):
            kind, first = "random", RANDOM_FROM
        elif self._proposer is not None and self._rivals.turn(len(self.drawn)) == "proposed":
            kind, first = "proposed", PROPOSED_FROM
        else:
            kind, first = "sampler", 0
        number = first + self._drawn[kind]
        values = self._again.get(number)
        if values is None and kind == "warm":
            values = self._warm[number - first]
        elif values is None and kind == "proposed":
            values = self._proposed(number)
        elif values is None:
            values = self._study.draw(number, "random" if kind == "random" else self.space.sampler)
        return Candidate(number, values)

    def _train(self, candidate: Candidate, rung: int) -> Iterator[tuple[Job, int]]:
        """Yields the trials of a candidate at a rung; none if the candidate makes no model on one of the tasks."""
        jobs = self._jobs(candidate, rung if self.space.fidelity else None)
        if rung == 0:
            kind = self._kind(candidate.number)
            self.drawn.append(candidate)
            self._drawn[kind] += 1
            self._spent[kind] += bool(jobs)
            candidate.infeasible = not jobs
            if self._every is None:
                candidate.outside = self.space.drawn(candidate.values) is None
                if not candidate.outside:
                    self._study.add(candidate.values, feasible=bool(jobs))
                self._untold += [candidate] if jobs else []
        if jobs or rung:
            candidate.rungs.append({job.task: None for job in jobs})
        yield from ((job, rung) for job in jobs)

    def _go_on(self, rung: int) -> Iterator[tuple[Job, int]]:
        """Yields the trials of the next rung, once all trials of this rung have ended; none if they were asked for."""
        if any(len(candidate.rungs) > rung + 1 for candidate in self.drawn):
            return
        trained = {candidate.number: candidate for candidate in self.drawn if len(candidate.rungs) > rung}
        scores = {number: candidate.scores(self.plan.objectives) for number, candidate in trained.items()}
        points = objective_points(self.plan.objectives, scores)
        by_rank, lots = going_on(lot_name(self.plan.spec.name, rung), points, self.space.halved[rung + 1])
        for number in (*by_rank, *lots):
            yield from self._train(trained[number], rung + 1)

    def _jobs(self, candidate: Candidate, rung: int | None) -> list[Job]:
        """The trials of a candidate. If it makes no model on some task, returns no trials, and records the reason."""
        jobs = []
        for arm in self.arms:
            try:
                jobs.append(self.plan.job(arm, "tune", candidate.number, candidate.values, rung=rung))
            except Infeasible as error:
                record = infeasible(error.job, str(error))
                self._store.record_trial(self._study_id, arm.name, record, candidate.number, dict(candidate.values))
                return []
        self._by_number |= {(job.arm, candidate.number, job.task): candidate for job in jobs}
        self._waiting += len(jobs)
        return jobs


def begin_draws(name: str, space: Searching, maximize: Sequence[bool]) -> MixedDraws | OptunaStudy:
    """Returns what draws the candidates of a search.

    Args:
        name: The name of the search, which seeds the draws.
        space: The space of the search.
        maximize: Whether more is better, for each objective.
    """
    return (MixedDraws if space.sampler == "mixed" else OptunaStudy)(name, space, maximize)


def controls_by(drawn: int, trials: int, controls: int) -> int:
    """Returns how many of the first `drawn` + 1 candidates the random control draws: the first `START`, then a share.

    Args:
        drawn: Candidates drawn so far.
        trials: Candidates of the search.
        controls: Candidates of the control.

    Examples:
        >>> [controls_by(n, 64, 13) for n in (0, 9, 10, 26, 27, 63)]
        [1, 10, 10, 10, 11, 13]
    """
    controls = min(controls, trials)
    first = min(controls, START)
    if drawn < first or trials == first:
        return min(drawn + 1, first)
    return first + (drawn + 1 - first) * (controls - first) // (trials - first)


def finalists(points: Sequence[Sequence[float]], most: int, metrics: Sequence[int] = ()) -> list[int]:
    """The indices of the candidates to confirm, in order.

    The best by each metric come first. Each further candidate adds the most to the hypervolume of those before it. Once
    no candidate adds to the hypervolume, the best of the others follow, then candidates without a result.

    Args:
        points: The candidates' points, of which less is better; NaN for a candidate without a result.
        most: How many candidates to confirm.
        metrics: The coordinates that are metrics of tasks.
    """
    limit = beyond_worst(points)
    ended = [i for i, point in enumerate(points) if not any(map(math.isnan, point))]
    # Among equals take the candidate on the front, which is no worse in the other coordinates.
    best = [min(ended, key=lambda i: (points[i][at], *points[i])) for at in metrics if ended]
    first = greedy_choice(points, limit, most, [*dict.fromkeys(best)])
    return [*first, *(i for i in ranked(points, limit, most) if i not in first)][:most]
