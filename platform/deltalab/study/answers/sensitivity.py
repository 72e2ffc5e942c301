"""Shows how scores depend on tuned values, and whether an arm's best value is the lowest or the highest tried."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deltalab.statistics.seed_choice import Runs, Scores
from deltalab.store import Store, Study, TrialRow
from deltalab.study.answers.recorded_scores import RecordedScores
from deltalab.study.planning.tuning_candidates import edge
from deltalab.study.searching.results import is_own
from deltalab.study.specs.recorded_study import RecordedSpec, RecordedTask


@dataclass(frozen=True)
class Sweep:
    """The candidates that one arm tried on one task.

    Attributes:
        arm: The name of the arm.
        values: Candidate number -> path -> value.
        runs: Candidate number -> seed -> run.
        best: The candidate with the best mean of validation scores; None if no candidate finished all seeds.
        ends: The settings whose best value is the lowest or the highest tried: path -> which of the two.
    """

    arm: str
    values: dict[int, dict[str, Any]]
    runs: Runs
    best: int | None
    ends: dict[str, str]

    def scores(self, number: int, split: Literal["validation", "test"]) -> list[float]:
        """Returns a candidate's scores, without those of seeds that did not finish."""
        runs = self.runs.get(number, {}).values()
        scores = [run.validation if split == "validation" else run.test for run in runs]
        return [score for score in scores if math.isfinite(score)]


def sensitivity(store: Store, study: Study) -> dict[str, list[Sweep]]:
    """Returns the sweeps of the arms so far, by task. Arms that tried nothing are left out.

    A study tunes every arm. A search tunes only the base and the finalists. For any other candidate, the search draws
    the settings of training together with the model.
    """
    arms = store.arms(study.id)
    ledger = RecordedScores(store, study, store.trials(study.id))
    sweeps = {}
    for name, task in ledger.tasks.items():
        scores = ledger.scores(task, arms)
        by_arm = [sweep(arm.name, task, ledger, scores) for arm in arms]
        sweeps[name] = [arm_sweep for arm_sweep in by_arm if arm_sweep.values]
    return sweeps


def sweep(arm: str, task: RecordedTask, ledger: RecordedScores, scores: Scores) -> Sweep:
    """Returns the candidates that an arm tried on a task.

    Args:
        arm: The name of the arm.
        task: The task at one size.
        ledger: The study's trials and their metrics.
        scores: The runs of all arms on the task.
    """
    tuned = ledger.spec.tuned_on(task.name)
    trials = ledger.of(arm, task.name)
    if tuning := _tuning_alone(ledger, arm, task.name):
        trials = tuning
        runs = ledger.runs(trials, task.metric)
        seeds = sorted({seed for by_seed in runs.values() for seed in by_seed})
        scores = Scores(arm, task.maximize, task.chance, {arm: runs}, {arm: seeds})
    # The values of a finalist hold the settings of its model, too, which are left out here.
    trainings = {t.number: {path: t.values[path] for path in tuned if path in t.values} for t in trials}
    values = {number: training for number, training in trainings.items() if training}
    best = scores.best(arm)
    ends: dict[str, str] = {}
    if best in values:
        tried = [*values.values()]
        shared = {path: search for path, search in tuned.items() if all(path in training for training in tried)}
        ends = edge(shared, tried, values[best])
    return Sweep(arm, values, scores.runs[arm], best, ends)


def _tuning_alone(ledger: RecordedScores, arm: str, task: str) -> list[TrialRow]:
    """The trials that only tuned an arm; [] if the arm was tuned on its confirmation trials.

    Only old releases recorded tuning trials apart from confirmation trials.
    """
    trials = ledger.of(arm, task, "tune")
    if not ledger.spec.is_search:
        return trials
    return [trial for trial in trials if is_own(trial.number, ledger.spec.search)]


def range_end_notes(sweeps: Sequence[Sweep], spec: RecordedSpec, task: str, state: str) -> Iterator[str]:
    """Writes a note for each end of a range at which arms have their best value.

    Args:
        sweeps: The sweeps of the arms on one task.
        spec: The study's file.
        task: The name of the task.
        state: The state of the study.
    """
    tuned = spec.tuned_on(task)
    arms_at: dict[tuple[str, str, str, bool], list[str]] = {}
    for sweep in sweeps:
        for path, end in sweep.ends.items():
            assert sweep.best is not None
            value = sweep.values[sweep.best][path]
            low, *_, high = tuned[path].extremes
            arms_at.setdefault((path, end, f"{value:.3g}", low < value < high), []).append(sweep.arm)
    hint = "tune: {extend: true} tries further"
    if spec.is_search:
        hint = "widen its range under search"
    elif spec.is_extended and state in ("done", "failed"):
        hint = "tune.extend moved it as far as it does"
    elif spec.is_extended:
        hint = "values that tune.extend adds beyond it may not be trained yet"
    for (path, end, value, is_inside), arms in arms_at.items():
        beyond = "these arms may do better beyond it" if len(arms) > 1 else "the arm may do better beyond it"
        advice = hint
        if is_inside and spec.is_search:
            advice = "more trainings try values between it and the end of its range"
        yield f"The best {path} of {', '.join(arms)} is the {end} that was tried, {value}: {beyond} ({advice})."
