"""Draws the candidates of a search: one Optuna study that lives as long as the search, and one of Optuna's samplers."""

import hashlib
import json
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalChoiceType,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from deltalab.statistics.pareto import front
from deltalab.study.specs.sections.budget import Sampler, Searching
from deltalab.study.specs.sections.search_space import Search

START = 10
"""Candidates that TPE and GP draw at random before they look at results. The control's candidates count among them."""
SHOWN = 128
"""How many results a new Optuna study of TPE or GP begins with.

At every draw, TPE and GP look at every result of their study. A study that holds twice as many results is replaced by a
study with the latest `SHOWN` / 2 results and as many of the best older results. docs/decisions/205 has the figures."""
POPULATION = (8, 50)
"""The least and the most candidates of a generation of NSGA-II and III. In between it is an eighth of the trials."""
WIDE = 16
"""The width of a range from which on integers are drawn as numbers and rounded.

TPE would compute the share of each integer in each of its kernels, and need several times as long for a draw."""
GENETIC = ("nsga2", "nsga3")
"""Samplers that cross whole candidates. They draw every knob, also knobs that do not exist beside the others drawn."""

optuna.logging.set_verbosity(optuna.logging.ERROR)


class OptunaStudy:
    """The Optuna study of one search.

    Candidates are added in the order in which they are drawn, whatever drew them, and their results are told in that
    order. What `draw` returns follows from these calls and from its arguments alone: each draw makes a new sampler,
    which keeps nothing for the next draw. So a search that was killed goes on with the same candidates, once the
    ledger's candidates and results are added and told again.
    """

    def __init__(self, name: str, space: Searching, maximize: Sequence[bool]) -> None:
        """Begins without a candidate.

        Args:
            name: The name of the search, which seeds the draws.
            space: The space of the search.
            maximize: Whether more is better, for each objective.
        """
        self._name, self._space = name, space
        self._directions = [StudyDirection.MAXIMIZE if more else StudyDirection.MINIMIZE for more in maximize]
        self._distributions = {name: _distribution(knob) for name, knob in space.knobs.items()}
        self._added = 0
        self._begin([])

    def draw(self, number: int, sampler: Sampler) -> dict[str, Any]:
        """Draws a candidate of the space by a sampler.

        Args:
            number: The candidate's number, which seeds the draw.
            sampler: The sampler.
        """
        trial = self._asked(str(number), sampler)
        if sampler in GENETIC:
            knobs = {name: self._suggested(trial, name) for name in self._space.knobs}
            candidate = self._space.draw(lambda name, _: knobs[name])
        else:
            candidate = self._space.draw(lambda name, _: self._suggested(trial, name))
        self._forget(trial)
        return candidate

    def add(self, candidate: Mapping[str, Any], *, feasible: bool = True) -> None:
        """Shows a candidate of the space to the samplers, which keep away from it until its result is told.

        Args:
            candidate: The candidate.
            feasible: Whether the candidate makes a model. If not, it ranks below every result, and no result is told.
        """
        knobs = self._space.drawn(candidate)
        assert knobs is not None, f"not in the space: {candidate}"
        attributes: dict[str, Any] = {}
        if self._space.sampler in GENETIC:
            # Optuna counts a trial to the generation in which the trial was asked for. Knobs that do not exist are
            # genes, too.
            trial = self._asked(f"added {self._added}", self._space.sampler)
            knobs = {name: self._suggested(trial, name) for name in self._space.knobs} | knobs
            attributes = self._forget(trial).system_attrs
        params = {name: _to_optuna(value, self._space.knobs[name]) for name, value in knobs.items()}
        self._show(
            create_trial(
                params=params,
                distributions={name: self._distributions[name] for name in params},
                state=TrialState.RUNNING if feasible else TrialState.PRUNED,
                system_attrs=attributes,
            )
        )
        self._added += 1

    def tell(self, values: Sequence[float] | None) -> None:
        """Tells the result of the oldest feasible candidate without a result.

        Args:
            values: The value of each objective; None if the candidate has no result that could be compared.
        """
        number = self._running.popleft()
        if values is None:
            self._study.tell(number, state=TrialState.FAIL)
        else:
            self._study.tell(number, list(values))
        if self._shown >= 2 * SHOWN and self._space.sampler not in GENETIC:
            self._renew()

    def _begin(self, trials: Sequence[FrozenTrial]) -> None:
        """Makes a new Optuna study with these trials."""
        self._study = optuna.create_study(directions=self._directions)
        self._trials = self._shown = 0
        self._running: deque[int] = deque()
        for trial in trials:
            self._show(trial)

    def _show(self, trial: FrozenTrial) -> None:
        """Adds a trial to the Optuna study."""
        self._study.add_trial(trial)
        if trial.state == TrialState.RUNNING:
            self._running.append(self._trials)
        self._trials += 1
        self._shown += 1

    def _asked(self, seed: str, sampler: Sampler) -> Trial:
        """Asks the Optuna study for a trial, with a new sampler."""
        self._study.sampler = self._sampler(sampler, _seed(f"{self._name}/{seed}"))
        self._trials += 1
        return self._study.ask()

    def _forget(self, trial: Trial) -> FrozenTrial:
        """Ends a trial that was only asked for its values: samplers look at no trial that failed."""
        return self._study.tell(trial, state=TrialState.FAIL)

    def _renew(self) -> None:
        """Begins a new Optuna study with some of the results and all candidates without a result."""
        states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        trials = self._study.get_trials(deepcopy=False, states=states)
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        ended = [trial for trial in trials if trial.state != TrialState.RUNNING]
        others, latest = ended[: -SHOWN // 2], ended[-SHOWN // 2 :]
        best = _best([trial for trial in others if trial.state == TrialState.COMPLETE], self._directions, SHOWN // 2)
        self._begin([*best, *latest, *running])

    def _sampler(self, name: Sampler, seed: int) -> BaseSampler:
        """Makes one of Optuna's samplers."""
        population = min(max(self._space.trials // 8, POPULATION[0]), POPULATION[1])
        if name == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        with warnings.catch_warnings():
            # Optuna marks NSGA-III, GP and the groups of TPE as experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if name == "nsga2":
                return optuna.samplers.NSGAIISampler(seed=seed, population_size=population)
            if name == "nsga3":
                return optuna.samplers.NSGAIIISampler(seed=seed, population_size=population)
            if name == "gp":
                return optuna.samplers.GPSampler(seed=seed, n_startup_trials=START)
            return optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=START, multivariate=True, group=True, constant_liar=True
            )

    def _suggested(self, trial: Trial, name: str) -> Any:
        """The value that a sampler gives a knob."""
        distribution, knob = self._distributions[name], self._space.knobs[name]
        if isinstance(distribution, CategoricalDistribution):
            return json.loads(str(trial.suggest_categorical(name, distribution.choices)))
        if isinstance(distribution, IntDistribution):
            drawn = trial.suggest_int(name, distribution.low, distribution.high)
            return drawn if knob.choice is None else sorted(knob.choice)[drawn]
        assert isinstance(distribution, FloatDistribution)
        value = trial.suggest_float(name, distribution.low, distribution.high, log=distribution.log)
        return value if knob.integers is None else min(max(round(value), knob.integers[0]), knob.integers[1])


def _best(trials: list[FrozenTrial], directions: Sequence[StudyDirection], most: int) -> list[FrozenTrial]:
    """The `most` best trials, oldest first. Takes the front, then the front of the remaining trials, and so on."""
    signs = [-1.0 if direction == StudyDirection.MAXIMIZE else 1.0 for direction in directions]
    points = {trial.number: [sign * value for sign, value in zip(signs, trial.values, strict=True)] for trial in trials}
    kept: set[int] = set()
    while points and len(kept) < most:
        numbers = [*points]
        for i in front([*points.values()])[: most - len(kept)]:
            kept.add(numbers[i])
            del points[numbers[i]]
    return [trial for trial in trials if trial.number in kept]


def _seed(text: str) -> int:
    """A seed that follows from a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _distribution(knob: Search) -> BaseDistribution:
    """The distribution from which Optuna draws a knob."""
    if knob.log_uniform is not None:
        return FloatDistribution(*knob.log_uniform, log=True)
    if knob.uniform is not None:
        return FloatDistribution(*knob.uniform)
    if knob.integers is not None:
        low, high = knob.integers
        return FloatDistribution(low - 0.5, high + 0.5) if high - low >= WIDE else IntDistribution(low, high)
    assert knob.choice is not None
    if _in_order(knob):
        return IntDistribution(0, len(knob.choice) - 1)
    return CategoricalDistribution([json.dumps(value) for value in knob.choice])


def _in_order(knob: Search) -> bool:
    """Whether a knob is a choice of numbers: samplers draw a place among them, and know which numbers are near."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in knob.choice or ("",))


def _to_optuna(value: Any, knob: Search) -> CategoricalChoiceType:
    """A value as its distribution has it. Choices are JSON, since they may be whole rules, and Optuna takes text."""
    if knob.choice is None:
        number: CategoricalChoiceType = value
        return number
    return sorted(knob.choice).index(value) if _in_order(knob) else json.dumps(value)
